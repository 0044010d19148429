"""Hidden rows on their way from the target to the MTP block: arrays, or rows of a context's tap.

A tap (patch 3) keeps the rows of a context's last batches where the graph computed them; the draft
context reads them there (patch 6). Without one, as in the upstream variant, rows are copied to the
host and sent back with the batch. Both kinds are used alike: cut, joined, kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import native
from .errors import InsufficientMemoryError, UsageError

if TYPE_CHECKING:
    from .context import Context

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

#: Slot of the carry row, which pairs with the next token, of sequence 0. Those of further sequences
#: follow it; the rest is free for checkpoints.
CARRY_SLOT = 0


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows in host memory: data is [n, n_embd] float32."""

    data: Floats

    def __len__(self) -> int:
        return len(self.data)

    def part(self, begin: int, end: int) -> HostRows:
        """Rows begin .. end-1."""
        return HostRows(self.data[begin:end])

    def after(self, first: Hidden) -> HostRows:
        """These rows with `first` before them."""
        assert isinstance(first, HostRows)
        return HostRows(np.concatenate([first.data, self.data]))

    def keep(self, slot: int) -> HostRows:
        """The same rows, safe from the next batch."""
        return HostRows(self.data.copy())

    def to_host(self) -> Floats:
        """[n, n_embd] float32."""
        return self.data


@dataclass(frozen=True, eq=False)
class TapRows:
    """Rows of a tap: index is [n] int32. Unless kept, valid until the batch after the next; after a
    batch of up to LLAMA_MTP_SHORT tokens, until as many more have come in such batches."""

    tap: Tap
    index: Ints

    def __post_init__(self) -> None:
        """Raises UsageError for an index that is not a list of whole numbers of 32 bits."""
        given = np.asarray(self.index)
        if given.dtype == np.int32 and given.ndim == 1 and given.flags.c_contiguous:
            return  # as it comes from a tap: a few microseconds in every round
        index = np.ascontiguousarray(given, dtype=np.int32)
        if index.ndim != 1 or not np.array_equal(index, given):
            raise UsageError("rows of a tap are named by one list of whole numbers of 32 bits")
        object.__setattr__(self, "index", index)

    def __len__(self) -> int:
        return len(self.index)

    def part(self, begin: int, end: int) -> TapRows:
        """Rows begin .. end-1."""
        return TapRows(self.tap, self.index[begin:end])

    def after(self, first: Hidden) -> TapRows:
        """These rows with `first`, of the same tap, before them."""
        assert isinstance(first, TapRows) and first.tap is self.tap
        return TapRows(self.tap, np.concatenate([first.index, self.index]))

    def keep(self, slot: int) -> TapRows:
        """The one row, copied on its device to where batches leave it."""
        assert len(self) == 1
        return self.tap.keep(int(self.index[0]), slot)

    def to_host(self) -> Floats:
        """[n, n_embd] float32: copies, after waiting for the computation."""
        return np.stack([self.tap.read(int(row)) for row in self.index])


Hidden: TypeAlias = "HostRows | TapRows"


def joined(parts: Sequence[Hidden]) -> Hidden:
    """The rows of all `parts`, at least one, in order; all on the host or all of one tap."""
    taps = [part for part in parts if isinstance(part, TapRows)]
    if not taps:
        return HostRows(np.concatenate([part.to_host() for part in parts]))
    assert len(taps) == len(parts) and all(part.tap is taps[0].tap for part in taps)
    return TapRows(taps[0].tap, np.concatenate([part.index for part in taps]))


class Tap:
    """The hidden-state tap of one context (llama-mtp.h: need_embd_pre_norm)."""

    def __init__(self, context: Context) -> None:
        """Raises UsageError when the library, the model or memory does not give one."""
        self.context = context
        self._lib = context.library.lib
        self._ffi = context.library.ffi
        if not context._call(self._lib.pyllama_set_embeddings_pre_norm, True):
            said = native.take_recent_errors()
            context.model.refuse_lost_worker()
            if native.short_of_memory(said):
                raise InsufficientMemoryError(f"no memory for a hidden-state tap: {said}")
            raise UsageError(
                "there is no hidden-state tap: the library is upstream's, the model has no MTP "
                "head, or memory is short; use handoff='host'"
            )

    @property
    def n_bytes(self) -> int:
        """Size of the tap: zeros, kept rows, rows of short batches and of two long ones."""
        lib, n_seq_max = self._lib, self.context.options.n_seq_max
        kept = n_seq_max + int(lib.LLAMA_MTP_MORE_SLOTS) + 3 * int(lib.LLAMA_MTP_SHORT)
        return 4 * self.context.model.n_embd * (1 + kept + 2 * self.context.n_batch)

    def is_on(self, device: Any = None) -> bool:
        """Whether it lies in this memory; `device` as for :meth:`.Context.memory`."""
        if device is None:
            return True
        library, model = self.context.library, self.context.model
        name = library.text(self.info().device)
        if device:
            return name == library.device_name(device)
        return all(name != library.device_name(one) for one in model.devices)

    def set(self, on: bool) -> None:
        """Whether the next batches leave their rows."""
        self._lib.llama_set_embeddings_pre_norm(self.context.handle, on)

    def rows(self, n: int) -> TapRows:
        """The rows of the last batch, which had `n` tokens, in batch order.

        In a draft context only output tokens have rows; the others' are undefined.

        Raises:
            UsageError: no token of it, or more than the batch had, left a row.
        """
        handle, row = self.context.handle, self._lib.llama_mtp_tap_row
        i = next((i for i in range(n) if row(handle, i) >= 0), None)
        if i is None:
            self.context.model.refuse_lost_worker()
            raise UsageError("the last decode left no hidden rows (was the tap on?)")
        had = len(self.context.last_outputs)
        if n > had:
            raise UsageError(f"{n} hidden rows are asked for; the last decode had {had} tokens")
        first = int(row(handle, i)) - i
        return TapRows(self, np.arange(first, first + n, dtype=np.int32))

    def first_row(self) -> int:
        """Index of the row of the last batch's first token. Raises UsageError: it has none."""
        row = int(self._lib.llama_mtp_tap_row(self.context.handle, 0))
        if row < 0:
            raise UsageError("the last decode left no hidden rows (was the tap on?)")
        return row

    def zero(self) -> TapRows:
        """The row of zeros that pairs with position 0."""
        return TapRows(self, np.array([self._lib.LLAMA_MTP_ROW_ZERO], dtype=np.int32))

    def keep(self, row: int, slot: int) -> TapRows:
        """Copy `row` to the kept row of `slot`; stays on the device."""
        kept = int(self._lib.llama_mtp_tap_keep(self.context.handle, slot, row))
        if kept < 0:
            raise UsageError(f"row {row} or slot {slot} of the tap does not exist")
        return TapRows(self, np.array([kept], dtype=np.int32))

    def read(self, row: int) -> Floats:
        """[n_embd] float32 copy of a row."""
        data = np.empty(self.context.model.n_embd, dtype=np.float32)
        pointer = self._ffi.from_buffer("float[]", data)
        if not self._lib.llama_mtp_tap_read(self.context.handle, row, pointer):
            raise UsageError(f"row {row} of the tap does not exist")
        self.context.model.refuse_lost_worker()
        return data

    def write(self, slot: int, data: Floats) -> TapRows:
        """Set the kept row of `slot` from the host: data is [n_embd] float32."""
        data = np.ascontiguousarray(data, dtype=np.float32)
        if data.shape != (self.context.model.n_embd,):
            raise UsageError(f"a hidden row of shape {data.shape}")
        pointer = self._ffi.from_buffer("float[]", data)
        kept = int(self._lib.llama_mtp_tap_write(self.context.handle, slot, pointer))
        if kept < 0:
            raise UsageError(f"slot {slot} of the tap does not exist")
        return TapRows(self, np.array([kept], dtype=np.int32))

    def info(self) -> Any:
        """struct llama_mtp_tap_info: device, leaves_device, n_bytes_to_host, n_bytes_from_host."""
        return self._lib.llama_mtp_get_tap_info(self.context.handle)


@dataclass(frozen=True)
class Traffic:
    """Bytes of hidden rows that crossed between an accelerator and the host.

    Attributes:
        leaves_device: rows have to cross, because the MTP block is not where they are computed.
    """

    to_host: int
    from_host: int
    leaves_device: bool

    def since(self, earlier: Traffic) -> dict[str, int]:
        """{"to_host": bytes, "from_host": bytes} from then to now."""
        return {
            "to_host": self.to_host - earlier.to_host,
            "from_host": self.from_host - earlier.from_host,
        }


def traffic(*contexts: Context) -> Traffic:
    """What has crossed so far; on a CPU rows are in host memory, and nothing crosses."""
    taps = [context.tap.info() for context in contexts if context.tap]
    to_host = sum(int(info.n_bytes_to_host) for info in taps)
    from_host = sum(int(info.n_bytes_from_host) for info in taps)
    if contexts[0].model.on_gpu:
        to_host += sum(context.hidden_bytes_read for context in contexts)
        from_host += sum(context.hidden_bytes_sent for context in contexts)
    return Traffic(to_host, from_host, any(bool(info.leaves_device) for info in taps))
