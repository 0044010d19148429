"""THE round of speculative decoding, for one sequence or several: :func:`speculate`.

The target has decoded the tokens x_0 .. x_{n-1} of a text and chosen x_n, the newest one, which is
in no cache yet. The MTP head guesses what follows, the target verifies all guesses in one pass, and
keeps those that it would have chosen itself (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192, algorithm 1). Two drafts d_1 and d_2:

    position           n-1       n         n+1       n+2
    token              x_{n-1}   x_n       d_1       d_2
    head pairs it with h_{n-2}   h_{n-1}   g_n
    head drafts                  d_1       d_2
    target computes    h_{n-1}   h_n       h_{n+1}   h_{n+2}
    target chooses     x_n       d_1?      d_2?      x

At a position the head takes the token there and the target's hidden state h of the position BEFORE
it, and predicts the token AFTER it. So the first draft comes from x_n and h_{n-1}, the last state
that the target has computed. h_n does not exist yet: for the second draft the head takes its own
state g_n in its place.

The target then decodes x_n d_1 d_2 together. Its row at x_n says what really follows x_n; if that
is d_1, its row at d_1 says what follows d_1, and so on: the accepted drafts and the row after them
give at least one token, the last of which is the newest one of the next round. Rejected drafts
leave the caches. What the head has written for its drafts, from g, is given back when they are
made; the target's pass writes the head's keys and values of all its positions, from h.
"""

from __future__ import annotations

import time

from .answer import top_logprobs
from .engine import Engine
from .errors import DecodeError
from .sampling.acceptance import Distribution, accept_best, accept_sampled
from .sequence import Sequence
from .telemetry import PHASES, timed


def speculate(engine: Engine, sequences: list[Sequence]) -> dict[str, float]:
    """One round: draft k tokens for each sequence, verify them in one pass, keep what holds.

    Returns:
        Seconds by phase, and of the whole "round".
    """
    began, times = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
    engine.intact = False
    with timed("draft", times):
        engine.drafting.draft(sequences)
    with timed("verify", times):
        engine.verify(sequences)
    with timed("sampling", times):
        for sequence in sequences:
            accept(engine, sequence, sequence.entry)
    with timed("sync", times):
        engine.roll_back(sequences)
        engine.drafting.accepted(sequences)
    engine.intact = True
    times["round"] = time.perf_counter() - began
    engine.drafting.learn(sequences, times["draft"], times["round"])
    return times


def accept(engine: Engine, sequence: Sequence, first: int) -> None:
    """Choose how the text goes on, `sequence.chosen`: the drafts that hold, and one token more.

    Drafts hold at imposed rates; by rejection sampling, if they were drawn; or else where they are
    the target's own choice.

    Args:
        first: batch entry of the target's row after the newest token; those of the drafts follow.
    """
    target, request = sequence.row or engine.target, sequence.request
    sequence.row = None
    sampler, ignore_eos = request.sampler, request.limits.ignore_eos
    tokens, q = sequence.drafts.tokens[: sequence.n_usable], sequence.drafts.distributions

    def ends(token: int) -> bool:
        return not ignore_eos and engine.model.is_end(token)

    def sample(row: int) -> int:
        return sampler.sample(target, first + row)

    def distribution(row: int) -> Distribution:
        return sampler.distribution(target, first + row)

    try:
        if sequence.synthetic:
            chosen = sequence.synthetic.accept(tokens, sample)
        elif q:
            chosen = accept_sampled(tokens, q, distribution, sampler.rng, ends, sampler.accept)
        else:
            chosen = accept_best(tokens, sample, ends)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # of this request's grammar, biases or processors: others go on
        sampler.failure = error
        chosen = [0]  # any token: the request ends here
    sequence.chosen = chosen
    sequence.wanted -= len(chosen)
    n = request.answer.n_logprobs
    if n is not None:
        rows = [target.logits(first + i) for i in range(len(chosen))]
        sequence.logprobs = [top_logprobs(r, t, n) for r, t in zip(rows, chosen, strict=True)]
