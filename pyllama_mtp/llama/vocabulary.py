"""The vocabulary of a loaded model: text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import instance, token_ids
from ..errors import InsufficientMemoryError, UsageError
from . import native

Tokens = npt.NDArray[np.int32]


class Vocabulary:
    """The part of a `Model` that its vocabulary answers.

    Attributes:
        n_vocab: tokens.
        eos: id of the end-of-text token; -1: there is none.
    """

    def __init__(self, library: native.Library, handle: Any) -> None:
        """`handle`: the native model."""
        self._library, self._ffi, self._lib = library, library.ffi, library.lib
        self._vocab = self._lib.llama_model_get_vocab(handle)
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.eos = int(self._lib.llama_vocab_eos(self._vocab))

    @property
    def handle(self) -> Any:
        """The native model. Raises ContextClosedError when it is closed."""
        raise NotImplementedError

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add BOS if the model wants one.
            parse_special: read ``<|im_start|>`` and the like as control tokens, not as text.
        """
        self.handle  # noqa: B018 - raises when closed
        instance("text", text, str, "text (str)")
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as reason:
            raise UsageError(f"the text is not valid Unicode: {reason}") from None
        message = self._ffi.new("char[256]")
        capacity = len(data) + 8
        while True:
            out = self._ffi.new("llama_token[]", capacity)
            flags = (add_special, parse_special)
            n = self._lib.pyllama_tokenize(
                self._vocab, data, len(data), out, capacity, *flags, message, len(message)
            )
            if n >= 0:
                return list(out[0:n])
            if -n <= capacity or n == -(2**31):
                why = self._library.text(message) or "too long"
                if native.short_of_memory(why):
                    raise InsufficientMemoryError(f"no memory to tokenize {len(data)} bytes: {why}")
                raise UsageError(f"a text of {len(data)} bytes cannot be tokenized: {why}")
            capacity = -n

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`."""
        self.check_tokens([token])
        capacity = 32
        while True:
            out = self._ffi.new("char[]", capacity)
            n = self._lib.llama_token_to_piece(self._vocab, token, out, capacity, 0, special)
            if n >= 0:
                return bytes(self._ffi.buffer(out, n))
            capacity = -n

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        ids = token_ids("tokens", tokens)
        return b"".join(self.piece(token, special) for token in ids).decode("utf-8", "replace")

    def attributes(self, token: int) -> int:
        """The vocabulary's flags of a token: LLAMA_TOKEN_ATTR_*."""
        self.check_tokens([token])
        return int(self._lib.llama_vocab_get_attr(self._vocab, token))

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, end of turn)."""
        self.handle  # noqa: B018 - raises when closed
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def check_tokens(self, tokens: Sequence[int] | Tokens) -> None:
        """Raises UsageError when an id is not in the vocabulary."""
        self.handle  # noqa: B018 - raises when closed
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        if len(ids) and (min(ids) < 0 or max(ids) >= self.n_vocab):
            bad = next(int(token) for token in ids if not 0 <= token < self.n_vocab)
            raise UsageError(f"token id {bad} is not in the vocabulary (0 to {self.n_vocab - 1})")
