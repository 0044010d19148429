"""A plugin for llm (https://llm.datasette.io), which finds it by its entry point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import llm
from pydantic import Field

from .errors import PyllamaMtpError


class PyllamaMtp(llm.Model):
    """A GGUF file, with MTP on; it stays loaded for the next turns."""

    model_id, can_stream = "pyllama-mtp", True
    _opened: tuple[Any, Any] = (None, None)

    class Options(llm.Options):
        path: str | None = Field(None, description="a .gguf file, or hf:OWNER/REPO[:QUANT]")
        n_ctx: int = Field(0, description="most tokens of the conversation; 0: as much as is usual")
        max_tokens: int | None = Field(None, description="most tokens of an answer")
        thinking: bool | None = Field(None, description="whether the model thinks first")
        temperature: float | None = Field(None, description="0: the likeliest tokens")
        top_p: float | None = Field(None, description="keep the likeliest that sum up to P")
        seed: int | None = Field(None, description="same seed, same text")

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """The text of the answer, piece by piece. Raises llm.ModelError."""
        messages: list[dict[str, str]] = []
        for turn in [*(conversation.responses if conversation else ()), response]:
            if turn.prompt.system:
                messages.append({"role": "system", "content": turn.prompt.system})
            messages.append({"role": "user", "content": turn.prompt.prompt})
            if turn is not response:
                messages.append({"role": "assistant", "content": turn.text()})
        options = prompt.options.model_dump(exclude_none=True)
        try:
            session = self._session(options.pop("path", None), options.pop("n_ctx"))
            told = {name: options.pop(name, None) for name in ("max_tokens", "thinking")}
            sampling = dataclasses.replace(session.model.sampling, **options)
            answer = session.chat(messages, sampling=sampling, **told)
            pieces = (piece for piece in answer if not piece.thought)
            yield from pieces if stream else ["".join(pieces)]
        except PyllamaMtpError as error:
            raise llm.ModelError(str(error)) from error
        response.set_usage(input=answer.telemetry.n_prompt, output=len(answer.tokens))

    def _session(self, *wanted: Any) -> Any:
        """The session on a file (None: the demo) with this n_ctx; another one is closed."""
        from . import Model, Session, Settings
        from .models.demo import demo_path
        from .models.hub import local_file

        before, session = self._opened
        if before != wanted:
            if session:
                session.model.close()
            self._opened = (None, None)
            path, n_ctx = wanted
            model = Model(local_file(path, images=False) if path else demo_path())
            session = Session(model, Settings(n_ctx=n_ctx))
            self._opened = wanted, session
        return session


@llm.hookimpl
def register_models(register: Callable[..., object]) -> None:
    """The one model of this plugin."""
    register(PyllamaMtp())
