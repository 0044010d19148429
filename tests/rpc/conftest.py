"""Two workers on loopback that live for one module, and what is compared with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyllama_mtp import Model

from ..regression.support import long_text, rounding
from ..workers import worker


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[str, str]]:
    """The addresses of two workers."""
    with worker() as first, worker() as second:
        yield first, second


@pytest.fixture(scope="session")
def text(demo: Model, demo_prompts: list[str]) -> list[int]:
    """Token ids of real text."""
    return long_text(demo, demo_prompts)


@pytest.fixture(scope="session")
def gap(demo: Model, text: list[int]) -> float:
    """How far two logits may lie apart and still change places by rounding."""
    return rounding(demo, text[:97])
