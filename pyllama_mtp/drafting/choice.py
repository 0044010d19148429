"""What a round drafts: by which drafter, how many, and what a grammar leaves of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..sampling.acceptance import SyntheticAcceptance
from ..sequence import NO_DRAFTS, Drafts, Sequence
from ..settings import Settings
from ..telemetry import Telemetry
from .depth import Costs, DepthController
from .drafter import Drafter
from .ngram import NgramDrafter

#: Most forced tokens in a pass: logits have the same bits in passes of up to 8 rows.
MOST_FORCED = 7


def cut(sequence: Sequence, drafts: Drafts, forced: bool = False) -> Drafts:
    """Drafts up to the first that breaks the grammar. A drawn draft that breaks it stays as the
    last one: dropping it would change the distribution (see :func:`.accept_sampled`).

    Args:
        forced: tokens that the grammar forces take the place of these drafts.
    """
    sampler = sequence.request.sampler
    if not sampler.constrained:
        return drafts
    if forced and (tokens := sampler.forced(len(drafts.tokens))):
        return Drafts(tokens, forced=True)
    n, n_head = sampler.n_valid(drafts.tokens), drafts.n_head
    n += bool(drafts.distributions and n < n_head)
    return Drafts(drafts.tokens[:n], drafts.distributions[:n], max(0, n - n_head))


class Drafting:
    """Chooses before each round of one or several sequences, and learns from its outcome.

    Attributes:
        head: the MTP head; a :class:`.Drafter` that drafts nothing where there is none.
        ngrams: n-gram drafts, which a lone sequence uses; None: off.
        adaptive: whether depths are chosen, by `depths`, once :meth:`know` was called.
    """

    def __init__(self, settings: Settings, depth: int, n_sequences: int, head: Drafter) -> None:
        """`depth`: most drafts of a round."""
        self.head = head
        self.ngrams: NgramDrafter | None = None
        self.adaptive = settings.draft_n_max == "auto"
        self.depths: DepthController | None = None
        self._settings, self._limit = settings, depth
        self._synthetic = settings.synthetic_acceptance
        self._keep: Callable[[dict[int, Costs]], None] | None = None
        self._plain_s, self._n_plain = 0.0, 0  # a sum over the tokens since the last begin()
        if self.adaptive and settings.ngram and self._synthetic is None:
            self.ngrams = NgramDrafter(self._limit, n_sequences)
        self._drafters = [self.head, *([self.ngrams] if self.ngrams else [])]

    def know(self, costs: Mapping[int, Costs], keep: Callable[[dict[int, Costs]], None]) -> None:
        """Choose depths by these costs, by number of sequences. `keep` is called by :meth:`close`
        with the costs as rounds have corrected them, if there were any."""
        self.depths = DepthController(costs, self.head.context is not None)
        self._keep = keep

    def close(self) -> None:
        """Keep what rounds taught. May be called again."""
        if self.depths and self._keep and (learned := self.depths.costs.learned()):
            self._keep(learned)
        self._keep = None

    def describe(self, telemetry: Telemetry) -> None:
        """Note what adaptive depth has measured: what plain steps would have taken a sequence that
        was always alone, at the pace of each round; and why fewer drafts are made, if so."""
        if self.depths and telemetry.passes:
            most = max(telemetry.passes)
            if most == 1 and self._n_plain:
                telemetry.plain_s = self._plain_s / self._n_plain
            telemetry.why_fewer_drafts = self.depths.why_fewer(most)

    def begin(self, sequence: Sequence) -> None:
        """The prompt of a sequence is processed: drafts are chosen from now on."""
        self._plain_s, self._n_plain = 0.0, 0
        sequence.draws = (
            self._settings.draft_sampling and not sequence.request.sampler.sampling.greedy
        )
        if self._synthetic:
            sequence.synthetic = SyntheticAcceptance(self._synthetic)
        for drafter in self._drafters if sequence.drafting else ():
            drafter.begin(sequence)

    def reset(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        for drafter in self._drafters:
            drafter.reset(sequence)

    # -- a round -------------------------------------------------------------------------------

    def draft(self, sequences: list[Sequence]) -> None:
        """Guess what follows the newest token of each sequence: tokens that its grammar forces;
        n-gram drafts, when they are likelier to pay; or else the head's drafts, and n-gram drafts
        behind them for as far as these pay."""
        for one in sequences:
            one.drafts, one.n_usable = NO_DRAFTS, 0
        room = min(one.room for one in sequences) - 1
        # A round emits one token more than it accepts.
        usable = min(room, max(one.wanted for one in sequences) - 1)
        asks = len(sequences) == 1 and self._may_force(sequences[0])
        if asks and self._force(sequences[0], usable):
            return
        drafted = [one for one in sequences if one.drafting]
        if not drafted:
            return
        drafter, n = self._choose(sequences, min(usable, self._limit), min(room, self._limit))
        if n <= 0:
            return
        for one in drafted:
            one.n_usable = min(n, one.wanted - 1)
        p_min = self._settings.p_min
        constrained = any(one.request.sampler.constrained for one in drafted)
        both = self.ngrams if drafter is self.head and len(sequences) == 1 else None
        # What follows drafts is only known once they are made.
        needed = p_min or constrained or (both and both.texts[drafted[0].id].copying)
        if not needed and len(drafted) == len(sequences) and drafter.to_come(drafted, n):
            for one in drafted:
                one.drafts = Drafts([one.newest] * n, to_come=True)
            return
        for one, drafts in zip(drafted, drafter.draft(drafted, n, p_min), strict=True):
            if both and drafts.tokens:
                if n_more := self._n_looked_up(one, min(usable, self._limit), drafts):
                    drafts = both.behind(one, drafts, n_more)
                one.n_usable = len(drafts.tokens)
            one.drafts = cut(one, drafts, not asks and self._synthetic is None)

    def _may_force(self, one: Sequence) -> bool:
        """Whether a lone sequence can go on with tokens whose rows nobody looks at."""
        request = one.request
        looked_at = request.answer.n_logprobs is not None or self._synthetic
        return request.sampler.constrained and not looked_at

    def _force(self, one: Sequence, usable: int) -> bool:
        """Forced tokens of a lone sequence, drafted for or not, which are never rolled back; False:
        there are none."""
        n_max = min(MOST_FORCED, usable, self._settings.ubatch - 1)
        tokens = one.request.sampler.forced(n_max)
        if tokens:
            one.drafts, one.n_usable = Drafts(tokens, forced=True), len(tokens)
        return bool(tokens)

    def _choose(self, sequences: list[Sequence], usable: int, room: int) -> tuple[Drafter, int]:
        """Whose drafts, and how many for each sequence.

        Args:
            usable: most drafts that can be accepted before the texts end.
            room: most drafts that the contexts have room for. A fixed depth drafts as many while
                any draft is usable, so that the last rounds find their graphs.
        """
        if not self.depths:
            return self.head, room if usable > 0 else 0
        ngrams = self.ngrams if len(sequences) == 1 and usable > 0 else None
        if ngrams and (n := self._n_looked_up(sequences[0], usable)):
            return ngrams, n
        return self.head, self.depths.choose(usable, len(sequences)) if self.head.context else 0

    def _n_looked_up(self, one: Sequence, usable: int, head: Drafts = NO_DRAFTS) -> int:
        """How many n-gram drafts pay: in place of the head's, or behind these."""
        assert self.ngrams and self.depths
        rates = self.ngrams.rates(one, head)
        return self.depths.lookup_depth(rates, usable, len(head.tokens)) if rates else 0

    def accepted(self, sequences: list[Sequence]) -> None:
        """See :meth:`.Drafter.accepted`."""
        drafted = [one for one in sequences if one.drafting]
        for drafter in self._drafters:
            drafter.accepted(drafted)

    def learn(self, sequences: list[Sequence], draft_s: float, total_s: float) -> None:
        """The outcome of a round: `draft_s` seconds of drafting, `total_s` of all of it."""
        drafted = [one for one in sequences if one.drafting]
        if not (self.depths and drafted):
            return
        drafts = max((one.drafts for one in drafted), key=lambda made: len(made.tokens))
        if not (drafts.forced and len(drafted) == 1):
            # A forced round says nothing of the head, nor of the cost of output rows.
            outcomes = [
                (min(one.n_usable, one.drafts.n_head), min(len(one.chosen) - 1, one.drafts.n_head))
                for one in drafted
            ]
            self.depths.update(len(drafts.tokens), outcomes, total_s, drafts.looked_up)
        n = len(drafted[0].chosen)
        self._plain_s += n * self.depths.costs.plain()
        self._n_plain += n
