"""Why MTP does not pay: the acceptance that costs ask for, and types without a fast path.

Sentences about a matrix are in tests/report/test_outputs.py.
"""

from __future__ import annotations

import pytest

from pyllama_mtp.drafting.depth import expected_tokens, needed_acceptance
from pyllama_mtp.measure.verdict import Round, verdict

SLOW = {"Q4_K": 0.6, "Q6_K": 0.27}


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_acceptance_that_is_needed(depth: int) -> None:
    for rate in (0.1, 0.5, 0.95):
        wanted = expected_tokens([rate] * depth, depth)
        assert needed_acceptance(wanted, depth) == pytest.approx(rate, abs=1e-6)
    assert needed_acceptance(depth + 1.01, depth) is None
    assert needed_acceptance(0.99, depth) == 0.0


def test_costs_that_no_acceptance_or_only_much_makes_up_for() -> None:
    text = verdict([Round(1, 1.95, 2.1), Round(2, 2.9, 3.2)], SLOW)
    assert text.startswith("MTP cannot pay here") and "Q4_K 60 %, Q6_K 27 %" in text
    text = verdict([Round(1, 1.7, 1.9), Round(2, 2.9, 3.2)], {}, "80 % are typical")
    assert "only if more than 90 %" in text and "fast path" not in text


def test_types_alone_decide_only_where_they_are_most() -> None:
    assert verdict((), {"Q4_K": 0.49}) == "" != verdict((), SLOW)
