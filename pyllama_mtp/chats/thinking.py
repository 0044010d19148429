"""A model's thought: told apart from its answer, and ended after a number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..llama.model import Model

#: The tags around a thought.
OPEN, CLOSE = "<think>", "</think>"
#: The tags around a call of a tool.
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
TAGS = (OPEN, CLOSE, OPEN_CALL, CLOSE_CALL)
#: The end of a thought that is too long; templates write the same after an empty thought.
GAP = "\n\n"
FORCED = f"\n{CLOSE}{GAP}"


class Piece(str):
    """Text of a generation.

    Attributes:
        thought: True: part of the model's thought. False: part of its answer.
    """

    __slots__ = ("thought",)
    thought: bool

    def __new__(cls, text: str, thought: bool = False) -> Piece:
        """Text of an answer or of a thought."""
        piece = super().__new__(cls, text)
        piece.thought = thought
        return piece


def overlap(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of `text` that is an incomplete mark."""
    lengths = (
        n
        for mark in marks
        for n in range(1, min(len(mark), len(text) + 1))
        if text.endswith(mark[:n])
    )
    return max(lengths, default=0)


def opened(model: Model, prompt: Sequence[int]) -> bool:
    """Whether a prompt, token ids, ends with an opened thought, as templates write it."""
    return model.detokenize(prompt[-8:], special=True).rstrip().endswith(OPEN)


def text_of(model: Model, token: int) -> bytes:
    """The bytes of a token's text; a control token has none, unless it is a tag."""
    data = model.piece(token)
    if not data:
        tag = model.piece(token, special=True)
        data = tag if tag.decode("utf-8", "replace") in TAGS else b""
    return data


class Splitter:
    """Tells thought from answer, as text comes.

    The prompt or the start of the model's text opens a thought. The tags, and white space around a
    thought, belong to neither. Later tags are text of the answer.

    Attributes:
        thinking: whether a thought is open.
        answering: whether the rest of the text is answer.
        n_taken: characters of the text that are no longer held back, tags included.
    """

    def __init__(self, thinking: bool = False) -> None:
        self.thinking, self.answering = thinking, False
        self.n_taken = 0
        self._held = ""
        self._skip_space = thinking

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Add text; return the pieces that are certain by now. `final`: the text is complete."""
        length = len(self._held) + len(text)
        self._held += text
        if not self.thinking and not self.answering:
            self._begin(final)
        pieces = [Piece(self._thought(final), True)] if self.thinking else []
        if self.answering:
            self._strip()
            pieces.append(Piece(self._held))
            self._held = ""
        self.n_taken += length - len(self._held)
        return [piece for piece in pieces if piece]

    def _begin(self, final: bool) -> None:
        """Decide between thought and answer, as soon as that is certain."""
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self.thinking, self._skip_space = text[len(OPEN) :], True, True
        else:
            self.answering = final or not OPEN.startswith(text)

    def _thought(self, final: bool) -> str:
        """The text that is certainly thought."""
        self._strip()
        end = self._held.find(CLOSE)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self.thinking, self.answering, self._skip_space = False, True, True
            return thought
        sure = self._held if final else self._held[: len(self._held) - overlap(self._held, [CLOSE])]
        thought = sure.rstrip()
        self._held = "" if final else self._held[len(thought) :]
        return thought

    def _strip(self) -> None:
        if self._skip_space:
            self._held = self._held.lstrip()
            self._skip_space = not self._held


class Thought:
    """The thought at the start of a text: whether it is over, and which tokens must end it."""

    def __init__(
        self, model: Model, budget: int | None, prompt: Sequence[int], gap: bool = False
    ) -> None:
        """Args:
        budget: most tokens of thought, 0 or more; None: no limit.
        prompt: token ids, which may open a thought.
        gap: an empty line must follow the closing tag.
        """
        self._model, self._left, self._gap = model, math.inf if budget is None else budget, gap
        self._splitter = Splitter(opened(model, prompt))
        self._due: list[int] | None = None

    @property
    def forced(self) -> int | None:
        """The token that must come next; None: any may."""
        if self._due is None and self._splitter.thinking and self._left < 1:
            self._due = self._tokens(FORCED)
        return self._due[0] if self._due else None

    @property
    def over(self) -> bool:
        """Whether the rest of the text is answer."""
        return not self._due if self._due is not None else self._splitter.answering

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        if self._due is not None:
            del self._due[:1]
        elif not self._splitter.answering:
            self._left -= self._splitter.thinking
            # An incomplete character is no part of a tag.
            text = text_of(self._model, token).decode("utf-8", "replace")
            self._splitter.feed(text)
            if self._gap and self._splitter.answering and text.endswith(CLOSE[-1]):
                self._due = self._tokens(GAP)

    def _tokens(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=True)
