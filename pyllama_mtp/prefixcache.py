"""The prefix cache: processed texts, in the sequences of the contexts and in a store, and how a
prompt comes to the longest beginning of it that there is.

:meth:`PrefixCache.find` asks once where a prompt goes; :meth:`PrefixCache.bring` uses the answer.

Attention caches can drop positions. A recurrent state (Gated DeltaNet) cannot go back: it needs a
checkpoint from before.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from .checkpoints import LONG_GRAPH, TAIL, Checkpoint, Checkpoints
from .drafting.choice import Drafting
from .drafting.drafter import Drafter
from .errors import FatalDecodeError, InsufficientMemoryError, PromptFileError, PyllamaMtpError
from .llama.batch import SEQ
from .llama.context import Context
from .llama.devicestates import DeviceState, on_host
from .promptfile import (
    ProcessedPrompt,
    SavedImage,
    compare,
    fingerprint,
    weights_sample,
)
from .promptstore import PromptStore, Stored
from .request import Request, rows_wanted
from .sequence import Sequence, shared_tokens
from .settings import Settings

if TYPE_CHECKING:
    from .llama.batch import KeptRow, State

log = logging.getLogger("pyllama_mtp")

#: Newest checkpoints that stay on the device; and the environment variable that asks for what has
#: not been measured on a GPU yet: bench/README.md, "On a GPU".
ON_DEVICE, TRIAL = 2, "PYLLAMA_MTP_TRIAL"


def go_back(target: Context, state: State | DeviceState, n_past: int, seq: int = SEQ) -> None:
    """Cut a sequence of the target to `n_past` positions; `state` is its recurrent state there.
    Raises FatalDecodeError: llama.cpp refused."""
    target.load_state(on_host(state), recurrent_only=True, seq=seq)
    if not target.remove(n_past, seq):
        raise FatalDecodeError("llama.cpp refused to go back to its own checkpoint")


@dataclass(frozen=True)
class Start:
    """From where on a sequence can process a prompt.

    Attributes:
        n: tokens of the prompt that need not be processed: all, if the last row was kept.
        shared: tokens that the prompt has in common with the sequence's text.
        checkpoint: to go back to for that, if one is needed.
    """

    n: int = 0
    shared: int = 0
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Place:
    """Where a prompt goes.

    Attributes:
        request: whose prompt it is.
        sequence: it takes the prompt.
        start: from where on it could process the prompt by itself.
        source: has so much more of the prompt that it is copied; None: nothing has.
        n: tokens of the prompt that `source` has.
    """

    request: Request
    sequence: Sequence
    start: Start
    source: Sequence | Stored | None = None
    n: int = 0


def identity_of(target: Context, head: Drafter, settings: Settings) -> dict[str, str | int]:
    """The identity of texts that fit a context; see :class:`.ProcessedPrompt`."""
    model, name = target.model, "apart or none"
    if 0 < head.n_blocks < (model.info.most_drafts or 1):
        name = f"apart, {head.n_blocks} of its blocks"  # no more drafts were wanted
    # A name that only one side has is a difference: these two are left out where they are empty.
    further = {"lora": model.adapters.names, "rope": json.dumps(settings.rope.given)}
    return {
        **{key: text for key, text in further.items() if text not in ("", "{}")},
        "model": fingerprint(model.info),
        "weights": weights_sample(model.info),
        "llama.cpp": str(target.library.stamp.get("upstream_commit", "")),
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "flash_attn": settings.flash_attn,
        "hidden": settings.hidden,
        "mtp": "with the model" if target.options.with_mtp else name,
    }


def _loses(sequence: Sequence, start: int) -> bool:
    """Whether a text worth keeping is lost, if the first `start` tokens of it stay: not if it is
    short, nor if most of its prompt stays."""
    n = sequence.n_prompt
    most_stays = start > n - min(TAIL, max(n // 2, 1))
    return len(sequence.tokens) - start >= TAIL and not most_stays


class PrefixCache:
    """The processed texts of an engine.

    Attributes:
        sequences: by their numbers in the contexts.
        store: of texts that have left them.
        identity: gives that of the texts; see :func:`identity_of`.
    """

    def __init__(
        self, target: Context, drafting: Drafting, settings: Settings, n_sequences: int
    ) -> None:
        """Raises UsageError: the store's folder cannot be made."""
        self._target, self._model = target, target.model
        self._drafting, self._head = drafting, drafting.head
        limit = settings.checkpoints if self._model.is_recurrent else 0
        n_ctx = target.n_ctx // n_sequences
        self.sequences = [Sequence(i, n_ctx, Checkpoints(limit)) for i in range(n_sequences)]
        if TRIAL in os.environ:
            target.keep_states(min(limit, ON_DEVICE))
        self._unstored = self.sequences
        self.identity = cache(partial(identity_of, target, drafting.head, settings))
        self.store = PromptStore(self._model, n_ctx, settings, self.identity)

    def close(self, intact: bool) -> None:
        """Store the texts in files, if there is a folder for them and the contexts are intact."""
        texts = [one for one in self.sequences if len(one.tokens) >= TAIL and intact]
        self._unstored = sorted(texts, key=lambda one: one.used)
        while self._unstored and self.store.has_folder:
            try:
                self._store(self._unstored[-1])
            except PyllamaMtpError as error:
                log.info("a prompt is not stored: %s", error)
            self._unstored.pop()
        self.store.close()

    @property
    def n_unwritten(self) -> int:
        """Texts that are still to be stored in files, if there is a folder for them."""
        left = sum(len(one.tokens) >= TAIL for one in self._unstored)
        return left + self.store.n_unwritten if self.store.has_folder else 0

    def release(self, sequence: Sequence) -> None:
        """Empty a sequence."""
        self._target.remove(0, sequence.id)
        self._drafting.reset(sequence)
        sequence.checkpoints.clear()
        sequence.cut(0)

    # -- where a prompt goes -------------------------------------------------------------------

    def find(self, free: list[Sequence], request: Request) -> Place:
        """The place for a request: a free sequence that holds as much of the prompt as there is
        anywhere, and nothing else of worth; or else an empty one, or the one unused for longest."""
        starts = {one: self._start(one, request) for one in free}
        n, source = self._elsewhere(request)

        def price(one: Sequence) -> tuple[bool, int, float]:
            start = starts[one].n
            leaves = _loses(one, start) or start + LONG_GRAPH <= n
            return leaves, -max(start, n), one.used if one.tokens else -1.0

        sequence = min(free, key=price)
        start = starts[sequence]
        if source is sequence or n < start.n + LONG_GRAPH:
            return Place(request, sequence, start)
        return Place(request, sequence, start, source, n)

    def _start(self, sequence: Sequence, request: Request) -> Start:
        """From where on a sequence can process a prompt."""
        if request.answer.prompt_logprobs is not None:  # no row of the prompt may be missing
            return Start()
        if end := self._repeated(sequence, request):
            return Start(end.n_past, end.n_past, end)
        drafting = request.limits.draft
        goal = start = shared = shared_tokens(sequence, request.prompt[:-1])
        if drafting:  # a draft context may end earlier than the target's
            goal, start = self._head.reach(sequence, shared)
        back = sequence.position(len(sequence.tokens)) - sequence.position(start)
        can_cut = start > 0 and back <= self._target.rewind(sequence.id)
        if back == 0 or can_cut:
            return Start(start, shared)
        checkpoint = sequence.checkpoints.closest(goal, drafting and bool(self._head.contexts))
        return Start(checkpoint.n_past if checkpoint else 0, shared, checkpoint)

    def _repeated(self, sequence: Sequence, request: Request) -> Checkpoint | None:
        """The checkpoint at the end of the request's prompt, if it has a row to choose from."""
        n, need_carry = len(request.prompt), request.limits.draft and bool(self._head.contexts)
        end = sequence.checkpoints.closest(n, need_carry)
        if not (end and end.n_past == n and end.row and end.row.serves(*rows_wanted([request]))):
            return None
        return end if shared_tokens(sequence, request.prompt) == n else None

    def _elsewhere(self, request: Request) -> tuple[int, Sequence | Stored | None]:
        """What most of a prompt can come from, and how many tokens: a stored text, or a sequence,
        where sequences share a cache."""
        if request.answer.prompt_logprobs is not None:
            return 0, None
        best: tuple[int, Sequence | Stored | None] = 0, None
        if self.store.on:
            best = self.store.find(request.prompt)
        if not self._target.options.unified or self._head.contexts or self._model.n_swa:
            return best
        for one in self.sequences:
            n = shared_tokens(one, request.prompt[:-1])
            if self._model.is_recurrent:
                end = self._repeated(one, request) or one.checkpoints.closest(n, False)
                n = end.n_past if end else 0
            if n >= max(best[0], 1):
                best = n, one
        return best

    # -- how it gets there ---------------------------------------------------------------------

    def bring(self, place: Place) -> int:
        """Have the place's sequence hold the beginning of its prompt and nothing else; a text that
        makes way is stored. Returns the tokens of the prompt that need not be processed."""
        request, sequence, start, source = place.request, place.sequence, place.start, place.source
        text = self.store.take(source, place.n) if isinstance(source, Stored) else None
        moves = isinstance(source, Sequence) or text is not None
        parts = _loses(sequence, 0 if moves else start.n)  # the prompt, from another conversation
        if parts:
            self._store(sequence)
        if isinstance(source, Stored) and text:
            try:
                self.put_back(sequence, text)
            except Exception as error:
                self.store.drop(source.name, error)  # or it would be tried again
                raise
            self.store.hits += 1
            self.store.n_saved += place.n - start.n
            parts = len(text.tokens) - place.n >= TAIL
        elif isinstance(source, Sequence):
            self._copy(source, sequence)
            source.checkpoints.parting, parts = place.n, True
        if moves:
            start = self._start(sequence, request)
        self._go_back(sequence, start)
        if start.checkpoint and start.n == len(request.prompt):
            sequence.row = start.checkpoint.row
        if parts:
            sequence.checkpoints.parting = start.n
        return start.n

    def _go_back(self, sequence: Sequence, start: Start) -> None:
        """Cut a sequence down to where it starts."""
        n, target = start.n, self._target
        sequence.checkpoints.drop_above(start.shared)
        self._head.go_back(sequence, start.shared)
        if n == 0:
            self.release(sequence)
        elif start.checkpoint:
            go_back(target, start.checkpoint.state, sequence.position(n), sequence.id)
            if sequence.drafting and start.checkpoint.carry is not None:
                self._head.go_back(sequence, n, start.checkpoint.carry)
        elif n < len(sequence.tokens):
            at = sequence.position(n)
            if not target.remove(at, sequence.id):
                raise FatalDecodeError(f"llama.cpp refused to go back to position {at}")
        elif n >= max(sequence.checkpoints.positions, default=0) + LONG_GRAPH:
            self.remember(sequence)  # the end of a turn
        sequence.cut(n)

    def _copy(self, source: Sequence, to: Sequence) -> None:
        """Have a sequence hold all that another one does; see :meth:`_elsewhere`. It is in the
        caches once."""
        self.release(to)
        self._target.copy(source.id, to.id)
        to.tokens, to.images = [*source.tokens], [*source.images]
        to.checkpoints.take(source.checkpoints.kept)

    def remember(self, sequence: Sequence, row: KeptRow | None = None) -> None:
        """Add a checkpoint of a sequence as it is now; `row`: the last one of its prompt."""
        if not sequence.checkpoints.limit:
            return
        state = self._target.save_checkpoint(sequence.id)
        in_step = sequence.n_drafted_for == len(sequence.tokens)
        carry = sequence.carry if in_step else None
        sequence.checkpoints.add(Checkpoint(len(sequence.tokens), state, carry, row))

    def _store(self, sequence: Sequence) -> None:
        """Store the text of a sequence, if texts are stored. A text for which there is no room is
        not stored."""
        if self.store.wants(sequence.tokens):
            try:
                text = self.processed(sequence, checkpoints=True)
            except InsufficientMemoryError as error:
                log.info("a prompt is not stored: %s", error)
            else:
                self.store.put(text)

    # -- texts with their states ---------------------------------------------------------------

    def processed(self, sequence: Sequence, checkpoints: bool = False) -> ProcessedPrompt:
        """The text of a sequence with its states, and its checkpoints if they are wanted. Raises
        InsufficientMemoryError."""
        draft = self._head.save(sequence)
        target = self._target.save_state(seq=sequence.id)
        images = tuple(map(SavedImage.of, sequence.images))
        kept = tuple(one.on_host() for one in sequence.checkpoints.kept) if checkpoints else ()
        return ProcessedPrompt([*sequence.tokens], target, *draft, self.identity(), images, kept)

    def check_fits(self, text: ProcessedPrompt, name: str, drafts: bool) -> None:
        """Raise PromptFileError: a text of another session, `name` for messages, does not fit here.
        Without `drafts`, it may have an MTP head's states, which loading leaves out."""
        identity = {**text.identity}
        if not drafts:
            identity |= {name: self.identity()[name] for name in ("mtp", "hidden")}
        compare(name, identity, self.identity())

    def put_back(self, sequence: Sequence, text: ProcessedPrompt) -> None:
        """Put a processed text into a sequence, instead of its present text; the sequence must be
        emptied if it fails. Raises PromptFileError: its state does not match its tokens."""
        self.release(sequence)
        target = self._target
        target.load_state(text.target, seq=sequence.id)
        sequence.tokens = [*text.tokens]
        sequence.images = [image.placed() for image in text.images]
        for image in text.images:
            first = sequence.position(image.start)
            end = first + image.n_positions
            target.note_image(first + image.last, end, sequence.id)
        if target.past(sequence.id) != sequence.position(len(text.tokens)):
            raise PromptFileError("its state does not match its tokens", "")
        if text.draft is not None:
            self._head.load(sequence, text.draft, text.draft_n_past, text.carry)
        sequence.checkpoints.take(text.checkpoints)
        sequence.n_prompt = len(text.tokens)
