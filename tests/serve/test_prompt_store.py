"""Conversations that leave their places, and a server that is started again, go on over HTTP."""

from __future__ import annotations

from pathlib import Path

from pyllama_mtp import Model

from .conftest import Running, Start, running
from .support import QUESTIONS, chat
from .test_limits import figures

Messages = list[dict[str, str]]


def ask(server: Running, messages: Messages) -> int:
    """Let the model answer; the number of prompt tokens that were not processed."""
    got = server.chat(messages, max_tokens=20, ignore_eos=True)
    messages.append({"role": "assistant", "content": got["choices"][0]["message"]["content"]})
    return int(got["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_more_conversations_than_places(start: Start) -> None:
    server = start(n_sequences=2, cache_ram=64)
    long = " Tell me all about it, and about everything else that you know, please." * 8
    chats = [chat(question + long) for question in QUESTIONS]
    assert all(ask(server, one) < 60 for one in chats)
    saved = list[int]()
    for one in chats:
        one.append({"role": "user", "content": "And then?"})
        saved.append(ask(server, one))
    assert min(saved) > 150
    found = figures(server)
    assert found["pyllama_mtp_stored_prompts_hits_total"] >= len(chats) - 2
    assert found["pyllama_mtp_stored_prompts_tokens_total"] > 150 * (len(chats) - 2)
    assert found["pyllama_mtp_stored_prompts"] > 0 < found["pyllama_mtp_stored_prompts_bytes"]


def test_a_server_that_is_started_again(demo: Model, tmp_path: Path) -> None:
    long = " Tell me all about it, and about everything else that you know, please." * 8
    messages = chat(QUESTIONS[0] + long)
    for _ in range(3):
        with running(demo, cache_dir=str(tmp_path)) as server:
            n_saved = ask(server, messages)
        messages.append({"role": "user", "content": "And then?"})
    assert n_saved > 200
