"""A ``llama_context``: made, called with its failures turned into exceptions, freed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..contextoptions import ContextOptions
from ..errors import (
    ContextClosedError,
    DecodeAborted,
    FatalDecodeError,
    InsufficientMemoryError,
    InvalidBatchError,
    NoKVSlotError,
    PyllamaMtpError,
    UsageError,
)
from . import native
from .owned import Exclusive, OfThisProcess, Owned
from .trace import Trace

if TYPE_CHECKING:
    from .model import Model

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
SEQ = 0  # the sequence of a driver that has one

#: How often a long computation looks for Ctrl-C.
POLL_PERIOD_US = 50_000

log = logging.getLogger("pyllama_mtp")


def decode_error(code: int, message: str) -> PyllamaMtpError:
    """The exception for a return code of ``llama_decode`` or of our shim (there is no other place).

    Args:
        code: non-zero; see ``llama_decode`` in llama.h and PYLLAMA_* in pyllama_shim.h.
        message: the native side's reason, may be empty.
    """
    lib = native.load().lib
    why = f": {message}" if message else ""
    if code == 1:
        return NoKVSlotError(
            f"no room in the KV cache{why}. Use a longer n_ctx or a shorter prompt.", code
        )
    if code == 2:
        return DecodeAborted("the computation was interrupted", code)
    if code in (-1, lib.PYLLAMA_BATCH_REFUSED):
        return InvalidBatchError(f"llama.cpp refused the batch{why}", code)
    if code == lib.PYLLAMA_FORKED:
        return UsageError(
            f"{message}: use n_threads=1, a thread of its own, or start processes with spawn"
        )
    ran_out = code in (-2, lib.PYLLAMA_OUT_OF_MEMORY, lib.PYLLAMA_NO_ROOM)
    if ran_out or (code < -2 and native.short_of_memory(message)):
        return InsufficientMemoryError(
            f"out of memory{why}: use a smaller n_ctx, n_batch, n_ubatch or fewer threads"
        )
    return FatalDecodeError(f"decode failed with code {code}{why}", code)


class NativeContext(Owned, OfThisProcess):
    """A context manager around ``llama_context``, for one thread at a time, in one process.

    A decode that runs out of memory, or finds a fault in llama.cpp, leaves caches of unknown
    contents: the context is then lost, and can only be closed.

    Attributes:
        n_ctx, n_batch, n_ubatch, n_rs_seq: sizes that llama.cpp has settled on.
    """

    def __init__(
        self, model: Model, options: ContextOptions, target: NativeContext | None = None
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
        self._message = self._ffi.new("char[256]")
        self._alone = Exclusive("a session or context")
        self.model, self.options = model, options
        self._refuse_options()
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

    def _create(self, target: NativeContext | None) -> Any:
        lib, options = self._lib, self.options
        p = lib.llama_context_default_params()
        options.fill(lib, p)
        n_bytes = self.model.options.moe_cache_size
        if n_bytes and not options.mtp_head:  # which would take the memory again, for one block
            p.moe_cache_size = n_bytes
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
        if options.tap != "off":
            masked = options.tap == "outputs"
            lib.llama_mtp_set_embeddings_nextn(self._handle, True, masked)
        self.model.adapters.apply(self)
        sliced = not self.model.has_mtp if options.slice is None else options.slice
        lib.llama_mtp_set_slice(self._handle, sliced)
        pre_norm = options.hidden == "pre-norm"
        point = lib.LLAMA_MTP_TAP_PRE_NORM if pre_norm else lib.LLAMA_MTP_TAP_POST_NORM
        lib.llama_set_embeddings_pre_norm_point(self._handle, point)
        if options.need_embd_pre_norm and not self._call(lib.pyllama_set_embeddings_pre_norm, True):
            raise self._refusal(
                "a hidden-state tap", "upstream's library has none, nor have some architectures"
            )

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
        lib.pyllama_context_free(handle)
        self._weights.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) or getattr(self, "_lost_handle", None):
            self.close()

    def disown(self) -> None:
        """In a forked child: forget everything; nothing can be used or freed here."""
        self._handle = self._lost_handle = self._batch = None
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

    def _call(self, function: Any, *arguments: Any) -> int:
        """Call a function of the shim whose codes below 0 are failures: its result. Raises
        PyllamaMtpError: by the code; see :func:`decode_error`."""
        code = self._run(function, *arguments)
        if code < 0:
            self._fail(code)
        if native.pending.exception:
            native.raise_pending()
        return code

    def _rows(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the shim that gives a pointer to floats last: the pointer."""
        found = self._ffi.new("const float *[1]")
        self._call(function, *arguments, found)
        return found[0]

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

    def _refusal(self, what: str, otherwise: str) -> PyllamaMtpError:
        """The exception for something that llama.cpp has just refused: InsufficientMemoryError if
        its log says so, else UsageError. `otherwise` is the reason where the log gives none."""
        said = native.take_recent_errors()
        self.model.refuse_lost_worker()
        if native.short_of_memory(said):
            return InsufficientMemoryError(f"no memory for {what}: {said}")
        return UsageError(f"{what} is not possible here: {said or otherwise}")

    # -- figures -------------------------------------------------------------------------------

    @property
    def n_past(self) -> int:
        """Positions of sequence 0 in the cache: the next one to fill."""
        return self.past()

    def past(self, seq: int = SEQ) -> int:
        """Positions of a sequence in the cache."""
        self.handle  # noqa: B018 - raises when closed
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

    @property
    def graphs_built(self) -> int:
        """How often a decode or draft found no graph of its shape and built one."""
        return int(self._lib.llama_mtp_get_n_graphs_built(self.handle))

    @property
    def output_bytes(self) -> int:
        """Bytes of logits and greedy tokens that decodes have copied out so far."""
        return int(self._lib.llama_mtp_get_output_bytes(self.handle))

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes: "model" (weights), "context" (caches and snapshots), "compute" (graph buffers).

        Args:
            device: the ggml_backend_dev_t whose memory is meant; NULL: the host's; None: all.
        """
        found = self._ffi.new("struct llama_mtp_memory *")
        which = (True, self._ffi.NULL) if device is None else (False, device)
        self._call(self._lib.pyllama_mtp_get_memory, *which, found)
        return {"model": found.model, "context": found.context, "compute": found.compute}

    def _view(self, pointer: Any, n: int) -> Floats:
        if not pointer:
            raise UsageError("the last decode produced no such rows (is the hidden-state tap on?)")
        return np.frombuffer(self._ffi.buffer(pointer, n * 4), dtype=np.float32)
