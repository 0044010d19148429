"""Drafts are what the contract gives: the head fed with the trunk's state, then with its own.

The text does not show it when they are not, so the drafts themselves are compared.
"""

from __future__ import annotations

import numpy as np

from pyllama_mtp import Model, Session

from .support import scaled, settings
from .twocontexts import TwoContexts, one_sequence

DEPTH = 3


def test_drafts_in_the_middle_of_a_generation(demo: Model, text: list[int]) -> None:
    """The drafts of every round are the contract's, whatever was accepted before."""
    prompt, rounds = text[:20], 0
    with Session(demo, settings(DEPTH)) as session:
        run = session.generate(prompt, max_tokens=24, log_pairs=True, ignore_eos=True).run()
        assert run.telemetry.pairs is not None
        known = [*prompt, *run.tokens[:1]]
        for pair in run.telemetry.pairs:
            if pair.position == 1:
                with TwoContexts(demo, n_batch=128, n_ubatch=128) as wanted:
                    wanted.decode(one_sequence(np.array(known[:-1], dtype=np.int32)))
                    steps = wanted.draft(known[-1], DEPTH)
                rounds += 1
            sure = min(steps.leads[: pair.position]) >= scaled(0.03)
            assert pair.drafted == steps.tokens[pair.position - 1] or not sure
            assert pair.actual == run.tokens[len(known) - len(prompt)]
            known.append(pair.actual)
            last = pair.drafted == pair.actual and pair.position == DEPTH
            if last:  # the target's own token after an accepted round has no pair
                known.append(run.tokens[len(known) - len(prompt)])
    assert rounds >= 4
