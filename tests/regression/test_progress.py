"""A prompt tells how far it is, also one that is interrupted."""

from __future__ import annotations

import pytest

from pyllama_mtp import BatchSession, Model, Session, Settings

PROMPT = "def read_lines(path):\n"


LONG = PROMPT * 90
SETTINGS = Settings(n_ctx=2048, n_threads=1, n_batch=128, n_ubatch=64, draft_n_max=3)


def test_a_prompt_tells_how_far_it_is(demo: Model) -> None:
    """After every decode of it, tokens that were kept among them."""
    n = len(demo.tokenize(LONG))
    with Session(demo, SETTINGS) as session:
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


def test_prompts_of_a_batch_tell_how_far_they_are(demo: Model) -> None:
    told: list[tuple[int, int, int]] = []
    with BatchSession(demo, SETTINGS, 2) as session:
        session.generate(
            [PROMPT, LONG, PROMPT], max_tokens=1, on_progress=lambda *t: told.append(t)
        ).run()
    for i, prompt in enumerate((PROMPT, LONG, PROMPT)):
        n = len(demo.tokenize(prompt))
        own = [each[1:] for each in told if each[0] == i]
        assert own == sorted(own) and own[-1] == (n, n) and len(own) > n // 128


def test_an_interrupted_prompt_has_its_real_figures(demo: Model) -> None:
    n = len(demo.tokenize(LONG))

    def stop(done: int, total: int) -> None:
        if done >= 256:
            raise KeyboardInterrupt

    with Session(demo, SETTINGS) as session:
        broken = session.generate(LONG, max_tokens=9, on_progress=stop)
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        t = broken.telemetry
        done = t.n_prompt - t.n_left
        assert t.n_prompt == n > done >= 256 and broken.finish_reason == "interrupted"
        assert t.prefill_tps == pytest.approx(done / t.prefill_s) and t.prefill_s > 0
        text = session.generate(LONG, max_tokens=9, ignore_eos=True).run().text
    with Session(demo, SETTINGS) as fresh:
        assert text == fresh.generate(LONG, max_tokens=9, ignore_eos=True).run().text
