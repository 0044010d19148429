"""``with`` for everything that owns native memory, and to whom it belongs: one process, one thread
at a time."""

from __future__ import annotations

import os
import weakref
from _thread import RLock
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


class Exclusive(OfThisProcess, RLock):  # type: ignore[misc]
    """``with`` for what one thread at a time may do; another one, and the same one within it, is
    refused at once.

    Ctrl-C may raise between any two lines of Python, so releasing is the base's ``__exit__``, which
    is C, and taking gives back what it has got when it is interrupted.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.claim()

    def disown(self) -> None:
        """Whoever held it is not in this process."""
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
