"""bench/decode.py: sessions side by side, ratios within a round, acceptance that is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import decode
import pytest
from benchkit import lockstep
from benchkit.sample import Sample

from pyllama_mtp import Model, Session, Settings


def sample(tps: float, drafted: int = 0, accepted: int = 0, rounds: int = 0) -> Sample:
    return Sample(1.0, tps, 4, 100, drafted, accepted, rounds)


def test_the_one_with_the_fewest_tokens_is_next() -> None:
    log: list[str] = []

    class Fake:
        def __init__(self, name: str, per_round: int) -> None:
            self.name, self.per_round = name, per_round
            self.tokens: list[int] = []

        def __iter__(self) -> Iterator[str]:
            return self

        def __next__(self) -> str:
            if len(self.tokens) >= 6:
                raise StopIteration
            log.append(self.name)
            self.tokens += [0] * self.per_round
            return "x"

    fakes: Any = {"slow": Fake("slow", 1), "fast": Fake("fast", 3)}
    sessions: Any = {
        name: SimpleNamespace(generate=lambda *_, fake=fake, **__: fake)
        for name, fake in fakes.items()
    }
    assert lockstep.decode(sessions, (), 6) == fakes
    assert log == ["slow", "fast", "slow", "slow", "slow", "fast", "slow", "slow"]


def test_sessions_decode_at_the_imposed_acceptance(demo: Model) -> None:
    imposed = decode.rates(0.5, 3)
    assert imposed == (0.5, 0.25, 0.125)
    depths: tuple[int | str, ...] = (0, 2, "auto")
    with_rates: Any = {"synthetic_acceptance": imposed, "n_threads": 1, "n_ctx": 256}
    made = {
        str(depth): Session(demo, Settings(draft_n_max=depth, **with_rates)) for depth in depths
    }
    for session in made.values():
        lockstep.impose(session, decode.rates(0.8, 3))
    decoded = lockstep.decode(made, list(range(20, 40)), 90)
    found = {name: lockstep.sample(one) for name, one in decoded.items()}
    assert {name: one.n_decoded for name, one in found.items()} == {"0": 90, "2": 90, "auto": 90}
    assert found["0"].rounds == 0 and found["auto"].drafted > 0
    two = found["2"]
    assert two.accepted / two.rounds == pytest.approx(0.8 + 0.64, abs=0.1)
    share = lockstep.python_share(made["2"], list(range(20, 40)), 30)
    assert 0 < share < 1
    assert type(made["2"]._engine.target._lib).__name__ != "_TimedLibrary"
    for session in made.values():
        session.close()


def test_tables() -> None:
    samples = {
        0.8: {
            "0": [sample(10), sample(20), sample(10)],
            "1": [sample(15), sample(28), sample(16)],
            "auto": [sample(12), sample(28), sample(16)],
            # 50 rounds of 100 tokens where 1.8 tokens a round were asked for
            "server 1": [sample(20, 50, 50, 50)] * 3,
        }
    }
    result = {"rounds": {"done": 3}, "python_share": {"depth": 1, "samples": [0.01, 0.03, 0.02]}}
    lines = "\n".join(decode.tables(result, samples))
    assert "| 0.8        |   10.0 |    16.0 | 16.0 |" in lines
    assert "| 0.8        |   1.500 | 1.400 |          1 |       1.000 |" in lines
    assert " 18.0 |" in lines and " 0.89 |" in lines, "20 tok/s at 2 tokens a round are 18 at 1.8"
    assert "2.00 % (median of 3)" in lines


@pytest.mark.parametrize(
    "options",
    [["--acceptance", "1.5"], ["--depths", "0"], ["--depths", "x"], ["--rounds", "0"]],
)
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.parse_arguments(options)
    assert options[0] in capsys.readouterr().err or options == ["--rounds", "0"]
