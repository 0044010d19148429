"""What drafting costs: every depth in turn, medians of the rounds that count; and n_ubatch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest

from pyllama_mtp import Settings
from pyllama_mtp.errors import InsufficientMemoryError, UsageError
from pyllama_mtp.measure import tune as costs
from pyllama_mtp.measure.tune import (
    Rotation,
    UbatchTimes,
    measure_ubatches,
    tokens_needed,
    ubatch_markdown,
)


def run(rotation: Rotation, draft_s: float, rest_s: float) -> list[int]:
    """Play rounds until the rotation is done; the first of each two is ten times slower."""
    chosen: list[int] = []
    while not rotation.done:
        depth = rotation.choose()
        slow = 10 if len(chosen) % 2 == 0 else 1
        chosen.append(depth)
        draft = slow * draft_s * depth
        rotation.update(depth, [], draft, draft + slow * rest_s * (depth + 1))
    return chosen


def test_depths_take_turns_and_the_first_round_of_each_is_dropped() -> None:
    rotation = Rotation(2, 2)
    assert run(rotation, 1.0, 5.0) == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]
    assert rotation.choose() == 0
    costs = rotation.medians()
    assert costs.draft == (0.0, 1.0, 2.0) and costs.verify == (0.0, 5.0, 10.0, 15.0)


def test_medians() -> None:
    rotation = Rotation(1, 3)
    for rest in (1.0, 9.0, 2.0):
        for depth in (0, 0, 1, 1) if rest != 9.0 else (1, 1, 0, 0):
            assert rotation.choose() == depth
            rotation.update(depth, [], depth * rest, depth * rest + rest)
    assert rotation.medians().verify == (0.0, 2.0, 2.0) and rotation.medians().draft == (0.0, 2.0)


def test_a_round_cut_short_does_not_count() -> None:
    rotation = Rotation(2, 1)
    while not rotation.done:
        at_most = 1
        depth = rotation.choose(at_most)
        assert depth <= at_most
        rotation.update(depth, [], 1.0, 2.0)
    with pytest.raises(UsageError, match="longer context"):
        rotation.medians()


def test_tokens_needed_is_what_all_accepted_rounds_emit() -> None:
    rotation, emitted = Rotation(3, 2), 1
    while not rotation.done:
        depth = rotation.choose()
        emitted += depth + 1
        rotation.update(depth, [], 1.0, 2.0)
    assert emitted == tokens_needed(3, 2)


@pytest.mark.parametrize(
    ("other", "best"),
    [
        ([0.90, 1.80, 0.96], 1024),
        ([0.90, 1.80, 0.98], 512),  # not sure in one round
        ([1.10, 2.20, 1.10], 512),
    ],
)
def test_another_ubatch_must_be_faster_in_every_round(other: list[float], best: int) -> None:
    times = UbatchTimes(1024, 512, {256: [0.95, 1.9, 0.99], 512: [1.0, 2.0, 1.0], 1024: other})
    assert times.best == best
    text = ubatch_markdown(times)
    assert "512: 1024 (1.00x)" in text and f"--n-ubatch {best}" in text
    assert ("1.04 times as fast as 512" in text) == (best == 1024)


@pytest.mark.parametrize(
    ("token_s", "n_batch", "most", "n_prompt", "sizes"),
    [
        (0.001, 2048, 1024, 2048, [256, 512, 1024]),
        (0.001, 600, 1024, 2048, [256, 512]),
        (0.001, 2048, 512, 2048, [256, 512]),  # no memory for more
        (0.006, 2048, 1024, 1024, [256, 512, 1024]),
        (0.019, 2048, 1024, 512, [256, 512]),
        (0.020, 2048, 1024, 0, []),
    ],
)
def test_prompts_get_shorter_where_they_take_long(
    monkeypatch: pytest.MonkeyPatch,
    token_s: float,
    n_batch: int,
    most: int,
    n_prompt: int,
    sizes: list[int],
) -> None:
    def open_session(model: None, settings: Settings) -> Any:
        if settings.n_ubatch > most:
            raise InsufficientMemoryError
        return nullcontext(settings.n_ubatch)

    done: list[tuple[int, int]] = []

    def process(n_ubatch: int, prompt: list[int]) -> float:
        done.append((n_ubatch, len(prompt)))
        return token_s * len(prompt)

    monkeypatch.setattr(costs, "process_prompt", process)
    monkeypatch.setattr(costs, "Session", open_session)
    times = measure_ubatches(cast("Any", None), Settings(n_batch=n_batch), [1] * 2048)
    assert (times.n_prompt if times else 0) == n_prompt
    assert done[0] == (512, 512), "the usual one is tried first"
    turns = [(n, n_prompt) for n in (*sizes, *sizes[::-1], *sizes)]
    assert done[len(sizes) or 1 :] == turns
    assert sorted(times.seconds if times else ()) == sizes
