"""Log probabilities of an answer's tokens, sent together with their text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyllama_mtp.llama.model import Model
from pyllama_mtp.llama.toplogprobs import TopLogprobs

#: The API's value for minus infinity, which JSON lacks.
LEAST = -9999.0


@dataclass(frozen=True)
class Entry:
    """The log probabilities of a token; its text begins `offset` characters into the answer."""

    found: TopLogprobs
    offset: int


class LogprobStream:
    """Holds entries back until their text is emitted; entries without text are dropped."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._held: list[Entry] = []

    def feed(self, found: Sequence[TopLogprobs]) -> None:
        """Add those of the next tokens."""
        for one in found:
            self._held.append(Entry(one, self._length))
            self._length += len(self._decoder.decode(self._model.piece(one.token)))

    def release(self, n_emitted: int) -> list[Entry]:
        """The entries whose text begins within the first `n_emitted` characters of the answer."""
        ready = [entry for entry in self._held if entry.offset < n_emitted]
        self._held = self._held[len(ready) :]
        return ready


def for_chat(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = model.piece(token, special=True)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(data),
        }

    content = [
        {
            **one(entry.found.token, entry.found.logprob),
            "top_logprobs": [one(token, logprob) for token, logprob in entry.found.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def for_completion(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""

    def text(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    return {
        "tokens": [text(entry.found.token) for entry in entries],
        "token_logprobs": [max(entry.found.logprob, LEAST) for entry in entries],
        "top_logprobs": [
            {text(token): max(logprob, LEAST) for token, logprob in entry.found.top}
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }
