"""The next token from the target's logits, by llama.cpp's own samplers.

Drafts that are the head's best tokens need no sampling from the head: each verified row is sampled
as in a plain decode step, and a draft is accepted if it is the sampled token. So the text is a draw
from the target's distribution, whatever the drafts are. Drafts that are drawn from the head need
the target's distribution itself; see :mod:`.acceptance`.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..chats.thinking import Thought, opened
from ..errors import FatalDecodeError, InsufficientMemoryError, UsageError
from ..grammar import Grammar, Value, require_llguidance
from ..llama.batch import Floats, Ints
from ..llama.native import Owned
from ..settings import Sampling
from ..telemetry import NearTie
from .acceptance import Distribution, draft_distribution, draw, point, softmax

if TYPE_CHECKING:
    from ..llama.batch import KeptRow
    from ..llama.context import Context
    from ..llama.model import Model

    Rows: TypeAlias = Context | KeptRow


#: For more candidates, all logits are fetched.
MOST_CANDIDATES = 256
#: Logits that differ by no more than this share of the best one are a near tie: kernels that sum in
#: another order may reverse them.
NEAR_TIE = 0.01
#: A share of the best token's probability that float32 can still tell from 0.
NEARLY_ZERO = 1e-30
#: Changes the seed for XTC.
XTC_SEED = 0x9E3779B9
#: Why nothing can be sampled.
NO_TOKEN = "the grammar or the logit biases exclude every token"


#: Seconds that a grammar may compute for a token, as all sequences wait for it. llama.cpp asks GBNF
#: for each token of the vocabulary if need be, and in one time with the rest of the chain.
MOST_STEP_S, MOST_GBNF_STEP_S = 0.05, 0.5
#: So many times as long it may be late in all, if it is not faster for other tokens.
MOST_LATE = 4


class Pace:
    """How long a grammar computes in this thread: llguidance has limits, llama.cpp has none."""

    _late_s = 0.0

    def __init__(self, most_s: float) -> None:
        """`most_s`: seconds for a token."""
        self.most_s = most_s

    @contextmanager
    def step(self, budget_s: float = 0.0) -> Iterator[None]:
        """A block in which it computes."""
        began = time.thread_time()
        yield
        self._late_s = max(0.0, self._late_s + time.thread_time() - began - budget_s)

    def error(self, grammar: Grammar) -> UsageError | None:
        """Why the answer must end, if so."""
        if self._late_s <= MOST_LATE * self.most_s:
            return None
        limit = f"{1000 * self.most_s:g} ms"
        return grammar.refused(f"it computes for more than {limit} for each token")


class Sampler(Owned):
    """A sampler chain for one generation; it remembers its tokens, for the repetition penalty.

    Attributes:
        constrained: by a grammar that can force tokens, see :meth:`forced`.
        seed: of the chain's generator, and of `rng`.
        rng: the generator for draws outside the chain: drafts, and their acceptance.
        near_ties: the list for near ties of greedy text, if wanted.
        failure: why no token could be chosen, if so: the answer must then end.
    """

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        history: Sequence[int] = (),
        near_ties: list[NearTie] | None = None,
    ) -> None:
        """`history`: the prompt's tokens, for the repetition penalty."""
        self.sampling = sampling
        self.seed = secrets.randbelow(2**32 - 1) if sampling.seed is None else sampling.seed
        self.rng = np.random.default_rng(self.seed)
        self._lib, self._ffi, self._n_vocab = model._lib, model._ffi, model.n_vocab
        self._detokenize = model.detokenize
        grammar, budget = sampling.constraint, sampling.reasoning_budget
        begun = grammar is not None and opened(model, history)
        self._thought: Thought | None = None
        if begun or (budget is not None and not grammar):
            self._thought = Thought(model, budget, history, gap=begun)
        self._late: Callable[[], int] | None = None  # begins the GBNF, when the thought is over
        follows = grammar is not None and grammar.kind != "gbnf"
        self.constrained = follows
        self._constraint = Constraint(model, grammar) if grammar and follows else None
        self._gbnf, self._pace = None if follows else grammar, Pace(MOST_GBNF_STEP_S)
        self._chain = None if sampling.plain_greedy else self._build(model, history)
        self.near_ties = near_ties if sampling.plain_greedy else None
        self._tokens = list(history) if sampling.logits_processors else None
        # Whether logits and chain alone decide, and the chain alone remembers.
        self._simple = not (self._thought or follows or sampling.logits_processors)
        self._n_sampled = 0
        self.failure: Exception | None = None

    def _build(self, model: Model, history: Sequence[int]) -> Any:
        lib, s = self._lib, self.sampling
        if s.logit_bias:
            model.check_tokens(list(s.logit_bias))
        gbnf = s.constraint if s.constraint and not self._constraint else None
        grammar = self._grammar(model, gbnf.source) if gbnf else None
        chain = lib.pyllama_sampler_chain_init()
        try:
            self._fill(chain, model, history, grammar)
        except BaseException:
            for unused in (chain, grammar if self._late is None else None):
                lib.llama_sampler_free(unused or model._ffi.NULL)
            raise
        return chain

    def _fill(self, chain: Any, model: Model, history: Sequence[int], grammar: Any) -> None:
        """Add the samplers to an empty chain. The chain owns them; the grammar too, once `_late` is
        set. Raises InsufficientMemoryError."""
        lib, s = self._lib, self.sampling

        def add(chain: Any, sampler: Any) -> None:
            self._check(lib.pyllama_sampler_chain_add(chain, sampler))

        if s.logit_bias:
            biases = model._ffi.new("llama_logit_bias[]", list(s.logit_bias.items()))
            add(chain, lib.pyllama_sampler_init_logit_bias(model.n_vocab, len(biases), biases))
        seen = 0  # recent tokens that count
        if s.penalizes:
            penalties = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
            args = (model.n_vocab, s.repeat_last_n, *penalties)
            add(chain, lib.pyllama_sampler_init_penalties(*args))
            seen = s.repeat_last_n
        if s.dry:
            add(chain, self._dry(model))
            seen = max(seen, s.dry_penalty_last_n)
        for token in history[-seen:] if seen else ():
            self._check(lib.pyllama_sampler_accept(chain, token))
        if grammar is not None:
            # A chain within the chain: empty, so without effect, until the grammar begins.
            slot = lib.pyllama_sampler_chain_init()
            add(chain, slot)
            self._late = partial(lib.pyllama_sampler_chain_add, slot, grammar)
            self._begin()
        for sampler in self._drawing(model.n_vocab):
            add(chain, sampler)

    def _dry(self, model: Model) -> Any:
        s, ffi = self.sampling, model._ffi
        texts = [
            ffi.new("char[]", text.encode(errors="replace")) for text in s.dry_sequence_breakers
        ]
        given = (s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n)
        breakers = ffi.new("const char *[]", texts)
        return self._lib.pyllama_sampler_init_dry(model._vocab, *given, breakers, len(texts))

    def _drawing(self, n_vocab: int) -> Iterator[Any]:
        """Filters, temperature, and the draw, which comes last."""
        lib, s = self._lib, self.sampling
        if s.greedy:
            yield lib.pyllama_sampler_init_greedy()
            return
        if s.top_n_sigma > 0:
            yield lib.pyllama_sampler_init_top_n_sigma(s.top_n_sigma)
        if s.top_k > 0:
            yield lib.pyllama_sampler_init_top_k(min(s.top_k, n_vocab))
        if s.typical_p < 1:
            # Typical turns probability 0 into NaN, and excluded tokens have it by now.
            yield lib.pyllama_sampler_init_min_p(NEARLY_ZERO, 1)
            yield lib.pyllama_sampler_init_typical(s.typical_p, 1)
        if s.top_p < 1:
            yield lib.pyllama_sampler_init_top_p(s.top_p, 1)
        if s.min_p > 0:
            yield lib.pyllama_sampler_init_min_p(s.min_p, 1)
        if s.xtc_probability > 0:
            # A generator of its own, which must not repeat the numbers of the draw.
            seed = (self.seed ^ XTC_SEED) % (2**32 - 1)
            given = (s.xtc_probability, s.xtc_threshold, 1, seed)
            yield lib.pyllama_sampler_init_xtc(*given)
        yield lib.pyllama_sampler_init_temp(s.temperature)
        yield lib.pyllama_sampler_init_dist(self.seed)

    def _grammar(self, model: Model, grammar: str) -> Any:
        """The sampler that excludes tokens that break `grammar`. Raises UsageError."""
        message = model._ffi.new("char[256]")
        text = grammar.encode(errors="replace")
        sampler = self._lib.pyllama_sampler_init_grammar(model._vocab, text, message, len(message))
        if not sampler:
            why = model._library.text(message) or "llama.cpp has written the reason to stderr"
            raise UsageError(f"the grammar is not valid GBNF with a rule `root`: {why}")
        return sampler

    @property
    def n_candidates(self) -> int:
        """How many best tokens of a row the chain needs; 0: all tokens, or only the best one."""
        if self.near_ties is not None:
            return 2
        s = self.sampling
        reorders = s.reorders or s.top_n_sigma > 0  # which looks at all logits
        few = 0 < s.top_k <= MOST_CANDIDATES
        return s.top_k if few and not s.greedy and not reorders else 0

    @property
    def _answers(self) -> bool:
        """Whether the answer has begun, and with it the grammar: no thought, or it is over."""
        return not self._thought or self._thought.over

    def _begin(self) -> None:
        """Begin a GBNF grammar, if the answer begins."""
        if self._late and self._answers:
            begin, self._late = self._late, None
            self._check(begin())

    @property
    def _certain(self) -> int | None:
        """The token that must come next, whatever the logits; None: there is a choice."""
        if self._thought and self._thought.forced is not None:
            return self._thought.forced
        return self._constraint.only if self._constraint and self._answers else None

    @property
    def error(self) -> Exception | None:
        """Why the answer cannot go on, if so; its grammar may have failed. It must then end."""
        if self.failure or not self._gbnf:
            return self.failure or (self._constraint.error if self._constraint else None)
        return self._pace.error(self._gbnf)

    def forced(self, most: int) -> list[int]:
        """Tokens that the grammar forces next, up to `most`. They are sampled without logits."""
        if not (self._constraint and self._answers):
            return []
        return self._ask(partial(self._constraint.forced, most), [])

    def n_valid(self, drafts: Sequence[int]) -> int:
        """How many drafts come before the first that breaks the grammar."""
        if self._constraint and self._answers:
            return self._ask(partial(self._constraint.n_valid, drafts), 0)
        return len(drafts)

    def _ask(self, question: Callable[[], Value], otherwise: Value) -> Value:
        """What the grammar says; if it fails, the answer ends after this round."""
        try:
            return question()
        except Exception as error:
            self.failure = error
            return otherwise

    def sample(self, context: Rows, row: int) -> int:
        """Draw a token from batch entry `row` of the last decode, and remember it; rows in order.

        A token that the grammar, or the end of the reasoning budget, forces is not drawn.
        """
        if self._simple:
            return self._draw(context, row)
        forced = self._certain
        if forced is not None:
            self._n_sampled += 1
            self.accept(forced)
            return forced
        with self._processed(context, row):
            token = self._draw(context, row)
        self._note(token)
        return token

    def _note(self, token: int) -> None:
        """Continue the text with this token."""
        if self._thought and not self._thought.over:
            self._thought.add(token)
            self._begin()
        elif self._constraint:
            self._constraint.add(token)
        if self._tokens is not None:
            self._tokens.append(token)

    @contextmanager
    def _processed(self, context: Rows, row: int) -> Iterator[None]:
        """A block in which the processors have changed the row's logits, and forbidden tokens have
        minus infinity. Raises UsageError: a processor returns another shape, a NaN or plus
        infinity."""
        follows = self._constraint if self._answers else None
        if self._tokens is None and not follows:
            yield
            return
        context.check_finite(row)
        logits = context.logits(row)
        kept = logits.copy()
        found: Any = kept.copy()
        for process in self.sampling.logits_processors:
            found = np.asarray(process(np.array(self._tokens or (), dtype=np.int32), found))
            if found.shape != kept.shape or not (found.max() < np.inf):  # a NaN is not
                raise UsageError(
                    f"a logits processor gives an array of shape {found.shape}, or one with a NaN "
                    f"or plus infinity; it must give the {len(kept)} logits"
                )
        logits[:] = np.where(follows.allowed(), found, -np.inf) if follows else found
        try:
            yield
        finally:
            logits[:] = kept

    def _draw(self, context: Rows, row: int) -> int:
        if self._chain is None:
            if self.near_ties is not None:
                self._watch(self.near_ties, context, row)
            return context.argmax(row)
        context.check_finite(row)  # the samplers would end the process on a NaN
        with self._pace.step(MOST_GBNF_STEP_S) if self._gbnf else nullcontext():
            token = int(self._lib.pyllama_sample(self._chain, *self._native(context, row)))
        self._check(token)
        return token

    def _native(self, context: Rows, row: int) -> tuple[Any, Any, int]:
        """A row as the shim takes it: some best tokens with their logits, or the logits of all."""
        view = self._ffi.from_buffer
        if context.n_candidates:
            ids, logits = context.candidates(row)
            return view("int32_t[]", ids), view("float[]", logits), len(ids)
        return self._ffi.NULL, view("float[]", context.logits(row)), self._n_vocab

    def _watch(self, near_ties: list[NearTie], context: Rows, row: int) -> None:
        """Note a near tie of the row's two best tokens."""
        if context.n_candidates:
            ids, logits = context.candidates(row)
        else:  # all logits were asked for
            every = context.logits(row)
            two = np.argpartition(every, len(every) - 2)[-2:].astype(np.int32)
            ids = two[np.lexsort((two, -every[two]))]
            logits = every[ids]
        gap = float(logits[0] - logits[1])
        if gap <= NEAR_TIE * abs(float(logits[0])):
            tokens = int(ids[0]), int(ids[1])
            texts = [self._detokenize([token], special=True) for token in tokens]
            near_ties.append(NearTie(self._n_sampled, *tokens, gap, *texts))
        self._n_sampled += 1

    def _check(self, code: int) -> None:
        """Raise the exception of a negative code of the shim."""
        if code == self._lib.PYLLAMA_NO_TOKEN:
            raise UsageError(NO_TOKEN)
        if code == self._lib.PYLLAMA_TOO_SLOW and self._gbnf:
            limit = f"{self._lib.PYLLAMA_GRAMMAR_S} s"
            raise self._gbnf.refused(f"it computes for more than {limit} for a token")
        if code < 0:
            if code in (self._lib.PYLLAMA_OUT_OF_MEMORY, self._lib.PYLLAMA_NO_ROOM):
                raise InsufficientMemoryError("sampling failed: out of memory")
            raise FatalDecodeError(f"sampling failed with code {code}: a fault in llama.cpp")

    def distribution(self, context: Rows, row: int) -> Distribution:
        """The distribution that :meth:`sample` draws from at batch entry `row`: after penalties,
        filters and temperature. Nothing is remembered: give the chosen token to :meth:`accept`. Ask
        once for each token: XTC draws whether it drops the best tokens.

        Raises:
            UsageError: no output row was asked for there.
            FatalDecodeError: the row holds a NaN, or a fault in llama.cpp.
        """
        forced = self._certain
        if forced is not None:
            return point(forced)
        if self._chain is None:
            return point(context.argmax(row))
        context.check_finite(row)
        s, most = self.sampling, self._n_vocab
        if s.top_k > 0 and not s.greedy:
            most = min(s.top_k, most)
        ids, logits = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.float32)
        array = self._ffi.from_buffer
        buffers = array("int32_t[]", ids), array("float[]", logits)
        with self._processed(context, row):
            of = self._native(context, row)
            n = self._lib.pyllama_distribution(self._chain, *of, *buffers, most)
        self._check(n)
        if n == 0 or np.isneginf(logits[:n].max()):
            raise UsageError(NO_TOKEN)
        if s.greedy:
            return point(int(ids[logits[:n].argmax()]))
        return softmax(ids[:n], logits[:n])

    def propose(self, logits: Floats, ids: Ints | None) -> tuple[int, Distribution]:
        """Draw a draft from the head's logits, filtered like the target's: (token, distribution).

        Args:
            logits: [n] float32: a row of the head.
            ids: [n] int32: their tokens; None: 0 to n - 1.
        """
        q = draft_distribution(logits, ids, self.sampling)
        return draw(q, self.rng), q

    def accept(self, token: int) -> None:
        """Remember a token chosen by :meth:`distribution`."""
        if self._chain is not None:
            self._check(self._lib.pyllama_sampler_accept(self._chain, token))
        self._note(token)

    def close(self) -> None:
        """Free the chain. May be called again."""
        chain, self._chain = self._chain, None
        if self._late and chain is not None:
            self._late()  # the grammar, which the chain then frees
            self._late = None
        if chain is not None:
            self._lib.llama_sampler_free(chain)

    def __del__(self) -> None:
        if getattr(self, "_chain", None) is not None:
            self.close()


# -- a grammar over tokens, by llguidance: which may come next, and which must ---------------------


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
        self._matcher = grammar.matcher(tokenizer(model))
        self.pace = Pace(MOST_STEP_S)
        self._words = np.zeros(-(-model.n_vocab // 32), dtype="<u4")
        self._known = False  # whether the mask in _words is the next token's
        if self.error:
            raise self.error

    @property
    def error(self) -> UsageError | None:
        """Why the grammar cannot go on, if so: it can become too complex in mid-answer, and then
        allows only the end token; or it takes too long."""
        if self._matcher.is_error():
            return self._grammar.refused(self._matcher.get_error())
        return self.pace.error(self._grammar)

    def _compute(self) -> None:
        if not self._known:
            self._model.handle  # noqa: B018 - raises when closed: the vocabulary is gone
            with self.pace.step(MOST_STEP_S):
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
        if not len(at):
            raise UsageError(NO_TOKEN)
        word = int(self._words[at[0]])
        single = len(at) == 1 and word & (word - 1) == 0
        return 32 * int(at[0]) + word.bit_length() - 1 if single else None

    def add(self, token: int) -> None:
        """Continue the text with this token; after the grammar's end, tokens do not count."""
        if not self._matcher.is_stopped():
            with self.pace.step():
                self._matcher.consume_token(token)
            self._known = False

    def n_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other; 0 after the grammar's end."""
        with self.pace.step():
            return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self, most: int) -> list[int]:
        """Tokens that must follow, one after the other, up to `most`.

        llguidance tokenizes the forced bytes, but only the first of these tokens is certain: its
        mask allows no other. So each token is asked for after the ones before it.
        """
        self._model.handle  # noqa: B018 - raises when closed
        matcher, found = self._matcher, list[int]()
        with self.pace.step():
            while len(found) < most and not matcher.is_stopped():
                token = next(iter(matcher.compute_ff_tokens()), None)
                if token is None or self._model.is_end(token) or not matcher.consume_token(token):
                    break
                found.append(token)
        if found:
            matcher.rollback(len(found))
            self._known = False
        return found
