"""Too little memory, at a few limits; ``bench/faults.py`` tries many more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _memory() -> ModuleType:
    """The module beside this one."""
    name = "pyllama_mtp_fault_memory"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("memory.py"))
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


memory = _memory()


@pytest.mark.parametrize(
    ("scenario", "steps"), [("load", 4), ("first generation", 5), ("batch", 4)]
)
def test_every_limit_ends_in_a_clean_error_or_in_success(
    demo_file: Path, scenario: str, steps: int
) -> None:
    found = memory.sweep(demo_file, scenario, threads=2, steps=steps, jobs=2)
    assert not found.bad
    kinds = [outcome.kind for outcome in found.outcomes]
    assert kinds[0] == memory.CLEAN and kinds[-1] == memory.DONE
