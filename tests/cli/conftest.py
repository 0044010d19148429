"""Running the command line: in this process with the fake driver, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import pyllama_mtp
import pyllama_mtp.llama
from pyllama_mtp.cli import main


@pytest.fixture
def fake(
    fake_driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[ModuleType]:
    """The fake driver in place of the real one; the current folder is empty."""
    module = fake_driver
    module.reset()
    for name in ("Model", "Session"):
        monkeypatch.setattr(pyllama_mtp, name, getattr(module, name), raising=False)
    native = module.Native()
    for package in (pyllama_mtp, pyllama_mtp.llama):
        monkeypatch.setattr(package, "native", native, raising=False)
    monkeypatch.setattr("pyllama_mtp.measure.machine.busy_cores", lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "no-cache"))
    monkeypatch.setattr(  # which asks the library about memory
        "pyllama_mtp.sizing.room_for",
        lambda model, s, *needed: replace(s, n_ctx=s.n_ctx or max(8192, sum(needed))),
    )
    module.native = native
    yield module
    module.reset()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """`cli("matrix", "--repeat", "1")` -> code, out, err."""

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run ``python -m pyllama_mtp`` and wait for it; not in the checkout, whose sources it would
    import in place of the installed package."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "pyllama_mtp", *arguments]
        environment = {**os.environ, "COLUMNS": "80"}
        options = {"cwd": tmp_path, "timeout": 120, **options}
        return subprocess.run(command, capture_output=True, env=environment, **options)

    return run
