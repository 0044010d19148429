"""A sequence: a text in the contexts, and what a round does with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .answer import TopLogprobs
from .checkpoints import Checkpoints
from .llama.batch import Floats, Ints
from .llama.vision import PlacedImage, position
from .sampling.acceptance import Distribution, SyntheticAcceptance

if TYPE_CHECKING:
    from .llama.batch import KeptRow, State
    from .promptfile import ProcessedPrompt
    from .request import Request
    from .telemetry import Telemetry


@dataclass(frozen=True)
class Drafts:
    """Drafts of one round for one sequence.

    Attributes:
        tokens: their ids.
        distributions: of the draw of each draft; empty where drafts are the head's best tokens.
        looked_up: how many, the last ones, are n-gram drafts, not the head's; see
            :mod:`.drafting.ngram`.
        forced: the grammar allows no other tokens, so all are accepted.
        to_come: the verification makes them, in one submission; until then `tokens` are places.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    looked_up: int = 0
    forced: bool = False
    to_come: bool = False

    @property
    def n_head(self) -> int:
        """How many, the first ones, are the head's."""
        return 0 if self.forced else len(self.tokens) - self.looked_up


NO_DRAFTS = Drafts()
_NONE: Ints = np.zeros(0, dtype=np.int32)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared much faster than items
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def shared_tokens(text: Sequence | ProcessedPrompt, prompt: list[int]) -> int:
    """How many tokens a prompt and a text have in common, at the beginning; a part of an image is
    no use."""
    n = common_prefix(text.tokens, prompt)
    return next((image.start for image in text.images if image.start < n < image.end), n)


@dataclass(eq=False)
class Sequence:
    """One of the 1..n sequences of an engine, and the request that it answers.

    When the request is done, the text stays, for a prompt that continues it.

    Attributes:
        id: the sequence's number in the contexts.
        n_ctx: tokens that it has room for.
        checkpoints: of the recurrent state along `tokens`.
        tokens: that the target's cache holds, position 0 first; rows of images are negative, see
            :mod:`.vision`.
        images: among them.
        used: when it was last given a prompt, and `n_prompt`: the tokens of that.
        cuts: where decodes of that prompt end, unless they are parts.
        row: kept from when the prompt was processed before; chooses the first token.
        request: the present one, or the last.
        counts: its telemetry, and that of all sequences together.
        drafting: whether the text is drafted for.
        draws: drafts are drawn by the request's sampler; else they are best tokens.
        synthetic: imposes the outcome of rounds; None: the target decides.
        wanted: tokens that may still come.
        chosen: what the target has chosen last; the last of these is the text's newest token, in no
            cache yet. After a round: the accepted drafts and one token more.
        logprobs: of `chosen`, if the request wants them.
        drafts: of the round, and `n_usable` of them can be accepted.
        batch: its tokens in the target's last decode, from position ``len(tokens)`` on.
        entry: of that decode with the first of them.
        state_before: the recurrent state before that decode, where it is needed to go back.
        n_drafted_for: positions that a draft context of its own holds, of the target's hidden
            states; `carry`, [1, n_embd] float32, is the state of the last of them, None where it is
            not known. See :mod:`.drafting.upstream`.
    """

    id: int
    n_ctx: int
    checkpoints: Checkpoints
    tokens: list[int] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)
    used: float = 0.0
    n_prompt: int = 0
    cuts: list[int] = field(default_factory=list)
    row: KeptRow | None = None
    request: Request = field(init=False)
    counts: tuple[Telemetry, ...] = ()
    drafting: bool = False
    draws: bool = False
    synthetic: SyntheticAcceptance | None = None
    wanted: int = 0
    chosen: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    drafts: Drafts = NO_DRAFTS
    n_usable: int = 0
    batch: Ints = field(default_factory=lambda: _NONE)
    entry: int = 0
    state_before: State = b""
    n_drafted_for: int = 0
    carry: Floats | None = None

    @property
    def newest(self) -> int:
        """The newest token, which the target has chosen and not decoded yet."""
        return self.chosen[-1]

    @property
    def room(self) -> int:
        """Tokens that the contexts can still take, the newest one included."""
        return self.n_ctx - len(self.tokens)

    def position(self, entry: int) -> int:
        """The position of an entry of `tokens`, or of the next; see :func:`.vision.position`."""
        return position(entry, self.images)

    def cut(self, n: int) -> None:
        """Forget all tokens but the first `n`."""
        self.tokens = self.tokens[:n]
        self.images = [image for image in self.images if image.end <= n]

    def begin(self, request: Request, *totals: Telemetry) -> None:
        """Answer this request from now on; its figures count in `totals`, too."""
        self.request, self.counts = request, (request.answer.telemetry, *totals)
        self.wanted, self.chosen, self.logprobs = request.limits.max_tokens, [], []
        self.drafts, self.n_usable, self.synthetic, self.row = NO_DRAFTS, 0, None, None
