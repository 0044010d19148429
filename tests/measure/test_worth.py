"""Views of a matrix: acceptance by class and position, costs, advice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyllama_mtp.measure.compare import compare
from pyllama_mtp.measure.figures import Cell, Sample
from pyllama_mtp.measure.plan import COPY
from pyllama_mtp.measure.verdict import summary
from pyllama_mtp.measure.worth import (
    acceptance_markdown,
    acceptance_rows,
    conditional,
    costs_of,
)

from ..cells import made_cell, made_sample


def timed(depth: int, rounds: int, verify_s: float, draft_s: float, **counts: Any) -> Sample:
    """A sample whose every round takes so long."""
    n = rounds + 1
    sample = made_sample(64, n, 1000, 1, rounds=rounds, time_s={"draft": rounds * draft_s})
    sample.decode_s = rounds * (verify_s + draft_s)
    sample.drafted = counts.get("drafted", [rounds] * depth)
    sample.accepted = counts.get("accepted", [0] * depth)
    return sample


def asked(depth: int, kind: str, *samples: Sample, **changes: Any) -> Cell:
    return made_cell(depth, samples, prompt_class=kind, **{"n_prompt": 0, **changes})


def test_costs_are_seconds_of_rounds_and_lie_on_a_line_between_measured_depths() -> None:
    plain, deep = timed(0, 10, 1.0, 0.0), timed(3, 10, 2.5, 0.75)
    costs = costs_of([made_cell(0, [plain]), made_cell(3, [deep])])
    assert costs is not None
    assert costs.verify == pytest.approx((0, 1.0, 1.5, 2.0, 2.5))
    assert costs.draft == pytest.approx((0, 0.25, 0.5, 0.75))


def test_costs_of_each_length_of_the_context_are_its_own() -> None:
    cells = []
    for at, verify_s in ((1024, 2.0), (16384, 1.2)):
        accepted = {"drafted": [50], "accepted": [50]}
        for depth, sample in enumerate(
            (timed(0, 50, 1.0, 0.0), timed(1, 50, verify_s, 0.1, **accepted))
        ):
            cells.append(made_cell(depth, [sample], axes={"n_context": at}))
    short, long = acceptance_markdown(cells).split("\n\n16384\n\n")
    assert "no depth is faster than no MTP" in short
    assert "depth 1 should be the best; it was about 1.0 times" in long
    assert (
        costs_of([made_cell(d, cells[d].samples, axes={"n_sequences": 2}) for d in (0, 1)]) is None
    )


@pytest.mark.parametrize("depths", [(0,), (2, 3), ()])
def test_without_no_mtp_or_drafts_there_are_no_costs(depths: tuple[int, ...]) -> None:
    assert costs_of([made_cell(n, [timed(n, 10, 1.0, 0.1)]) for n in depths]) is None


def test_acceptance_is_conditional_on_the_drafts_before() -> None:
    samples = [
        timed(2, 10, 1, 1, drafted=[10, 9], accepted=[8, 4]),
        timed(2, 10, 1, 1, drafted=[10, 10], accepted=[6, 3]),
        timed(2, 1, 1, 1, drafted=[1], accepted=[1]),
    ]
    first, second = conditional(samples)
    assert first is not None and second is not None
    rate, low, high = first
    assert low is not None and high is not None
    assert rate == 15 / 21 and low < rate < high
    assert second[0] == 7 / 14


def test_the_interval_knows_that_prompts_differ() -> None:
    """As many accepted drafts, but the same in all prompts, or all in half of them."""
    alike = [timed(1, 10, 1, 1, accepted=[5]) for _ in range(8)]
    apart = [timed(1, 10, 1, 1, accepted=[10 * (n % 2)]) for n in range(8)]
    (same,), (other,) = conditional(alike), conditional(apart)
    assert same == (0.5, 0.5, 0.5), "no prompt differs"
    rate, low, high = other or (0, 0, 0)
    assert rate == 0.5 and low is not None and low < 0.3 and high is not None and high > 0.7


def test_positions_that_were_never_judged_have_no_rate() -> None:
    assert conditional([timed(2, 4, 1, 1, accepted=[0, 0])])[1] is None


def matrix() -> list[Cell]:
    """Two classes; a round of one draft takes 1.5 steps, of two drafts 2 steps."""
    good, bad = [40, 40], [20, 0]
    return [
        asked(depth, kind, timed(depth, 40, 1 + depth / 4, depth / 4, accepted=hits[:depth]))
        for kind, hits in (("code", good), ("factual", bad))
        for depth in (0, 2)
    ]


def test_classes_and_all_of_them_at_the_deepest_fixed_depth() -> None:
    rows = acceptance_rows([*matrix(), asked(9, "code", timed(9, 4, 1, 1), adaptive=True)])
    assert [(row["class"], row["prompts"], row["rounds"]) for row in rows] == [
        ("code", 1, 40),
        ("factual", 1, 40),
        ("all", 2, 80),
    ]
    assert [rate and rate[0] for rate in rows[-1]["conditional"]] == [0.75, 4 / 6]
    assert rows[0]["accepted_per_round"] == 2


def test_models_and_axes_are_not_mixed() -> None:
    other = [asked(2, "code", timed(2, 4, 9, 9), model="n.gguf", run="b")]
    shown = acceptance_markdown([*matrix(), *other])
    assert "| 2 | 0.50 | 1.50 | 2.00 | 62 | 1.50x | 0.75x | 1.12x |" in shown
    assert "n.gguf\n\nAcceptance" in shown and "costs were not measured" not in shown
    hidden = [{"hidden": "post-norm"}, {"hidden": "pre-norm"}]
    cells = [asked(1, "code", timed(1, 4, 1, 1, accepted=[4]), axes=one) for one in hidden]
    assert [row["series"] for row in acceptance_rows(cells)] == ["post-norm", "pre-norm"]


def test_copying_is_a_row_of_its_own_and_part_of_no_mean() -> None:
    """Not even where it is five times as fast and every draft is accepted."""
    plain, fast = timed(0, 40, 1, 0), timed(2, 40, 0.1, 0.1, accepted=[40, 40])
    fast.decode_tps = 5.0
    copies = [asked(0, COPY, plain), asked(2, COPY, fast)]
    several, one = matrix(), matrix()[:2]
    rows = acceptance_rows([*copies, *several])
    assert [row["class"] for row in rows] == ["copy", "code", "factual", "all"]
    assert rows[1:] == acceptance_rows(several) and rows[0]["accepted_per_round"] == 2
    for cells in (several, one):
        verdict = acceptance_markdown(cells).partition("verdict: ")[2]
        assert acceptance_markdown([*copies, *cells]).partition("verdict: ")[2] == verdict
        assert summary([*copies, *cells]) == summary(cells) != summary(copies) != ""
    twice = [
        replace(cell, samples=2 * cell.samples, repeats=[0, 1]) for cell in (*copies, *several)
    ]
    changes = compare(twice, twice).changes
    assert {change.n for change in changes if change.name == "all cells"} == {2 * len(several)}
    assert [row["class"] for row in acceptance_rows(copies)] == ["copy"]


def test_prompts_without_a_partner_give_no_factor() -> None:
    cells = [replace(cell, repeats=[cell.n_max]) for cell in matrix()]
    assert "depth 1 should be the best\n" in acceptance_markdown(cells)
