"""The command line in this process, with the fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pyllama_mtp
import pyllama_mtp.llama

#: A matrix of 8 samples; later options replace these.
SMALL = (
    *("matrix", "--model", "folder/m.gguf", "--prompt-sizes", "64,128"),
    *("--depths", "0,2", "--max-tokens", "8", "--repeat", "2"),
)


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
    monkeypatch.setattr("pyllama_mtp.machine.busy_cores", lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "no-cache"))
    module.native = native
    yield module
    module.reset()
