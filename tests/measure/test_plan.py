"""Plans: what is measured, in which order, and what makes no sense."""

from __future__ import annotations

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import GOLDEN, Key, Plan, axis_value, axis_words
from pyllama_mtp.measure.request import axis_values
from pyllama_mtp.settings import AUTO_DEPTH


def cells(plan: Plan) -> tuple[Key, ...]:
    return plan.cells(*plan.kinds()[0])


def test_every_depth_above_zero_has_every_combination() -> None:
    axes = {"hidden": ("pre-norm", "post-norm"), "prompt_sync": ("kv",)}
    plan = Plan((5,), (0, 2, 4), 1, 1, axes)
    both = [{"prompt_sync": "kv", "hidden": one} for one in axes["hidden"]]
    drafting = [Key("", 5, "text", n, 1, axes=chosen) for n in (2, 4) for chosen in both]
    assert cells(plan) == (Key("", 5, "text", 0, 1), *drafting)
    assert [*map(plan.label, cells(plan))][:2] == ["no MTP", "depth 2, hidden pre-norm"]


def test_a_key_is_one_whatever_the_order_of_its_axes() -> None:
    one = Key("", 5, "text", 2, 1, axes={"n_context": 8, "hidden": "pre-norm"})
    other = Key("", 5, "text", 2, 1, axes={"hidden": "pre-norm", "n_context": 8})
    assert one == other and len({one, other}) == 1
    assert one.plain == Key("", 5, "text", 0, 1, axes={"n_context": 8})
    assert (one.axis("hidden"), one.axis("prompt_rows")) == ("pre-norm", "")


def test_the_first_repeat_of_everything_comes_first() -> None:
    plan = Plan((5, 7), (0,), 1, 2, classes=("text", "code"))
    assert [(repeat, *keys[0].kind) for repeat, keys in plan.groups()] == [
        (repeat, size, kind) for repeat in (0, 1) for kind in ("text", "code") for size in (5, 7)
    ]
    assert plan.n_samples == 8


def test_nobody_is_always_first_and_neighbours_change_sides() -> None:
    plan = Plan((5,), (0, 2, 3, 4), 1, 8)
    orders = [order for _, order in plan.groups()]
    assert all(sorted(key.n_max for key in order) == [0, 2, 3, 4] for order in orders)
    places = [sum(order.index(key) for order in orders) for key in cells(plan)]
    assert places == [12] * 4, "in eight repeats everybody has the same mean place"
    assert {order[0].depth for order in orders} == {0, 2, 3, 4}
    assert orders[1] == orders[0][::-1]


def test_plans_that_make_no_sense_are_refused() -> None:
    for plan, message in (
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
        (((5, 6), (0,), 1, 1, {"n_context": (50,)}), "one prompt size"),
        (((5,), (0,), 1, 1, {"n_context": (50,)}, ("code",)), "classes text and source"),
        (((5,), (0,), 1, 1, {"n_context": (9,), "n_sequences": (2,)}), "several sequences"),
        (((5,), (0,), 1, 1, {}, ("a", "a")), "classes a, a name one value twice"),
        (((5,), (0,), 1, 1, {}, ("text",), ("a", "a")), "libraries a, a name one value twice"),
        (
            ((5,), (0,), 1, 1, {}, ("text",), ("llama-bench", "a"), ("llama-bench",)),
            "libraries and peers llama-bench, a, llama-bench name one value twice",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            Plan(*plan)


def test_other_programs_stay_together_before_ours_or_after() -> None:
    plan = Plan((8,), (0, 2, 3), 4, 4, peers=("llama-server", "llama-bench"))
    peers = [(one.build, one.depth) for one in cells(plan)[3:]]
    assert peers == [*(("llama-server", depth) for depth in (0, 2, 3)), ("llama-bench", 0)]
    assert plan.n_samples == 4 * 7
    ours = Plan((8,), (0, 2, 3), 4, 4)
    for (repeat, order), (_, alone) in zip(plan.groups(), ours.groups(), strict=True):
        theirs = [one.build != "" for one in order]
        assert theirs == sorted(theirs, reverse=repeat % 2 == 1)
        assert set(order) == set(cells(plan))
        own = [one for one in order if not one.build]
        assert tuple(own) == alone, "ours take their turns as without them"


@pytest.mark.parametrize(
    ("depths", "most"),
    [((0, 2), 2), ((0, "auto"), AUTO_DEPTH), (("auto", 9), 9), (("auto",), AUTO_DEPTH)],
)
def test_every_variant_has_room_for_the_drafts_of_all(
    depths: tuple[int | str, ...], most: int
) -> None:
    assert Plan((100,), depths, 7, 1).context_needed(100) == 100 + 7 + most + 1


def test_what_only_drafts_depend_on_is_varied_where_there_are_drafts() -> None:
    axes = {"ngram": (True, False), "cache_type_k": ("f16", "q8_0"), "p_min": (0.0, 0.5)}
    plan = Plan((5,), (0, 2, "auto"), 1, 1, axes, peers=("llama-server", "llama-bench"))
    names = [(one.build, one.depth, tuple(one.settings)) for one in cells(plan)]
    assert sorted(set(names), key=str) == sorted(
        [
            ("", 0, ("cache_type_k",)),
            ("", 2, ("cache_type_k", "p_min")),
            ("", "auto", ("cache_type_k", "ngram", "p_min")),
            ("llama-server", 0, ("cache_type_k",)),
            ("llama-server", 2, ("cache_type_k", "p_min")),
            ("llama-bench", 0, ("cache_type_k",)),
        ],
        key=str,
    )
    assert len({*cells(plan)}) == len(cells(plan)) == 2 + 4 + 8 + 2 + 4 + 2
    last = next(one for one in reversed(cells(plan)) if not one.build)
    assert plan.label(last) == "depth auto, cache type k q8_0, ngram off, p min 0.5"


def test_values_of_axes_are_words() -> None:
    for name, word, value in (
        ("ngram", "off", False),
        ("n_ubatch", "256", 256),
        ("p_min", "0.5", 0.5),
        ("n_threads", "2", 2),
        ("n_threads", "auto", "auto"),
        ("n_sequences", "8", 8),
        ("cache_type_v", "q8_0", "q8_0"),
        ("synthetic_acceptance", "0.5^3", (0.5, 0.25, 0.125)),
        ("synthetic_acceptance", "0.8/0.7/0.6", (0.8, 0.7, 0.6)),
        ("synthetic_acceptance", "golden:qwen3.5", GOLDEN["golden:qwen3.5"]),
        ("synthetic_acceptance", "none", None),
    ):
        assert axis_value(name, word) == value and axis_words(value) == word


@pytest.mark.parametrize("name", ["ngram", "n_ubatch", "synthetic_acceptance"])
def test_a_word_that_is_no_value(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is .*x"):
        axis_values(name, axis_value(name, "x"))
