"""The answer to a prompt: tokens to text, stop strings, the reason of its end."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from .chats.thinking import Piece, Splitter, overlap, text_of
from .chats.toolcalls import CallPiece, CallReader, ToolCall
from .llama.batch import Floats
from .llama.model import Model
from .telemetry import Telemetry


@dataclass(frozen=True)
class TopLogprobs:
    """Log probabilities at one position, before temperature and filters.

    Attributes:
        token, logprob: of the chosen token.
        top: (token, log probability) of the best tokens, the best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(logits: Floats, token: int, n: int) -> TopLogprobs:
    """Log probabilities of `token` and of the `n` best tokens.

    Args:
        logits: [n_vocab] float32.
    """
    largest = float(logits.max())
    norm = largest + float(np.log(np.exp(logits - largest, dtype=np.float64).sum()))
    n = min(n, len(logits))
    best = np.argpartition(logits, len(logits) - n)[len(logits) - n :] if n else np.empty(0, int)
    best = best[np.lexsort((best, -logits[best]))]
    top = [(int(i), float(logits[i]) - norm) for i in best]
    return TopLogprobs(token, float(logits[token]) - norm, top)


class TextStream:
    """Token bytes to text; holds back half characters, and beginnings of stop strings."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = ""

    def feed(self, data: bytes, final: bool = False) -> str:
        """Text that can be emitted. A stop string is dropped, and becomes `stopped`."""
        self._held += self._decoder.decode(data, final)
        cuts = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if cuts:
            cut, self.stopped = min(cuts)
            out, self._held = self._held[:cut], ""
            return out
        keep = 0 if final else overlap(self._held, self._stop)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


class Answer:
    """The answer to one prompt.

    Attributes:
        text, tokens: generated so far; tokens include the end token, text does not.
        reasoning: the model's thought, if it is told apart; `text` is then the rest.
        tool_calls: the functions that the model calls, if it was given some; not part of text.
        n_reasoning: tokens of the thought, its tags included.
        n_taken: characters of text and reasoning, tags included.
        finish_reason: "length" (max_tokens or a full context), "eos", "stop", "interrupted" (by an
            exception or the consumer), or None while the generation runs.
        telemetry: see :class:`Telemetry`; complete when the generation is.
        n_logprobs: keep the log probability of each token, and of so many best tokens; None: keep
            none.
        logprobs: one for each token, if they are kept.
        prompt_logprobs: those of the prompt's tokens from the second on; None: not kept.
        ended: "eos" or "stop" once the text has ended.
    """

    def __init__(
        self,
        model: Model,
        ignore_eos: bool,
        stop: Sequence[str],
        telemetry: Telemetry,
        n_logprobs: int | None = None,
        splitter: Splitter | None = None,
        calls: CallReader | None = None,
    ) -> None:
        """`splitter`: tells thought from answer; None: all is text. `calls`: tells calls of tools
        from text; None: they are text."""
        self.text = self.reasoning = ""
        self.n_reasoning = self.n_taken = 0
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.telemetry = telemetry
        self.n_logprobs = n_logprobs
        self.logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[TopLogprobs] | None = None
        self.ended: str | None = None
        self._model, self._ignore_eos, self._stream = model, ignore_eos, TextStream(stop)
        self._splitter, self._calls = splitter, calls
        self.tool_calls: list[ToolCall] = []

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        state = self.finish_reason or "not complete"
        return f"<{type(self).__name__}: {len(self.tokens)} tokens, {state}, {text!r}>"

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens so far, drafts verified for them, and drafts accepted."""
        return len(self.tokens), self.telemetry.n_drafted, self.telemetry.n_accepted

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the text; "": none has."""
        return self._stream.stopped

    @property
    def message(self) -> dict[str, Any]:
        """The turn, for a conversation that goes on: role, content, thought and calls."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return found

    def take(self, token: int) -> list[Piece]:
        """Take the next token: text that can be emitted now."""
        self.tokens.append(token)
        end = self._model.is_end(token) and not self._ignore_eos
        splitter = self._splitter
        tags = self._calls or (splitter and not splitter.answering)
        read = text_of if tags else Model.piece
        before = splitter is not None and splitter.thinking
        text = self._stream.feed(b"" if end else read(self._model, token))
        if end or self._stream.stopped:
            self.ended = "eos" if end else "stop"
        pieces = self._keep(text)
        if self._calls and self._calls.done:
            self.ended = self.ended or "stop"
        self.n_reasoning += before or (splitter is not None and splitter.thinking)
        return pieces

    def rest(self) -> list[Piece]:
        """The text that was held back; no token follows."""
        return self._keep("" if self._stream.stopped else self._stream.feed(b"", final=True), True)

    def _keep(self, text: str, final: bool = False) -> list[Piece]:
        """Add text to the answer: its pieces."""
        if self._splitter:
            pieces = self._splitter.feed(text, final)
            self.n_taken = self._splitter.n_taken
        else:
            pieces = [Piece(text)] if text else []
            self.n_taken += len(text)
        if self._calls:
            told = [[piece] if piece.thought else self._calls.feed(piece) for piece in pieces]
            pieces = [*chain(*told), *(self._calls.feed("", final=True) if final else [])]
        for piece in pieces:
            if isinstance(piece, CallPiece):
                if piece.name is not None:
                    self.tool_calls.append(ToolCall(piece.id or "", piece.name))
                self.tool_calls[-1].arguments += piece.arguments
            elif piece.thought:
                self.reasoning += piece
            else:
                self.text += piece
        return pieces
