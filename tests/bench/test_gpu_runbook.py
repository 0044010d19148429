"""The GPU runbook on the CPU: a dry run of everything, cut and failed commands, what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import gpu_runbook
import pytest
from gpu_runbook import CUT, DONE, FAILED, Runbook, Unit, run_all

from ..processes import Cli

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")
GPU = {"name": "NVIDIA Test 1", "driver": "580.1", "capability": "9.0", "memory": "80 GiB"}


def runbook(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    command = [sys.executable, str(ROOT / "bench" / "gpu_runbook.py"), *map(str, words)]
    known = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=known)


def book(folder: Path, gpu: dict[str, str] | None = GPU) -> Runbook:
    """What a call works with that goes on with `folder`."""
    words = ["--work", str(folder), *([] if gpu else ["--dry-run"])]
    return gpu_runbook.open_work(gpu_runbook.parse_arguments(words), gpu)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runbook:
    """One whose units may begin with little time left."""
    monkeypatch.setattr(gpu_runbook, "LEAST_S", 0.1)
    return book(tmp_path / "work")


# --- the whole script -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A dry run of everything that was cut after some seconds, and went on."""
    folder = tmp_path_factory.mktemp("runbook") / "dry"
    done = [runbook("--dry-run", "--work", folder, "--budget", budget) for budget in (0.1, 9)]
    return folder, done


@pytest.mark.long
def test_a_dry_run_does_it_all(dry: tuple[Path, list[Any]]) -> None:
    folder, (cut, done) = dry
    assert (cut.returncode, done.returncode) == (3, 0), done.stderr + done.stdout
    assert "the same command goes on" in cut.stderr and "send back" in cut.stdout
    units = json.loads((folder / "state.json").read_text())["units"]
    assert {unit["status"] for unit in units.values()} == {DONE}
    kinds = {*["build", "doctor", "model", "tests", "matrix", "drafting", "vocabulary", "peers"]}
    assert {name.split()[0] for name in units} == kinds
    asked = (folder / "logs" / "build.log").read_text()
    assert "cmake.define.GGML_CUDA=ON" in asked and "--no-index" in asked
    assert "runbook: build ..." not in done.stderr, "it was done before the cut"


@pytest.mark.long
def test_a_dry_run_says_so_and_names_what_to_send_back(dry: tuple[Path, list[Any]]) -> None:
    folder, (_, done) = dry
    assert done.stdout.startswith("DRY RUN")
    with tarfile.open(folder / "send-back.tar.gz") as tar:
        names = set(tar.getnames())
    measured = {f"{kind}-{shape}-16" for kind in ("matrix", "drafting", "vocabulary", "peers")
                for shape in ("tiny", "tiny-moe")}  # fmt: skip
    measured |= {f"matrix-{shape}-48" for shape in ("tiny", "tiny-moe")}
    assert {f"results/{name}.jsonl" for name in measured} <= names
    assert {"state.json", "logs/tests-test_snapshots.log"} <= names
    assert all(f"\n{name}\n|" in done.stdout for name in measured), "its table"


@pytest.mark.long
def test_what_is_measured(dry: tuple[Path, list[Any]]) -> None:
    def samples(name: str) -> list[Any]:
        lines = (dry[0] / "results" / f"{name}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "sample"]

    depths = {sample["settings"]["draft_n_max"] for sample in samples("matrix-tiny-48")}
    assert depths == {0, 2, 3, 4, "auto"}
    for kind, name, values in (
        ("drafting", "prompt_sync", {"kv", "full"}),
        ("vocabulary", "draft_vocab", {"512", "full"}),
    ):
        settings = [sample["settings"] for sample in samples(f"{kind}-tiny-moe-16")]
        assert {of[name] for of in settings if of["draft_n_max"]} == values


@pytest.mark.long
def test_what_is_done_is_not_done_again(dry: tuple[Path, list[Any]]) -> None:
    again = runbook("--dry-run", "--work", dry[0])
    assert again.returncode == 0 and "..." not in again.stderr


def test_what_a_real_run_does(tmp_path: Path) -> None:
    real = book(tmp_path)
    shapes, sizes = gpu_runbook.SHAPES, gpu_runbook.SIZES
    units = {unit.name: unit for unit in gpu_runbook.preparations(real, shapes)}
    files = {f"tests {file.stem}" for file in (ROOT / "tests" / "regression").glob("test_*.py")}
    assert files <= set(units)
    assert "cmake.define.CMAKE_CUDA_ARCHITECTURES=90-real" in units["build"].command  # type: ignore[operator]
    assert "-1" in list(units["tests test_snapshots"].command)  # type: ignore[arg-type]
    units |= {unit.name: unit for unit in gpu_runbook.measurements(real, shapes, sizes)}
    assert {f"matrix {shape} {size}" for shape in shapes for size in sizes} <= set(units)
    words = units["matrix qwen3.6-27b 196608"].command(540.0)  # type: ignore[operator]
    assert words[words.index("--budget") + 1] == "495s" and "--resume" in words
    assert words[words.index("--depths") + 1] == "0,3", "five sessions of 192k take a day"
    assert all(unit.needs in units for unit in units.values() if unit.needs)


# --- units and their time -------------------------------------------------------------------------


def test_a_cut_unit_goes_on(quick: Runbook) -> None:
    """One that leaves something in every attempt; what follows waits for it."""
    counter, marker = quick.work / "counter", quick.work / "marker"
    code = (
        "import sys, time, pathlib; p = pathlib.Path(sys.argv[1])\n"
        "p.open('a').write('x'); time.sleep(0 if p.stat().st_size > 2 else 60)"
    )
    slow = Unit("slow", [*PYTHON, code, counter], output=counter)
    after = Unit("after", [*PYTHON, f"open({str(marker)!r}, 'w')"], needs="slow")
    for expected in (3, 3, 0):
        assert not marker.exists()
        assert run_all(quick, [slow, after], 2.0) == expected
        quick = book(quick.work)
    assert marker.exists() and {unit["status"] for unit in quick.units.values()} == {DONE}


def test_what_can_never_finish_is_a_failure(quick: Runbook) -> None:
    endless = Unit("endless", [*PYTHON, "import time; time.sleep(60)"])
    assert run_all(quick, [Unit("first", [*PYTHON, "import time; time.sleep(1)"]), endless], 2) == 3
    assert quick.units["endless"]["status"] == CUT, "it did not have a whole call"
    assert run_all(quick, [endless], 1.0) == 1 and quick.units["endless"]["status"] == FAILED
    assert "larger --budget" in quick.units["endless"]["message"]


def test_a_failure_is_told_and_the_rest_goes_on(
    quick: Runbook, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what needs it; the next call tries it last."""
    bad = Unit("bad", [*PYTHON, "import sys; print('no cuBLAS'); sys.exit(4)"])
    units = [bad, Unit("worse", [*PYTHON, "pass"], needs="bad"), Unit("good", [*PYTHON, "pass"])]
    assert run_all(quick, units, 30) == 1
    assert quick.units["bad"]["message"] == "exit code 4: no cuBLAS"
    assert quick.units["worse"]["message"] == "no bad"
    assert quick.units["good"]["status"] == DONE
    bad.command = [*PYTHON, "pass"]
    capsys.readouterr()
    assert run_all(quick, [*units, Unit("new", [*PYTHON, "pass"])], 30) == 0
    begun = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert begun == ["new", "bad", "worse"]


def test_nothing_survives_a_cut(quick: Runbook) -> None:
    """Neither the command nor what it started, even where both ignore SIGINT."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    run_all(quick, [Unit("stubborn", [*PYTHON, code])], 2.0)
    child = Path("/proc") / quick.log("stubborn").read_text().split()[0] / "stat"
    deadline = time.monotonic() + 10
    while (alive := _runs(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_matrix_is_done_when_nothing_is_left_out(cli: Cli, tmp_path: Path) -> None:
    words = ["matrix", "-p", "16", "-n", "2", "--depths", "0", "--output", tmp_path / "m.jsonl"]
    left_out = cli(*words, "--repeat", "9", "--budget", "0.1s").err
    assert "of 9 repeats" in gpu_runbook.unmeasured(left_out)
    assert gpu_runbook.unmeasured(cli(*words, "--repeat", "1").err) == ""


# --- the machine ----------------------------------------------------------------------------------


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runbook, "MODULES", ("numpy", "no_such_module"))
    monkeypatch.setattr(gpu_runbook, "DISK_BYTES", 1e18)
    monkeypatch.setattr(gpu_runbook, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_runbook.shutil, "which", lambda name, path=None: None)
    monkeypatch.delenv("PYLLAMA_MTP_SDIST", raising=False)
    found = {line.split(":")[0]: line for line in gpu_runbook.lacking(None, tmp_path)}
    assert set(found) == {"a GPU", "nvcc", "Python modules", "upstream's sources", "disk"}
    assert found["Python modules"].endswith("pip install no-such-module")
    monkeypatch.setenv("PYLLAMA_MTP_SDIST", "archive.tar.gz")
    assert "upstream's sources" not in str([*gpu_runbook.lacking(GPU, tmp_path)])


def test_without_a_gpu_nothing_begins(tmp_path: Path) -> None:
    done = runbook("--work", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2 and "MISSING  a GPU" in done.stdout
    assert not (tmp_path / "state.json").exists()


def test_folders_of_other_machines_are_refused(tmp_path: Path) -> None:
    book(tmp_path).save()
    assert book(tmp_path).gpu == GPU
    for other in (None, {**GPU, "name": "NVIDIA Test 2"}):
        with pytest.raises(ValueError, match=r"has the figures of .*Test 1"):
            book(tmp_path, other)


def test_what_nvidia_smi_says() -> None:
    found = gpu_runbook.parse_gpu("NVIDIA H100 80GB HBM3, 580.159.04, 9.0, 81559 MiB\nanother")
    assert found and (found["capability"], found["memory"]) == ("9.0", "81559 MiB")
    for odd in ("", "No devices were found", "A, B, [N/A], 12"):
        assert gpu_runbook.parse_gpu(odd) is None
