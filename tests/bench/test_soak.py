"""bench/soak.py: the same steps from a seed, differences and growth are found, and a short soak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import soak
from benchkit.soaking import STEPS, Different, Soak

from pyllama_mtp import Model
from pyllama_mtp.measure.prompts import demo_prompts

#: Short runs grow: allocators settle, and switches meet settings for the first time.
BOUND = 12 * 2**20


@pytest.fixture
def work(demo: Model, tmp_path: Path) -> Iterator[Soak]:
    """A soak on the demo model, as the command makes it."""
    made = make(demo, tmp_path, 3)
    yield made
    made.close()


def make(model: Model, folder: Path, seed: int) -> Soak:
    return Soak(model, [p.tokens(model) for p in demo_prompts()], seed, 1, folder)


@pytest.mark.long
def test_a_short_soak(work: Soak) -> None:
    """Every kind of step, every greedy answer equal, and no growth that a leak would explain."""
    readings: soak.Readings = []
    for name in STEPS:  # each once, then at random
        weights = dict.fromkeys(STEPS, 0) | {name: 1}
        work.weights = weights
        work.step()
    work.weights = dict(STEPS)
    readings = soak.soak(work, 0, 40)
    assert set(work.tally.steps) == set(STEPS)
    assert work.tally.equal > 30 and work.tally.near_ties < 5
    assert soak.growth(readings)["most"] - readings[0][1] < BOUND


def test_the_seed_says_what_is_done(demo: Model, tmp_path: Path) -> None:
    digests, names = [], []
    for seed in (5, 5, 6):
        work = make(demo, tmp_path, seed)
        names.append([work.step() for _ in range(8)])
        work.close()
        digests.append(work.tally.digest.hexdigest())
    assert names[0] == names[1] != names[2]
    assert digests[0] == digests[1] != digests[2]


def test_another_answer_is_found(work: Soak) -> None:
    prompt = work._prompts[0]
    with work._fresh() as fresh:
        answer = fresh.generate(prompt, max_tokens=6).run().tokens
    assert work._compare(prompt, answer, 6)
    answer[3] = (answer[3] + 1) % work.model.n_vocab
    with pytest.raises(Different, match="token 3 differs, and not by rounding"):
        work._compare(prompt, answer, 6)
    with pytest.raises(Different, match="shorter"):
        work._compare(prompt, answer[:3], 6)
    assert work.tally.equal == 1


def test_a_near_tie_is_no_difference(work: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = work._prompts[0]
    with work._fresh() as fresh:
        answer = fresh.generate(prompt, max_tokens=6).run().tokens
    logits = work._logits([*prompt, *answer[:3]], work.settings)
    assert int(logits.argmax()) == answer[3], "the logits are those of the fresh context"
    other = (answer[3] + 1) % work.model.n_vocab
    logits[other] = logits.max() - 1e-4
    monkeypatch.setattr(work, "_logits", lambda tokens, settings: logits)
    assert not work._compare(prompt, [*answer[:3], other, 0, 0], 6)
    assert (work.tally.equal, work.tally.near_ties) == (0, 1)
    logits[:] = 0
    logits[[answer[3], other]] = 10, 9
    with pytest.raises(Different, match="not by rounding"):
        work._compare(prompt, [*answer[:3], other, 0, 0], 6)


def test_growth_is_taken_after_the_warm_up() -> None:
    mib = 2**20
    leak: soak.Readings = [(60.0 * i, 50 * mib + i * mib) for i in range(61)]
    found = soak.growth(leak)
    assert found["slope"] == pytest.approx(60 * mib) and found["grown"] > 40 * mib
    flat: soak.Readings = [(60.0 * i, (50 if i > 11 else i) * mib) for i in range(61)]
    found = soak.growth(flat)
    assert found["slope"] == pytest.approx(0, abs=1) and found["grown"] == 0


@pytest.mark.parametrize("wrong", ["", "different", "grown"])
def test_exit_codes(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: Soak) -> str:
        raise Different("an answer")

    if wrong == "different":
        monkeypatch.setattr(Soak, "step", step)
    elif wrong == "grown":
        monkeypatch.setattr(soak, "SLACK", -(2**40))
    assert soak.main(["--steps", "3"]) == bool(wrong)
    said = capsys.readouterr().out
    told = ("an answer differs" in said, "memory grew" in said)
    assert told == (wrong == "different", wrong == "grown")


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--steps", "0"], ["--threads", "0"]])
def test_bad_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.parse_arguments(options)
    assert ended.value.code == 2 and "above 0" in capsys.readouterr().err
