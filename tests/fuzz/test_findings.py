"""What once ended the process is refused by name: findings.json holds what was done to the demo.

Each of them ended it, by an assertion, a division by zero or a wrong access, before the validator
had the rule that its message comes from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzkit.pool import Case, Pool

FINDINGS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("findings.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def outcomes(demo_file: Path) -> dict[int, Any]:
    """The outcomes by index; a worker that dies is replaced."""
    cases = [Case("model", index, f["edits"]) for index, f in enumerate(FINDINGS)]
    with Pool(demo_file, jobs=1) as pool:
        return {outcome.case.seed: outcome for outcome in pool.run(cases)}


@pytest.mark.parametrize("index", range(len(FINDINGS)), ids=[f["name"] for f in FINDINGS])
def test_a_finding_is_refused(index: int, outcomes: dict[int, Any]) -> None:
    outcome = outcomes[index]
    assert outcome.outcome == "refused by the validator", outcome.detail
    assert FINDINGS[index]["message"] in outcome.detail
