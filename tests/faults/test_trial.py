"""Files of architectures that are not checked in depth are loaded in a child process first."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import InsufficientMemoryError, ModelFileError, UnsupportedArchitectureError
from pyllama_mtp.llama import trial

from ..plain import write_model
from ..processes import every_core


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What children were asked for; nothing has passed before."""
    started, run = list[Any](), subprocess.run

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(json.loads(arguments[0][-1])["arguments"])
        return run(*arguments, **options)

    monkeypatch.setattr(trial.subprocess, "run", counted)
    monkeypatch.setattr(trial, "_passed", set())
    yield started


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain") / "llama.gguf", "llama")


def test_what_would_end_the_process_ends_a_child(tmp_path: Path, children: list[Any]) -> None:
    """An assertion in a kernel: where several threads compute it ends the child, on one it is an
    error."""
    epsilon = {"attention.layer_norm_rms_epsilon": -1.0}
    path = write_model(tmp_path / "bad.gguf", "llama", **epsilon)
    said = r"eps >= 0.0f"
    with every_core(), pytest.raises(ModelFileError, match=said) as caught:
        Model(path)
    assert caught.value.path == str(path) and len(children) == 1


@pytest.mark.long
def test_a_child_that_hangs(
    llama: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "import sys, time; print('x', file=sys.stderr, flush=True); time.sleep(300)"
    monkeypatch.setattr(trial.child, "_CHILD", hangs)
    monkeypatch.setattr(trial, "LEAST_S", 1.5)  # Python may take a second to start
    with pytest.raises(ModelFileError, match="did not come to an end: x"):
        Model(llama)


def test_a_file_is_tried_once_as_it_is(
    llama: Path, children: list[Any], demo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with Model(llama) as model, model.without_memory():
            pass
    assert len(children) == 1
    os.utime(llama)
    Model(llama, no_alloc=True).close()
    Model(llama, no_alloc=True).close()
    assert len(children) == 2
    Model(llama).close()  # its weights were not read
    assert [one["no_alloc"] for one in children] == [False, True, False]
    Model(demo_file).close()  # checked in depth
    assert len(children) == 3
    monkeypatch.setattr(trial, "available_memory", lambda: 0)
    os.utime(llama)
    Model(llama).close()
    assert children[3]["no_alloc"]


def test_errors_of_a_child_are_errors_here(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "nan.gguf", "llama", **{"rope.freq_base": 0.0})
    with pytest.raises(ModelFileError, match="cannot be used: the model's logits are NaN"):
        Model(path)
    with pytest.raises(ModelFileError, match=r"llama.cpp cannot load it: .*ffn_gate_inp"):
        Model(write_model(tmp_path / "m.gguf", "llama", expert_count=2, expert_used_count=2))
    with pytest.raises(UnsupportedArchitectureError, match="does not know architecture 'llama9'"):
        Model(write_model(tmp_path / "new.gguf", "llama9"))
    child = "import json; print(json.dumps({'error': 'InsufficientMemoryError', 'message': 'no'}))"
    monkeypatch.setattr(trial.child, "_CHILD", child)
    monkeypatch.setattr(trial, "_passed", set())
    with pytest.raises(InsufficientMemoryError, match="no"):
        Model(llama)


def test_a_child_imports_what_this_process_has_imported(
    llama: Path, tmp_path: Path, children: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what lies in the folder where it is started."""
    for name in ("json.py", "numpy.py", "pyllama_mtp.py"):
        (tmp_path / name).write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    Model(llama).close()
    assert len(children) == 1
