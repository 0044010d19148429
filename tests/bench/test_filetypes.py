"""bench/filetypes.py: a dry run beside fake peers, rounds that are kept, the ratios asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filetypes
import pytest
from benchkit import filetable, lockstep, results
from benchkit.filetable import OURS, Claim, Job, Records
from benchkit.rivals import IK, UPSTREAM
from benchkit.sample import Sample

from pyllama_mtp import Model, Settings

JOB = Job("dense-q4_k_m", 512, "f16")
SMALL = ("--contexts", "24,48", "--n-decode", "6", "--long", "8", "--depths", "1,2")


def sample(tps: float, prefill: float | None = None) -> Sample:
    return Sample(prefill, tps, 4, 100)


@pytest.fixture
def folder(demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the demo model as a file to measure; results are written there too."""
    for name in ("dense-q8_0", "mine"):
        (tmp_path / f"{name}.gguf").symlink_to(demo_file)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    real = results.write
    monkeypatch.setattr(results, "write", lambda *given: real(*given, tmp_path))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    usual = ("--types", "dense-q8_0", "--folder", str(folder), "--threads", "1", *SMALL)
    return [*usual, "--cache-types", "f16", "--peers", str(folder / "none"), *more]


def samples(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "filetypes.json").read_text())["samples"]
    return rows


def test_dry_run_beside_both_peers(
    folder: Path,
    fake_peers: Any,
    no_peers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers = str(fake_peers.folder)
    monkeypatch.setenv("FAKE_LOG", fake_peers.environment["FAKE_LOG"])
    given = [*command(folder), "--cache-types", "f16,q8_0", "--peers", peers, "--ik", peers]
    assert filetypes.main([*given, "--dry-run"]) == 0
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")] for line in printed.out.splitlines()]
    what = {row[2].split(",")[0]: row for row in rows if len(row) == 9}
    for claim in ("no MTP / llama-bench", "prefill / llama-bench's", "auto / best fixed"):
        assert claim in what
    assert any("/ llama-server's best" in row and "depth 3" in row for row in map(str, rows))
    assert any("f16 cache: gain after 64" in row for row in map(str, rows))
    speeds = {tuple(row[1:3]): row[3:-1] for row in rows if len(row) > 9}
    first = "dense-q8_0, 32 tokens, f16 cache"
    assert speeds[first, "llama-bench"][:2] == ["500", "50.0"]
    # the fakes gain `depth` tokens a round, and 8 tokens are 8, 4 and 3 rounds
    served = ["-", "50.0", "60.0 (1.00)", "70.0 (2.00)", "80.0 (2.67)"]
    assert speeds[first, "llama-server"][:5] == served
    for option in ("", " -rtr"):
        assert speeds[first, f"ik_llama.cpp{option}"][:5] == ["500", *served[1:]]
    assert [cell == "-" for cell in speeds[first, "ours"]] == [False] * 4 + [True, False]
    assert speeds["dense-q8_0, 64 tokens, q8_0 cache", "ours"][-1] == "-", 'no "auto" there'
    assert "note:" not in printed.err and not (folder / "filetypes.json").exists()
    started = [given for given in fake_peers.log("arguments") if "--alias" in given]
    assert len(started) == 4 + 2 * 4, "a server is started once"
    assert sum("-rtr" in given for given in started) == 4
    assert "mtp:n_max=3,p_min=0.0" in started[-1]


def test_rounds_are_kept_and_more_are_added(
    folder: Path, no_peers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert filetypes.main(command(folder, "--rounds", "1")) == 0
    assert {row["round"] for row in samples(folder)} == {0}
    assert filetypes.main(command(folder, "--rounds", "2", "--resume")) == 0
    by_job = {(row["context"], row["round"]) for row in samples(folder)}
    assert by_job == {(24, 0), (24, 1), (48, 0), (48, 1)}
    parts = [row["part"] for row in samples(folder) if row["context"] == 24 and row["case"] == "0"]
    forth = ["prefill", "decode", "alone"]
    assert [part for part in parts if part != "long"] == [*forth, *forth[::-1]]
    text = (folder / "filetypes.md").read_text()
    assert "- Note: llama-server is left out" in text and str(folder) not in text
    other = ("--rounds", "2", "--resume", "--n-decode", "7")
    assert filetypes.main([*command(folder), *other]) == 1
    assert "measured with another plan" in capsys.readouterr().err


def test_what_is_interrupted_keeps_its_rounds(
    folder: Path, no_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = lockstep.SideBySide.prefill, itertools.count()

    def interrupted(self: lockstep.SideBySide, name: str) -> Sample:
        if next(calls) == 5:  # two to begin with, two of the first round
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(lockstep.SideBySide, "prefill", interrupted)
    assert filetypes.main([*command(folder), "--types", "mine"]) == 130
    assert {(row["file"], row["round"]) for row in samples(folder)} == {("mine", 0)}


def test_a_job_has_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    class Fake:
        def __init__(self, args: Any, job: Job, records: Records, peers: Any) -> None:
            self.job, self.records = job, records

        def rounds(self) -> Iterator[int]:
            for number in range(9):
                clock[0] += 20
                self.records.add(self.job, number, OURS, "decode", {"0": sample(1)})
                yield number

    monkeypatch.setattr(filetypes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(filetypes, "Measurement", Fake)
    given = ["--types", "dense-a,dense-b,dense-c,dense-d", "--dry-run", "--peer-depths", ""]
    # 100 s: 25 for the first, 80 / 3 for the second, 60 / 2 for the third, 40 for the last
    assert filetypes.main([*given, "--budget-minutes", f"{100 / 60}"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines if "round" in line] == [
        *("dense-a,", "dense-b,", "dense-c,", "dense-d,", "dense-d,")
    ]
    assert filetypes.main([*given, "--budget-minutes", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "the time was over: dense-d" in lines[-1] and len(lines) == 4


def test_sessions_begin_alike_and_without_experience(
    demo: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed, real = [], lockstep.sample

    def note(generation: Any) -> Sample:
        processed.append(generation.telemetry.n_prompt - generation.telemetry.n_cached)
        return real(generation)

    monkeypatch.setattr(lockstep, "sample", note)
    settings = {
        name: Settings(n_ctx=256, n_threads=1, draft_n_max=depth)
        for name, depth in {"0": 0, "2": 2, "auto": "auto"}.items()
    }
    with lockstep.SideBySide(demo, settings, range(30, 60), tmp_path / "state") as sessions:
        assert sessions.prefill("2").n_prompt == 30
        before = sessions._sessions["auto"]._engine.choice
        for _ in range(2):
            found = sessions.decode(settings, [7, 8], 40)
            assert {one.n_decoded for one in found.values()} == {40}
            cached = [session._engine.places[0].cached for session in sessions._sessions.values()]
            assert cached[0][:32] == [*range(30, 60), 7, 8] and cached == cached[:1] * 3
        assert processed == [2] * 6, "what comes after the context"
        assert sessions._sessions["auto"]._engine.choice is not before
        assert found["2"].drafted > found["0"].drafted == 0


def records() -> Records:
    """Two rounds of everything; llama-server at depth 1 has been left behind after one."""
    made = Records()
    speeds = {
        (OURS, "decode"): {"0": (10, 20), "1": (14, 28), "2": (16, 30), "auto": (15, 30)},
        (OURS, "alone"): {"0": (11, 21)},
        (OURS, "long"): {"2": (16, 32), "auto": (16, 30)},
        (UPSTREAM, "decode"): {"0": (16, 8), "1": (13,)},
        (IK, "decode"): {"0": (10, 20), "0 -rtr": (12, 24), "2": (11, 22)},
        (filetable.BENCH, "decode"): {"0": (10, 20)},
    }
    for (side, part), cases in speeds.items():
        for case, by_round in cases.items():
            for number, tps in enumerate(by_round):
                made.add(JOB, number, side, part, {case: sample(tps)})
    for side, case, tps in ((OURS, "0", 95), (OURS, "2", 90), (filetable.BENCH, "0", 100)):
        made.add(JOB, 0, side, "prefill", {case: sample(0, tps)})
    return made


def test_the_ratios_that_are_asked_for() -> None:
    found = {claim.what: claim for claim in filetable.claims(records(), [JOB])}
    expected = {
        "depth 2 / no MTP": ([1.6, 1.5], 1.5),
        "depth 2 / llama-server's best, no MTP": ([1.0, 30 / 8], 1.4),
        "depth 2 / ik_llama.cpp's best, no MTP -rtr": ([16 / 12, 30 / 24], 1.2),
        "auto / best fixed, depth 2, long": ([1.0, 30 / 32], 0.97),
        "no MTP / llama-bench": ([1.1, 1.05], 0.98),
        "prefill / llama-bench's": ([0.95], 0.98),
        "prefill, MTP on / off": ([90 / 95], None),
    }
    assert {what: ([*c.ratios.values()], c.least) for what, c in found.items()} == expected
    assert found["depth 2 / no MTP"].row()[2:] == ["1.549", "1.500-1.600", "2", "1.5", "yes"]
    assert found["prefill / llama-bench's"].row()[-2:] == ["0.98", "NO"]


def test_gain_after_a_longer_context() -> None:
    made, long = records(), Job(JOB.file, 6000, "f16")
    for number, tps in enumerate((12, 14)):
        made.add(long, number, OURS, "decode", {"0": sample(10), "3": sample(tps)})
    found = [*filetable.claims(made, [JOB, long])][-1]
    assert found.what == "f16 cache: gain after 6,000 (depth 3) / after 512"
    assert [*found.ratios.values()] == [1.2 / 1.6, 1.4 / 1.5] and found.least == 0.9


def test_what_is_not_there_is_not_claimed() -> None:
    made = Records()
    made.add(JOB, 0, OURS, "decode", {"0": sample(10), "1": sample(20)})
    assert [claim.what for claim in filetable.claims(made, [JOB])] == ["depth 1 / no MTP"]
    assert [*filetable.claims(Records(), [])] == []


def test_slow_servers_leave_the_race() -> None:
    made = records()
    assert made.near_best(JOB, IK, 0.85) == ["0 -rtr", "2"]
    assert made.near_best(JOB, IK, 0.0) == ["0 -rtr", "2", "0"]
    assert Claim("f", "w", {0: 2.0}).row()[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--types", "q4_k_m"], "there is no"),
        (["--contexts", "x"], "numbers"),
        (["--rounds", "0"], "at least 1"),
        (["--depths", "0,1"], "at least 1"),
        (["--cache-types", "q9"], "f16"),
    ],
)
def test_bad_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        filetypes.parse_arguments(options)
    assert said in capsys.readouterr().err
