"""APIs that tell an answer as a list of items, one after the other: thought, text, calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

from pyllama_mtp.chats.toolcalls import CallPiece
from pyllama_mtp.scheduler import Progress

from .answers import Choice, Part, Reply, Served
from .bodies import Body


class ItemsReply(Reply, ABC):
    """The response of such an API. A stream's events make the items that the whole answer has."""

    def __init__(self, served: Served, body: Body) -> None:
        super().__init__(served, body)
        self._items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None  # kind and number of the item that grows

    def whole(self) -> dict[str, Any]:
        """The complete response."""
        deque(self._grow(self._choices[0].whole()), 0)
        return self._response()

    def _events(self, choice: Choice, news: Progress | dict[str, float]) -> Iterator[bytes]:
        if isinstance(news, dict):
            yield self._waiting()
        elif part := choice.part(news):
            yield from self._grow(part)

    def _grow(self, part: Part) -> Iterator[bytes]:
        """Add a part of the answer to the items."""
        if part.thought:
            yield from self._add("thought", part.thought, part)
        if part.text:
            yield from self._add("text", part.text, part)
        for call in part.calls:
            yield from self._add("call", call.arguments, part, call)
        if part.finish_reason:
            yield from self._end(part.finish_reason)

    def _add(
        self, kind: str, text: str, part: Part, call: CallPiece | None = None
    ) -> Iterator[bytes]:
        """Add text, or arguments, to the item of this kind that grows, or to a new one."""
        wanted = kind, 0 if call is None else call.number
        if self._open != wanted:
            if self._open:
                yield from self._close()
            yield from self._begin(kind, call)
            self._open = wanted
        yield from self._extend(text, part)

    def _end(self, finish_reason: str) -> Iterator[bytes]:
        """Close the last item; the answer is complete."""
        if self._items:
            yield from self._close()

    def _waiting(self) -> bytes:
        """More of the prompt is processed."""
        return b""

    @abstractmethod
    def _response(self) -> dict[str, Any]:
        """The response as it is now."""

    @abstractmethod
    def _begin(self, kind: str, call: CallPiece | None = None) -> Iterator[bytes]:
        """Begin an item: a "thought", "text", or a "call"."""

    @abstractmethod
    def _extend(self, text: str, part: Part) -> Iterator[bytes]:
        """Add text, or arguments of a call, to the last item."""

    @abstractmethod
    def _close(self) -> Iterator[bytes]:
        """End the last item."""
