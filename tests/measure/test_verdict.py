"""Why MTP does not pay: from measured costs, types without a fast path, and a matrix."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pyllama_mtp.drafting.depth import expected_tokens, needed_acceptance
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.verdict import Round, summary, verdict

from ..cells import made_cell, made_sample

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
    assert verdict((), {"Q4_K": 0.49}) == ""
    assert verdict((), SLOW).startswith("MTP will hardly pay on this CPU. 87 % of what")


def cell(depth: int, decode_s: float, n_prompt: int = 512, **changes: Any) -> Cell:
    """8 tokens in plain steps, or in 5 rounds with 4 first drafts accepted of 5."""
    rounds = 5 if depth else 7
    drafts = {"drafted": [5] * depth, "accepted": [4] * depth, "tokens_per_round": 8 / rounds}
    times = {"prefill_s": 1.0, "decode_s": decode_s, "elapsed_s": 1 + decode_s}
    times["time_s"] = {"verify": 0.8 * decode_s}
    sample = made_sample(n_prompt, 8, 512.0, 7 / decode_s, rounds=rounds, **drafts, **times)
    return made_cell(depth, [sample] * 2, n_prompt=n_prompt, slow_types=SLOW, **changes)


def gained(*cells: Cell) -> str:
    return summary(cells)


def test_what_mtp_gains() -> None:
    """7 tokens in 0.7 s without MTP, in 0.44 s with one draft per round, which is the best."""
    text = gained(cell(0, 0.7), cell(1, 0.44), cell(2, 0.5), cell(3, 0.46, adaptive=True))
    for said in ("1.6 times as fast", "depth 1, 1.6 tokens", "1.5 times)", "2 repeats", "rough"):
        assert said in text
    assert "(auto, 1.6 tokens per pass);" in gained(cell(0, 0.7), cell(3, 0.4, adaptive=True))
    longer = [cell(0, 0.7, 4096), cell(1, 0.35, 4096)]
    assert "1.6 to 2.0 times" in gained(cell(0, 0.7), cell(1, 0.44), *longer)
    assert gained(cell(0, 0.7), cell(1, 0.44, synthetic_acceptance=[0.8])).startswith("At the impo")


def test_that_it_loses_and_why() -> None:
    text = gained(cell(0, 0.7), cell(1, 1.0), cell(2, 2.0))
    assert "0.70 times as fast at best (depth 1, " in text and "as long as 2.0 steps" in text
    assert "87 % of what a step reads is in types without a fast path" in text
    assert "tiny" not in text and "tiny: a step takes 1.0 ms" in gained(
        cell(0, 0.007), cell(1, 0.01)
    )
    assert "about as fast as without" in gained(cell(0, 0.7), cell(1, 0.695))


def test_ratios_that_may_be_noise_are_no_gain() -> None:
    """Within a repeat 0.9, 1.03 and 1.2: an interval around 1."""
    base, drafting = (cell(depth, 0.7) for depth in (0, 1))
    for one, times in ((base, (0.7, 0.7, 0.7)), (drafting, (0.7 / 0.9, 0.7 / 1.03, 0.7 / 1.2))):
        one.samples = [replace(one.samples[0], decode_tps=7 / time) for time in times]
        one.repeats = [0, 1, 2]
    assert "about as fast" in gained(base, drafting) and "rough" not in gained(base, drafting)


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert gained(cell(0, 0.7)) == "" == gained(cell(1, 0.7), cell(2, 0.7))


def test_one_repeat_has_no_verdict() -> None:
    base, drafting = (cell(depth, time) for depth, time in ((0, 0.7), (1, 0.44)))
    for one in (base, drafting):
        one.samples, one.repeats = one.samples[:1], [0]
    said = gained(base, drafting)
    assert (
        said.startswith("About 1.6 times as fast with MTP (depth 1), one sample")
        and "%" not in said
    )


def test_two_tokens_have_no_verdict() -> None:
    """A model that accepts nothing in them: no draft was judged at all."""
    base, drafting = (cell(depth, time, max_tokens=2) for depth, time in ((0, 0.7), (3, 0.9)))
    for one in (base, drafting):
        one.samples = [replace(sample, drafted=[], accepted=[], rounds=1) for sample in one.samples]
    assert gained(base, drafting).startswith("2 generated tokens say too little of the speed")
