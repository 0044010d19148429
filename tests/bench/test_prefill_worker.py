"""The process that is measured, with the real libraries and the demo model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchkit.ours import DriverError
from benchkit.paths import BENCH
from benchkit.worker import Load, Prefill, Prompt, Worker

SETTINGS = {"n_ctx": 256, "n_threads": 1, "draft_n_max": 2}


@pytest.fixture(params=["patched", "upstream"])
def worker(request: pytest.FixtureRequest, demo_file: Path) -> Iterator[Worker]:
    with Worker(request.param) as made:
        loaded = made.ask(Load(str(demo_file)))
        assert loaded["stamp"]["variant"] == request.param
        yield made


def test_one_session_after_the_other(worker: Worker) -> None:
    prompt = worker.ask(Prompt(101, 0))["tokens"]
    assert len(prompt) == 101 and worker.ask(Prompt(101, 1))["tokens"] != prompt
    for depth, sync in ((2, "full"), (0, ""), (2, "full")):
        settings = {**SETTINGS, "draft_n_max": depth, "prompt_sync": "full"}
        telemetry = worker.ask(Prefill(settings, prompt, 40, 8))["telemetry"]
        assert telemetry["n_prompt"] == 100 and telemetry["n_cached"] == 0
        assert telemetry["prefill_tps"] > 0 and telemetry["prompt_sync"] == sync
        assert (telemetry["time_s"]["prompt_sync"] > 0) == (depth > 0)


def test_it_is_idle_between_requests(worker: Worker) -> None:
    prompt = worker.ask(Prompt(101, 0))["tokens"]
    settings = {**SETTINGS, "n_threads": 2}
    worker.ask(Prefill(settings, prompt, 40, 8))
    time.sleep(1.1)
    answer = worker.ask(Prompt(8, 0))
    assert answer["idle_s"] >= 1.0
    assert answer["idle_cpu_s"] < 0.2, "ggml's threads must not spin while others are measured"


def test_a_failure_says_what_it_was(demo_file: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(DriverError, match=r"upstream library failed \(1\): .*not in upstream's"),
        Worker("upstream") as worker,
    ):
        worker.ask(Load(str(demo_file)))
        worker.ask(Prefill({**SETTINGS, "prompt_sync": "kv"}, [1, 2, 3], 1, 1))
    with pytest.raises(DriverError, match="nowhere"), Worker("patched") as worker:
        worker.ask(Load(str(tmp_path / "nowhere.gguf")))


def test_it_ends_with_its_owner(demo_file: Path) -> None:
    with Worker("patched") as worker:
        worker.ask(Load(str(demo_file)))
        assert worker._process.poll() is None
    assert worker._process.returncode == 0


def test_what_a_library_prints_is_no_answer(demo_file: Path, tmp_path: Path) -> None:
    """Standard output of the process is where warnings of native code may go."""
    code = (
        "import os, sys\nfrom benchkit import worker\n"
        "def serve(lines, answers):\n"
        "    os.write(1, b'a warning')\n"
        "    print('an answer', file=answers)\n"
        "worker.serve = serve\nworker.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), *package_path()])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (done.stdout, done.stderr) == (b"an answer\n", b"a warning")


def package_path() -> list[str]:
    import pyllama_mtp

    return [str(Path(pyllama_mtp.__file__).parents[1])]


def test_the_program(demo_file: Path, tmp_path: Path) -> None:
    options: list[Any] = ["--dry-run", "--each-switch", "--threads", "1", "--model", demo_file]
    done = subprocess.run(
        [sys.executable, BENCH / "prefill.py", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(package_path())},
    )
    assert done.returncode == 0, done.stderr
    for words in ("48 tokens", "96 tokens", "all rows", "K/V only", "full block", "Load average"):
        assert words in done.stdout
