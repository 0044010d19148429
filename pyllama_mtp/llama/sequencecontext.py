"""The sequences in a context's cache: how far they reach, going back, and their state as bytes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..contextoptions import ContextOptions
from ..errors import FatalDecodeError, InsufficientMemoryError, PyllamaMtpError
from . import native
from .nativecontext import Ints, NativeContext

if TYPE_CHECKING:
    from .model import Model

SEQ = 0  # the sequence of a driver that has one


class SequenceContext(NativeContext):
    """A context whose sequences can be cut, cleared, saved and loaded."""

    def __init__(
        self, model: Model, options: ContextOptions, target: NativeContext | None = None
    ) -> None:
        self._on_device: dict[int, bytearray] = {}  # by sequence: the state kept on its device
        self._rewind: dict[int, int] = {}  # by sequence: positions that its state can go back
        self._snapshots = True
        super().__init__(model, options, target)

    @property
    def n_past(self) -> int:
        """Positions of sequence 0 in the cache: the next one to fill."""
        return self.past(SEQ)

    def past(self, seq: int) -> int:
        """Positions of a sequence in the cache."""
        self.handle  # noqa: B018 - raises when closed
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

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
        with self._alone:
            size = self._lib.llama_state_seq_get_size_ext(self.handle, seq, flags)
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
