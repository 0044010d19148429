"""A server on a model without an MTP head, of another architecture."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pyllama_mtp import Model, Session, Settings

from ..plain import write_model
from .conftest import running
from .support import chat

#: Nowhere in their texts do the two best logits lie within rounding.
PROMPTS = ("the time is", "42", "x = y; x = y; x =")


def test_several_clients(at_once: None, tmp_path: Path) -> None:
    with Model(write_model(tmp_path / "m.gguf", "gemma3")) as model:
        with Session(model, Settings(n_ctx=512, n_threads=1, draft_n_max=0)) as session:
            expected = [
                session.generate(prompt, max_tokens=24, ignore_eos=True).run().text
                for prompt in PROMPTS
            ]
        with (
            running(model, draft_n_max="auto", n_sequences=2) as server,
            ThreadPoolExecutor(len(PROMPTS)) as pool,
        ):
            for _ in range(2):
                assert [*pool.map(lambda prompt: server.text(prompt, 24), PROMPTS)] == expected
            assert server.chat(chat("hello"), max_tokens=4)["usage"]["completion_tokens"] == 4
