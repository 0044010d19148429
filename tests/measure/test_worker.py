"""Workers run other libraries in their own processes, idle between requests, and end with us."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pyllama_mtp.errors import InsufficientMemoryError, PyllamaMtpError, UsageError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.native import CPU_SWITCHES
from pyllama_mtp.measure.runner import LibraryProcess, Task, load_library, split_library
from pyllama_mtp.settings import Sampling, Settings

from ..marks import usual

SETTINGS = Settings(n_ctx=256, n_threads=2, draft_n_max=2)
CPU = {"n_gpu_layers": 0, "mtp": True}


def task(n_prompt: int = 40, settings: Settings = SETTINGS) -> Task:
    return Task(settings, Sampling(), [list(range(300, 300 + n_prompt))], 12, n_prompt)


@pytest.fixture
def worker(request: pytest.FixtureRequest, demo_file: Path) -> Iterator[LibraryProcess]:
    variant = getattr(request, "param", "patched")
    with closing(LibraryProcess(variant, variant, str(demo_file), **CPU)) as made:
        build = made.loaded()
        assert build.variant == variant
        assert re.fullmatch(r"[0-9a-f]{40}|b\d+", build.upstream_commit)
        yield made


def test_a_process_is_given_variables_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    class Library:
        def set_cpu_switch(self, name: str, on: bool) -> bool:
            done.append((name, on))
            return name != "large_batch"

    monkeypatch.setattr(native, "load", lambda name: done.append(name) or Library())
    monkeypatch.setenv("MATRIX_TEST", "before")
    load_library("patched:small_batch=off:MATRIX_TEST=1:few_rows_attention=on")
    assert done == ["patched", ("small_batch", False), ("few_rows_attention", True)]
    assert os.environ["MATRIX_TEST"] == "1"
    with pytest.raises(UsageError, match="has no large_batch"):
        load_library("patched:large_batch=off")


@pytest.mark.parametrize("switch", CPU_SWITCHES)
def test_the_library_has_these_switches(switch: str) -> None:
    assert native.load().set_cpu_switch(switch, True)


@pytest.mark.parametrize("word", ["small_batch=maybe", "quick=on", "VARIABLE", ""])
def test_what_a_process_cannot_be_given(word: str) -> None:
    with pytest.raises(UsageError, match=f"'{word}' is nothing that a process can be given"):
        split_library(f"patched:{word}")


def cpu_s(process: int) -> float:
    """CPU time that a process has used."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("worker", usual("patched", long=["upstream"]), indirect=True)
def test_sessions_side_by_side_and_idle_between(worker: LibraryProcess) -> None:
    plain = Settings(n_ctx=256, n_threads=2, draft_n_max=0)
    worker.begin(0, task())
    worker.begin(1, task(settings=plain))
    assert worker.advance(0, 1) >= 1 and worker.advance(1, 1) >= 1
    assert worker._process.pid
    time.sleep(0.5)  # OpenMP's threads spin for a moment
    before = cpu_s(worker._process.pid)
    time.sleep(0.5)
    assert cpu_s(worker._process.pid) - before <= 0.02, "an idle worker must use no CPU"
    assert worker.advance(0, 5) >= 5
    found = [worker.finish(number) for number in (0, 1)]
    assert [sample.n_generated for sample, _ in found] == [12, 12]
    assert found[0][0].drafted and not found[1][0].drafted
    assert found[0][1]["weights"] > 0
    worker.drop()


def test_what_is_refused_there_is_refused_here(worker: LibraryProcess) -> None:
    with pytest.raises(InsufficientMemoryError, match="available"):
        worker.check(Settings(n_ctx=2_000_000_000, draft_n_max=0))
    with pytest.raises(UsageError, match=r"longer|context"):
        worker.begin(0, task(n_prompt=400))
    worker.check(SETTINGS)


def test_a_worker_that_dies_is_an_error_with_its_last_words(worker: LibraryProcess) -> None:
    """As after a native abort."""
    with Path(worker._errors.name).open("ab") as file:
        file.write(b"GGML_ASSERT(something) failed\n")
    assert worker._process.pid
    os.kill(worker._process.pid, signal.SIGABRT)
    with pytest.raises(PyllamaMtpError, match=r"library has ended \(-6\): GGML_ASSERT"):
        worker.check(SETTINGS)
    worker.drop()


def test_a_library_or_model_that_cannot_be_loaded(demo_file: Path, tmp_path: Path) -> None:
    for library, model in ("patched", tmp_path / "nowhere.gguf"), (str(tmp_path), demo_file):
        failed = pytest.raises(PyllamaMtpError, match=r"nowhere|no native library|tried")
        with closing(LibraryProcess(library, "mine", str(model), **CPU)) as worker, failed:
            worker.loaded()


def test_it_is_gone_when_it_is_closed_in_the_middle_of_something(worker: LibraryProcess) -> None:
    worker._pipe.send(("check", (SETTINGS,)))
    worker._waiting = True
    worker.drop()
    worker._process.join(60)
    assert worker._process.exitcode == -signal.SIGKILL
