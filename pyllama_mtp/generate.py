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

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field

import numpy as np

from .answer import Answer
from .arguments import FLAG, keep_checked, option, wholes
from .drafting.acceptance import (
    Distribution,
    SyntheticAcceptance,
    accept_best,
    accept_sampled,
    point,
)
from .drafting.drafter import Drafts, Newest
from .drafting.sampling import Sampler
from .drafting.upstream import Decoded
from .engine import Engine, Place
from .llama.batch import Batch, Ints
from .llama.toplogprobs import TopLogprobs, top_logprobs
from .telemetry import timed

#: judge(drafts, first): the accepted drafts of one sequence, and one token more; `first` is the
#: batch entry of its first verified row.
Judge = Callable[[Drafts, int], list[int]]
#: Most forced tokens in a pass: logits have the same bits in passes of up to 8 rows.
MOST_FORCED = 7
#: Called while a prompt is processed, with (tokens done, tokens in all).
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True)
class Limits:
    """When to stop, and whether to draft. `ignore_eos`: generate on after an end token.

    Raises UsageError for a bad value.
    """

    max_tokens: int = option(MISSING, wholes(1, math.inf, "at least 1"))
    ignore_eos: bool = option(False, FLAG)
    draft: bool = option(True, FLAG)

    def __post_init__(self) -> None:
        keep_checked(self)


@dataclass(eq=False)
class Request:
    """A prompt, its sampler and limits, and the answer to fill.

    The request owns the sampler, which is closed when the request is done. `on_progress` counts
    tokens of the prompt that were kept from before as done.
    """

    prompt: list[int]
    sampler: Sampler
    limits: Limits
    answer: Answer
    on_progress: OnProgress | None = None


@dataclass(eq=False)
class Live:
    """A request that has a place, and its share of the current round.

    Attributes:
        judge: accepts its drafts.
        draws: draws its drafts; None: drafts are the head's best tokens.
        wanted: tokens that may still come.
        token: the newest token, in no cache yet; -1: the prompt is being processed.
        drafts: those that are verified.
        n_usable: how many of the drafts can be accepted.
        chosen: the target's choice: the accepted drafts and one token more.
        logprobs: of the chosen tokens, if the request wants them.
    """

    request: Request
    place: Place
    judge: Judge
    draws: Sampler | None
    wanted: int
    token: int = -1
    drafts: Drafts = field(default_factory=Drafts)
    n_usable: int = 0
    chosen: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)


def speculate(engine: Engine, live: Sequence[Live]) -> None:
    """One round: draft k tokens for each sequence, verify them in one pass, keep what holds."""
    with timed(engine.times, "draft"):
        draft(engine, live)
    with timed(engine.times, "verify"):
        passed = verify(engine, live)
    with timed(engine.times, "sampling"):
        accept(engine, live)
    with timed(engine.times, "sync"):
        roll_back(engine, live, passed)


def draft(engine: Engine, live: Sequence[Live]) -> None:
    """Guess what follows the newest token of each sequence: tokens that its grammar forces; n-gram
    drafts, when they are likelier to pay; or else the head's drafts."""
    for one in live:
        one.drafts = Drafts()
    forced = force(engine, live)
    if forced:
        live[0].drafts = Drafts(forced, forced=True)
        return
    room = min(engine.depth, min(engine.room(one.place) for one in live) - 1)
    # A round emits one token more than it accepts.
    usable = min(room, max(one.wanted for one in live) - 1)
    drafted = [one for one in live if one.place.drafting]
    if not drafted:
        return
    newest = [(one.place.seq, one.token) for one in drafted]
    found = engine.choice.look_up(newest, usable if len(live) == 1 else 0)
    n_max = len(found) or engine.choice.depth(len(live), usable, room)
    for one in drafted:
        one.n_usable = min(n_max, one.wanted - 1)
    if found:
        q = [point(token) for token in found] if live[0].draws else []
        live[0].drafts = cut(live[0], Drafts(found, q, looked_up=True), forced)
    elif n_max > 0 and engine.drafter:
        engine.intact = False
        begun = [Newest(one.place.seq, one.token, one.n_usable, one.draws) for one in drafted]
        made = engine.drafter.draft(begun, n_max, engine.settings.p_min)
        for one, drafts in zip(drafted, made, strict=True):
            one.drafts = cut(one, drafts, forced)


def force(engine: Engine, live: Sequence[Live]) -> list[int] | None:
    """Tokens that the grammar of a lone sequence forces, drafted for or not: they are never rolled
    back. None: the grammar was not asked."""
    one, settings = live[0], engine.settings
    if not one.request.sampler.constrained or len(live) > 1:
        return None
    if one.request.answer.n_logprobs is not None or settings.synthetic_acceptance:
        return None
    most = min(MOST_FORCED, one.wanted - 1, engine.room(one.place) - 1, settings.n_ubatch - 1)
    found = one.request.sampler.forced(most)
    if found and one.place.drafting:
        engine.choice.look_up([(one.place.seq, one.token)], 0)
    one.n_usable = len(found)
    return found


def cut(one: Live, made: Drafts, forced: list[int] | None = None) -> Drafts:
    """Drafts up to the first that breaks the grammar; or the tokens that the grammar forces, if
    :func:`force` has not asked for them. A drawn draft that breaks the grammar stays: dropping it
    would change the distribution (see :func:`.accept_sampled`)."""
    sampler = one.request.sampler
    if not sampler.constrained:
        return made
    if forced is None and (found := sampler.forced(len(made.tokens))):
        return Drafts(found, forced=True)
    n = sampler.n_valid(made.tokens) + bool(made.distributions and not made.looked_up)
    return Drafts(made.tokens[:n], made.distributions[:n], made.looked_up)


def verify(engine: Engine, live: Sequence[Live]) -> Ints:
    """One pass of the target over the newest token and the k drafts of each sequence.

    Row i of a sequence says what follows its first i drafts. All rows are outputs. Where a lone
    sequence's drafts are forced, only the last row is (unless log probabilities are kept), and
    nothing is rolled back.

    Returns:
        [sequences, k + 1]: the tokens of the pass.
    """
    target, n_rows = engine.target, 1 + max(len(one.drafts.tokens) for one in live)
    wanted = live[0].request.answer.n_logprobs is not None
    forced = len(live) == 1 and live[0].drafts.forced and not wanted
    prepare_rows(engine, live)
    engine.intact = False
    engine.follow(any(one.place.drafting for one in live))
    target.set_snapshots(n_rows > 1 and not forced)
    tokens, positions, seqs = list[int](), list[int](), list[int]()
    for one in live:
        place, start, made = one.place, len(one.place.cached), one.drafts
        if place.rollback and n_rows > 1 and not forced:
            place.rollback.before()
        tokens += [one.token, *made.tokens, *[one.token] * (n_rows - 1 - len(made.tokens))]
        positions += range(start, start + n_rows)
        seqs += [place.seq] * n_rows
    ids: Ints
    ids, at, of = np.array([tokens, positions, seqs], dtype=np.int32)
    outputs = np.ones(len(ids), dtype=np.int8)
    if forced:
        outputs[:-1] = 0
    target.decode_batch(Batch(ids, at, of, outputs))
    target.synchronize()
    return ids.reshape(len(live), n_rows)


def accept(engine: Engine, live: Sequence[Live]) -> None:
    """Accept drafts by the target's own choice in each row, and add the token after them."""
    n_rows, entry = 1 + max(len(one.drafts.tokens) for one in live), 0
    for one in live:
        usable = Drafts(one.drafts.tokens[: one.n_usable], one.drafts.distributions)
        take(engine, one, one.judge(usable, entry), entry)
        entry += n_rows


def take(engine: Engine, one: Live, chosen: list[int], entry: int) -> None:
    """Take the target's choice at batch entries from `entry` on; its last token is the sequence's
    newest one now."""
    n, row = one.request.answer.n_logprobs, engine.target.logits
    one.chosen, one.logprobs, one.token = chosen, [], chosen[-1]
    one.wanted -= len(chosen)
    if n is not None:
        one.logprobs = [top_logprobs(row(entry + i), token, n) for i, token in enumerate(chosen)]


def roll_back(engine: Engine, live: Sequence[Live], passed: Ints) -> None:
    """Keep the newest token and the accepted drafts of each sequence, drop the rest."""
    n_rows, kept = passed.shape[1], [len(one.chosen) for one in live]
    if engine.upstream:
        engine.upstream.decoded(
            [
                Decoded(one.place.seq, len(one.place.cached), passed[i], i * n_rows, kept[i])
                for i, one in enumerate(live)
                if one.place.drafting
            ]
        )
    for one, tokens, n in zip(live, passed, kept, strict=True):
        place = one.place
        if place.rollback and n_rows > 1:
            place.rollback.after(tokens, len(place.cached), n)
        place.cached += tokens[:n].tolist()
    engine.intact = True


# -- how one sequence goes on ----------------------------------------------------------------------


def start(engine: Engine, place: Place, request: Request) -> Live:
    """Give a request a place; its prompt is still to be processed."""
    sampler, limits = request.sampler, request.limits
    draws = sampler if engine.settings.draft_sampling and not sampler.sampling.greedy else None
    return Live(request, place, make_judge(engine, sampler, limits), draws, limits.max_tokens)


def prepare_rows(engine: Engine, live: Sequence[Live]) -> None:
    """Have the next decodes leave rows that all samplers can use: the best token, some best tokens,
    or all logits, which log probabilities need, too."""
    few, most = True, 0
    for request in (one.request for one in live):
        n, best = request.sampler.n_candidates, request.sampler.sampling.plain_greedy
        few = few and (n > 0 or best) and request.answer.n_logprobs is None
        most = max(most, n)
    engine.target.set_greedy(few)
    engine.target.set_candidates(most if few else 0)


def make_judge(engine: Engine, sampler: Sampler, limits: Limits) -> Judge:
    """How drafts of a sequence are accepted: at imposed rates; by rejection sampling, if they were
    drawn; or else where they are the target's own choice."""
    rates = engine.settings.synthetic_acceptance
    synthetic = SyntheticAcceptance(rates) if rates and engine.drafter else None

    def ends(token: int) -> bool:
        return not limits.ignore_eos and engine.model.is_end(token)

    def judge(drafts: Drafts, entry: int) -> list[int]:
        def sample_row(row: int) -> int:
            return sampler.sample(engine.target, entry + row)

        def distribution(row: int) -> Distribution:
            return sampler.distribution(engine.target, entry + row)

        if synthetic:
            return synthetic.accept(drafts.tokens, sample_row)
        if drafts.distributions:
            given = drafts.tokens, drafts.distributions
            return accept_sampled(*given, distribution, sampler.rng, ends, sampler.accept)
        return accept_best(drafts.tokens, sample_row, ends)

    return judge
