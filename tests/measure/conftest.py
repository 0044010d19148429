"""The fake driver, for tests that need no native library."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def fake(fake_driver: ModuleType) -> Iterator[ModuleType]:
    """The fake driver's module, freshly reset."""
    fake_driver.reset()
    yield fake_driver
    fake_driver.reset()
