"""Too little memory, at a few limits; ``bench/faults.py`` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import memory


@pytest.mark.long
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
