"""Time budgets: lengths of time, estimates, and which repeats are the least useful."""

from __future__ import annotations

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import Group, duration, estimate, parse_duration, to_drop

SMALL, BIG = (100, "text"), (400, "text")


def groups(kind: tuple[int, str], repeats: range) -> list[Group]:
    return [Group(*kind, repeat) for repeat in repeats]


def cost(group: Group) -> float:
    return group.size / 100


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1.5h", 5400), ("20", 20)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "10 minutes", "1d", "m", "nan", "1h30m"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give 90s, 10m or 1h"):
        parse_duration(text)


def test_durations_in_words() -> None:
    assert [duration(s) for s in (8.4, 125, 4200)] == ["8 s", "2 min 05 s", "1 h 10 min"]


def test_an_estimate_is_the_median_of_what_was_measured() -> None:
    found = estimate({SMALL: [1.0, 9.0, 2.0]}, float)
    assert found is not None
    assert found(Group(100, "text", 0)) == 2.0
    assert found(Group(400, "text", 0)) == 8.0, "scaled by the work"
    assert estimate({}, float) is None


def test_late_repeats_of_expensive_cells_go_first() -> None:
    pending = groups(SMALL, range(5)) + groups(BIG, range(5))
    assert to_drop(pending, {}, cost, 25.0) == set(), "nothing is left out while it fits"
    assert to_drop(pending, {}, cost, 24.9) == {Group(*BIG, 4)}
    assert to_drop(pending, {}, cost, 20.0) == {Group(*BIG, 4), Group(*BIG, 3)}


def test_a_second_repeat_of_the_big_one_is_worth_more_than_a_fifth_of_the_small_one() -> None:
    """4 s x 2 x 1 against 1 s x 5 x 4."""
    pending = groups(SMALL, range(5)) + groups(BIG, range(2))
    assert to_drop(pending, {}, cost, 12.9) == {Group(*SMALL, 4)}


def test_everything_is_kept_once_as_long_as_possible() -> None:
    pending = groups(SMALL, range(3)) + groups(BIG, range(3))
    kept = set(pending) - to_drop(pending, {}, cost, 5.0)
    assert kept == {Group(*SMALL, 0), Group(*BIG, 0)}
    assert set(pending) - to_drop(pending, {}, cost, 4.9) == {Group(*SMALL, 0)}
    assert set(pending) - to_drop(pending, {}, cost, 0.5) == set()


def test_repeats_that_are_done_count() -> None:
    """The big one has two repeats already, the small one none."""
    pending = groups(BIG, range(2, 3)) + groups(SMALL, range(1))
    assert to_drop(pending, {BIG: 2}, cost, 4.0) == {Group(*BIG, 2)}
