"""bench/prefill_pairs.py: ratios within a round, and sessions that take turns at being first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prefill_pairs
import pytest


def round_of(plain: float, again: float, mtp: float) -> dict[str, float]:
    return {"no MTP": plain, "no MTP again": again, "MTP": mtp}


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [round_of(8, 12, 10), round_of(20, 20, 25), round_of(6, 4, 4)]
    found = prefill_pairs.summarize(1000, rounds)
    assert found["ratios"] == [1.0, 0.8, 1.25] and found["ratio"] == 1.0
    assert found["controls"] == [8 / 12, 1.0, 1.5]
    assert found["tokens_per_s"] == {"no MTP": 100.0, "MTP": 100.0}


def test_every_step_and_every_round_begins_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int, int]] = []

    class FakeSession:
        def __init__(self, model: object, settings: Any) -> None:
            self.name = f"{len(log)}:{settings.draft_n_max}"
            log.append((self.name, 0, settings.n_ctx))

        def generate(self, *_: object, **__: object) -> FakeSession:
            return self

        run = reset = close = lambda self: None

        def process(self, prompt: list[int]) -> Any:
            log.append((self.name, len(prompt), prompt[0]))
            return SimpleNamespace(prefill_s=1.0)

    monkeypatch.setattr("pyllama_mtp.Session", FakeSession)
    args = prefill_pairs.parse_arguments(["--sizes", "25", "--step", "10", "--threads", "1"])
    model = SimpleNamespace(n_vocab=50)
    first = prefill_pairs.one_round(model, args, 25, 0)
    names, lengths = [name for name, _, _ in log], [n for _, n, _ in log]
    off, again, mtp = "0:0", "1:0", "2:3"
    assert names == [off, again, mtp, again, mtp, off, mtp, off, again, off, again, mtp]
    assert lengths == [0] * 3 + [11] * 3 + [21] * 3 + [26] * 3, "a step, and the token that is left"
    assert first["MTP"] == 3.0
    log.clear()
    prefill_pairs.one_round(model, args, 25, 2)
    assert [name for name, _, _ in log][:4] == ["0:3", "1:0", "2:0", "1:0"]


@pytest.mark.parametrize(
    "options", [("--sizes", "1,x"), ("--rounds", "0"), ("--rounds", "5"), ("--step", "0")]
)
def test_bad_options(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill_pairs.parse_arguments(list(options))
    assert "error" in capsys.readouterr().err
