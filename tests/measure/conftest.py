"""The fake driver, for tests that need no native library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def fake(fake_driver: ModuleType) -> Iterator[ModuleType]:
    """The fake driver's module, freshly reset."""
    fake_driver.reset()
    yield fake_driver
    fake_driver.reset()


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module ``acceptance_fakes.py``: runs made by hand."""
    path = Path(__file__).with_name("acceptance_fakes.py")
    spec = importlib.util.spec_from_file_location("acceptance_fakes", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
