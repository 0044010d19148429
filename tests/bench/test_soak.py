"""bench/soak.py: differences and growth are found, and a short soak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import soak

from pyllama_mtp import Model
from pyllama_mtp.telemetry import NearTie

#: Short runs grow: allocators settle, and switches meet settings for the first time.
BOUND = 12 * 2**20


@pytest.fixture
def work(demo: Model, tmp_path: Path) -> Iterator[soak.Soak]:
    """A soak on the demo model, as the command makes it."""
    made = soak.Soak(demo, 3, 1, tmp_path)
    yield made
    made.switch()


@pytest.mark.long
def test_a_short_soak(work: soak.Soak) -> None:
    """Every kind of step, every greedy answer equal, and no growth that a leak would explain."""
    for name in soak.STEPS:  # each once, then at random
        work.step(name)
    readings = soak.soak(work, 0, 40)
    assert set(work.counts) >= set(soak.STEPS)
    assert work.counts["equal"] > 30 and work.counts["near tie"] < 5
    assert max(readings) - readings[0] < BOUND


def test_another_answer_is_found_and_a_near_tie_is_none(
    work: soak.Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = work.prompts[0]
    with work.fresh() as fresh:
        run = fresh.generate(prompt, max_tokens=6, log_ties=True).run()
    assert work.compare(prompt, run.tokens, 6)
    other = (run.tokens[3] + 1) % work.model.n_vocab
    changed = [*run.tokens[:3], other, 0, 0]
    with pytest.raises(soak.Different, match="token 3 differs, and not by rounding"):
        work.compare(prompt, changed, 6)
    with pytest.raises(soak.Different, match="differs"):
        work.compare(prompt, run.tokens[:3], 6)
    run.telemetry.near_ties = [NearTie(3, run.tokens[3], other, 0.01, "a", "b")]
    ended = SimpleNamespace(run=lambda: run)
    monkeypatch.setattr(soak.Session, "generate", lambda *_, **__: ended)
    assert not work.compare(prompt, changed, 6)
    assert (work.counts["equal"], work.counts["near tie"]) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["", "different", "grown"])
def test_exit_codes(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: soak.Soak) -> str:
        raise soak.Different("an answer")

    if wrong == "different":
        monkeypatch.setattr(soak.Soak, "step", step)
    elif wrong == "grown":
        monkeypatch.setattr(soak, "SLACK", -(2**40))
    assert soak.main(["--minutes", "0.01"]) == bool(wrong)
    said = capsys.readouterr().out
    told = ("an answer differs" in said, "memory grew" in said)
    assert told == (wrong == "different", wrong == "grown")
