"""Responses: whole answers, chunks of a stream, usage, log probabilities."""

from __future__ import annotations

import codecs
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeAlias

from pyllama_mtp.answer import TopLogprobs
from pyllama_mtp.chats.toolcalls import CallPiece
from pyllama_mtp.llama.model import Model

from .bodies import Body, ChatBody
from .generator import Event, Job
from .jobs import Served

#: The log of requests; see :func:`.app.log_requests`.
log = logging.getLogger("pyllama_mtp.serve.requests")

#: The API's words for why an answer has ended.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
#: The API's value for minus infinity, which JSON lacks.
LEAST_LOGPROB = -9999.0
#: The log probabilities of a token, and where in the answer its text begins, in characters.
Entry: TypeAlias = tuple[TopLogprobs, int]


def sse(data: str) -> bytes:
    """One server-sent event."""
    return f"data: {data}\n\n".encode()


DONE = sse("[DONE]")


def to_json(value: Any) -> str:
    """A value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def one_line(text: str) -> str:
    """A client's text as a part of a line."""
    return " ".join(text.split())[:300]


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """The usage of all choices; a prompt with `n` choices counts once."""
    telemetries = [job.request.answer.telemetry for job in jobs]
    n_prompt = sum(len(job.request.prompt) for job in jobs[::n])
    n_generated = sum(len(job.request.answer.tokens) for job in jobs)
    drafted = sum(sum(t.drafted) + t.looked_up["drafted"] for t in telemetries)
    accepted = sum(sum(t.accepted) + t.looked_up["accepted"] for t in telemetries)
    n_reasoning = sum(job.request.answer.n_reasoning for job in jobs)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(t.n_cached for t in telemetries[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": n_reasoning,
        },
    }


def _thought(text: str) -> dict[str, str]:
    """Thought, by the name that most clients know and by the newer name."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _calls(pieces: Sequence[CallPiece]) -> dict[str, Any]:
    """Parts of calls, as a chunk of a stream has them: one part of each call."""
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        begin = {"index": piece.number, "function": {"arguments": ""}}
        if piece.id is not None:
            begin |= {"id": piece.id, "type": "function"}
            begin["function"] = {"name": piece.name, "arguments": ""}
        found.setdefault(piece.number, begin)["function"]["arguments"] += piece.arguments
    return {"tool_calls": list(found.values())} if found else {}


class Choice:
    """One choice of an answer."""

    def __init__(self, served: Served, body: Body, job: Job) -> None:
        self._served, self._index, self._answer = served, job.index, job.request.answer
        self._chat = isinstance(body, ChatBody)
        keeps = self._answer.n_logprobs is not None
        self._logprobs = _LogprobStream(served.model) if keeps else None
        self._begun = False  # a part was sent

    def _choice(
        self, content: dict[str, Any], finish_reason: str | None, n_taken: int
    ) -> dict[str, Any]:
        """A choice, with the log probabilities of the text since the last call, up to `n_taken`."""
        logprobs = None
        if self._logprobs:
            make = _for_chat if self._chat else _for_completion
            logprobs = make(self._served.model, self._logprobs.release(n_taken))
        reason = FINISH_REASONS[finish_reason] if finish_reason else None
        if reason == "stop" and self._answer.tool_calls:
            reason = "tool_calls"
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        """The choice of a complete answer."""
        answer = self._answer
        content: dict[str, Any] = {"text": answer.text}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            calls = [call.to_message() for call in answer.tool_calls]
            if calls:
                message |= {"content": answer.text or None, "tool_calls": calls}
            content = {"message": message | _thought(answer.reasoning)}
        if self._logprobs:
            self._logprobs.feed(answer.logprobs)
        return self._choice(content, answer.finish_reason, answer.n_taken)

    def part(self, event: Event) -> dict[str, Any] | None:
        """The choice of a chunk with an event's text; None: there is nothing to send."""
        if self._logprobs:
            self._logprobs.feed(event.logprobs)
        says = event.text or event.reasoning or event.calls or event.finish_reason
        if self._begun and not (says or event.progress):
            return None
        content: dict[str, Any] = {"text": event.text}
        if self._chat:
            delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
            text = {"content": event.text} if event.text else {}
            content = {"delta": delta | _thought(event.reasoning) | text | _calls(event.calls)}
        self._begun = True
        return self._choice(content, event.finish_reason, event.n_taken)


class Reply:
    """The response to one request."""

    def __init__(self, served: Served, body: Body, jobs: Sequence[Job]) -> None:
        chat = isinstance(body, ChatBody)
        kind = "chat.completion" if chat else "text_completion"
        self._body, self._jobs, self._began = body, jobs, time.monotonic()
        self._choices = [Choice(served, body, job) for job in jobs]
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and body.stream else kind,
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.fingerprint,
        }

    @property
    def name(self) -> str:
        """The answer's id."""
        return str(self._head["id"])

    def log(self, status: int, why: str = "") -> None:
        """Log a line about the request: how it ended, tokens, speed, drafts, seconds."""
        counts = usage(self._jobs, self._body.n)
        details = counts["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        drafted = accepted + details["rejected_prediction_tokens"]
        answers = [job.request.answer for job in self._jobs]
        seconds = max(answer.telemetry.decode_s for answer in answers)
        speed = counts["completion_tokens"] / seconds if seconds else 0.0
        log.info(
            "%s %s %d: prompt %d (%d cached), answer %d at %.1f tok/s, drafts %d of %d, %s, %.2f s",
            *(self.name, one_line(self._body.model or str(self._head["model"])), status),
            *(counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]),
            *(counts["completion_tokens"], speed, accepted, drafted),
            one_line(why) or ", ".join(answer.finish_reason or "?" for answer in answers),
            time.monotonic() - self._began,
        )

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        choices = [choice.whole() for choice in self._choices]
        return {**self._head, "choices": choices, "usage": usage(self._jobs, self._body.n)}

    def chunk(self, job: Job, event: Event) -> bytes:
        """The chunk of a stream with this event; empty: nothing to send."""
        part = self._choices[job.index].part(event)
        if part is None:
            return b""
        chunk: dict[str, Any] = {**self._head, "choices": [part]}
        if event.progress:
            chunk["prompt_progress"] = event.progress
        if self._body.include_usage:
            chunk["usage"] = None
        return sse(to_json(chunk))

    def end(self) -> bytes:
        """The end of a stream."""
        if not self._body.include_usage:
            return DONE
        found = {**self._head, "choices": [], "usage": usage(self._jobs, self._body.n)}
        return sse(to_json(found)) + DONE


# --- log probabilities --------------------------------------------------------------------------


class _LogprobStream:
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


def _for_chat(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        data = model.piece(token, special=True)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
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


def _for_completion(model: Model, entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""

    def text(token: int) -> str:
        return model.piece(token, special=True).decode("utf-8", "replace")

    return {
        "tokens": [text(found.token) for found, _ in entries],
        "token_logprobs": [max(found.logprob, LEAST_LOGPROB) for found, _ in entries],
        "top_logprobs": [
            {text(token): max(logprob, LEAST_LOGPROB) for token, logprob in found.top}
            for found, _ in entries
        ],
        "text_offset": [offset for _, offset in entries],
    }
