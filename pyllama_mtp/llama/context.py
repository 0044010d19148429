"""One llama.cpp context: decode, what a decode left behind, and the sequences in the cache."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from ..contextoptions import ContextOptions
from ..errors import FatalDecodeError, InsufficientMemoryError, PyllamaMtpError, UsageError
from . import native
from .batch import Batch
from .draftingcontext import NAN, DraftingContext
from .nativecontext import SEQ, Floats, Ints
from .trace import Node

__all__ = ["SEQ", "Context", "ContextOptions"]


class Context(DraftingContext):
    """A context that decodes; see :class:`.NativeContext` for its life, and
    :class:`.DraftingContext` for drafts.

    Attributes:
        last_outputs: output marks of the last batch.
        greedy: decodes leave the best token of every output row, and no logits.
        n_candidates: decodes also leave so many best tokens of every output row, with their logits.
    """

    last_outputs = np.zeros(0, dtype=np.int8)
    greedy = False
    n_candidates = 0
    _left_greedy = False
    _block = 0
    _settled = True  # what the last decode computed is known to be here
    _snapshots = True

    def _prepare(self) -> None:
        super()._prepare()
        self._on_device: dict[int, bytearray] = {}  # by sequence: the state kept on its device
        self._rewind: dict[int, int] = {}  # by sequence: positions that its state can go back

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

    def decode_batch(self, batch: Batch) -> None:
        """Process a batch of any sequences; for the errors see :meth:`decode`."""
        batch.check(self)
        view, alive = batch.view(self)
        if self._trace:
            self._trace.clear()
        self._rewind = {}
        self._settled = not (self.model.on_gpu or self.model.rpc_servers)
        code = self._run(self._lib.pyllama_decode, self._batch, view)
        del alive
        self.last_outputs, self._left_greedy = batch.outputs, self.greedy
        if code != 0:
            self._fail(code)
        self._raise_what_came()
        self._rewind = self._rewinds(batch.seqs)

    def synchronize(self) -> None:
        """Wait until the last decode has finished: devices and workers go on after it returns.
        Raises WorkerLostError: a worker was lost meanwhile, and its results are zeros."""
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
        return self._view(self._rows(self._lib.pyllama_get_logits, row), self.model.n_vocab)

    def argmax(self, row: int) -> int:
        """Token with the largest logit of batch entry `row`; the smallest one of equals.

        Raises:
            UsageError: no output row was asked for there.
            FatalDecodeError: the row holds a NaN (on a GPU, greedy tokens do not tell).
        """
        if self._left_greedy:
            self._check_output(row)
            token = self._ffi.new("int32_t *")
            self._call(self._lib.pyllama_mtp_get_greedy, row, token)
            if token[0] < 0:
                raise FatalDecodeError(NAN)
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
            raise FatalDecodeError(NAN)

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

    def candidates(self, row: int) -> tuple[Ints, Floats]:
        """The best tokens of batch entry `row`, the best one first: ([n] int32 ids, [n] float32
        logits). n is `n_candidates`. Raises UsageError: no output row was asked for there, or no
        candidates."""
        self._check_output(row)
        out = self._ffi.new("const int32_t *[1]"), self._ffi.new("const float *[1]")
        n = self._call(self._lib.pyllama_mtp_get_candidates, row, *out)
        if not n:
            raise UsageError("the last decode left no candidates; see set_candidates()")
        ids = np.frombuffer(self._ffi.buffer(out[0][0], 4 * n), dtype=np.int32)
        logits = self._view(out[1][0], n)
        order = np.lexsort((ids, -logits)).astype(np.int32)
        return ids[order], logits[order]

    def set_tap(self, on: bool) -> None:
        """Whether the next decodes leave hidden rows, if `options` ask for any."""
        if self.options.need_embd_pre_norm:
            self._call(self._lib.pyllama_set_embeddings_pre_norm, on)
        elif self.options.tap != "off":
            masked = on and self.options.tap == "outputs"
            self._lib.llama_mtp_set_embeddings_nextn(self.handle, on, masked)

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
            pointer = self._rows(self._lib.pyllama_get_embeddings_pre_norm)
        else:
            pointer = self._rows(self._lib.pyllama_mtp_get_embeddings_nextn)
            if self.options.tap == "outputs":
                n = int(np.count_nonzero(self.last_outputs))
        return self._view(pointer, n * self.model.n_embd).reshape(n, self.model.n_embd)

    def nodes(self) -> list[Node]:
        """Graph nodes of the last decode, in order; needs ``trace=True``."""
        if not self._trace:
            raise UsageError("the context was made without trace=True")
        return self._trace.nodes()

    # -- sequences in the cache --------------------------------------------------------------------

    def set_snapshots(self, on: bool) -> None:
        """Whether the next decodes leave snapshots of the recurrent state to go back to."""
        if self.n_rs_seq and self.library.has_tap and on != self._snapshots:
            self._snapshots = on
            self._lib.llama_mtp_set_rs_snapshots(self.handle, on)

    def _rewinds(self, seqs: Ints) -> dict[int, int]:
        """How far each sequence can go back after a decode of tokens of these sequences.

        A decode of n tokens makes n snapshots at most, the last one being the state itself; older
        snapshots are left from earlier decodes, and llama.cpp would go back to them all the same.
        Snapshots lie beside the state of their sequence. A graph of several sequences brings their
        states together, which may move the state of another sequence, and leaves its snapshots
        behind. So several sequences can go back only if a single graph had them all: equally many
        tokens of each, and no more than n_ubatch together.
        """
        if not self._snapshots or not self.n_rs_seq:
            return {}
        if self.options.n_seq_max == 1:
            return {SEQ: min(len(seqs) - 1, self.n_rs_seq)}
        counts = Counter(seqs.tolist())
        alike = len({*counts.values()}) == 1 and len(seqs) <= self.n_ubatch
        if len(counts) > 1 and not (self.options.unified and alike):
            return {}
        return {seq: min(n - 1, self.n_rs_seq) for seq, n in counts.items()}

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
        removed = bool(self._call(self._lib.pyllama_memory_seq_rm, seq, start, -1))
        if removed and back > 0:
            self._rewind.pop(seq, None)
        return removed

    def clear(self) -> None:
        """Empty the cache."""
        self._call(self._lib.pyllama_memory_clear)

    # -- state ---------------------------------------------------------------------------------

    def save_state(
        self, recurrent_only: bool = False, seq: int = SEQ, on_device: bool = False
    ) -> bytearray:
        """The cache of a sequence, as bytes for :meth:`load_state`.

        Args:
            on_device: the contents stay in memory of their device, and the bytes only say where.
                They are good until the next such call for the sequence.

        Raises:
            InsufficientMemoryError: there is no room for the state.
        """
        flags = self._state_flags(recurrent_only, on_device)
        size = self._run(self._lib.pyllama_state_seq_get_size, seq, flags)
        if size == 0:
            self._raise_what_came()
            raise self._state_error("saved")
        try:
            data = bytearray(size)
        except MemoryError:
            raise InsufficientMemoryError(f"no memory for a state of {size} bytes") from None
        target = self._ffi.from_buffer("uint8_t[]", data)
        n = self._run(self._lib.pyllama_state_seq_get, target, size, seq, flags)
        self._raise_what_came()
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
            InsufficientMemoryError: llama.cpp got no memory. Either way, the context must be
                cleared.
        """
        on_device = any(data is kept for kept in self._on_device.values())
        flags = self._state_flags(recurrent_only, on_device)
        source = self._ffi.from_buffer("uint8_t[]", data)
        self._rewind = {}
        n = self._run(self._lib.pyllama_state_seq_set, source, len(data), seq, flags)
        self._raise_what_came()
        if n == 0:
            raise self._state_error("restored")

    def _state_flags(self, recurrent_only: bool, on_device: bool) -> int:
        lib = self._lib
        flags = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if recurrent_only else 0
        return flags | (lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if on_device else 0)

    def _state_error(self, what: str) -> PyllamaMtpError:
        reason = native.reason(self._message)
        kind = InsufficientMemoryError if native.short_of_memory(reason) else FatalDecodeError
        return kind(f"the state cannot be {what}: {reason}")
