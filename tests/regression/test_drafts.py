"""Drafts are what the contract gives: the head fed with the trunk's state, then with its own.

The text does not show it when they are not, so the drafts themselves are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.speculative.drafter import top_probability

from .support import OneSequence, scaled, settings
from .twocontexts import TwoContexts, one_sequence

DEPTH = 5


def contract(model: Model, tokens: Sequence[int]) -> tuple[list[int], list[float], list[float]]:
    """Drafts after `tokens`, whose last one the trunk has not seen.

    Returns:
        The drafts, the probability of each, and how far each was ahead of the second.
    """
    with TwoContexts(model, n_batch=128, n_ubatch=128) as wanted:
        wanted.decode(one_sequence(np.array(tokens[:-1], dtype=np.int32)))
        steps = wanted.draft(tokens[-1], DEPTH)
    return steps.tokens, [top_probability(logits) for logits in steps.logits], steps.leads


@pytest.mark.parametrize("n", [1, 2, 17, 40, 49])
def test_a_chain_of_drafts(demo: Model, text: list[int], n: int) -> None:
    """Equal up to the first place where the two best are as close as rounding."""
    for start in range(0, 50, 10):
        tokens = text[start : start + n + 1]
        wanted, shares, leads = contract(demo, tokens)
        engine = OneSequence(demo, settings(DEPTH))
        engine.process(tokens[:n])
        assert engine.drafter is not None
        sure = next((i for i, lead in enumerate(leads) if lead < scaled(0.03)), DEPTH)
        for _ in range(2):  # the first time leaves nothing behind
            assert engine.draft(tokens[n], DEPTH).tokens[:sure] == wanted[:sure]
        middle = sorted(shares)[DEPTH // 2]
        confident = next((i for i, p in enumerate(shares) if p < middle - 0.01), DEPTH)
        engine.close()
        if sure == DEPTH:
            engine = OneSequence(demo, settings(DEPTH, p_min=middle - 0.01))
            engine.process(tokens[:n])
            assert engine.draft(tokens[n], DEPTH).tokens == wanted[:confident]
            engine.close()


def test_drafts_in_the_middle_of_a_generation(demo: Model, text: list[int]) -> None:
    """The first draft of every round is the contract's, whatever was accepted before."""
    prompt, rounds = text[:20], 0
    with Session(demo, settings(3)) as session:
        run = session.generate(prompt, max_tokens=24, log_pairs=True, ignore_eos=True).run()
        assert run.telemetry.pairs is not None
        known = [*prompt, *run.tokens[:1]]
        for pair in run.telemetry.pairs:
            if pair.position == 1:
                wanted, _, leads = contract(demo, known)
                rounds += 1
            assert pair.drafted == wanted[pair.position - 1] or min(
                leads[: pair.position]
            ) < scaled(0.03)
            assert pair.actual == run.tokens[len(known) - len(prompt)]
            known.append(pair.actual)
            last = pair.drafted == pair.actual and pair.position == 3
            if last:  # the target's own token after an accepted round has no pair
                known.append(run.tokens[len(known) - len(prompt)])
    assert rounds >= 4
