"""bench/prefill_pairs.py: ratios within a round, and sessions that take turns at being first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prefill_pairs
import pytest


def round_of(plain: float, again: float, mtp: float, sync: float) -> dict[str, dict[str, float]]:
    return {
        "no MTP": {"prefill_s": plain, "prompt_sync_s": 0.0},
        "no MTP again": {"prefill_s": again, "prompt_sync_s": 0.0},
        "MTP": {"prefill_s": mtp, "prompt_sync_s": sync},
    }


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [round_of(8, 12, 10, 0.1), round_of(20, 20, 25, 0.5), round_of(6, 4, 4, 0.02)]
    found = prefill_pairs.summarize(1000, rounds)
    assert found["ratios"] == [1.0, 0.8, 1.25] and found["ratio"] == 1.0
    assert found["controls"] == [8 / 12, 1.0, 1.5]
    assert found["tokens_per_s"] == {"no MTP": 100.0, "MTP": 100.0}
    assert found["prompt_sync_share"] == 0.01


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
            return SimpleNamespace(prefill_s=1.0, time_s={"prompt_sync": 0.25})

    monkeypatch.setattr("pyllama_mtp.Session", FakeSession)
    args = prefill_pairs.parse_arguments(["--sizes", "25", "--step", "10", "--threads", "1"])
    model = SimpleNamespace(n_vocab=50)
    first = prefill_pairs.one_round(model, args, 25, 0)
    names, lengths = [name for name, _, _ in log], [n for _, n, _ in log]
    off, again, mtp = "0:0", "1:0", "2:3"
    assert names == [off, again, mtp, again, mtp, off, mtp, off, again, off, again, mtp]
    assert lengths == [0] * 3 + [11] * 3 + [21] * 3 + [26] * 3, "a step, and the token that is left"
    assert first["MTP"] == {"prefill_s": 3.0, "prompt_sync_s": 0.75}
    log.clear()
    prefill_pairs.one_round(model, args, 25, 2)
    assert [name for name, _, _ in log][:4] == ["0:3", "1:0", "2:0", "1:0"]


def test_one_session_takes_every_round_of_a_step_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[int, int, list[bool]]] = []

    class FakeOneSession:
        def __init__(self, session: object) -> None:
            pass

        def step(self, prompt: list[int], start: int, end: int, drafts: list[bool]) -> list[Any]:
            log.append((start, end, drafts))
            return [
                SimpleNamespace(prefill_s=2.0 + draft, time_s={"prompt_sync": 0.5 * draft})
                for draft in drafts
            ]

    session = SimpleNamespace(close=lambda: log.append((0, 0, [])))
    monkeypatch.setattr(prefill_pairs, "OneSession", FakeOneSession)
    monkeypatch.setattr(prefill_pairs, "open_session", lambda *_, **__: session)
    options = ["--one-session", "--rounds", "2", "--step", "10", "--threads", "1"]
    args = prefill_pairs.parse_arguments(options)
    rounds = prefill_pairs.all_rounds(SimpleNamespace(n_vocab=50), args, 25)
    assert log == [
        (0, 10, [False, True, True, False]),
        (10, 20, [True, False, False, True]),
        (20, 25, [False, True, True, False]),
        (0, 0, []),
    ]
    assert (
        rounds
        == [
            {
                "no MTP": {"prefill_s": 6.0, "prompt_sync_s": 0.0},
                "MTP": {"prefill_s": 9.0, "prompt_sync_s": 1.5},
            }
        ]
        * 2
    )
    found = prefill_pairs.summarize(25, rounds)
    assert found["ratio"] == pytest.approx(2 / 3) and found["controls"] == []


@pytest.mark.parametrize(
    "options", [("--sizes", "1,x"), ("--rounds", "0"), ("--rounds", "5"), ("--step", "0")]
)
def test_bad_options(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill_pairs.parse_arguments(list(options))
    assert "error" in capsys.readouterr().err
