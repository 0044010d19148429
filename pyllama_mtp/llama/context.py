"""One llama.cpp context: caches, decode, and what a decode left behind (logits, hidden rows)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..contextoptions import ContextOptions
from ..errors import (
    ContextClosedError,
    FatalDecodeError,
    InsufficientMemoryError,
    PyllamaMtpError,
    UsageError,
)
from . import native
from .batch import Batch, Floats, Ints, decode_error
from .owned import Exclusive, OfThisProcess, Owned
from .trace import Node, Trace

if TYPE_CHECKING:
    from .drafthead import HeadRows
    from .model import Model

#: How often a long computation looks for Ctrl-C.
POLL_PERIOD_US = 50_000
SEQ = 0  # the sequence of a driver that has one

NAN = "the model's logits are NaN: damaged weights, or a kernel bug"

__all__ = ["Context", "ContextOptions"]

log = logging.getLogger("pyllama_mtp")


class Context(Owned, OfThisProcess):
    """A context manager around ``llama_context``, for one thread at a time, in one process.

    A decode that runs out of memory, or finds a fault in llama.cpp, may leave anything behind: the
    context is lost then, and can only be closed.

    Attributes:
        last_outputs: output marks of the last batch.
        greedy: decodes leave the best token of every output row, and no logits.
        n_candidates: and so many of its best tokens, with their logits.
        draft_ids: [n] int32: tokens that the draft head is over, by row; None: the whole
            vocabulary.
    """

    def __init__(
        self, model: Model, options: ContextOptions, target: Context | None = None
    ) -> None:
        """Allocate caches and buffers.

        Args:
            model: stays open for as long as this context.
            options: see :class:`ContextOptions`.
            target: for a context of the MTP block alone, the context that it drafts for.

        Raises:
            InsufficientMemoryError: llama.cpp could not allocate it.
            UsageError: llama.cpp refused the combination; its reason is given.
            WorkerLostError: a worker of the model is lost; so with every other method that
                computes.
        """
        self.library = native.load()
        self._ffi, self._lib = self.library.ffi, self.library.lib
        self._handle: Any = None
        self._lost_handle: Any = None  # to be freed, and not to be used
        self._why_closed = "the context is closed"
        self._on_device: dict[int, bytearray] = {}  # by sequence: the state kept on its device
        self._batch: Any = None
        self._message = self._ffi.new("char[256]")
        self._alone = Exclusive("a session or context")
        self.last_outputs = np.zeros(0, dtype=np.int8)
        self._rewind: dict[int, int] = {}  # by sequence: positions that its state can go back
        self._snapshots, self._block = True, 0
        self._settled = True  # what the last decode computed is known to be here
        self.greedy = self._left_greedy = False
        self.n_candidates = 0
        self.draft_ids: Ints | None = None
        self.model, self.options = model, options
        if options.with_mtp and not (self.library.has_tap and model.has_mtp):
            raise UsageError("with_mtp needs the patched library, and a model with an MTP head")
        if options.with_mtp and options.tap == "outputs":
            raise UsageError("with_mtp needs hidden rows of all tokens: tap must not be 'outputs'")
        n_ubatch = min(options.n_ubatch, options.n_batch, options.n_ctx)
        if model.is_recurrent and options.n_rs_seq > 0 and n_ubatch < options.n_rs_seq + 2:
            raise UsageError(
                f"n_ubatch is {n_ubatch}; {options.n_rs_seq} state snapshots need at least "
                f"{options.n_rs_seq + 2}"
            )
        self._trace = Trace(self.library) if options.trace else None
        self._interrupt = self._ffi.new("struct pyllama_interrupt *")
        self._interrupt.poll = self._lib.pyllama_on_poll
        self._interrupt.period_us = POLL_PERIOD_US
        self._weights = model.weights.hold()
        try:
            self._handle = self._create(target)
        except BaseException:
            self._weights.release()
            raise
        self.claim()
        model.contexts.add(self)
        try:
            self._prepare()
        except BaseException:
            self.close()  # now: whoever catches this may want the memory
            raise

    def _prepare(self) -> None:
        """What follows the making of the native context."""
        options, message = self.options, self._message
        self._batch = self._lib.pyllama_batch_ext_init(self._handle, message, len(message))
        if not self._batch:
            raise InsufficientMemoryError(f"no memory for a batch of {options.n_batch} tokens")
        self._memory = self._lib.llama_get_memory(self._handle)
        self.n_ctx = int(self._lib.llama_n_ctx(self._handle))
        self.n_batch = int(self._lib.llama_n_batch(self._handle))
        self.n_ubatch = int(self._lib.llama_n_ubatch(self._handle))
        self.n_rs_seq = int(self._lib.llama_n_rs_seq(self._handle))
        if options.tap != "off":
            masked = options.tap == "outputs"
            self._lib.llama_mtp_set_embeddings_nextn(self._handle, True, masked)
        self.model.adapters.apply(self._handle)
        self._lib.llama_mtp_set_slice(self._handle, options.slice)
        pre_norm = options.hidden == "pre-norm"
        point = self._lib.LLAMA_MTP_TAP_PRE_NORM if pre_norm else self._lib.LLAMA_MTP_TAP_POST_NORM
        self._lib.llama_set_embeddings_pre_norm_point(self._handle, point)
        if options.need_embd_pre_norm:
            self._make_tap()

    def _create(self, target: Context | None) -> Any:
        lib, options = self._lib, self.options
        p = lib.llama_context_default_params()
        options.fill(lib, p)
        p.abort_callback = lib.pyllama_abort_poll
        p.abort_callback_data = self._interrupt
        if watching := self._trace or options.times:
            p.cb_eval, p.cb_eval_user_data = watching.callback, watching.data
        if target is not None:
            p.ctx_other = target.handle
        message = self._ffi.new("char[512]")
        native.take_recent_errors()
        handle = lib.pyllama_context_init(self.model.handle, p, message, len(message))
        try:
            native.raise_pending()
            self.model.refuse_lost_worker()
        except BaseException:
            if handle:
                lib.llama_free(handle)
            raise
        if handle:
            return handle
        reason = "; ".join(filter(None, (self.library.text(message), native.take_recent_errors())))
        if native.short_of_memory(reason):
            raise InsufficientMemoryError(
                f"no memory for a context of {options.n_ctx} tokens ({reason}); "
                "use a smaller n_ctx, n_ubatch or cache type"
            )
        raise UsageError(f"llama.cpp refused the context: {reason or 'no reason given'}")

    # -- life ----------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The native handle. Raises ContextClosedError after :meth:`close` or a failure, and in a
        forked child."""
        if not self._handle:
            if self._lost_handle:
                self.model.refuse_lost_worker()  # that is why, if one is lost
            raise ContextClosedError(self._why_closed)
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return not self._handle

    def close(self) -> None:
        """Free everything. May be called again; the model closes it too."""
        with self._alone:
            # Forget first, free then: Ctrl-C in between leaks at worst, and never frees twice.
            batch, self._batch = self._batch, None
            handle, self._handle = self._handle or self._lost_handle, None
            self._lost_handle = None
        if batch:
            self._lib.llama_batch_ext_free(batch)
        if handle:
            self._free(handle)
        native.raise_pending()  # of a log handler

    def _free(self, handle: Any) -> None:
        """Destructors cannot tell that a device has failed, they end the process: what is on such
        a device stays there, the model's weights with it."""
        lib = self._lib
        code = lib.pyllama_synchronize(handle, self._ffi.NULL, 0)
        if code in (lib.PYLLAMA_ABORTED, lib.PYLLAMA_EXCEPTION):
            log.warning("a device has failed; the memory of a context on it cannot be freed")
            return
        lib.llama_free(handle)
        self._weights.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) or getattr(self, "_lost_handle", None):
            self.close()

    def disown(self) -> None:
        """In a forked child: nothing of it can be used here, nor need be freed."""
        self._handle = self._lost_handle = self._batch = None
        self._why_closed = (
            "this session or context belongs to the process that this one was forked from; make "
            "one here, or start processes with spawn"
        )

    def _call(self, function: Any, *arguments: Any) -> int:
        """Call one of the shim's twins: its result, 0 or above.

        Raises:
            PyllamaMtpError: by its code; see :func:`.decode_error`.
        """
        message = self._message
        native.take_recent_errors()
        with self._alone:
            code = int(function(self.handle, *arguments, message, len(message)))
        if code < 0:
            self._fail(code)
        if native.pending.exception:
            native.raise_pending()
        return code

    def _fail(self, code: int) -> NoReturn:
        """Raise what a failure's code means, or what a callback had parked."""
        said = (self.library.text(self._message), native.take_recent_errors())
        error = decode_error(code, "; ".join(filter(None, said)))
        lib = self._lib
        if code in (lib.PYLLAMA_ABORTED, lib.PYLLAMA_OUT_OF_MEMORY, lib.PYLLAMA_EXCEPTION):
            self._lose(error)
        native.raise_pending()
        self.model.refuse_lost_worker()
        raise error

    def _lose(self, error: PyllamaMtpError) -> None:
        """Nobody knows what is in it now."""
        self._lost_handle, self._handle = self._handle, None
        self._why_closed = f"the context was lost in a failure ({error}); close it, make another"

    # -- decode --------------------------------------------------------------------------------

    def decode(
        self,
        tokens: Ints,
        start: int,
        outputs: npt.NDArray[np.int8],
        hidden: Floats | None = None,
        seq: int = SEQ,
    ) -> None:
        """Process tokens at positions start, start + 1, ... of one sequence.

        Args:
            tokens: [n] int32 ids, n at most n_batch.
            outputs: [n] int8, 1 where an output row (logits) is wanted; at most n_outputs_max.
            hidden: [n, n_embd] float32, for a context of the MTP block only: row i is the hidden
                state that pairs with tokens[i], that is the trunk's at position start + i - 1.
            seq: the sequence; for several in one batch see :meth:`decode_batch`.

        Raises:
            UsageError: sizes or ids that llama.cpp would abort on.
            DecodeError: a subclass that names the failure.
            KeyboardInterrupt: Ctrl-C; the context must then be cleared.
        """
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        seqs = np.full(len(tokens), seq, dtype=np.int32)
        self.decode_batch(Batch(tokens, positions, seqs, outputs, hidden))

    def decode_batch(self, batch: Batch) -> None:
        """Process a batch of any sequences; for the errors see :meth:`decode`."""
        batch.check(self)
        view, alive = batch.view(self)
        message = self._message
        native.take_recent_errors()
        if self._trace:
            self._trace.clear()
        self._rewind = {}
        self._settled = not (self.model.on_gpu or self.model.rpc_servers)
        with self._alone:
            code = self._lib.pyllama_decode(self.handle, self._batch, view, message, len(message))
        del alive
        self.last_outputs, self._left_greedy = batch.outputs, self.greedy
        if code != 0:
            self._fail(code)
        native.raise_pending()
        self.model.refuse_lost_worker()
        self._rewind = self._rewinds(batch)

    def _rewinds(self, batch: Batch) -> dict[int, int]:
        """How far each sequence can go back after `batch`.

        A decode of n tokens makes n snapshots at most, the last one being the state itself; older
        ones are left from earlier decodes, and llama.cpp would go back to them all the same.
        Snapshots lie beside the state of their sequence. A graph of several sequences brings their
        states together, which may move that of another one, and leaves its snapshots behind. So
        several can go back only if a single graph had them all: equally many tokens of each, and
        no more than n_ubatch together.
        """
        if not self._snapshots or not self.n_rs_seq:
            return {}
        if self.options.n_seq_max == 1:
            return {SEQ: min(len(batch.tokens) - 1, self.n_rs_seq)}
        counts = Counter(batch.seqs.tolist())
        alike = len({*counts.values()}) == 1 and len(batch.tokens) <= self.n_ubatch
        if len(counts) > 1 and not (self.options.unified and alike):
            return {}
        return {seq: min(n - 1, self.n_rs_seq) for seq, n in counts.items()}

    def rewind(self, seq: int = SEQ) -> int:
        """How many positions a sequence can go back now. A recurrent state can by its snapshots; a
        cache with a sliding window by those that it holds, less what is looked back at from there;
        another one, and that of a head alone, all the way."""
        if self.model.is_recurrent and not self.options.mtp_head:
            return self._rewind.get(seq, 0)
        past, window = self.past(seq), self.model.n_swa
        if not window or self.options.mtp_head:
            return past
        first = int(self._lib.llama_memory_seq_pos_min(self._memory, seq))
        return past if first <= 0 else max(0, past - first - window)

    def draft(
        self,
        tokens: Ints,
        seqs: Ints,
        n: int,
        n_candidates: int = 0,
        temperatures: Floats | None = None,
        noise: Floats | None = None,
    ) -> Ints:
        """The MTP block's drafts for what follows the newest token of each sequence, in one graph.

        What the last decode left stays, and so do the caches. For a context with_mtp.

        Args:
            tokens: [n_seqs] int32: chosen and not decoded yet.
            seqs: [n_seqs] int32: each has decoded something. More than one need a unified cache.
            n: drafts for each.
            n_candidates: keep the logits of so many best tokens of every draft; see
                :attr:`draft_logits`.
            temperatures: [n_seqs] float32, above 0: drafts are drawn from softmax(logits /
                temperature) by `noise`; None: they are the best tokens.
            noise: [n, n_seqs, n_head] float32 from the standard Gumbel distribution: the largest of
                logits / temperature + noise is drawn. n_head is what :attr:`n_head` says. Zeros
                give the best token.

        Returns:
            [n, n_seqs] int32.

        Raises:
            UsageError: no such context, or arrays of other shapes.
            NoKVSlotError: the cache has no room for them.
            FatalDecodeError: the logits hold a NaN (on a GPU drafts do not tell).
            DecodeError: as :meth:`decode`.
        """
        self._check_draft(tokens, seqs, n, n_candidates)
        view, null = self._ffi.from_buffer, self._ffi.NULL
        tokens, seqs = (np.ascontiguousarray(a, dtype=np.int32) for a in (tokens, seqs))
        drafts = np.empty((n, len(seqs)), dtype=np.int32)
        drawn = null, null
        self._draft_shape: tuple[int, ...] = (n, len(seqs), n_candidates)
        if temperatures is not None or noise is not None:
            self._draft_shape = (n, len(seqs), self.n_head)
            drawn = self._noise(temperatures, noise, n_candidates)
        given = view("int32_t[]", tokens), view("int32_t[]", seqs), len(seqs), n
        message = self._message
        native.take_recent_errors()
        with self._alone:
            code = self._lib.pyllama_mtp_draft(
                *(self.handle, *given, n_candidates, *drawn, view("int32_t[]", drafts)),
                *(message, len(message)),
            )
        if code != 0:
            self._fail(code)
        if native.pending.exception:
            native.raise_pending()
        self.model.refuse_lost_worker()
        if drafts.min() < 0:
            raise FatalDecodeError(NAN)
        return drafts

    def _noise(
        self, temperatures: Floats | None, noise: Floats | None, n_candidates: int
    ) -> tuple[Any, Any]:
        """Noise and factors for the native call."""
        shapes = [None if given is None else given.shape for given in (noise, temperatures)]
        if shapes != [self._draft_shape, self._draft_shape[1:2]] or n_candidates:
            raise UsageError(
                f"noise of shape {shapes[0]} and temperatures of shape {shapes[1]}, expected "
                f"{self._draft_shape} and {self._draft_shape[1:2]}, without candidates"
            )
        assert temperatures is not None and noise is not None
        pair = (noise, 1 / temperatures)
        arrays = [np.ascontiguousarray(given, dtype=np.float32) for given in pair]
        return tuple(self._ffi.from_buffer("float[]", array) for array in arrays)

    def _check_draft(self, tokens: Ints, seqs: Ints, n: int, n_candidates: int) -> None:
        """Refuse what the native call would read beyond its arrays for, or does not explain."""
        options = self.options
        if not options.with_mtp:
            raise UsageError("drafts come from a context with_mtp")
        if options.n_seq_max > 1 and not options.unified:
            raise UsageError("drafts of a context for several sequences need a unified cache")
        if n < 1 or n_candidates < 0 or not 0 < len(seqs) == len(tokens):
            raise UsageError(
                f"{n} drafts with {n_candidates} candidates after {len(tokens)} tokens of "
                f"{len(seqs)} sequences: it takes one draft or more, and a token of each sequence"
            )

    @property
    def draft_logits(self) -> Floats:
        """[n, n_seqs, n_candidates] float32 of the last :meth:`draft`: logits of the best tokens of
        each, in no order; [n, n_seqs, n_head], all of them, if it has drawn. A view that the next
        one overwrites. Raises UsageError when the last one left none."""
        n = self._ffi.new("int32_t *")
        pointer = self._lib.llama_mtp_get_draft_logits(self.handle, n)
        if not n[0]:
            raise UsageError("the last draft left no logits: ask it for candidates")
        return self._view(pointer, int(n[0])).reshape(*self._draft_shape[:2], -1)

    @property
    def n_head(self) -> int:
        """Rows of the LM head that drafts come from."""
        return self.model.n_vocab if self.draft_ids is None else len(self.draft_ids)

    def reserve_rounds(self, n_seqs: int, depths: Iterable[int]) -> None:
        """Allocate what rounds of `n_seqs` sequences need, with as many drafts as `depths` say.

        Raises:
            InsufficientMemoryError: there is no room for it.
        """
        for n in depths:
            if not self._call(self._lib.pyllama_mtp_reserve, n_seqs, n):
                self.model.refuse_lost_worker()
                said = native.take_recent_errors()
                raise InsufficientMemoryError(f"no memory for rounds of {n} drafts: {said}")

    @property
    def graphs_built(self) -> int:
        """How often a decode or draft found no graph of its shape and built one."""
        return int(self._lib.llama_mtp_get_n_graphs_built(self.handle))

    def synchronize(self) -> None:
        """Wait until the last decode has finished: devices and workers go on after it returns.

        Raises:
            WorkerLostError: a worker was lost meanwhile, and what it should have computed is zeros.
        """
        if self._settled:
            with self._alone:
                self.handle  # noqa: B018 - raises when closed
            return
        self._call(self._lib.pyllama_synchronize)
        self.model.refuse_lost_worker()
        self._settled = True

    # -- results of the last decode ------------------------------------------------------------

    def logits(self, row: int) -> Floats:
        """Logits of batch entry `row`: a view that the next decode overwrites.

        Returns:
            [n_vocab] float32.

        Raises:
            UsageError: no output row was asked for there, or greedy tokens only.
        """
        self._check_output(row)
        if self._left_greedy:
            raise UsageError("this context keeps greedy tokens only; see set_greedy()")
        pointer = self._lib.llama_get_logits_ith(self.handle, row)
        return self._view(pointer, self.model.n_vocab)

    def argmax(self, row: int) -> int:
        """Token with the largest logit of batch entry `row`; the smallest one of equals.

        Raises:
            UsageError: no output row was asked for there.
            FatalDecodeError: the row holds a NaN (on a GPU, greedy tokens do not tell).
        """
        if self._left_greedy:
            self._check_output(row)
            token = int(self._lib.llama_mtp_get_greedy_ith(self.handle, row))
            if token < 0:
                raise FatalDecodeError(NAN)
            return token
        best = int(self.logits(row).argmax())  # numpy: the first NaN, if there is one
        self._refuse_nan(self.logits(row)[best])
        return best

    def _check_output(self, row: int) -> None:
        if not (0 <= row < len(self.last_outputs) and self.last_outputs[row]):
            raise UsageError(f"entry {row} of the last batch was not marked as an output row")
        self._settle()

    def _settle(self) -> None:
        """With workers: have what was computed here, or the news that one is lost, before a result
        is used. Whoever asks would wait for it anyway."""
        if not self._settled and self.model.rpc_servers:
            self.synchronize()

    def check_finite(self, row: int) -> None:
        """Raises FatalDecodeError when the logits of batch entry `row` hold a NaN."""
        if self._left_greedy:
            self.argmax(row)
        else:
            self._refuse_nan(self.logits(row).max())

    @staticmethod
    def _refuse_nan(largest: np.float32) -> None:
        if np.isnan(largest):
            raise FatalDecodeError(NAN)

    def set_greedy(self, on: bool) -> None:
        """Whether the next decodes leave the best token of each output row in place of its logits;
        ignored by upstream's library, whose rows are searched on the host."""
        if self.library.has_tap and on != self.greedy:
            self.greedy = on
            self._lib.llama_mtp_set_greedy(self.handle, on)

    def set_candidates(self, n: int) -> None:
        """Keep the `n` best tokens of each output row of the next decodes, too, with their logits;
        needs greedy tokens. Ignored by upstream's library."""
        if self.library.has_tap and n != self.n_candidates:
            self.n_candidates = n
            self._lib.llama_mtp_set_candidates(self.handle, n)

    def candidates(self, row: int) -> tuple[Ints, Floats]:
        """The best tokens of batch entry `row`, the best one first: ([n] int32 ids, [n] float32
        logits). n is `n_candidates`.

        Raises:
            UsageError: no output row was asked for there, or no candidates.
        """
        self._check_output(row)
        out = self._ffi.new("llama_token *[1]"), self._ffi.new("float *[1]")
        n = int(self._lib.llama_mtp_get_candidates_ith(self.handle, row, *out))
        if not n:
            raise UsageError("the last decode left no candidates; see set_candidates()")
        ids = np.frombuffer(self._ffi.buffer(out[0][0], 4 * n), dtype=np.int32)
        logits = self._view(out[1][0], n)
        order = np.lexsort((ids, -logits)).astype(np.int32)
        return ids[order], logits[order]

    def set_draft_head(self, rows: HeadRows | None, ids: Ints) -> None:
        """Give the MTP block an LM head over a part of the vocabulary, for :meth:`draft`.

        Args:
            rows: [n] rows of the model's LM head, as they are in its file; None: those of the
                trimmed head that the file has.
            ids: [n] int32: their tokens, ascending; those of the trimmed head as in the file.

        Raises:
            UsageError: the library, or the model, has no use for one, or memory is short.
        """
        ids = np.array(ids, dtype=np.int32)
        if rows is None:
            self._use_model_draft_head(ids)
            return
        data = np.ascontiguousarray(rows.data)
        if not len(ids) or rows.type < 0:
            raise UsageError(f"a draft head of {len(ids)} rows of type {rows.type}")
        pointers = (self._ffi.from_buffer(data), self._ffi.from_buffer("int32_t[]", ids))
        set_head = self._lib.pyllama_mtp_set_draft_head
        if not self._call(set_head, rows.type, pointers[0], data.nbytes, pointers[1], len(ids)):
            said = native.take_recent_errors()
            self.model.refuse_lost_worker()
            if native.short_of_memory(said):
                raise InsufficientMemoryError(f"no memory for a draft head: {said}")
            raise UsageError(
                f"there is no draft head here: {said or 'it needs the patched library'}"
            )
        self.draft_ids = ids

    def use_own_head(self) -> None:
        """Give the MTP block its own LM head again, over the whole vocabulary."""
        if self.draft_ids is not None:
            null = self._ffi.NULL
            self._call(self._lib.pyllama_mtp_set_draft_head, 0, null, 0, null, 0)
            self.draft_ids = None

    def replace_draft_rows(self, slots: Ints, ids: Ints, rows: HeadRows) -> None:
        """Write other rows over some of the draft head's, where they are.

        Args:
            slots: [n] int32: which rows of the head, none twice.
            ids: [n] int32: whose rows these are from now on; tokens that have no other.
            rows: [n], of the type that the head has.

        Raises:
            UsageError: the head is none that was given rows, or they do not fit.
        """
        slots, ids = np.array(slots, dtype=np.int32), np.array(ids, dtype=np.int32)
        if len(slots) != len(ids):
            raise UsageError(f"{len(slots)} slots for {len(ids)} tokens")
        data = np.ascontiguousarray(rows.data)
        pointers = [self._ffi.from_buffer("int32_t[]", array) for array in (slots, ids)]
        given = (len(ids), *pointers, self._ffi.from_buffer(data), data.nbytes)
        if not self._call(self._lib.pyllama_mtp_replace_draft_rows, *given):
            said = native.take_recent_errors()
            self.model.refuse_lost_worker()
            raise UsageError(f"no row is replaced: {said or 'it needs the patched library'}")
        assert self.draft_ids is not None
        self.draft_ids = self.draft_ids.copy()  # what was drawn from the one before refers to it
        self.draft_ids[slots] = ids

    def _use_model_draft_head(self, ids: Ints) -> None:
        out = self._ffi.new("int32_t *[1]")
        n = self._call(self._lib.pyllama_mtp_use_model_draft_head, out)
        if not n:
            said = native.take_recent_errors()
            self.model.refuse_lost_worker()
            raise UsageError(f"there is no draft head here: {said or 'it needs a trimmed head'}")
        self.model.refuse_lost_worker()
        native_ids = np.frombuffer(self._ffi.buffer(out[0], 4 * n), dtype=np.int32)
        if not np.array_equal(native_ids, ids):
            raise UsageError("the file's trimmed head has other tokens than these")
        self.draft_ids = ids

    @property
    def output_bytes(self) -> int:
        """Bytes of logits and greedy tokens that decodes have copied out so far."""
        return int(self._lib.llama_mtp_get_output_bytes(self.handle))

    @property
    def graphs_reused(self) -> int:
        """How often a decode found its graph built already."""
        return int(self._lib.llama_perf_context(self.handle).n_reused)

    def _make_tap(self) -> None:
        if not self._call(self._lib.pyllama_set_embeddings_pre_norm, True):
            said = native.take_recent_errors()
            self.model.refuse_lost_worker()
            if native.short_of_memory(said):
                raise InsufficientMemoryError(f"no memory for a hidden-state tap: {said}")
            raise UsageError(
                "there is no hidden-state tap: the library is upstream's, or the model's "
                "architecture has none"
            )

    def set_tap(self, on: bool) -> None:
        """Whether the next decodes leave hidden rows, if `options` ask for any."""
        if self.options.need_embd_pre_norm:
            self._lib.llama_set_embeddings_pre_norm(self.handle, on)
        elif self.options.tap != "off":
            masked = on and self.options.tap == "outputs"
            self._lib.llama_mtp_set_embeddings_nextn(self.handle, on, masked)

    def set_block(self, block: int) -> None:
        """Which of several MTP blocks the next decodes run; for a context of these alone."""
        if block != self._block:
            self._block = block
            self._lib.llama_mtp_set_layer_offset(self.handle, block)

    def set_snapshots(self, on: bool) -> None:
        """Whether the next decodes leave snapshots of the recurrent state to go back to."""
        if self.n_rs_seq and self.library.has_tap and on != self._snapshots:
            self._snapshots = on
            self._lib.llama_mtp_set_rs_snapshots(self.handle, on)

    def hidden_rows(self) -> Floats:
        """Hidden rows of the last batch on the host: [n, n_embd] float32, valid until the next one.

        n is the number of tokens; of output tokens for ``tap="outputs"``. Waits for the
        computation.
        """
        self._settle()
        n = len(self.last_outputs)
        if self.options.need_embd_pre_norm:
            pointer = self._lib.llama_get_embeddings_pre_norm(self.handle)
        else:
            pointer = self._lib.llama_mtp_get_embeddings_nextn(self.handle)
            if self.options.tap == "outputs":
                n = int(np.count_nonzero(self.last_outputs))
        return self._view(pointer, n * self.model.n_embd).reshape(n, self.model.n_embd)

    def nodes(self) -> list[Node]:
        """Graph nodes of the last decode, in order; needs ``trace=True``."""
        if not self._trace:
            raise UsageError("the context was made without trace=True")
        return self._trace.nodes()

    def _view(self, pointer: Any, n: int) -> Floats:
        if not pointer:
            raise UsageError("the last decode produced no such rows (is the hidden-state tap on?)")
        return np.frombuffer(self._ffi.buffer(pointer, n * 4), dtype=np.float32)

    # -- cache ---------------------------------------------------------------------------------

    @property
    def n_past(self) -> int:
        """Positions of sequence 0 in the cache: the next one to fill."""
        return self.past(SEQ)

    def past(self, seq: int) -> int:
        """Positions of a sequence in the cache."""
        self.handle  # noqa: B018 - raises when closed
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def remove(self, start: int, seq: int = SEQ) -> bool:
        """Remove positions `start` and above of a sequence; False when it cannot go back there, see
        :meth:`rewind`."""
        self.handle  # noqa: B018 - raises when closed
        back = self.past(seq) - start
        if start > 0 and back > self.rewind(seq):
            return False
        removed = bool(self._call(self._lib.pyllama_memory_seq_rm, seq, start, -1))
        if removed and back > 0:
            self._rewind.pop(seq, None)
        return removed

    def clear(self) -> None:
        """Empty the cache."""
        self._call(self._lib.pyllama_memory_clear)

    def _state_flags(self, recurrent_only: bool, on_device: bool) -> int:
        lib = self._lib
        flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if recurrent_only else 0
        return flags | (lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if on_device else 0)

    def save_state(
        self, recurrent_only: bool = False, seq: int = SEQ, on_device: bool = False
    ) -> bytearray:
        """The cache of a sequence, as bytes for :meth:`load_state`.

        Args:
            on_device: the contents stay in memory of their device, and the bytes only say where.
                They are good until the next such call for the sequence.

        Raises:
            InsufficientMemoryError: there is no room for them.
        """
        flags, message = self._state_flags(recurrent_only, on_device), self._message
        native.take_recent_errors()
        with self._alone:
            size = self._lib.llama_state_seq_get_size_ext(self.handle, seq, flags)
            try:
                data = bytearray(size)
            except MemoryError:
                raise InsufficientMemoryError(f"no memory for a state of {size} bytes") from None
            target = self._ffi.from_buffer("uint8_t[]", data)
            n = self._lib.pyllama_state_seq_get(
                self.handle, target, size, seq, flags, message, len(message)
            )
        native.raise_pending()
        self.model.refuse_lost_worker()
        if n == 0:
            raise self._state_error("saved")
        del target  # cffi's hold on the buffer
        del data[n:]
        if on_device:
            self._on_device[seq] = data
        return data

    def load_state(
        self, data: bytes | bytearray, recurrent_only: bool = False, seq: int = SEQ
    ) -> None:
        """Put back what :meth:`save_state` gave for a context of the same model and settings.

        Raises:
            FatalDecodeError: llama.cpp refused.
            InsufficientMemoryError: it had no memory. Either way, the context must be cleared.
        """
        on_device = any(data is kept for kept in self._on_device.values())
        flags = self._state_flags(recurrent_only, on_device)
        source, message = self._ffi.from_buffer("uint8_t[]", data), self._message
        self._rewind = {}
        native.take_recent_errors()
        with self._alone:
            n = self._lib.pyllama_state_seq_set(
                self.handle, source, len(data), seq, flags, message, len(message)
            )
        native.raise_pending()
        self.model.refuse_lost_worker()
        if n == 0:
            raise self._state_error("restored")

    def _state_error(self, what: str) -> PyllamaMtpError:
        said = (self.library.text(self._message), native.take_recent_errors())
        reason = "; ".join(filter(None, said))
        kind = InsufficientMemoryError if native.short_of_memory(reason) else FatalDecodeError
        return kind(f"the state cannot be {what}: {reason or 'no reason given'}")

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes: "model" (weights), "context" (caches and snapshots), "compute" (graph buffers).

        Args:
            device: the ggml_backend_dev_t whose memory is meant; NULL: the host's; None: all.
        """
        if device is None:
            found = self._lib.llama_mtp_get_memory(self.handle)
        else:
            found = self._lib.llama_mtp_get_memory_of(self.handle, device)
        return {"model": found.model, "context": found.context, "compute": found.compute}
