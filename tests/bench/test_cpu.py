"""bench/cpu.py: the table, and one dry run on the demo model."""

from __future__ import annotations

from pathlib import Path

import cpu
import pytest


def test_the_ratios_are_to_neither_patch() -> None:
    samples = ([10.0, 20.0], [11.0, 22.0], [12.0, 24.0], [15.0, 40.0])
    speeds = {0: dict(zip(cpu.SWITCHES, samples, strict=True))}
    row = cpu.table(speeds)[-1]
    assert "| 15.0 | 1.10 (1.10 to 1.10) | 1.20 (1.20 to 1.20) |" in " ".join(row.split())
    assert "| 1.75 (1.50 to 2.00) | 27.5 |" in " ".join(row.split())


def test_dry_run(demo_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--threads", "1", "--depths", "0,2"]
    assert cpu.main(["--dry-run", "--model", str(demo_file), *options]) == 0
    out = capsys.readouterr().out
    assert "neither, tok/s" in out and len(out.splitlines()) == 4
    assert "| 2 |" in " ".join(out.split())


def test_texts_that_differ_are_an_error(demo_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the switches changed what is computed."""
    from pyllama_mtp import Session

    calls, generate = iter(range(100)), Session.generate

    def other(session: Session, prompt: list[int], **options: object) -> object:
        return generate(session, [*prompt, next(calls)], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "generate", other)
    with pytest.raises(RuntimeError, match="the texts differ"):
        cpu.main(["--dry-run", "--model", str(demo_file), "--depths", "0", "--threads", "1"])


def test_a_list_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.main(["--depths", "one"])
    assert "no list of numbers" in capsys.readouterr().err
