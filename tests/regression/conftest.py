"""What most regression tests begin with: real text, the size of rounding, a model of each kind."""

from __future__ import annotations

import pytest

from pyllama_mtp import Model

from .support import long_text, rounding


@pytest.fixture(scope="session")
def text(demo: Model, demo_prompts: list[str]) -> list[int]:
    """Token ids of real text, longer than every edge."""
    return long_text(demo, demo_prompts)


@pytest.fixture(scope="session")
def gap(demo: Model, text: list[int]) -> float:
    """How far two logits may lie apart and still change places by rounding."""
    return rounding(demo, text[:97])


@pytest.fixture(params=["demo", "moe"])
def model(request: pytest.FixtureRequest) -> Model:
    """A dense model and a mixture of experts."""
    found: Model = request.getfixturevalue(request.param)
    return found
