"""The GPU runbook, on the CPU: every step as a dry run, cut steps, what is missing, publishing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_runbook
import pytest
from gpukit import bundle, collect, machine, table, units
from gpukit.state import CUT, DONE, FAILED, RunbookError, Work
from gpukit.units import ALL_DONE, CALL_AGAIN, SOME_FAILED, Unit, parse_budget, run_units

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PYTHON = (sys.executable, "-c")
GPU = machine.Gpu("NVIDIA Test 1", "580.1", "9.0", 80 * 2**30)


def runbook(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    command = [sys.executable, str(ROOT / "bench" / "gpu_runbook.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def units_of(folder: Path) -> dict[str, dict[str, object]]:
    """What the state says of each unit."""
    found: dict[str, dict[str, object]] = json.loads((folder / "state.json").read_text())["units"]
    return found


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A dry run of everything."""
    folder = tmp_path_factory.mktemp("runbook") / "dry"
    return folder, runbook("all", "--dry-run", "--work", folder)


# --- the whole script -----------------------------------------------------------------------------


def test_every_step_runs(dry: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = dry
    assert done.returncode == 0, done.stderr
    found = units_of(folder)
    assert {unit["status"] for unit in found.values()} == {DONE}
    kinds = {name.split()[0] for name in found}
    assert kinds == {*gpu_runbook.UNITS, "handoff", "drafting"}
    assert "passed, 0 failed" in done.stdout
    logged = (folder / "logs" / "build-command.log").read_text()
    assert "cmake.define.GGML_CUDA=ON" in logged and "--no-index" in logged
    assert "--n-gpu-layers 0" in str(found["correctness test_snapshots"]["command"])


def test_every_measurement_is_in_the_table(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = dry
    rows = [json.loads(line) for line in (folder / "dry-run.jsonl").read_text().splitlines()]
    kinds = {row["kind"] for row in rows}
    assert kinds == {"header", "tests", "matrix", "drafting", "handoff", "prefill", "decode"}
    matrix = {(r["shape"], r["n_prompt"], r["depth"]) for r in rows if r["kind"] == "matrix"}
    assert matrix == {
        (s, n, d) for s in ("tiny", "tiny-moe") for n in (16, 48) for d in (0, 2, 3, 4)
    }
    ways = {r["handoff"] for r in rows if r["kind"] == "handoff" and r["depth"]}
    assert ways == {"device", "host"}
    drafting = {(r["drafting"], r["draft_vocab"]) for r in rows if r["kind"] == "drafting"}
    assert {("chain", "512"), ("stepwise", "full")} <= {(a, str(b)) for a, b in drafting}
    for title in ("Matrix", "Prefill with MTP", "Hidden states", "Decode at", "Drafting at"):
        assert f"## {title}" in done.stdout


def test_what_is_done_is_not_done_again(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = dry
    before = (folder / "state.json").read_text()
    again = runbook("matrix", "--dry-run", "--work", folder)
    assert again.returncode == 0 and "..." not in again.stderr
    assert (folder / "state.json").read_text() == before
    assert "done" in runbook("list", "--dry-run", "--work", folder).stdout


def test_next_goes_on_and_ends_in_the_table(
    dry: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, _ = dry
    finished = runbook("next", "--dry-run", "--work", folder, "--commit", "1234")
    assert finished.returncode == 0 and "commit 1234" in finished.stdout
    begun = runbook("next", "--dry-run", "--work", tmp_path, "--budget", "9s")
    assert begun.returncode == CALL_AGAIN and "## Decode" not in begun.stdout
    assert units_of(tmp_path)["build command"]["status"] == DONE


def test_a_dry_run_says_so_and_is_not_published(
    dry: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = dry
    before = sorted(RESULTS.iterdir())
    assert done.stdout.count("DRY RUN") == 2
    rows = [json.loads(line) for line in (folder / "dry-run.jsonl").read_text().splitlines()]
    assert all(row["dry_run"] is True for row in rows)
    refused = runbook("table", "--publish", "--dry-run", "--work", folder)
    assert refused.returncode == 1 and "dry run" in refused.stderr
    assert sorted(RESULTS.iterdir()) == before


def test_dry_and_real_folders_stay_apart(
    dry: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, _ = dry
    real = runbook("table", "--work", folder)
    assert real.returncode == 1 and "holds a dry run" in real.stderr
    Work.open(tmp_path, dry_run=False)
    with pytest.raises(RunbookError, match="holds a real run"):
        Work.open(tmp_path, dry_run=True)


# --- units and their time -------------------------------------------------------------------------


def test_a_cut_unit_goes_on(tmp_path: Path) -> None:
    """One that resumes takes a bit further in every attempt; what follows waits for it."""
    counter, marker = tmp_path / "counter", tmp_path / "marker"
    code = (
        "import sys, time, pathlib; p = pathlib.Path(sys.argv[1])\n"
        "n = int(p.read_text()) + 1 if p.exists() else 1; p.write_text(str(n))\n"
        "time.sleep(0 if n > 2 else 60)"
    )
    slow = Unit("slow", [*PYTHON, code, str(counter)], 0.1, resumes=True)
    after = Unit("after", [*PYTHON, f"open({str(marker)!r}, 'w')"], 0.1)
    work = Work.open(tmp_path / "work", dry_run=False)
    for expected in (CALL_AGAIN, CALL_AGAIN, ALL_DONE):
        assert not marker.exists()
        assert run_units(work, [slow, after], 2.0) == expected
        work = Work.open(tmp_path / "work", dry_run=False)
    assert marker.exists() and work.units["slow"].attempts == 3
    assert work.units["slow"].status == work.units["after"].status == DONE


def test_a_unit_that_can_never_finish_is_a_failure(tmp_path: Path) -> None:
    work = Work.open(tmp_path, dry_run=False)
    endless = Unit("endless", [*PYTHON, "import time; time.sleep(60)"], 0.1)
    assert run_units(work, [endless], 1.0) == SOME_FAILED
    assert work.units["endless"].status == FAILED
    assert "larger --budget" in work.units["endless"].message
    greedy = Unit("greedy", [*PYTHON, "pass"], least_s=100)
    assert run_units(work, [greedy], 1.0) == SOME_FAILED and "greedy" not in work.units
    assert run_units(work, [greedy], 1.0, whole_s=540) == CALL_AGAIN
    late = Unit("late", [*PYTHON, "import time; time.sleep(60)"], 0.1)
    assert run_units(work, [late], 1.0, whole_s=540) == CALL_AGAIN, "it had no whole call"
    assert work.units["late"].status == CUT


def test_an_unfinished_result_is_cut(tmp_path: Path) -> None:
    """A command may succeed with a part of the work done."""
    work = Work.open(tmp_path, dry_run=False)
    missing = iter(["2 of 3 samples", ""])
    unit = Unit("matrix", [*PYTHON, "pass"], 0.1, missing=lambda: next(missing), resumes=True)
    assert run_units(work, [unit], 20) == CALL_AGAIN and work.units["matrix"].status == CUT
    assert run_units(work, [unit], 20) == ALL_DONE


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    work = Work.open(tmp_path, dry_run=False)
    bad = Unit("bad", [*PYTHON, "import sys; print('no cuBLAS'); sys.exit(4)"], 0.1)
    good = Unit("good", [*PYTHON, "pass"], 0.1)
    assert run_units(work, [bad, good], 30) == SOME_FAILED
    assert work.units["bad"].message == "exit code 4: no cuBLAS" and work.is_done("good")
    other = Work.open(tmp_path / "other", dry_run=False)
    assert run_units(other, [bad, good], 30, stop=True) == SOME_FAILED
    assert "good" not in other.units


def test_nothing_survives_a_cut(tmp_path: Path) -> None:
    """Neither the command nor what it started, even where both ignore SIGINT."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    assert units.run_logged([*PYTHON, code], log, 2.0) is None
    child = int(log.read_text().split()[0])
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_matrix_is_done_when_all_its_samples_are_there(tmp_path: Path) -> None:
    plan = {"sizes": [16], "depths": [0, 3], "repeat": 2, "prompt_rows": ["last"]}
    plan |= {"prompt_sync": ["auto"], "hidden": ["post-norm"], "draft_vocab": ["512", "full"]}
    plan["drafting"] = ["chain"]
    lines = [{"kind": "run", "run": "a", "plan": plan}]
    lines += [{"kind": "sample", "run": "a"}] * 3
    path = tmp_path / "m.jsonl"
    from gpukit.measure import unmeasured

    assert "nothing in" in unmeasured(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert unmeasured(path) == "3 of 6 samples"
    lines += [{"kind": "sample", "run": "a"}, {"kind": "skipped", "run": "a"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert unmeasured(path) == ""


def test_budgets() -> None:
    assert [parse_budget(text) for text in ("9m", "540s", "540", "0.5h")] == [540, 540, 540, 1800]
    for bad in ("", "0", "9 minutes", "-1m"):
        with pytest.raises(RunbookError, match="give a time"):
            parse_budget(bad)
    assert runbook("matrix", "--budget", "soon", "--dry-run").returncode == 2


# --- what is missing ------------------------------------------------------------------------------


def test_missing_tools_are_named(tmp_path: Path) -> None:
    """With an empty PATH: one line for each, and what to do."""
    environment = {**os.environ, "PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    environment.pop("CUDA_PATH", None)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from gpukit import machine\n"
        "machine.CUDA_FOLDERS = ()\n"
        "found = [*machine.check_gpu(machine.find_gpu()), *machine.check_toolkit()]\n"
        "print(*(f.line(False) for f in found), sep='\\n')"
    )
    done = subprocess.run(
        [*PYTHON, code, str(ROOT / "bench")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert all(lines[name].startswith("MISSING") for name in ("GPU", "nvcc", "compiler"))
    assert "CUDA_HOME" in lines["nvcc"] and "g++" in lines["compiler"]


def test_missing_packages_disk_and_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RUN_MODULES", ("numpy", "no_such_module_1", "no_such_module_2"))
    (tmp_path / "no_such_module_1-1.0-py3-none-any.whl").touch()
    found = {f.name: f for f in machine.check_python(tmp_path)}
    assert not found["to run"].ok and "no_such_module_2" in found["to run"].todo
    assert "no_such_module_1" not in found["to run"].detail, "a wheel of the bundle will do"
    space = machine.check_space(tmp_path / "not" / "there", 1e18, "disk")
    assert not space.ok and "MISSING" in space.line(dry_run=True)
    assert machine.check_space(tmp_path, 1, "disk").ok
    nothing = next(machine.check_gpu(None))
    assert "MISSING" in nothing.line(dry_run=False) and "not here" in nothing.line(dry_run=True)


@pytest.mark.skipif(machine.find_gpu() is not None, reason="there is a GPU here")
def test_a_real_step_needs_a_gpu(tmp_path: Path) -> None:
    done = runbook("build", "--work", tmp_path)
    assert done.returncode == 1 and "--dry-run runs everything on the CPU" in done.stderr
    assert "MISSING  GPU" in done.stdout and units_of(tmp_path) == {}


def test_what_nvidia_smi_says() -> None:
    gpu = machine.parse_gpu("NVIDIA H100 80GB HBM3, 580.159.04, 9.0, 81559\n")
    assert gpu == machine.Gpu("NVIDIA H100 80GB HBM3", "580.159.04", "9.0", 81559 * 2**20)
    assert gpu.architecture == "90-real"
    blackwell = machine.parse_gpu("NVIDIA GeForce RTX 5090, 570.1, 12.0, 32607")
    assert blackwell and blackwell.architecture == "120a-real"
    for odd in ("", "No devices were found", "A, B, [N/A], 12"):
        assert machine.parse_gpu(odd) is None


def test_the_bundle_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "big-1-py3-none-any.whl").write_bytes(bytes(2**20))
    assert "1.0 MiB" in bundle.report(tmp_path)[0]
    monkeypatch.setattr(bundle, "LIMIT", 2**19)
    with pytest.raises(RunbookError, match="--leave-out"):
        bundle.report(tmp_path)


def test_measurements_need_what_comes_before(tmp_path: Path) -> None:
    config = configuration(tmp_path, "matrix", "--work", tmp_path)
    with pytest.raises(RunbookError, match="step `build`"):
        gpu_runbook.UNITS["shapes"](config)
    config.work.note("build patched", DONE, 1.0)
    with pytest.raises(RunbookError, match="step `shapes`"):
        gpu_runbook.UNITS["matrix"](config)


def configuration(tmp_path: Path, *words: object) -> gpu_runbook.Config:
    """What a call with these words would work with."""
    return gpu_runbook.configure(gpu_runbook.parse_arguments([str(word) for word in words]))


def test_what_a_real_run_measures(tmp_path: Path) -> None:
    """The sizes, depths and shapes that were asked for, every one a unit; none may start late."""
    config = configuration(tmp_path, "matrix", "--work", tmp_path)
    config.work.note("build patched", DONE, 1.0)
    config.models.mkdir()
    for shape in config.shapes:
        config.model(shape).touch()
    names = {unit.name for unit in gpu_runbook.UNITS["matrix"](config)}
    sizes = [1024, 8192, 32768, 65536, 131072, 196608]
    shapes = ["qwen3.6-27b", "qwen3.6-35b-a3b"]
    assert names == {f"matrix {shape} {size}" for shape in shapes for size in sizes}
    unit = gpu_runbook.UNITS["matrix"](config)[0]
    words = unit.words(540.0)
    assert words[words.index("--depths") + 1] == "0,2,3,4" and "--resume" in words
    assert words[words.index("--budget") + 1] == "500s"
    assert words[words.index("--synthetic-acceptance") + 1] == "0.8,0.64,0.512,0.4096"
    decode = gpu_runbook.UNITS["decode"](config)
    assert len(decode) == 2 * 2 * 3
    files = gpu_runbook.UNITS["correctness"](config)
    assert len(files) == len(list((ROOT / "tests" / "regression").glob("test_*.py")))
    assert "--tolerance-scale 10" in " ".join(files[0].words(1))


# --- publishing -----------------------------------------------------------------------------------


HEAD = {"dry_run": False, "gpu": GPU.to_dict()}
ROW = {"kind": "matrix", "backend": "CUDA"}


@pytest.mark.parametrize(
    ("head", "rows", "why"),
    [
        ({**HEAD, "dry_run": True}, [ROW], "dry run"),
        (HEAD, [{**ROW, "dry_run": True}], "dry run"),
        ({**HEAD, "gpu": None}, [ROW], "no GPU"),
        (HEAD, [ROW, {**ROW, "backend": "CPU"}], "measured on CPU"),
        (HEAD, [{"kind": "tests"}], "which backend"),
    ],
)
def test_only_what_a_gpu_measured_is_published(
    head: dict[str, object], rows: Sequence[dict[str, object]], why: str
) -> None:
    table.check_publishable(HEAD, [ROW])
    with pytest.raises(RunbookError, match=why):
        table.check_publishable(head, rows)


def test_the_table_judges_by_the_bars() -> None:
    def decoded(shape: str, depth: str, tps: float) -> dict[str, object]:
        row = {"kind": "decode", "shape": shape, "n_prompt": 1024, "acceptance": 0.8}
        return {**row, "depth": depth, "decode_tps": tps, "ratio": tps / 10}

    def served(shape: str, tps: float) -> dict[str, object]:
        row = {"kind": "upstream", "shape": shape, "n_prompt": 1024, "acceptance": 0.8}
        return {**row, "depth": 3, "decode_tps": tps}

    dense, moe = "qwen3.6-27b", "qwen3.6-35b-a3b"
    rows = [decoded(dense, "0", 10), decoded(dense, "3", 26), served(dense, 20)]
    rows += [decoded(moe, "0", 10), decoded(moe, "3", 15), served(moe, 20)]
    machine_ = {"cpu": "c", "cores": 1, "os": "o"}
    head = {**HEAD, "machine": machine_, "nvcc": "13.0", "date": "d", "project_commit": "p"}
    head |= {"command": "c", "unfinished": [], "tolerance_scale": 10}
    page = table.render(head, rows)
    cells = [[word.strip() for word in line.split("|")] for line in page.splitlines()]
    judged = {line[1]: line[-2] for line in cells if len(line) == 8 and line[3] == "0.8"}
    assert judged == {dense: "met", moe: ""}
    beside = {line[1]: line[-3:-1] for line in cells if len(line) == 8 and "depth" in line[3]}
    assert beside == {dense: ["1.30", "ahead"], moe: ["0.75", "behind"]}
    assert "NVIDIA Test 1, 80 GiB, driver 580.1" in page
    rows[1] = decoded(dense, "3", 24)
    assert "missed" in table.render(head, rows)


def test_published_figures_stand_beside_ours() -> None:
    found = table.read_published()
    assert found["qwen3.6-35b-a3b", 1024] == "118.1 x1.29"
    assert found["qwen3.6-35b-a3b", 196608] == "20.6 x3.35"
    assert collect.shape_of("synth-qwen3.6-35b-a3b-iq4_nl.gguf") == "qwen3.6-35b-a3b"
