"""``with`` for everything that owns native memory, and to whom it belongs: one process, one thread
at a time."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import TypeVar

from ..errors import UsageError
from . import native

T = TypeVar("T", bound="Owned")


class Owned:
    """A context manager that calls :meth:`close`, which may be called more than once."""

    def close(self) -> None:
        """Free what is owned."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C, or the program ends
            native.be_patient_no_longer()
        self.close()


class OfThisProcess:
    """What a forked child must not go on with: it has the memory, and not the threads.

    Subclasses call :meth:`claim` once, when they are made.
    """

    def claim(self) -> None:
        """Have :meth:`disown` called in every child that is forked from now on."""
        _claimed.add(self)

    def disown(self) -> None:
        """In a child: forget what is owned, without freeing it."""
        raise NotImplementedError


_claimed: weakref.WeakSet[OfThisProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for one in list(_claimed):
        one.disown()


os.register_at_fork(after_in_child=_disown_all)


class Exclusive(OfThisProcess):
    """``with`` for what one thread at a time may do; another one is refused at once."""

    def __init__(self, what: str) -> None:
        self._what, self._lock = what, threading.Lock()
        self.claim()

    def disown(self) -> None:
        """Whoever held it is not in this process."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"{self._what} is used by two threads at once, or from within its own callback; "
                "give each thread its own (several may share a model)"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._lock.release()
