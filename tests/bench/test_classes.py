"""bench/classes.py: sums by class, ratios within a round."""

from __future__ import annotations

import json
from pathlib import Path

import classes
import pytest

from pyllama_mtp import Model


def figures(n: float, seconds: float, held: float = 0.0) -> dict[str, float]:
    tried = 4.0 if held else 0.0
    return {
        "n_decoded": n,
        "decode_s": seconds,
        "draft_s": 0.01 * tried,
        "rounds": n / 2 if held else n,
        "tried": tried,
        "held": held,
        "looked_up": n / 4 if held else 0.0,
    }


def test_ratios_are_taken_within_a_round() -> None:
    plain = [figures(100, 1), figures(100, 2), figures(100, 4)]
    drafted = [figures(100, 0.5, 3), figures(100, 2, 1), figures(100, 1, 2)]
    lines = classes.table({"code": {classes.PLAIN: plain, "depth 1": drafted}})
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["code", "no MTP", "50", "1.000", "-", "1.00", "0", "-"]
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == ["code", "depth 1", "100", "2.000", "0.500", "2.00", "25", "0.80"]


def test_one_round_on_the_demo_model(
    demo: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    rows = [
        {"class": "code", "prompt": "def f(x):\n"},
        {"class": "chat", "prompt": "Hello", "chat": True},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    options = ["--prompts", str(prompts), "--depths", "2", "--dry-run"]
    assert classes.main([*options, "--draft-vocab", "512,full"]) == 0
    out = capsys.readouterr().out
    for case in ("no MTP", "vocab 512", "vocab full"):
        found = [line for line in out.splitlines() if f" {case} |" in line]
        assert len(found) == 3, "two classes and all"


@pytest.mark.parametrize("options", [["--depths", "x"], ["--rounds", "0"]])
def test_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        classes.parse_arguments(options)
    assert options[0].strip("-") in capsys.readouterr().err
