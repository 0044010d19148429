"""Recurrent states that stay on the devices that compute them, until the host wants them.

A copy on a device takes its place behind the computations there, and nobody waits for it. Its bytes
come to the host later, best while the device computes something else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ContextClosedError, FatalDecodeError
from . import native
from .batch import State
from .native import HostMemory


class DeviceState:
    """A recurrent state, as :meth:`.Context.save_state` gives it, on its device or on the host.

    ``len()`` is the number of bytes that it takes of the host.
    """

    def __init__(self, owner: DeviceStates, slot: int, size: int) -> None:
        self._owner, self._slot, self._size = owner, slot, size
        self._data: State = b""

    def __len__(self) -> int:
        return len(self._data)

    def on_host(self) -> State:
        """The bytes for :meth:`.Context.load_state`. The first call copies them, and frees the
        place on the device. Raises ContextClosedError, InsufficientMemoryError, FatalDecodeError.
        """
        if not self._data:
            self._data = self._owner.fetch(self._slot, self._size)
        return self._data


def on_host(state: State | DeviceState) -> State:
    """The bytes of a state, wherever it is; see :meth:`DeviceState.on_host`."""
    return state.on_host() if isinstance(state, DeviceState) else state


class DeviceStates:
    """Room for the newest states of a context. The context must outlive it."""

    def __init__(self, context: Any, call: Callable[..., int], memory: HostMemory, n: int) -> None:
        """Allocate room for `n` states, or none where that is not possible.

        Args:
            context: the native context.
            call: :meth:`.Context.call` of it, whose owner has this object, and may be gone first.
            memory: for states that come to the host.
        """
        self._call, self._memory = weakref.WeakMethod(call), memory
        self._lib, self._n = native.load().lib, n
        self._states: dict[int, weakref.ref[DeviceState]] = {}  # by slot, the oldest first
        message = native.load().ffi.new("char[256]")
        init = self._lib.pyllama_mtp_checkpoints_init
        self._handle: Any = init(context, n, message, len(message))

    def close(self) -> None:
        """Free the room; what is still there is lost."""
        handle, self._handle = self._handle, None
        if handle:
            self._lib.llama_mtp_checkpoints_free(handle)

    def n_bytes(self, device: Any = None) -> int:
        """Bytes of the room; `device` as for :meth:`.Context.memory`."""
        if not self._handle:
            return 0
        everywhere = device is None
        device = native.load().ffi.NULL if everywhere else device
        return int(self._lib.llama_mtp_checkpoints_size(self._handle, everywhere, device))

    def keep(self, seq: int) -> DeviceState | None:
        """A copy of a sequence's state after what was decoded; None: it cannot be kept here."""
        self.make_room()
        if not self._handle:
            return None
        slot = next(slot for slot in range(self._n) if slot not in self._states)
        size = self._run(self._lib.pyllama_mtp_checkpoints_take, slot, seq)
        if size == 0:
            return None
        state = DeviceState(self, slot, size)
        self._states[slot] = weakref.ref(state)
        return state

    def make_room(self) -> None:
        """Bring the oldest state to the host if all room is taken."""
        there = [(slot, ref, ref()) for slot, ref in self._states.items()]
        self._states = {slot: ref for slot, ref, state in there if state is not None}
        states = [state for _, _, state in there if state is not None]
        if len(states) == self._n:
            states[0].on_host()

    def fetch(self, slot: int, size: int) -> State:
        """The bytes of a state, whose place is free then; see :meth:`DeviceState.on_host`."""
        if not self._handle:
            raise ContextClosedError("the context of this state is closed")
        data = self._memory.take(size)
        with native.load().ffi.from_buffer("uint8_t[]", data) as target:  # see save_state()
            done = self._run(self._lib.pyllama_mtp_checkpoints_get, slot, target, size)
        if not done:
            raise FatalDecodeError("a state did not come back from its device")
        self._states.pop(slot, None)
        return data

    def _run(self, function: Any, *arguments: Any) -> int:
        """Call a function of the shim that takes the room first."""
        call = self._call()
        if not call:
            raise ContextClosedError("the context of this state is closed")
        return call(lambda _, *rest: function(self._handle, *rest), *arguments)
