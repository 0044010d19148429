"""Log probabilities of an answer's tokens, sent together with their text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, TypeAlias

from pyllama_mtp.llama.model import Model
from pyllama_mtp.llama.toplogprobs import TopLogprobs

#: The API's value for minus infinity, which JSON lacks.
LEAST = -9999.0
#: The log probabilities of a token, and where in the answer its text begins, in characters.
Entry: TypeAlias = tuple[TopLogprobs, int]


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
            self._held.append((one, self._length))
            self._length += len(self._decoder.decode(self._model.piece(one.token)))

    def release(self, n_emitted: int) -> list[Entry]:
        """The entries whose text begins within the first `n_emitted` characters of the answer."""
        ready = [entry for entry in self._held if entry[1] < n_emitted]
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
            **one(found.token, found.logprob),
            "top_logprobs": [one(token, logprob) for token, logprob in found.top],
        }
        for found, _ in entries
    ]
    return {"content": content, "refusal": None}


def for_completion(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""

    def text(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    return {
        "tokens": [text(found.token) for found, _ in entries],
        "token_logprobs": [max(found.logprob, LEAST) for found, _ in entries],
        "top_logprobs": [
            {text(token): max(logprob, LEAST) for token, logprob in found.top}
            for found, _ in entries
        ],
        "text_offset": [offset for _, offset in entries],
    }
