"""Owners of native memory: ``with``, one process, one thread at a time."""

from __future__ import annotations

import os
import weakref
from _thread import RLock
from typing import TypeVar

from ..errors import UsageError
from . import native

T = TypeVar("T", bound="Owned")


class Owned:
    """A context manager that calls :meth:`close`, which may be called more than once."""

    def close(self) -> None:
        """Free the native memory."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C, or the program ends
            native.be_patient_no_longer()
        self.close()


class OfThisProcess:
    """An object that a forked child must not use: the child has its memory, but not its threads.

    Subclasses call :meth:`claim` once, when they are made.
    """

    def claim(self) -> None:
        """Have :meth:`disown` called in every child that is forked from now on."""
        _claimed.add(self)

    def disown(self) -> None:
        """In a child: forget the native memory, without freeing it."""
        raise NotImplementedError


_claimed: weakref.WeakSet[OfThisProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for one in list(_claimed):
        one.disown()


os.register_at_fork(after_in_child=_disown_all)


class Exclusive(OfThisProcess, RLock):  # type: ignore[misc]
    """A lock for ``with`` that refuses a second thread at once, and the same thread within it.

    Ctrl-C may raise between any two lines of Python. So releasing is the base's ``__exit__``, in C,
    and taking gives the lock back when it is interrupted.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.claim()

    def disown(self) -> None:
        """The thread that held the lock is not in this process."""
        self._at_fork_reinit()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._mine:
            raise self._refusal()
        try:
            if not self.acquire(blocking=False):
                raise self._refusal()
        except BaseException:
            if self._mine:
                self.release()
            raise
        return True

    @property
    def _mine(self) -> bool:
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def _refusal(self) -> UsageError:
        return UsageError(
            f"{self._what} is used by two threads at once, or from within its own callback; "
            "give each thread its own (several may share a model)"
        )
