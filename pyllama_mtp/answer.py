"""What comes of a prompt: tokens to text, stop strings, why it ended."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .model import Model
from .telemetry import Telemetry
from .toplogprobs import TopLogprobs


class TextStream:
    """Token bytes to text: holds back half characters, and what may become a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """Text that is safe to emit; sets `stopped` when a stop string has come (it is dropped)."""
        self._held += self._decoder.decode(data, final)
        cuts = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if cuts:
            self.stopped = True
            out, self._held = self._held[: min(cuts)], ""
            return out
        keep = 0 if final else self._possible_stop()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _possible_stop(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        longest = 0
        for s in self._stop:
            for n in range(1, min(len(s), len(self._held) + 1)):
                if self._held.endswith(s[:n]):
                    longest = max(longest, n)
        return longest


class Answer:
    """What is generated after one prompt.

    Attributes:
        text, tokens: what was generated so far; tokens include the end token, text does not.
        finish_reason: "length" (max_tokens or a full context), "eos", "stop", "interrupted" (an
            exception or the consumer ended it), or None while it runs.
        telemetry: see :class:`Telemetry`; complete when the generation is.
        n_logprobs: keep the log probability of each token, and of so many of the best ones; None:
            of none.
        logprobs: as many as there are tokens, if they are kept.
        ended: "eos" or "stop" once no token may follow, by the text itself.
    """

    def __init__(
        self,
        model: Model,
        ignore_eos: bool,
        stop: Sequence[str],
        telemetry: Telemetry,
        n_logprobs: int | None = None,
    ) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.telemetry = telemetry
        self.n_logprobs = n_logprobs
        self.logprobs: list[TopLogprobs] = []
        self.ended: str | None = None
        self._model, self._ignore_eos, self._stream = model, ignore_eos, TextStream(stop)

    def take(self, token: int) -> str:
        """The next token. The text that can be emitted now; "" for none."""
        self.tokens.append(token)
        end = self._model.is_end(token) and not self._ignore_eos
        piece = self._stream.feed(b"" if end else self._model.piece(token))
        self.text += piece
        if end or self._stream.stopped:
            self.ended = "eos" if end else "stop"
        return piece

    def rest(self) -> str:
        """No token follows: the text that was held back; "" for none."""
        piece = "" if self._stream.stopped else self._stream.feed(b"", final=True)
        self.text += piece
        return piece
