"""Checkpoints along a prompt: which ones stay, which one serves, and where prefill is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pyllama_mtp.checkpoints import Checkpoint, Checkpoints, boundaries, partings
from pyllama_mtp.sequence import common_prefix


def at(n_past: int, carry: bool = True) -> Checkpoint:
    return Checkpoint(n_past, b"state", np.zeros(4, dtype=np.float32) if carry else None)


def filled(limit: int, *positions: int) -> Checkpoints:
    checkpoints = Checkpoints(limit)
    for n_past in positions:
        checkpoints.add(at(n_past))
    return checkpoints


def found(checkpoints: Checkpoints, n_past: int, need_carry: bool = False) -> int | None:
    checkpoint = checkpoints.closest(n_past, need_carry)
    return checkpoint and checkpoint.n_past


# --- the books ------------------------------------------------------------------------------------


def test_the_closest_lies_at_or_below_what_is_shared() -> None:
    checkpoints = filled(8, 100, 200, 300)
    expected = {0: None, 99: None, 100: 100, 199: 100, 200: 200, 299: 200, 10_000: 300}
    assert {n: found(checkpoints, n) for n in expected} == expected
    checkpoints.add(at(400, carry=False))
    assert [found(checkpoints, 450, need_carry) for need_carry in (False, True)] == [400, 300]
    assert found(filled(0, 100, 200), 300) is None, "none are kept"


def test_what_lies_there_or_further_on_belongs_to_a_text_that_is_gone() -> None:
    checkpoints, newer = filled(8, 100, 200, 300), Checkpoint(200, b"newer state")
    checkpoints.add(newer)
    assert checkpoints.positions == [100, 200] and checkpoints.closest(200, False) is newer
    assert checkpoints.n_bytes == len(b"state") + len(b"newer state")
    for n, left in ((200, [100, 200]), (199, [100])):
        checkpoints.drop_above(n)
        assert checkpoints.positions == left
    checkpoints.clear()
    assert (checkpoints.positions, checkpoints.n_bytes) == ([], 0)


# --- which one goes -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_limit_holds_and_the_last_two_always_stay(limit: int) -> None:
    checkpoints, rng, n_past = Checkpoints(limit), random.Random(limit), 0
    before: list[int] = []
    for _ in range(200):
        n_past += rng.choice((1, 5, 512, 2048))
        checkpoints.add(at(n_past))
        assert checkpoints.positions[-2:] == [*before[-1:], n_past][-min(2, limit) :]
        assert len(checkpoints.positions) == min(limit, len(before) + 1)
        before = checkpoints.positions


@pytest.mark.parametrize(
    ("positions", "dropped"),
    [
        ((100, 200, 700, 900), 100),  # gaps without 100, 200, 700: 200/900, 600/800, 700/700
        ((400, 450, 800, 900), 400),  # 450/900, 400/500, 450/450: the widest, but furthest back
        ((200, 400, 450, 850, 900), 400),  # 400/900, 250/700, 450/500, 450/450
    ],
)
def test_the_thinnest_relative_gap_goes(positions: tuple[int, ...], dropped: int) -> None:
    kept = filled(len(positions) - 1, *positions).positions
    assert kept == [n for n in positions if n != dropped]


@pytest.mark.parametrize("limit", [3, 4, 8])
def test_where_another_text_has_parted_stays(limit: int) -> None:
    checkpoints = filled(limit, 600, 700)
    checkpoints.parting = 600
    for n_past in range(800, 9000, 300):
        checkpoints.add(at(n_past))
        assert checkpoints.positions[0] == 600 and checkpoints.positions[-1] == n_past
    assert 600 in checkpoints.survivors([600]) and len(checkpoints.positions) == limit
    checkpoints.clear()
    assert checkpoints.parting == 0


@pytest.mark.parametrize("limit", [8, 16])
def test_work_is_in_proportion_to_what_has_changed(limit: int) -> None:
    """After an edit d tokens before the end, going back costs at most 1.5 d more, or one call."""
    end, n_batch = 32_768 + 100, 512
    checkpoints = Checkpoints(limit)
    for n_past in boundaries(0, end, n_batch, 256):
        checkpoints.add(at(n_past))
    for shared in range(end):
        more, d = shared - (found(checkpoints, shared) or 0), end - shared
        assert more <= max(1.5 * d, n_batch), f"{more} tokens more for the last {d}"


def test_what_would_not_be_kept_need_not_be_made() -> None:
    for limit in (0, 1, 4):
        all_made, planned = filled(limit, 700, 1000), filled(limit, 700, 1000)
        cuts = list(range(1500, 20_000, 512))
        survivors = planned.survivors(cuts)
        assert planned.positions == all_made.positions, "a trial must leave no trace"
        for n_past in cuts:
            all_made.add(at(n_past))
            if n_past in survivors:
                planned.add(at(n_past))
        assert planned.positions == all_made.positions
        assert len(survivors) <= limit


# --- cuts -----------------------------------------------------------------------------------------


def test_boundaries() -> None:
    for arguments, ends in (
        ((0, 1, 2048, 512), [1]),
        ((0, 512, 2048, 512), [512]),
        ((0, 513, 2048, 512), [512, 513]),
        ((0, 1024, 2048, 512), [512, 1024]),
        ((0, 2048, 2048, 512), [1536, 2048]),
        ((0, 2049, 2048, 512), [1536, 2048, 2049]),
        ((0, 5000, 2048, 512), [2048, 4096, 4608, 5000]),
        ((7, 2600, 2048, 512), [2055, 2567, 2600]),
        ((0, 1000, 300, 128), [256, 512, 768, 896, 1000]),
        ((0, 10, 4, 512), [4, 8, 10]),
        ((5, 8, 1, 1), [6, 7, 8]),
    ):
        assert boundaries(*arguments) == ends


def test_prompts_are_cut_where_others_may_part() -> None:
    for arguments, cuts in (
        ((0, 1000, 0), []),
        ((0, 1000, 500), [492]),
        ((0, 1000, 20), []),  # a part that is too short
        ((0, 1000, 980), [972]),
        ((480, 1000, 500), []),
        ((0, 60, 40), []),  # cut nothing for so few tokens
        ((0, 300, 0, []), [220, 284]),  # the opening, and another question before it
        ((0, 100, 0, []), [84]),
        ((0, 1000, 0, [200, 400, 995]), [400, 931, 995]),  # also: before the last message
        ((0, 1000, 0, [200, 960, 995]), [960, 995]),
        ((0, 1000, 0, [200, 980, 995]), [980]),
        ((0, 1000, 0, [200, 400, 900]), [900, 984]),  # no end of a turn near the end
        ((0, 1000, 600, [200, 400, 995]), [400, 592, 931, 995]),
        ((0, 1000, 983, [995]), [975]),
    ):
        assert partings(*arguments) == cuts


def test_cuts_fit_a_call_and_those_at_partings_cost_a_graph_each() -> None:
    rng = random.Random(2)
    for n_partings in [0, 3] * 1500:
        start, length = rng.randrange(5000), rng.randrange(1, 5000)
        n_batch, n_ubatch = rng.randrange(1, 600), rng.randrange(1, 300)
        stop = start + length
        at = sorted({rng.randrange(start, stop) for _ in range(n_partings)} - {start})
        ends = boundaries(start, stop, n_batch, n_ubatch, at)
        calls = [end - begin for begin, end in zip([start, *ends], ends, strict=False)]
        graph = min(n_batch, n_ubatch)
        assert {*at, stop} <= {*ends} and sum(calls) == length
        assert all(0 < n <= n_batch for n in calls) and (at or calls[-1] <= graph)
        assert sum(-(-n // graph) for n in calls) <= -(-length // graph) + len(at)


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0), ([1], [1], 1)],
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n
