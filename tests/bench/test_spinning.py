"""bench/spinning.py: ratios within a round, bad arguments, busy cores that end with their block."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import spinning


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyllama_mtp.llama.spinning import ROUNDS

    speeds = {spinning.LIBGOMP: iter([10.0, 20.0, 5.0] * 2), ROUNDS: iter([20.0, 20.0, 15.0] * 2)}

    def sample(args: Any, model: Any, spin: int, depth: int) -> Any:
        telemetry = {"decode_tps": next(speeds[spin])}
        return SimpleNamespace(telemetry=telemetry, stamp={"series": "x"})

    monkeypatch.setattr(spinning, "decode_tps", sample)
    args = spinning.parse_arguments(["--model", "m.gguf", "--busy", "0", "--rounds", "3"])
    rows, stamp = spinning.measure(args)
    assert [(row["busy"], row["depth"]) for row in rows] == [(0, 0), (0, spinning.DEPTH)]
    assert rows[0]["ratios"] == [2.0, 3.0, 1.0], "the depths take turns within a round"
    assert rows[1]["ratios"] == [1.0, 2.0, 3.0]
    assert stamp == {"series": "x"}


def test_busy_cores_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*words, **options))
        return started[-1]

    monkeypatch.setattr(spinning.subprocess, "Popen", popen)
    with pytest.raises(ZeroDivisionError), spinning.busy(2):
        assert [other.poll() for other in started] == [None, None]
        raise ZeroDivisionError
    assert all(other.returncode is not None for other in started)


@pytest.mark.parametrize(
    "options", [["--busy", "x"], ["--busy", "-1"], ["--rounds", "0"], ["--tokens", "1"]]
)
def test_bad_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        spinning.parse_arguments(options)
    assert ended.value.code == 2 and options[0] in capsys.readouterr().err
