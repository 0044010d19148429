"""Plans: what is measured, in which order, and what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import AXES, Group, Plan, Variant, axis_value, axis_words
from pyllama_mtp.settings import AUTO_DEPTH


def test_every_depth_above_zero_has_every_combination() -> None:
    axes = {"hidden": ("pre-norm", "post-norm"), "prompt_sync": ("kv",)}
    plan = Plan((5,), (0, 2, 4), 1, 1, axes)
    both = [(("prompt_sync", "kv"), ("hidden", one)) for one in axes["hidden"]]
    drafting = [Variant(depth, chosen) for depth in (2, 4) for chosen in both]
    assert plan.variants == (Variant(0), *drafting)
    assert [plan.label(v) for v in plan.variants[:2]] == ["no MTP", "depth 2, hidden pre-norm"]


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
        (((5,), ("auto", "auto"), 1, 1), "depths auto, auto name one value twice"),
        (((5,), (2,), 1, 1, {"p_min": (0.5, 0.5)}), "p_min 0.5, 0.5 name one value twice"),
        (((5,), (2,), 1, 1, {"prompt_sync": ("kv", "auto")}), "auto is kv or full; leave it out"),
        (((5,), (2,), 1, 1, {"hidden": ()}), "no hidden given"),
        (
            ((5,), (2,), 1, 1, {"n_sequences": (2,)}, ("text",), ("",), ("llama-bench",)),
            "other programs are measured with one sequence",
        ),
        (((5,), (0,), 1, 1, {}, ("a", "a")), "classes a, a name one value twice"),
        (((5,), (0,), 1, 1, {}, ("text",), ("a", "a")), "libraries a, a name one value twice"),
        (
            ((5,), (0,), 1, 1, {}, ("text",), ("llama-bench", "a"), ("llama-bench",)),
            "libraries and peers llama-bench, a, llama-bench name one value twice",
        ),
    ],
)
def test_plans_that_make_no_sense_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(*plan)


def test_other_programs_stay_together_before_ours_or_after() -> None:
    plan = Plan((8,), (0, 2, 3), 4, 4, peers=("llama-server", "llama-bench"))
    peers = [(one.library, one.depth) for one in plan.variants[3:]]
    assert peers == [*(("llama-server", depth) for depth in (0, 2, 3)), ("llama-bench", 0)]
    assert plan.n_samples == 4 * 7
    for repeat in range(4):
        theirs = [one.library != "" for one in plan.order(repeat)]
        assert theirs == sorted(theirs, reverse=repeat % 2 == 1)
        assert set(plan.order(repeat)) == set(plan.variants)
    ours = Plan((8,), (0, 2, 3), 4, 4)
    for repeat in range(4):
        own = [one for one in plan.order(repeat) if not one.library]
        assert tuple(own) == ours.order(repeat), "ours take their turns as without them"


@pytest.mark.parametrize(
    ("depths", "most"),
    [((0, 2), 2), ((0, "auto"), AUTO_DEPTH), (("auto", 9), 9), (("auto",), AUTO_DEPTH)],
)
def test_every_variant_has_room_for_the_drafts_of_all(
    depths: tuple[int | str, ...], most: int
) -> None:
    assert Plan((100,), depths, 7, 1).context_needed(100) == 100 + 7 + most + 1


@pytest.mark.parametrize(("peer", "depth"), [("llama-server", "auto"), ("llama-bench", 3)])
def test_other_programs_are_measured_without_drafts_where_they_have_none(
    peer: str, depth: int | str
) -> None:
    """Adaptive depth is ours, and llama-bench has no drafts."""
    plan = Plan((8,), (depth,), 4, 1, peers=(peer,))
    assert [one.depth for one in plan.variants if one.library] == [0]


def test_what_only_drafts_depend_on_is_varied_where_there_are_drafts() -> None:
    axes = {"ngram": (True, False), "cache_type_k": ("f16", "q8_0"), "p_min": (0.0, 0.5)}
    plan = Plan((5,), (0, 2, "auto"), 1, 1, axes, peers=("llama-server", "llama-bench"))
    names = [(one.library, one.depth, tuple(one.settings)) for one in plan.variants]
    assert sorted(set(names), key=str) == sorted(
        [
            ("", 0, ("cache_type_k",)),
            ("", 2, ("cache_type_k", "p_min")),
            ("", "auto", ("cache_type_k", "ngram", "p_min")),
            ("llama-server", 0, ("cache_type_k",)),
            ("llama-server", 2, ("cache_type_k",)),
            ("llama-bench", 0, ("cache_type_k",)),
        ],
        key=str,
    )
    assert len(set(plan.variants)) == len(plan.variants) == 2 + 4 + 8 + 3 * 2
    last = next(one for one in reversed(plan.variants) if not one.library)
    assert plan.label(last) == "depth auto, cache type k q8_0, ngram off, p min 0.5"


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("ngram", "off", False),
        ("n_ubatch", "256", 256),
        ("p_min", "0.5", 0.5),
        ("n_threads", "2", 2),
        ("n_threads", "auto", "auto"),
        ("n_sequences", "8", 8),
        ("cache_type_v", "q8_0", "q8_0"),
        ("synthetic_acceptance", "0.5^3", (0.5, 0.25, 0.125)),
        ("synthetic_acceptance", "0.8/0.7/0.6", (0.8, 0.7, 0.6)),
        ("synthetic_acceptance", "none", None),
    ],
)
def test_values_of_axes_are_words(name: str, word: str, value: Any) -> None:
    assert axis_value(name, word) == value and axis_words(value) == word


@pytest.mark.parametrize("name", ["ngram", "n_ubatch", "synthetic_acceptance"])
def test_a_word_that_is_no_value(name: str) -> None:
    assert name in AXES
    with pytest.raises(UsageError, match=f"'x' is no value of the axis {name}"):
        axis_value(name, "x")
