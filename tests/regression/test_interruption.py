"""After an interruption or a second generation a session is sound: no mixture of two texts."""

from __future__ import annotations

import gc
import logging

import pytest

from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native

PROMPT = "def read_lines(path):\n"


def settings(depth: int) -> Settings:
    return Settings(n_ctx=256, n_threads=1, draft_n_max=depth)


def text_of(session: Session, prompt: str = PROMPT) -> str:
    return session.generate(prompt, max_tokens=24, ignore_eos=True).run().text


def test_a_dropped_session_is_freed(demo: Model) -> None:
    before = set(demo.contexts)  # those of other tests, which may be freed only now
    session = Session(demo, settings(3))
    assert len(set(demo.contexts) - before) == 1
    del session
    gc.collect()
    assert not set(demo.contexts) - before


def test_a_temperature_next_to_zero_is_greedy(demo: Model) -> None:
    cold = Sampling(temperature=1e-42, top_k=0, top_p=1.0, min_p=0.0)
    with Session(demo, settings(0)) as session:
        greedy = session.generate(PROMPT, max_tokens=8).run().tokens
        assert session.generate(PROMPT, max_tokens=8, sampling=cold).run().tokens == greedy


def test_what_is_told_to_stop_has_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp calls it one that a graph was given up."""
    text = native.load().ffi.new("char[]", b"failed to compute graph\n")
    caplog.set_level(logging.DEBUG, "pyllama_mtp.llama.native")
    for exception in (None, KeyboardInterrupt()):
        native.pending.exception = exception
        native.pyllama_on_log(4, text, None)
        native.pending.exception = None
    native.take_recent_errors()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.DEBUG]


LONG = PROMPT * 90


def test_a_prompt_tells_how_far_it_is(demo: Model) -> None:
    """After every decode of it, tokens that were kept among them."""
    n = len(demo.tokenize(LONG))
    chosen = Settings(n_ctx=2048, n_threads=1, n_batch=128, n_ubatch=64, draft_n_max=3)
    with Session(demo, chosen) as session:
        told: list[tuple[int, int]] = []
        answer = session.generate(LONG, max_tokens=1, on_progress=lambda *t: told.append(t)).run()
        assert told[0] == (0, n) and told[-1] == (n, n) and len(told) > n // 128
        assert told == sorted(told) and answer.telemetry.n_left == 0
        more = LONG + "more\n" * 40
        told.clear()
        session.process(more, on_progress=lambda *t: told.append(t))
        total = len(demo.tokenize(more)) - 1
        assert told[0][0] > n and told[-1] == (total, total)
        told.clear()
        question = [{"role": "user", "content": PROMPT}]
        session.chat(question, max_tokens=1, on_progress=lambda *t: told.append(t)).run()
        assert told[-1][0] == told[-1][1] > 0
        with pytest.raises(UsageError, match="on_progress"):
            session.generate(PROMPT, on_progress=3)  # type: ignore[arg-type]


def test_prompts_of_a_batch_tell_how_far_they_are(demo: Model) -> None:
    told: list[tuple[int, int, int]] = []
    chosen = Settings(n_ctx=2048, n_threads=1, n_batch=128, n_ubatch=64, draft_n_max=0)
    with BatchSession(demo, chosen, 2) as session:
        session.generate(
            [PROMPT, LONG, PROMPT], max_tokens=1, on_progress=lambda *t: told.append(t)
        ).run()
        with pytest.raises(UsageError, match="on_progress"):
            session.generate([PROMPT], on_progress=3)  # type: ignore[arg-type]
    for i, prompt in enumerate((PROMPT, LONG, PROMPT)):
        n = len(demo.tokenize(prompt))
        own = [each[1:] for each in told if each[0] == i]
        assert own == sorted(own) and own[-1] == (n, n) and len(own) > n // 128


def test_an_interrupted_prompt_has_its_real_figures(demo: Model) -> None:
    n = len(demo.tokenize(LONG))
    chosen = Settings(n_ctx=2048, n_threads=1, n_batch=128, n_ubatch=64, draft_n_max=3)

    def stop(done: int, total: int) -> None:
        if done >= 256:
            raise KeyboardInterrupt

    with Session(demo, chosen) as session:
        broken = session.generate(LONG, max_tokens=9, on_progress=stop)
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        t = broken.telemetry
        done = t.n_prompt - t.n_left
        assert t.n_prompt == n > done >= 256 and broken.finish_reason == "interrupted"
        assert t.prefill_tps == pytest.approx(done / t.prefill_s) and t.prefill_s > 0
        text = session.generate(LONG, max_tokens=9, ignore_eos=True).run().text
    with Session(demo, chosen) as fresh:
        assert text == fresh.generate(LONG, max_tokens=9, ignore_eos=True).run().text


def test_adaptive_depth_says_what_a_step_without_drafts_takes(demo: Model) -> None:
    with Session(demo, Settings(n_ctx=256, n_threads=1)) as session:
        t = session.generate(PROMPT, max_tokens=64, ignore_eos=True).run().telemetry
        assert t.plain_s and t.speed_up == pytest.approx(t.decode_tps * t.plain_s)
    with Session(demo, settings(3)) as session:
        t = session.generate(PROMPT, max_tokens=8, ignore_eos=True).run().telemetry
        assert t.plain_s is t.speed_up is None
