"""The LM head for drafts: how many rows, and how they follow the text.

More rows make each draft dearer; fewer rows leave out tokens, which then cannot be drafted. Both
effects are known: a draft and a plain step take time in proportion to the bytes that they read, and
the ranking says which tokens of the text each size of draft vocabulary leaves out.

A draft vocabulary is the best part of a ranking, and no ranking knows the present text: tokens of
names, of another language or of code may be missing, and are then never drafted. So tokens of the
text that the vocabulary lacks take the rows of its least likely tokens, in place. The text does not
change: the model verifies over its whole vocabulary. The clock algorithm, as for pages of memory
(Corbato 1969), decides which rows are replaced: a hand goes round over the rows of the ranking's
lower half, the least likely first, and takes the next row whose token has not occurred since the
hand last passed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InsufficientMemoryError
from ..llama.context import Context
from ..llama.drafthead import (
    DraftHead,
    HeadFile,
    head_tensor,
    replace_draft_rows,
    set_draft_head,
    use_own_head,
)
from ..llama.model import Model
from ..models.draftvocab import DEFAULT_SIZE, Ids
from ..models.modelinfo import GGUFInfo
from ..settings import Settings
from ..telemetry import Telemetry
from .depth import Costs, best_depth, speed

log = logging.getLogger("pyllama_mtp")

#: Draft vocabularies to choose from, beside the whole one.
SIZES = (8192, 16384, 32768, 65536, 131072)
#: Before any text: the share of tokens outside a draft vocabulary of PRIOR_SIZE, for other sizes in
#: inverse proportion to the size; and how many tokens this prior is worth.
#: Published for 32,768 of 248,320 tokens: mean accepted length 2.89 -> 2.64.
PRIOR_OUTSIDE, PRIOR_SIZE, PRIOR_WEIGHT = 0.04, 32768, 256
#: Guesses: acceptance over the whole vocabulary, and the cost of a verification's further row in
#: plain steps.
ACCEPTANCE, ROW, DEPTH = 0.8, 0.3, 4
#: Tokens after which a head is chosen again, at the next prompt; and how much faster another head
#: must promise to be: these are guesses, and rows have to be read, or quantized.
ENOUGH, BETTER = 512, 1.03
#: Most rows that are replaced for a prompt, and after a round. On the 0.8B shape a row takes 2 us
#: as it is in the file, 10 us in q4_0 and 70 us in q4_k.
MOST_PER_PROMPT, MOST_PER_ROUND = 1024, 16


class Coverage:
    """Tokens of a text that draft vocabularies of several sizes leave out. The vocabularies follow
    the text, so a token counts at its first occurrence."""

    def __init__(self, ranked: Ids, sizes: Sequence[int], follow: bool = True) -> None:
        """Args:
        ranked: [n_vocab] all tokens, most useful first.
        follow: False: they stay as they are, and a token counts whenever it is met.
        """
        self._rank = np.empty(len(ranked), dtype=np.int32)
        self._rank[ranked] = np.arange(len(ranked), dtype=np.int32)
        self._seen = np.zeros(len(ranked), dtype=bool)
        self._outside = dict.fromkeys(sizes, 0)
        self._follow = follow
        self.n_tokens = 0

    def see(self, ids: npt.NDArray[np.int32], counts: bool) -> None:
        """Add tokens of the text. Tokens of a prompt do not count, but have occurred."""
        if counts:
            ranks = self._rank[np.unique(ids[~self._seen[ids]]) if self._follow else ids]
            for size in self._outside:
                self._outside[size] += int((ranks >= size).sum())
            self.n_tokens += len(ids)
        self._seen[ids] = True

    def fade(self) -> None:
        """Halve the counts, and forget which tokens have occurred, as a vocabulary that follows
        texts does."""
        self._outside = {size: n // 2 for size, n in self._outside.items()}
        self.n_tokens //= 2
        self._seen[:] = False

    def outside(self, size: int) -> float:
        """The share of tokens that cannot be drafted, by prior and text."""
        if size >= len(self._rank):
            return 0.0
        believed = PRIOR_WEIGHT * PRIOR_OUTSIDE * PRIOR_SIZE / size
        return min(1.0, (believed + self._outside[size]) / (PRIOR_WEIGHT + self.n_tokens))


@dataclass(frozen=True)
class HeadOption:
    """A possible draft head.

    Attributes:
        n_rows: tokens that it is over.
        n_bytes: of its rows.
        draft: the cost of one draft: seconds, or where nothing was measured the bytes that it
            reads.
        outside: share of the text's tokens that cannot be drafted.
        speed_up: expected, at its best depth, against no MTP.
    """

    n_rows: int
    n_bytes: int
    draft: float
    outside: float
    speed_up: float


def head_options(
    read: tuple[int, int],
    coverage: Coverage,
    row_bytes: int,
    sizes: Sequence[int],
    measured: Costs | None = None,
    byte_s: float = 1.0,
) -> list[HeadOption]:
    """All possible draft heads, the best first; of equals, the head with fewer rows.

    Args:
        read: bytes that a plain step reads, and the MTP block; see :func:`read_bytes`.
        row_bytes: bytes of a row of the LM head.
        sizes: of draft vocabularies, the whole vocabulary's among them.
        measured: seconds of rounds, for the costs of verifications; None: guesses.
        byte_s: seconds for each byte that a draft reads, beside `measured`.
    """
    step, block = read
    verify = tuple(step * (1 + ROW * n) for n in range(DEPTH + 1))
    verify = measured.verify[1:] if measured else verify
    found = []
    for size in sizes:
        outside = coverage.outside(size)
        draft = (block + size * row_bytes) * byte_s
        rounds = Costs((0.0, *verify), tuple(n * draft for n in range(len(verify))))
        rates = [ACCEPTANCE * (1 - outside)] * rounds.limit
        gain = speed(rounds, rates, best_depth(rounds, rates)) * rounds.plain
        found.append(HeadOption(size, size * row_bytes, draft, outside, gain))
    return sorted(found, key=lambda option: -option.speed_up)


def read_bytes(info: GGUFInfo) -> tuple[int, int]:
    """Bytes of weights that a plain decode step reads, and that the MTP block without an LM head
    reads: of the experts used only, and without embeddings that are looked up."""
    share = info.n_expert_used / info.n_expert if info.n_expert else 1.0
    totals = {False: 0.0, True: 0.0}
    for tensor in info.tensors:
        own = tensor.name.startswith(f"blk.{info.n_layer}.")
        looked_up = tensor.name == "token_embd.weight" and not info.tied_embeddings
        mine = (".shared_head_head.", ".embed_tokens.")
        if not (looked_up or (own and any(part in tensor.name for part in mine))):
            totals[own] += tensor.nbytes * (share if "_exps." in tensor.name else 1.0)
    return int(totals[False]), int(totals[True])


def follows(settings: Settings, head: DraftHead) -> bool:
    """Whether a draft head follows the text."""
    # Text at imposed acceptance means nothing. Draws from a head depend on its rows, and so on the
    # past, on which the text of a seed must not depend.
    means_nothing = settings.synthetic_acceptance is not None or settings.draft_sampling
    return settings.draft_follow and head.ranked is not None and not means_nothing


class Following:
    """Has the draft head of a context follow the text of all its sequences together."""

    def __init__(self, context: Context, head: DraftHead) -> None:
        """Args:
        head: the present head of `context`; with `file` and `ranked`.
        """
        assert head.file and head.ranked is not None
        self._context, self._file = context, head.file
        n = len(head.ids)
        self._slots = np.full(context.model.n_vocab, -1, dtype=np.int32)
        self._slots[head.ids] = np.arange(n)
        self._loose: list[int] = self._slots[head.ranked[: n // 2 - 1 : -1]].tolist()
        self._hand = 0
        self._used = np.zeros(n, dtype=bool)  # by slot: its token has occurred since the hand

    def see(self, tokens: Sequence[int], telemetries: Sequence[Telemetry], prompt: bool) -> None:
        """Continue the text.

        Args:
            telemetries: count the tokens.
            prompt: the tokens are a prompt's, not the target's choice in a round.
        """
        began = time.perf_counter()
        ids = np.asarray(tokens, dtype=np.int32)
        slots = self._slots[ids]
        outside = ids[slots < 0]
        self._used[slots[slots >= 0]] = True
        most = min(MOST_PER_PROMPT if prompt else MOST_PER_ROUND, len(self._loose))
        wanted = _most_frequent(outside, most) if len(outside) else outside
        if len(wanted):
            self._replace(wanted)
        seconds = time.perf_counter() - began
        for telemetry in telemetries:
            count = telemetry.draft_vocab
            if not prompt:
                count["tokens"] += len(ids)
                count["outside"] += len(outside)
            count["replaced"] += len(wanted)
            count["seconds"] += seconds

    def _replace(self, ids: Ids) -> None:
        """Give these tokens, which have no rows, the rows of other tokens."""
        slots = np.array([self._next_slot() for _ in ids], dtype=np.int32)
        assert self._context.draft_ids is not None
        dropped = self._context.draft_ids[slots]
        replace_draft_rows(self._context, slots, ids, self._file.rows(ids))
        self._slots[dropped] = -1
        self._slots[ids] = slots

    def _next_slot(self) -> int:
        """The next row to replace; it counts as used."""
        while True:
            slot = self._loose[self._hand]
            self._hand = (self._hand + 1) % len(self._loose)
            if not self._used[slot]:
                self._used[slot] = True
                return slot
            self._used[slot] = False


def _most_frequent(ids: Ids, most: int) -> Ids:
    """Up to `most` different ids: the most frequent; of equals, the ids that occurred last."""
    found, last, counts = np.unique(ids[::-1], return_index=True, return_counts=True)
    return found[np.lexsort((last, -counts))][:most]


class Heads:
    """The draft head of a context: chosen, kept in step with the text, and chosen again.

    Attributes:
        chosen: the last choice of draft_vocab "auto"; None: there is no choice.
    """

    def __init__(self, context: Context, model: Model, settings: Settings) -> None:
        """Give `context` its head. Raises UsageError, DraftVocabError, ModelFileError,
        InsufficientMemoryError: see :func:`.drafthead.draft_head` and
        :func:`.set_draft_head`."""
        self._context, self._model, self._settings = context, model, settings
        self._following: Following | None = None
        self._coverage: Coverage | None = None
        self._judged = 0  # tokens of the text when the head was chosen last
        self.chosen: HeadOption | None = None
        spec, kind = settings.draft_vocab, settings.draft_head_type
        if spec == "auto" and self._can_choose():
            self._begin(HeadFile(model.info, kind).row_bytes(kind))
        else:
            self._use(spec)

    def _can_choose(self) -> bool:
        """Whether there is a choice, and meaningful text to judge it by.

        No choice where drafts must not depend on texts of the past, with RPC workers, or in a
        context of the MTP head alone, whose costs are others.
        """
        s, model = self._settings, self._model
        if self._context.options.mtp_head:
            return False
        if s.draft_sampling or s.synthetic_acceptance is not None or model.rpc_servers:
            return False
        if head_tensor(model.info).name in model.adapters.changed:
            return False
        return model.n_vocab > 2 * DEFAULT_SIZE and model.ranking is not None

    def _begin(self, row_bytes: int) -> None:
        model, ranked = self._model, self._model.ranking
        assert ranked is not None
        self._row_bytes, self._read = row_bytes, read_bytes(model.info)
        self._sizes = [*(size for size in SIZES if size < model.n_vocab), model.n_vocab]
        self._coverage = Coverage(ranked, self._sizes, self._settings.draft_follow)
        self._choose()

    def table(self, measured: Costs | None = None) -> list[HeadOption]:
        """The heads to choose from by the text so far, see :func:`head_options`; empty: there is no
        choice.

        Args:
            measured: seconds of rounds with the present head.
        """
        if not self._coverage:
            return []
        byte_s = 1.0
        if measured and self.chosen:
            byte_s = measured.draft[1] / (self._read[1] + self.chosen.n_bytes)
        given = self._read, self._coverage, self._row_bytes, self._sizes
        return head_options(*given, measured, byte_s)

    def _choose(self) -> None:
        """Take the best head if it is BETTER than the present one, which has DEFAULT_SIZE rows at
        first."""
        found, now = self.table(), self.chosen
        given = now.n_rows if now else DEFAULT_SIZE
        best = found[0]
        for one in found:
            if one.n_rows == given and best.speed_up < BETTER * one.speed_up:
                best = one
        if now and best.n_rows == given:
            return
        try:
            self._use("full" if best.n_rows == self._model.n_vocab else best.n_rows)
        except InsufficientMemoryError as error:
            if not now:
                raise
            log.warning("the draft head stays as it is: %s", error)
            return
        self.chosen = best
        log.info(
            "drafts come from %d rows: %.1f MB, %.1f %% of tokens outside",
            *(best.n_rows, best.n_bytes / 1e6, 100 * best.outside),
        )

    def _use(self, spec: str | int | tuple[int, ...]) -> None:
        head = self._model.draft_head(spec, self._settings.draft_head_type)
        rows = head.rows() if head else None
        unread = rows is None and self._model.options.no_alloc  # a trimmed head of the file
        if not head or unread:
            use_own_head(self._context)
            self._following = None
            return
        set_draft_head(self._context, rows, head.ids)
        followed = follows(self._settings, head)
        self._following = Following(self._context, head) if followed else None

    def see(self, tokens: Sequence[int], telemetries: Sequence[Telemetry], prompt: bool) -> None:
        """Continue the text; see :meth:`.Following.see`. At a prompt, the head is chosen again if
        enough text was seen since the last choice."""
        if self._coverage:
            if prompt and self._coverage.n_tokens - self._judged >= ENOUGH:
                self._choose()
                self._coverage.fade()
                self._judged = self._coverage.n_tokens
            self._coverage.see(np.asarray(tokens, dtype=np.int32), counts=not prompt)
        if self._following:
            self._following.see(tokens, telemetries, prompt)
