"""A llama.cpp context: decode, what a decode left behind, drafts, sequences in the cache."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import (
    ContextClosedError,
    FatalDecodeError,
    InsufficientMemoryError,
    PyllamaMtpError,
    UsageError,
)
from ..machine import Threads, available_memory
from ..models.architectures import ARCHITECTURES
from . import native
from .batch import SEQ, Batch, Floats, Ints, KeptRow, State
from .contextoptions import ContextOptions
from .devicestates import DeviceState, DeviceStates
from .native import Exclusive, HostMemory, OfThisProcess, Owned, decode_error

if TYPE_CHECKING:
    from .model import Model

#: How often a long computation looks for Ctrl-C.
POLL_PERIOD_US = 50_000
#: States of more bytes are refused where memory is short, before the system ends the process.
LARGE_STATE = 1 << 26
#: Computations of more rows are parts of prompts.
FEW_ROWS = 64
#: Several threads hardly gain in steps that read fewer bytes of weights.
TINY = 8_000_000

log = logging.getLogger("pyllama_mtp")


class Context(Owned, OfThisProcess):
    """A context manager around ``llama_context``, for one thread at a time, in one process.

    A decode that runs out of memory, or finds a fault in llama.cpp, leaves caches of unknown
    contents: the context is then lost, and can only be closed.

    Attributes:
        n_ctx, n_batch, n_ubatch, n_rs_seq: sizes that llama.cpp has settled on.
        last_outputs: output marks of the last batch.
        greedy: decodes leave the best token of every output row, and no logits.
        n_candidates: decodes also leave so many best tokens of every output row, with their logits.
        draft_ids: [n] int32: tokens that the draft head is over, by row; None: the whole
            vocabulary. See :func:`.set_draft_head`.
        draft_shape: (drafts, sequences, logits of each draft) of the last :func:`.compute_drafts`.
        checkpoint_memory: host memory for recurrent states.
        states: room for recurrent states on the devices of this context; see :meth:`keep_states`.
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
        self._lost_handle: Any = None  # to be freed, not to be used
        self._why_closed = "the context is closed"
        self._batch: Any = None
        self.last_outputs = np.zeros(0, dtype=np.int8)
        self.greedy = self._left_greedy = False
        self.n_candidates = 0
        self.draft_ids: Ints | None = None
        self.draft_shape: tuple[int, ...] = ()
        self._block = 0
        self._settled = True  # what the last decode computed is known to be here
        self._on_device: dict[int, State] = {}  # by sequence: the state kept on its device
        self.checkpoint_memory = HostMemory(model.on_gpu)
        self.states: DeviceStates | None = None
        #: By sequence, for images in the cache: last position, and the one at which text goes on.
        self._image_ends: dict[int, dict[int, int]] = {}
        self._rewind: dict[int, int] = {}  # by sequence: positions that its state can go back
        self._message = self._ffi.new("char[256]")
        self._alone = Exclusive("a session or context")
        self.model, self.options = model, options
        self._refuse_options()
        self._threads = self._own_threads()
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

    def _refuse_options(self) -> None:
        """Raises UsageError for options that do not fit each other or the model."""
        model, options = self.model, self.options
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

    def _own_threads(self) -> list[Threads]:
        """How many threads compute few rows, and prompts; empty: as many as `options` say."""
        model, n = self.model, self.options.n_threads
        here = self.library.has_tap and not (model.on_gpu or model.rpc_servers)
        if not (self.options.auto_threads and here and n > 1):
            return []
        tiny = sum(model.info.step_types.values()) < TINY
        return [Threads(n, 1 if tiny else None), Threads(n)]

    def _create(self, target: Context | None) -> Any:
        lib, options = self._lib, self.options
        self._interrupt = self._ffi.new("struct pyllama_interrupt *")
        self._interrupt.poll = lib.pyllama_on_poll
        self._interrupt.period_us = POLL_PERIOD_US
        p = lib.llama_context_default_params()
        options.fill(lib, p)
        n_bytes = self.model.options.moe_cache_size
        if n_bytes and not options.mtp_head:  # which would take the memory again, for one block
            p.moe_cache_size = n_bytes
        p.abort_callback = lib.pyllama_abort_poll
        p.abort_callback_data = self._interrupt
        if target is not None:
            p.ctx_other = target.handle
        message = self._ffi.new("char[512]")
        native.take_recent_errors()
        handle = lib.pyllama_context_init(self.model.handle, p, message, len(message))
        try:
            self._raise_what_came()
        except BaseException:
            if handle:
                lib.pyllama_context_free(handle)
            raise
        if handle:
            return handle
        reason = native.reason(message)
        if native.short_of_memory(reason):
            raise InsufficientMemoryError(
                f"no memory for a context of {options.n_ctx} tokens ({reason}); "
                "use a smaller n_ctx, n_ubatch or cache type"
            )
        raise UsageError(f"llama.cpp refused the context: {reason}")

    def _prepare(self) -> None:
        """Set up a native context that was just made."""
        lib, options, message = self._lib, self.options, self._message
        self._batch = lib.pyllama_batch_ext_init(self._handle, message, len(message))
        if not self._batch:
            raise InsufficientMemoryError(f"no memory for a batch of {options.n_batch} tokens")
        self._memory = lib.llama_get_memory(self._handle)
        self.n_ctx = int(lib.llama_n_ctx(self._handle))
        self.n_batch = int(lib.llama_n_batch(self._handle))
        self.n_ubatch = int(lib.llama_n_ubatch(self._handle))
        self.n_rs_seq = int(lib.llama_n_rs_seq(self._handle))
        self.model.adapters.apply(self.call)
        if self._threads:
            lib.llama_set_n_threads(self._handle, *[self._threads[0].n] * 2)
        lib.llama_mtp_set_slice(self._handle, options.slice)
        self._tap_point = options.hidden
        if options.with_mtp:
            lib.llama_mtp_set_block_input(self._handle, self._native_point)
        if not self.set_tap(True):
            architectures = ", ".join(name for name, one in ARCHITECTURES.items() if one.in_trunk)
            error = self.refusal("a hidden-state tap", "upstream's library has none")
            raise type(error)(f"{error}; the patched library has one for {architectures}")

    # -- life ----------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The native handle. Raises ContextClosedError after :meth:`close` or a failure, and in a
        forked child."""
        if not self._handle:
            if self._lost_handle:
                self.model.refuse_lost_worker()  # a lost worker may be the reason
            raise ContextClosedError(self._why_closed)
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether the context can no longer be used."""
        return not self._handle

    def close(self) -> None:
        """Free everything. May be called again; the model closes its contexts too."""
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
        """Free the native context, unless a device has failed: destructors would then end the
        process. What is on such a device stays there, the model's weights with it."""
        lib = self._lib
        code = lib.pyllama_synchronize(handle, self._ffi.NULL, 0)
        if code in (lib.PYLLAMA_ABORTED, lib.PYLLAMA_EXCEPTION):
            log.warning("a device has failed; the memory of a context on it cannot be freed")
            return
        if self.states:
            self.states.close()
        lib.pyllama_context_free(handle)
        self._weights.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) or getattr(self, "_lost_handle", None):
            self.close()

    def disown(self) -> None:
        """In a forked child: forget everything; nothing can be used or freed here."""
        self._handle = self._lost_handle = self._batch = self.states = None
        self._why_closed = (
            "this session or context belongs to the process that this one was forked from; make "
            "one here, or start processes with spawn"
        )

    # -- calls ---------------------------------------------------------------------------------

    def _run(self, function: Any, *arguments: Any) -> int:
        """Call a function of the shim, which takes the context first: its result."""
        native.take_recent_errors()
        with self._alone:
            message = self._message
            return int(function(self.handle, *arguments, message, len(message)))

    def compute(self, n_rows: int, kind: Hashable, function: Any, *arguments: Any) -> None:
        """Call a function of the shim that computes so many rows, a computation of this kind, with
        as many threads as are best: few rows have many short operations, prompts few long ones.
        Raises PyllamaMtpError: by its code; see :func:`.decode_error`."""
        threads = self._threads[n_rows > FEW_ROWS] if self._threads else None
        if threads and threads.n != self.n_threads:
            self._lib.llama_set_n_threads(self.handle, threads.n, threads.n)
        self.model.refuse_truncated_file()
        began = time.perf_counter()
        code = self._run(function, *arguments)
        if threads:
            threads.took(kind, time.perf_counter() - began)
        if code != 0:
            self._fail(code)
        self._raise_what_came()

    @property
    def n_threads(self) -> int:
        """CPU threads of the last computation; before it, of a first round."""
        return int(self._lib.llama_n_threads(self.handle))

    def call(self, function: Any, *arguments: Any) -> int:
        """Call a function of the shim whose codes below 0 are failures: its result. Raises
        PyllamaMtpError: by the code; see :func:`.decode_error`."""
        code = self._run(function, *arguments)
        if code < 0:
            self._fail(code)
        if native.pending.exception:
            native.raise_pending()
        return code

    def _rows(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the shim that gives a pointer to floats last: the pointer."""
        pointer = self._ffi.new("const float *[1]")
        self.call(function, *arguments, pointer)
        return pointer[0]

    def _raise_what_came(self) -> None:
        """After a native call: raise what a callback parked, or the loss of a worker."""
        native.raise_pending()
        self.model.refuse_lost_worker()

    def _fail(self, code: int) -> NoReturn:
        """Raise what a failure's code means, or what a callback parked."""
        error = decode_error(code, native.reason(self._message, ""))
        lib = self._lib
        if code in (lib.PYLLAMA_ABORTED, lib.PYLLAMA_OUT_OF_MEMORY, lib.PYLLAMA_EXCEPTION):
            self._lose(error)
        self._raise_what_came()
        raise error

    def _lose(self, error: PyllamaMtpError) -> None:
        """After a failure that left caches of unknown contents."""
        self._lost_handle, self._handle = self._handle, None
        self._why_closed = f"the context was lost in a failure ({error}); close it, make another"

    def refusal(self, what: str, otherwise: str) -> PyllamaMtpError:
        """The exception for something that llama.cpp has just refused: InsufficientMemoryError if
        its log says so, else UsageError. `otherwise` is the reason where the log gives none."""
        said = native.take_recent_errors()
        self.model.refuse_lost_worker()
        if native.short_of_memory(said):
            return InsufficientMemoryError(f"no memory for {what}: {said}")
        return UsageError(f"{what} is not possible here: {said or otherwise}")

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
            outputs: [n] int8, 1 where an output row (logits) is wanted; at most n_outputs_max 1s.
            hidden: [n, n_embd] float32, for a context of the MTP block only: row i is the hidden
                state that pairs with tokens[i]: the trunk's at position start + i - 1.
            seq: the sequence; for several in one batch see :meth:`decode_batch`.

        Raises:
            UsageError: sizes or ids that llama.cpp would abort on.
            DecodeError: a subclass that names the failure.
            KeyboardInterrupt: Ctrl-C; the context must then be cleared.
        """
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        seqs = np.full(len(tokens), seq, dtype=np.int32)
        self.decode_batch(Batch(tokens, positions, seqs, outputs, hidden))

    def decode_rows(self, rows: Floats, positions: Ints, end: int, seq: int = SEQ) -> None:
        """Process embeddings of an image, or of a part of one; for the errors see :meth:`decode`.

        Args:
            rows: [n, n_embd_inp] float32.
            positions: [n, 1] or, with M-RoPE, [n, 4] int32.
            end: the position at which the text goes on.
        """
        seqs, none = np.full(len(rows), seq, np.int32), np.zeros(len(rows), dtype=np.int8)
        self.decode_batch(Batch(np.zeros_like(seqs), positions, seqs, none, rows=rows))
        self.note_image(self._last(seq), end, seq)

    def note_image(self, last: int, end: int, seq: int = SEQ) -> None:
        """An image in the cache, whose largest position there is `last`; `end`: see
        :meth:`decode_rows`. :meth:`load_state` forgets it."""
        self._image_ends.setdefault(seq, {})[last] = end

    def _check(self, batch: Batch) -> None:
        """Refuse every batch on which a GGML_ASSERT would end the interpreter. Raises UsageError:
        the batch does not fit; the message says what would."""
        n, options, model = len(batch.tokens), self.options, self.model
        if not 1 <= n <= self.n_batch:
            raise UsageError(f"a batch of {n} tokens; it must hold 1 to n_batch = {self.n_batch}")
        self._check_places(batch)
        if batch.rows is None:
            model.check_tokens(batch.tokens)
        elif batch.rows.shape != (n, model.n_embd_inp):
            raise UsageError(
                f"rows of shape {batch.rows.shape} for a model that takes {(n, model.n_embd_inp)}"
            )
        rows = n - batch.outputs.tobytes().count(0)
        if rows > options.n_outputs_max:
            raise UsageError(
                f"{rows} output rows; this context was made for {options.n_outputs_max}"
            )
        hidden, shape = batch.hidden, (n, model.n_embd)
        if options.mtp_head != (hidden is not None):
            raise UsageError(
                "hidden rows belong to a context of the MTP block, and to every batch of one"
            )
        if hidden is not None and hidden.shape != shape:
            raise UsageError(f"hidden rows of shape {hidden.shape}, expected {shape}")

    def _check_places(self, batch: Batch) -> None:
        """Refuse positions and sequences that are not there; see :meth:`_check`."""
        # Lists: for the few tokens of a round their minimum costs a tenth of what numpy's does.
        places = batch.positions if batch.positions.ndim == 1 else batch.positions[:, 0]
        positions, seqs, options = places.tolist(), batch.seqs.tolist(), self.options
        first, last = min(positions), max(positions)
        if first < 0 or last >= self.n_ctx:
            raise UsageError(
                f"positions {first} to {last} do not fit a context of {self.n_ctx} tokens"
            )
        if min(seqs) < 0 or max(seqs) >= options.n_seq_max:
            raise UsageError(
                f"sequences {min(seqs)} to {max(seqs)}; the context was made for "
                f"{options.n_seq_max}"
            )
        if options.mtp_head:
            return
        # llama.cpp only warns, with M-RoPE. A context of the MTP block is its user's care.
        starts = dict[int, int]()
        for seq, at in zip(seqs, positions, strict=True):
            starts[seq] = min(at, starts.get(seq, at))
        for seq, start in starts.items():
            if start > self.past(seq):
                raise UsageError(f"a batch at position {start}; the cache ends at {self.past(seq)}")

    def decode_batch(self, batch: Batch) -> None:
        """Process a batch of any sequences; for the errors see :meth:`decode`."""
        self._check(batch)
        view, alive = batch.view(self._ffi, self.model.n_embd)
        self._decode(batch, "decode", self._lib.pyllama_decode, self._batch, view)
        del alive

    def _decode(self, batch: Batch, what: str, function: Any, *arguments: Any) -> None:
        """Call a function of the shim that decodes a batch."""
        self._rewind = {}
        self._settled = not (self.model.on_gpu or self.model.rpc_servers)
        n_rows = len(batch.tokens)
        kind = what, n_rows, int(np.count_nonzero(batch.outputs))
        self.last_outputs, self._left_greedy = batch.outputs, self.greedy
        self.compute(n_rows, kind, function, *arguments)
        self._rewind = self._rewinds(batch.seqs)

    def can_draft_and_decode(self, n_seqs: int, n: int) -> bool:
        """Whether :meth:`draft_and_decode` can make `n` drafts for each of so many sequences: in a
        context with_mtp, unless an adapter or the MTP block has other embeddings than the trunk."""
        return bool(self.call(self._lib.pyllama_mtp_can_draft_and_decode, n_seqs, n))

    def draft_and_decode(self, batch: Batch, n: int) -> None:
        """A round in one submission: as :func:`.compute_drafts`, and then :meth:`decode_batch` of
        what was drafted, which does not come to the host in between.

        Args:
            batch: of each sequence its newest token and places for `n` drafts, one sequence after
                the other; all are outputs. The drafts are written into `batch.tokens`.

        Raises:
            FatalDecodeError: the logits of a draft hold a NaN (on a GPU drafts do not tell).
            UsageError, DecodeError: as :meth:`decode_batch`.
        """
        self._check(batch)
        rows = batch.tokens.reshape(-1, n + 1)
        newest, seqs = rows[:, 0].copy(), batch.seqs.reshape(rows.shape)[:, 0].copy()
        drafts = np.empty((n, len(rows)), dtype=np.int32)
        ids = [self._ffi.from_buffer("int32_t[]", array) for array in (newest, seqs, drafts)]
        function = self._lib.pyllama_mtp_draft_and_decode
        self._decode(batch, "round", function, *ids[:2], len(rows), n, ids[2])
        self._settled = True
        if drafts.min() < 0:
            raise FatalDecodeError(native.NAN)
        rows[:, 1:] = drafts.T

    def synchronize(self) -> None:
        """Wait until the last decode has finished: devices and workers go on after it returns.
        Raises WorkerLostError: a worker was lost meanwhile, and its results are zeros."""
        if self._settled:
            with self._alone:
                self.handle  # noqa: B018 - raises when closed
            return
        self.call(self._lib.pyllama_synchronize)
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
        return self.view(self._rows(self._lib.pyllama_get_logits, row), self.model.n_vocab)

    def argmax(self, row: int) -> int:
        """Token with the largest logit of batch entry `row`; the smallest one of equals.

        Raises:
            UsageError: no output row was asked for there.
            FatalDecodeError: the row holds a NaN (on a GPU, greedy tokens do not tell).
        """
        if self._left_greedy:
            self._check_output(row)
            token = self._ffi.new("int32_t *")
            self.call(self._lib.pyllama_mtp_get_greedy, row, token)
            if token[0] < 0:
                raise FatalDecodeError(native.NAN)
            return int(token[0])
        best = int(self.logits(row).argmax())  # numpy: the first NaN, if there is one
        self._refuse_nan(self.logits(row)[best])
        return best

    def _check_output(self, row: int) -> None:
        if not (0 <= row < len(self.last_outputs) and self.last_outputs[row]):
            raise UsageError(f"entry {row} of the last batch was not marked as an output row")
        self._settle()

    def _settle(self) -> None:
        """With workers: wait for the last decode before a result of it is used, and raise the loss
        of a worker. Reading the result would wait as well."""
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
            raise FatalDecodeError(native.NAN)

    def set_greedy(self, on: bool) -> None:
        """Whether the next decodes leave the best token of each output row in place of its logits.
        Ignored by upstream's library, whose rows are searched on the host."""
        if self.library.has_tap and on != self.greedy:
            self.greedy = on
            self._lib.llama_mtp_set_greedy(self.handle, on)

    def set_candidates(self, n: int) -> None:
        """Also keep the `n` best tokens of each output row of the next decodes, with their logits.
        Needs greedy tokens. Ignored by upstream's library."""
        if self.library.has_tap and n != self.n_candidates:
            self.n_candidates = n
            self._lib.llama_mtp_set_candidates(self.handle, n)

    def set_draft_window(self, n: int) -> None:
        """How many of the last tokens drafts attend to, besides the first ones; 0: all. For a
        context with_mtp; ignored by upstream's library."""
        if self.library.has_tap:
            self._lib.llama_mtp_set_draft_window(self.handle, n)

    def candidates(self, row: int) -> tuple[Ints, Floats]:
        """The best tokens of batch entry `row`, the best one first: ([n] int32 ids, [n] float32
        logits). n is `n_candidates`. Raises UsageError: no output row was asked for there, or no
        candidates."""
        self._check_output(row)
        out = self._ffi.new("const int32_t *[1]"), self._ffi.new("const float *[1]")
        n = self.call(self._lib.pyllama_mtp_get_candidates, row, *out)
        if not n:
            raise UsageError("the last decode left no candidates; see set_candidates()")
        ids = np.frombuffer(self._ffi.buffer(out[0][0], 4 * n), dtype=np.int32)
        logits = self.view(out[1][0], n)
        order = np.lexsort((ids, -logits)).astype(np.int32)
        return ids[order], logits[order]

    def keep(self, row: int) -> KeptRow:
        """What the last decode left of an output row, to be kept. Raises UsageError: see
        :meth:`argmax`."""
        if not self._left_greedy:
            self.check_finite(row)
            return KeptRow(values=self.logits(row).copy())
        return KeptRow(self.argmax(row), *(self.candidates(row) if self.n_candidates else ()))

    def set_tap(self, on: bool) -> bool:
        """Whether the next decodes leave hidden rows, if `options` ask for any. False: this model
        and library cannot."""
        if self.options.need_embd_pre_norm:
            point = self._native_point if on else self._lib.LLAMA_HIDDEN_TAP_NONE
            return bool(self.call(self._lib.pyllama_set_hidden_tap, point))
        if self.options.tap != "off":
            masked = on and self.options.tap == "outputs"
            self._lib.llama_mtp_set_embeddings_nextn(self.handle, on, masked)
        return True

    def set_tap_point(self, point: str) -> None:
        """Where the next decodes take hidden rows, and turn the tap on: "post-norm" or "pre-norm",
        see `hidden` of :class:`.ContextOptions`."""
        self._tap_point = point
        self.set_tap(True)

    @property
    def _native_point(self) -> Any:
        before = self._tap_point == "pre-norm"
        lib = self._lib
        return lib.LLAMA_HIDDEN_TAP_PRE_NORM if before else lib.LLAMA_HIDDEN_TAP_POST_NORM

    def set_block(self, block: int) -> None:
        """Which of several MTP blocks the next decodes run; for a context of MTP blocks alone."""
        if block != self._block:
            self._block = block
            self._lib.llama_mtp_set_layer_offset(self.handle, block)

    def hidden_rows(self) -> Floats:
        """Hidden rows of the last batch on the host: [n, n_embd] float32, valid until the next one.

        n is the number of tokens; of output tokens for ``tap="outputs"``. Waits for the
        computation.
        """
        self._settle()
        n = len(self.last_outputs)
        if self.options.need_embd_pre_norm:
            pointer = self._rows(self._lib.pyllama_get_hidden_rows, 0, n)
        else:
            pointer = self._rows(self._lib.pyllama_mtp_get_embeddings_nextn)
            if self.options.tap == "outputs":
                n = int(np.count_nonzero(self.last_outputs))
        return self.view(pointer, n * self.model.n_embd).reshape(n, self.model.n_embd)

    # -- sequences in the cache --------------------------------------------------------------------

    def _rewinds(self, seqs: Ints) -> dict[int, int]:
        """How far each sequence can go back after a decode of tokens of these sequences.

        A decode of n tokens makes n snapshots at most, the last one being the state itself; older
        snapshots are left from earlier decodes, and llama.cpp would go back to them all the same.
        More tokens of a sequence than there can be snapshots leave none, but in llama.cpp as it is.
        Snapshots lie beside the state of their sequence. A graph of several sequences brings their
        states together, which may move the state of another sequence, and leaves its snapshots
        behind. So several sequences can go back only if a single graph had them all: equally many
        tokens of each, and no more than n_ubatch together.
        """
        if not self.n_rs_seq:
            return {}
        rest = 0 if self.library.has_tap else self.n_rs_seq
        if self.options.n_seq_max == 1:
            return {SEQ: len(seqs) - 1 if len(seqs) <= self.n_rs_seq + 1 else rest}
        counts = Counter(seqs.tolist())
        alike = len({*counts.values()}) == 1 and len(seqs) <= self.n_ubatch
        if len(counts) > 1 and not (self.options.unified and alike):
            return {}
        return {seq: n - 1 if n <= self.n_rs_seq + 1 else rest for seq, n in counts.items()}

    def rewind(self, seq: int = SEQ) -> int:
        """How many positions a sequence can go back now.

        A recurrent state goes back by its snapshots. A cache with a sliding window goes back by the
        positions that it holds, less the window before the position reached. Any other cache, and
        the cache of a head alone, goes all the way.
        """
        if self.model.is_recurrent and not self.options.mtp_head:
            return self._rewind.get(seq, 0)
        past, window = self.past(seq), self.model.n_swa
        if not window or self.options.mtp_head:
            return past
        first = int(self._lib.llama_memory_seq_pos_min(self._memory, seq))
        return past if first <= 0 else max(0, past - first - window)

    def remove(self, start: int, seq: int = SEQ) -> bool:
        """Remove positions `start` and above of a sequence; False when the sequence cannot go back
        there, see :meth:`rewind`."""
        self.handle  # noqa: B018 - raises when closed
        back = self.past(seq) - start
        if start > 0 and back > self.rewind(seq):
            return False
        removed = bool(self.call(self._lib.pyllama_memory_seq_rm, seq, start, -1))
        if removed and back > 0:
            self._rewind.pop(seq, None)
        if removed and (ends := self._image_ends.pop(seq, None)):
            self._image_ends[seq] = {at: end for at, end in ends.items() if at < start}
        return removed

    def copy(self, source: int, to: int) -> None:
        """Have a sequence that is empty share another one's caches, and take its recurrent state.
        For a unified cache."""
        self._image_ends[to] = {**self._image_ends.get(source, {})}
        self.call(self._lib.pyllama_memory_seq_cp, source, to, -1)

    def clear(self) -> None:
        """Empty the cache."""
        self._image_ends.clear()
        self.call(self._lib.pyllama_memory_clear)

    # -- state ---------------------------------------------------------------------------------

    def save_state(
        self, recurrent_only: bool = False, seq: int = SEQ, on_device: bool = False
    ) -> State:
        """The cache of a sequence, as bytes for :meth:`load_state`.

        Args:
            on_device: the contents stay in memory of their device, and the bytes only say where.
                They are good until the next such call for the sequence.

        Raises:
            InsufficientMemoryError: there is no room for the state.
        """
        flags = self._state_flags(recurrent_only, on_device)
        size = self._state_call("saved", self._lib.pyllama_state_seq_get_size, seq, flags)
        data: State
        try:
            if size > LARGE_STATE and not recurrent_only and size > available_memory():
                raise MemoryError
            data = self.checkpoint_memory.take(size) if recurrent_only else bytearray(size)
        except MemoryError:
            raise InsufficientMemoryError(f"no memory for a state of {size} bytes") from None
        # Released at once: an error keeps this frame, and the collector cannot free memory in use.
        with self._ffi.from_buffer("uint8_t[]", data) as target:
            get = self._lib.pyllama_state_seq_get
            n = self._state_call("saved", get, target, size, seq, flags)
        self._rewind.pop(seq, None)  # what was pending has been taken in
        data = data[:n] if n < size else data
        if on_device:
            self._on_device[seq] = data
        return data

    def keep_states(self, n: int) -> None:
        """Have :meth:`save_checkpoint` leave the newest `n` states on the devices that compute
        them, where layers are on devices with memory of their own."""
        if n and self.model.on_gpu:
            self.states = DeviceStates(self.handle, self.call, self.checkpoint_memory, n)

    def save_checkpoint(self, seq: int = SEQ) -> State | DeviceState:
        """The recurrent state of a sequence; for the errors see :meth:`save_state`."""
        state = self.states.keep(seq) if self.states else None
        if state is None:
            return self.save_state(recurrent_only=True, seq=seq)
        self._rewind.pop(seq, None)
        return state

    def load_state(self, data: State, recurrent_only: bool = False, seq: int = SEQ) -> None:
        """Put back what :meth:`save_state` gave for a context of the same model and settings.

        Raises:
            FatalDecodeError: llama.cpp refused.
            InsufficientMemoryError: llama.cpp got no memory. Either way, the context must be
                cleared.
        """
        on_device = any(data is kept for kept in self._on_device.values())
        flags = self._state_flags(recurrent_only, on_device)
        self._rewind = {}
        if not recurrent_only:
            self._image_ends.pop(seq, None)
        with self._ffi.from_buffer("uint8_t[]", data) as source:  # see save_state()
            put = self._lib.pyllama_state_seq_set
            self._state_call("restored", put, source, len(data), seq, flags)

    def _state_flags(self, recurrent_only: bool, on_device: bool) -> int:
        lib = self._lib
        flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if recurrent_only else 0
        return flags | (lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if on_device else 0)

    def _state_call(self, what: str, function: Any, *arguments: Any) -> int:
        """Call a function of the shim that is about a state: bytes of it."""
        n = self._run(function, *arguments)
        self._raise_what_came()
        if n == 0:
            reason = native.reason(self._message)
            kind = InsufficientMemoryError if native.short_of_memory(reason) else FatalDecodeError
            raise kind(f"the state cannot be {what}: {reason}")
        return n

    # -- figures -------------------------------------------------------------------------------

    @property
    def n_head(self) -> int:
        """Rows of the LM head that drafts come from."""
        return self.model.n_vocab if self.draft_ids is None else len(self.draft_ids)

    def past(self, seq: int = SEQ) -> int:
        """Positions of a sequence in the cache, of which an image may leave some free."""
        self.handle  # noqa: B018 - raises when closed
        last = self._last(seq)
        return self._image_ends.get(seq, {}).get(last, last + 1)

    def _last(self, seq: int) -> int:
        """The largest position of a sequence in the cache."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq))

    @property
    def graphs_built(self) -> int:
        """How often a decode or draft found no graph of its shape and built one."""
        return int(self._lib.llama_mtp_get_n_graphs_built(self.handle))

    @property
    def output_bytes(self) -> int:
        """Bytes of logits and greedy tokens that decodes have copied out so far."""
        return int(self._lib.llama_mtp_get_output_bytes(self.handle))

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes: "model" (weights), "context" (caches, snapshots, and :attr:`states`), "compute"
        (graph buffers, and the CPU's work buffer).

        Args:
            device: the ggml_backend_dev_t whose memory is meant; NULL: the host's; None: all.
        """
        sizes = self._ffi.new("struct llama_mtp_memory *")
        which = (True, self._ffi.NULL) if device is None else (False, device)
        self.call(self._lib.pyllama_mtp_get_memory, *which, sizes)
        kept = self.states.n_bytes(device) if self.states else 0
        return {"model": sizes.model, "context": sizes.context + kept, "compute": sizes.compute}

    def view(self, pointer: Any, n: int) -> Floats:
        """[n] float32 at a native pointer, valid until the next computation."""
        if not pointer:
            raise UsageError("the last decode produced no such rows (is the hidden-state tap on?)")
        return np.frombuffer(self._ffi.buffer(pointer, n * 4), dtype=np.float32)
