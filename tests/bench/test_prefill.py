"""bench/prefill.py: a dry run beside fake peers, steps by turns, the ratios asked for, memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prefill
import pytest
from benchkit import results
from benchkit.filetable import BENCH, OURS, Job, Records
from benchkit.rivals import IK
from benchkit.sample import Sample

MIB = 2**20
JOB = Job("dense-q8_0", 512, "f16")


@pytest.fixture
def folder(demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the demo model as a file to measure; results are written there too."""
    (tmp_path / "dense-q8_0.gguf").symlink_to(demo_file)
    real = results.write
    monkeypatch.setattr(results, "write", lambda *given: real(*given, tmp_path))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    usual = ("--types", "dense-q8_0", "--folder", str(folder), "--threads", "1")
    return [*usual, "--sizes", "24,40", "--step", "16", "--peers", str(folder / "none"), *more]


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]


def test_dry_run_beside_both_peers(
    folder: Path, fake_peers: Any, no_peers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = str(fake_peers.folder)
    assert prefill.main([*command(folder), "--peers", peers, "--ik", peers, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "note:" not in printed.err and not [*folder.glob("prefill.*")]
    rows = {tuple(row[:2]): row[2:] for row in cells(printed.out.splitlines())}
    for size in (32, 64):
        for what in ("MTP on / llama-bench", "MTP on / off", f"MTP on / {IK}"):
            ratio = rows["dense-q8_0", f"{size} tokens: {what}"]
            assert float(ratio[0]) > 0 and ratio[2] == "1"
        file = f"dense-q8_0, {size}"
        speeds = next(row for row in cells(printed.out.splitlines()) if row[0] == file)
        assert speeds[4:] == ["500 (500-500)"] * 3
        for side in (prefill.OFF, prefill.ON):
            peak, above, without = rows[file, side]
            assert float(peak) > 20 and above.endswith("%") and without.endswith("%")
        assert float(rows[file, BENCH][0]) > 1


def test_rounds_are_written_and_missing_peers_named(folder: Path, no_peers: None) -> None:
    assert prefill.main(command(folder, "--rounds", "2")) == 0
    found = json.loads((folder / "prefill.json").read_text())
    seen = [(row["round"], row["context"], row["case"]) for row in found["samples"]]
    assert sorted(seen) == sorted(
        (number, size, case) for number in (0, 1) for size in (24, 40) for case in prefill.CASES
    )
    text = (folder / "prefill.md").read_text()
    assert "- Note: llama-server is left out" in text and str(folder) not in text
    assert "MTP on / off" in text and "/ llama-bench |" not in text


def test_every_step_and_every_round_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []

    class FakeSession:
        def __init__(self, model: object, settings: Any) -> None:
            self.name = f"{len(log)}:{settings.draft_n_max}"
            log.append((self.name, 0))

        reset = close = lambda self: None

        def process(self, prompt: list[int]) -> Any:
            if len(log) >= 6:  # after the warm-ups
                log.append((self.name, len(prompt)))
            else:
                log.append(("warm-up", len(prompt)))
            return SimpleNamespace(prefill_s=0.5)

    monkeypatch.setattr("pyllama_mtp.Session", FakeSession)
    args = SimpleNamespace(step=10, depth=3)
    plan = prefill.Plan(Path("m.gguf"), 25)
    first = prefill.steps(SimpleNamespace(n_vocab=50), args, plan, 0)
    off, again, mtp = "0:0", "2:0", "4:3"
    turns = [again, mtp, off, mtp, off, again, off, again, mtp]
    assert [name for name, _ in log[6:]] == turns
    assert [n for _, n in log[6:]] == [11] * 3 + [21] * 3 + [26] * 3, "and the token that is left"
    assert first[prefill.ON].prefill_tps == 25 / 1.5
    log.clear()
    prefill.steps(SimpleNamespace(n_vocab=50), args, plan, 2)
    assert [name for name, _ in log[:6:2]] == ["0:3", "2:0", "4:0"], "made first"


def test_ratios_are_taken_within_a_round() -> None:
    records = Records()
    speeds = {
        (OURS, prefill.OFF): (8, 20),
        (OURS, prefill.CONTROL): (12, 20),
        (OURS, prefill.ON): (10, 18),
        (BENCH, "0"): (5, 12),
        (IK, "0"): (8, 16),
        (IK, "0 -rtr"): (10, 20),
    }
    for (side, case), by_round in speeds.items():
        for number, tps in enumerate(by_round):
            records.add(JOB, number, side, "prefill", {case: Sample(tps, None, 512, 0)})
    found = {claim.what: claim for claim in prefill.claims(records, [JOB], 1.6)}
    expected = {
        "512 tokens: MTP on / llama-bench": ([2.0, 1.5], 1.6),
        "512 tokens: MTP on / off": ([1.0, 0.9], 0.99),
        "512 tokens: MTP off / off again (the machine)": ([8 / 12, 1.0], None),
        f"512 tokens: MTP on / {IK} -rtr": ([1.0, 0.9], None),
    }
    assert {what: ([*c.ratios.values()], c.least) for what, c in found.items()} == expected


def test_memory_above_llama_bench() -> None:
    found = {"model": 800 * MIB, BENCH: {"peak": 1000 * MIB}}
    found[prefill.OFF] = {"peak": 1040 * MIB, "before": 32 * MIB}
    rows = cells(prefill.memory_table({"dense-q8_0, 512": found}))
    assert rows[2:] == [
        ["dense-q8_0, 512", BENCH, "1000", "-", "-"],
        ["dense-q8_0, 512", prefill.OFF, "1040", "+5.0 %", "+1.0 %"],
    ]


def test_the_peak_is_the_programs_own() -> None:
    """Not that of the process that starts it, which holds a model."""
    mine = bytearray(200 * MIB)
    mine[::4096] = b"x" * len(mine[::4096])
    code = "import time; kept = b'x' * (60 << 20); time.sleep(0.3); del kept; time.sleep(0.2)"
    assert 60 * MIB < prefill.peak([sys.executable, "-c", code]) < 120 * MIB


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--types", "q4_k_m"], "there is no"),
        (["--sizes", "1,x"], "numbers"),
        (["--sizes", ""], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--depth", "0"], "at least 1"),
    ],
)
def test_bad_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill.parse_arguments(options)
    assert said in capsys.readouterr().err
