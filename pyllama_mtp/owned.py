"""``with`` for everything that owns native memory: leaving the block closes it."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

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
        self.close()
