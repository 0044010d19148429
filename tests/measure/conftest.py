"""The fake driver, for tests that need no native library."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def _load_fake() -> ModuleType:
    name = "pyllama_mtp_fake_driver"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "measure" / "fake_driver.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    """The fake driver's module, freshly reset."""
    module = _load_fake()
    module.reset()
    yield module
    module.reset()
