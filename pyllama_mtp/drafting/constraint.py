"""A grammar over tokens, by llguidance: which tokens may come next, and which must."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..grammar import Grammar, require_llguidance, with_room

if TYPE_CHECKING:
    from ..llama.model import Model

Flags = npt.NDArray[np.bool_]

_tokenizers: weakref.WeakKeyDictionary[Model, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def tokenizer(model: Model) -> Any:
    """llguidance's view of the vocabulary, made once for each model: about a second. Raises
    UsageError: llguidance cannot use the vocabulary, or is missing."""
    with _lock:
        if model not in _tokenizers:
            _tokenizers[model] = _make_tokenizer(model)
        return _tokenizers[model]


def _make_tokenizer(model: Model) -> Any:
    ffi, lib = model._ffi, model._lib
    tokens, ends = list[bytes](), list[int]()
    for token in range(model.n_vocab):
        piece, attributes = model.piece(token, special=True), model.attributes(token)
        special = attributes & lib.LLAMA_TOKEN_ATTR_CONTROL or (
            attributes & lib.LLAMA_TOKEN_ATTR_USER_DEFINED
            and piece.startswith(b"<")
            and piece.endswith(b">")
        )
        tokens.append(b"\xff" + piece if special else piece)  # llguidance's mark
        if model.is_end(token):
            ends.append(token)
    if not ends:
        raise UsageError("the model has no end token: no answer that follows a grammar could end")
    pointers = model._vocab, ffi.addressof(lib, "pyllama_tokenize_forced")
    vocab, tokenize = (int(ffi.cast("uintptr_t", pointer)) for pointer in pointers)
    make: Any = require_llguidance().LLTokenizer.from_llamacpp
    try:
        return make(tokens=tokens, vocab_ptr=vocab, tokenize_fptr=tokenize, eos_token=ends)
    except ValueError as reason:
        raise UsageError(f"llguidance cannot use the model's vocabulary: {reason}") from None


class Constraint:
    """The state of a text in its grammar. Drafts change nothing: the tokens before each row of the
    target mask it."""

    def __init__(self, model: Model, grammar: Grammar) -> None:
        """Raises UsageError if the grammar does not fit the vocabulary."""
        self._model, self._grammar = model, grammar
        make, known = require_llguidance().LLMatcher, tokenizer(model)
        self._matcher = with_room(lambda: make(known, grammar.compiled(), log_level=0))
        self._words = np.zeros(-(-model.n_vocab // 32), dtype="<u4")
        self._known = False  # whether the mask in _words is the next token's
        if self.error:
            raise self.error

    @property
    def error(self) -> UsageError | None:
        """Why the grammar cannot go on, if so: it can become too complex in mid-answer, and then
        allows only the end token."""
        failed = self._matcher.is_error()
        return self._grammar.refused(self._matcher.get_error()) if failed else None

    def _compute(self) -> None:
        if not self._known:
            self._model.handle  # noqa: B018 - raises when closed: the vocabulary is gone
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._known = True

    def allowed(self) -> Flags:
        """[n_vocab] bool: tokens that may come next; end tokens where the answer may end."""
        self._compute()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return bits[: self._model.n_vocab].view(np.bool_)

    @property
    def only(self) -> int | None:
        """The token that must come next; None: there is a choice."""
        self._compute()
        at = np.flatnonzero(self._words)
        word = int(self._words[at[0]])
        single = len(at) == 1 and word & (word - 1) == 0
        return 32 * int(at[0]) + word.bit_length() - 1 if single else None

    def add(self, token: int) -> None:
        """Continue the text with this token; after the grammar's end, tokens do not count."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._known = False

    def n_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other; 0 after the grammar's end."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self, most: int) -> list[int]:
        """Tokens that must follow, one after the other, up to `most`.

        llguidance tokenizes the forced bytes, but only the first of these tokens is certain: its
        mask allows no other. So each token is asked for after the ones before it.
        """
        self._model.handle  # noqa: B018 - raises when closed
        matcher, found = self._matcher, list[int]()
        while len(found) < most and not matcher.is_stopped():
            token = next(iter(matcher.compute_ff_tokens()), None)
            if token is None or self._model.is_end(token) or not matcher.consume_token(token):
                break
            found.append(token)
        if found:
            matcher.rollback(len(found))
            self._known = False
        return found
