"""Plans: what is measured, in which order, and what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import Group, Plan, Variant


def test_every_depth_above_zero_has_every_combination() -> None:
    plan = Plan((5,), (0, 2, 4), 1, 1, hidden=("pre-norm", "post-norm"), prompt_sync=("kv",))
    assert plan.variants == (
        Variant(0),
        Variant(2, prompt_sync="kv", hidden="pre-norm"),
        Variant(2, prompt_sync="kv"),
        Variant(4, prompt_sync="kv", hidden="pre-norm"),
        Variant(4, prompt_sync="kv"),
    )
    assert [plan.label(v) for v in plan.variants[:2]] == ["no MTP", "depth 2, hidden pre-norm"]
    assert plan.label(plan.variants[1], short=True) == "depth 2, pre-norm"


def test_every_library_has_all_of_them() -> None:
    plan = Plan((5,), (0, 2), 1, 1, libraries=("upstream", "patched"))
    assert [plan.label(v) for v in plan.variants] == [
        "upstream, no MTP",
        "upstream, depth 2",
        "patched, no MTP",
        "patched, depth 2",
    ]


def test_the_first_repeat_of_everything_comes_first() -> None:
    plan = Plan((5, 7), (0,), 1, 2, classes=("text", "code"))
    assert plan.groups()[:5] == [
        Group(5, "text", 0),
        Group(7, "text", 0),
        Group(5, "code", 0),
        Group(7, "code", 0),
        Group(5, "text", 1),
    ]
    assert plan.n_samples == 8


def test_nobody_is_always_first_and_neighbours_change_sides() -> None:
    plan = Plan((5,), (0, 2, 3, 4), 1, 8)
    orders = [plan.order(repeat) for repeat in range(8)]
    assert all(sorted(v.depth for v in order) == [0, 2, 3, 4] for order in orders)
    places = [sum(order.index(variant) for order in orders) for variant in plan.variants]
    assert places == [12] * 4, "in eight repeats everybody has the same mean place"
    assert {order[0].depth for order in orders} == {0, 2, 3, 4}
    assert orders[1] == orders[0][::-1]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (((), (0,), 1, 1), "no prompt sizes"),
        (((5,), (), 1, 1), "no depths"),
        (((5,), (-1,), 1, 1), "depths must be 0 or more, not -1"),
        (((0,), (0,), 1, 1), "prompt sizes must be 1 or more, not 0"),
        (((5,), (2, 2), 1, 1), "twice"),
        (((5,), (0,), 0, 1), "max_tokens"),
        (((5,), (0,), 1, 0), "repeat"),
        (((5,), (2,), 1, 1, ("all", "all")), "prompt_rows all, all name one value twice"),
        (((5,), (2,), 1, 1, ("all",), ("kv", "auto")), "auto is kv or full; leave it out"),
        (((5,), (2,), 1, 1, ("all",), ("kv",), ()), "no hidden given"),
    ],
)
def test_plans_that_make_no_sense_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(*plan)


@pytest.mark.parametrize("axis", ["classes", "libraries"])
def test_an_axis_names_nothing_twice(axis: str) -> None:
    values: dict[str, Any] = {axis: ("a", "a")}
    with pytest.raises(UsageError, match=f"{axis} a, a name one value twice"):
        Plan((5,), (0,), 1, 1, **values)
