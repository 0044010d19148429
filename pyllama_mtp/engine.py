"""The contexts of a generation, and the 1..n sequences in them: prefill, verify, roll back.

Invariant between decodes: the target's cache holds exactly `tokens` of every sequence. The newest
token, which the target has chosen, is in no cache yet.

Attention caches can drop positions, and so take rejected drafts back. A recurrent state (Gated
DeltaNet) cannot: it needs snapshots, which llama.cpp keeps per token when the context was made with
``n_rs_seq``; or a checkpoint from before the round, from which the accepted tokens are decoded once
more ("replay").
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .answer import top_logprobs
from .checkpoints import LONG_GRAPH, boundaries, partings
from .drafting.choice import Drafting
from .drafting.drafter import Drafter, HeadDrafter
from .drafting.upstream import UpstreamDrafter
from .errors import FatalDecodeError, PromptFileError, UsageError
from .llama import native
from .llama.batch import Batch, Ints
from .llama.cachetypes import cache_costs
from .llama.context import Context
from .llama.contextoptions import ContextOptions, padded
from .llama.drafts import reserve_rounds
from .llama.model import Model
from .llama.native import Exclusive
from .llama.vision import PlacedImage
from .machine import waited_for_core
from .prefixcache import Place, PrefixCache, go_back
from .promptfile import ProcessedPrompt
from .request import rows_wanted
from .sequence import Drafts, Sequence, shared_tokens
from .settings import HEAD_TYPES, Settings
from .telemetry import Telemetry, timed

log = logging.getLogger("pyllama_mtp")


@dataclass(frozen=True)
class Resolved:
    """What an engine is made by; see :func:`.memory.resolve`.

    Attributes:
        settings: as they hold for the model: `n_ctx`, in tokens, is above 0.
        n_sequences: number of sequences, each of `n_ctx` tokens.
        depth: most drafts per round.
        prompt_sync: "kv": the MTP head is in the target's context; "full": upstream's way; "": no
            head drafts.
    """

    settings: Settings
    n_sequences: int
    depth: int
    prompt_sync: str

    @classmethod
    def of(cls, model: Model, settings: Settings, n_sequences: int = 1) -> Resolved:
        """Settle everything but `n_ctx`, which may still be 0.

        Without an MTP head, "auto" drafts from the text itself, or not at all without `ngram`.
        Heads that draft a token each make no more drafts than there are heads, as in llama-server.

        Raises:
            UsageError: a number of drafts is asked for, and there is no head; or a setting that
                drafting in upstream's way does not support.
        """
        most = model.info.most_drafts if model.has_mtp else None
        if not model.has_mtp and settings.depth_limit:
            if settings.draft_n_max != "auto":
                raise UsageError(
                    f"{model.path} was loaded without an MTP head; use draft_n_max=0 or 'auto'"
                )
            settings = replace(settings, synthetic_acceptance=None, draft_sampling=False)
            if not settings.ngram:
                settings = replace(settings, draft_n_max=0)
        depth = min(most or settings.depth_limit, settings.depth_limit)
        sync = _prompt_sync(model, settings) if depth and model.has_mtp else ""
        return cls(settings, n_sequences, depth, sync)

    def with_n_ctx(self, n_ctx: int) -> Resolved:
        """The same with sequences of so many tokens."""
        return replace(self, settings=replace(self.settings, n_ctx=n_ctx))

    @property
    def measured_counts(self) -> list[int]:
        """Numbers of sequences whose rounds are measured for "auto": a few, and all."""
        return [*(n for n in (1, 2, 4, 8) if n < self.n_sequences), self.n_sequences]

    @property
    def n_snapshots(self) -> int:
        """Snapshots of the recurrent state that each sequence keeps."""
        return self.depth if self.settings.rollback != "replay" else 0

    @property
    def target(self) -> ContextOptions:
        """The options of the target's context. Raises UsageError: batches cannot hold a round."""
        s, depth, n_sequences = self.settings, self.depth, self.n_sequences
        assert s.n_ctx > 0
        # llama.cpp keeps a sequence's last depth + 1 tokens in one graph, and asserts room for one.
        least = max(depth + 2 if depth else 1, n_sequences * (depth + 1))
        if min(s.n_batch, s.ubatch) < least:
            of = f" of {n_sequences} sequences" if n_sequences > 1 else ""
            raise UsageError(
                f"n_batch is {s.n_batch} and n_ubatch {s.ubatch}; "
                f"verifying {depth} drafts{of} in one graph needs at least {least} of both"
            )
        n_ctx = max(s.n_ctx, least)  # llama.cpp cuts n_batch down to n_ctx
        if n_sequences > 1:
            n_ctx = n_sequences * padded(n_ctx)
        n_batch = min(s.n_batch, n_ctx)
        return ContextOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(s.ubatch, n_batch),
            n_threads=s.threads,
            auto_threads=s.n_threads == "auto",
            type_k=s.cache_type_k,
            type_v=s.cache_type_v,
            flash_attn=s.flash_attn,
            rope=s.rope,
            with_mtp=self.prompt_sync == "kv",
            hidden=s.hidden,
            tap="all" if self.prompt_sync == "full" else "off",
            n_outputs_max=n_batch if s.prompt_rows == "all" else n_sequences * (depth + 1),
            n_rs_seq=self.n_snapshots,
            n_seq_max=n_sequences,
            unified=n_sequences > 1,
        )


def _prompt_sync(model: Model, settings: Settings) -> str:
    """How the MTP head is kept in step: "kv", or "full" if asked for or if library or architecture
    leave no choice. Raises UsageError: a setting that drafting in upstream's way, "full", does not
    support."""
    s, has_patches = settings, native.load().has_tap
    possible = has_patches and model.info.in_trunk
    if possible and s.prompt_sync != "full":
        return "kv"
    if not has_patches:
        where, other = "in upstream's library", "the patched variant"
    elif not possible:
        where, other = f"there for models of architecture {model.architecture!r}", "another model"
    else:
        where, other = "with prompt_sync 'full'", "prompt_sync 'kv'"
    part = has_patches and not possible
    for name, value, usable in (
        ("prompt_sync", s.prompt_sync, ("auto", "full")),
        ("hidden", s.hidden, ("post-norm",)),
        ("draft_vocab", s.draft_vocab, (s.draft_vocab,) if part else ("auto", "full")),
        ("draft_head_type", s.draft_head_type, HEAD_TYPES if part else ("file",)),
        ("draft_window", s.draft_window, (0,)),
    ):
        if value not in usable:
            raise UsageError(
                f"{name} {value!r} is not {where}; use {other}, or {name} {usable[-1]!r}"
            )
    return "full"


# -- the engine ------------------------------------------------------------------------------------


def replays(target: Context, settings: Settings, depth: int) -> bool:
    """Whether rejected drafts are taken back by replay. Raises UsageError: snapshots were asked
    for, and the architecture keeps too few of them."""
    enough = target.n_rs_seq >= depth or not target.model.is_recurrent
    if settings.rollback == "snapshot" and not enough:
        raise UsageError(
            f"{target.n_rs_seq} state snapshots per sequence are available for this "
            f"architecture, {depth} are needed; use rollback='replay'"
        )
    return settings.rollback == "replay" or not enough


class Engine:
    """The target's context, drafters, and sequences.

    An exception, Ctrl-C among them, may come anywhere between the start of a prefill or round and
    its end. The engine is then not intact, and the next generation starts from empty caches.

    Attributes:
        sequences: by their numbers in the contexts.
        n_ctx: tokens that each sequence has room for.
        intact: False between the start of a prefill or round and its end.
        settings, depth, prompt_sync: see :class:`.Resolved`.
        chats: prompts are likely to come again, as they are or with another end.
        head: the MTP head, or a drafter that drafts nothing.
        drafting: chooses what each round drafts.
        prefixes: the processed texts, in the sequences and in a store.
        turn: changes with every generation and reset; a generation whose turn is over has been
            overtaken.
        alone: held while a thread changes the contents; other threads are refused meanwhile.
    """

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        chats: bool = False,
    ) -> None:
        """Raises UsageError, InsufficientMemoryError: see :class:`Context`.

        Args:
            resolved: see :func:`.memory.resolve`.
            chats: see the attribute.
        """
        settings, n_sequences, depth = resolved.settings, resolved.n_sequences, resolved.depth
        self.model, self.settings, self.depth = model, settings, depth
        self.turn = 0
        self.alone = Exclusive("a session")
        self.intact = True
        self.chats = chats
        self._outputs_before, self._waited_before = 0, 0.0
        self.prompt_sync = resolved.prompt_sync
        options = resolved.target
        if not model.options.no_alloc:
            for cost in cache_costs(model, settings.cache_type_k, settings.cache_type_v):
                log.warning("%s", cost)
        self.head = Drafter()
        self.sequences = list[Sequence]()
        self.target = Context(model, options)
        self.n_ctx = self.target.n_ctx // n_sequences
        try:
            if self.prompt_sync == "full":
                self.head = UpstreamDrafter(self.target, options, settings, depth)
            elif self.prompt_sync:
                self.head = HeadDrafter(self.target, settings)
                if settings.draft_n_max == "auto":
                    for n in resolved.measured_counts:
                        reserve_rounds(self.target, n, range(depth + 1))
                else:
                    reserve_rounds(self.target, n_sequences, (0, depth))
            self._replays = replays(self.target, settings, depth)
            self.drafting = Drafting(settings, depth, n_sequences, self.head)
            self.prefixes = PrefixCache(self.target, self.drafting, settings, n_sequences)
        except BaseException:
            self.close()
            raise
        self.sequences = self.prefixes.sequences

    def close(self) -> None:
        """Free the contexts; files keep what rounds cost, and texts if wanted. May be repeated."""
        if self.sequences and not self.target.closed:
            self.drafting.close()
            self.prefixes.close(self.intact)
        for context in reversed(self._contexts()):
            context.close()

    def begin(self) -> int:
        """Start a generation, from empty caches if the last computation broke off; its turn."""
        if not self.intact:
            self.reset()
        self._outputs_before = self._output_bytes()  # refused if the contexts are closed
        self._waited_before = waited_for_core()
        self.turn += 1
        return self.turn

    def reset(self) -> None:
        """Empty the caches and all sequences."""
        for context in self._contexts():
            context.clear()
        for sequence in self.sequences:
            self.prefixes.release(sequence)
        if self.drafting.ngrams:
            self.drafting.ngrams.forget()
        self.intact = True
        self.turn += 1

    def check_length(self, n_tokens: int, name: str = "the prompt") -> None:
        """Raises UsageError: a text of so many tokens is longer than the context."""
        if n_tokens > self.n_ctx:
            raise UsageError(
                f"{name} has {n_tokens} tokens and the context {self.n_ctx}; use a longer n_ctx "
                "(--n-ctx), or a shorter text"
            )

    # -- texts with their states ---------------------------------------------------------------

    def processed(self, sequence: Sequence) -> ProcessedPrompt:
        """The text of a sequence with its states.

        Raises:
            UsageError: nothing is processed, or a computation was interrupted.
            ContextClosedError: the context is closed.
            InsufficientMemoryError: there is no room for the states.
        """
        if self.target.handle and not (self.intact and sequence.tokens):
            raise UsageError("there is no processed prompt to save; process one first")
        return self.prefixes.processed(sequence)

    def put_back(self, sequence: Sequence, text: ProcessedPrompt, name: str) -> int:
        """Put a processed text into a sequence, instead of its present text: the number of tokens.

        Args:
            name: where the text came from, for messages.

        Raises:
            PromptFileError: its states do not match its tokens.
            UsageError: longer than the context.
        """
        self.check_length(len(text.tokens), name)
        self.begin()
        try:
            self.prefixes.put_back(sequence, text)
        except BaseException as error:
            self.reset()
            if isinstance(error, PromptFileError):
                raise PromptFileError(f"{name}: {error}", name) from None
            raise
        sequence.used = time.monotonic()
        return len(text.tokens)

    # -- prefill -------------------------------------------------------------------------------

    def enter(self, place: Place, *totals: Telemetry) -> Sequence:
        """Have a place's sequence answer its request from now on, and hold as much of the prompt as
        there is, and nothing else; :meth:`prefill` follows. Its figures count in `totals`, too."""
        self.intact, request, sequence = False, place.request, place.sequence
        sequence.begin(request, *totals)
        sequence.used = time.monotonic()
        sequence.drafting = request.limits.draft and self.depth > 0
        prompt, telemetry = request.prompt, request.answer.telemetry
        telemetry.synthetic_acceptance = self.settings.synthetic_acceptance
        shared = max(shared_tokens(one, prompt) for one in self.sequences)
        start = self.prefixes.bring(place)
        telemetry.n_prompt, telemetry.n_cached = len(prompt), start
        telemetry.n_left = len(prompt) - start
        sequence.cuts = [] if sequence.row else self._cuts(sequence, start, shared)
        sequence.n_prompt = len(prompt)
        self.intact = True
        return sequence

    def prefill(self, sequence: Sequence, at_most: int | None = None) -> int | None:
        """Process the next part of the prompt, which begins with the sequence's tokens: one decode.

        Rounds of other sequences may come between the parts.

        Args:
            at_most: tokens of the part, if fewer than a batch; but at least LONG_GRAPH. Checkpoints
                are where they would be otherwise. A part of an image is as long as a batch.

        Returns:
            None while something is left; then the batch entry that holds the last token's logits.
            Of a prompt whose last row was kept, nothing is left.
        """
        target, prompt = self.target, sequence.request.prompt
        if sequence.row:
            return 0
        self.intact = False
        self._prepare_rows([sequence])
        start, images = len(sequence.tokens), sequence.request.images
        placed = next((image for image in images if start < image.end), None)
        if placed and placed.start <= start:
            self._prefill_image(sequence, placed)
            return None
        cuts = [cut for cut in sequence.cuts if cut > start]
        end = min(cuts[0], placed.start) if placed else cuts[0]
        scored = sequence.request.answer.prompt_logprobs
        if scored is not None:
            end = min(end, start + target.options.n_outputs_max)
        size, left = max(at_most or 0, LONG_GRAPH), end - start
        if at_most is not None and left > size and left >= 2 * LONG_GRAPH:  # one for the rest
            end = start + min(size, left - LONG_GRAPH)
        part = np.array(prompt[start:end], dtype=np.int32)
        outputs = np.zeros(len(part), dtype=np.int8)
        outputs[-1] = end == len(prompt)
        if self.settings.prompt_rows == "all" or scored is not None:
            outputs[:] = 1
        target.decode(part, sequence.position(start), outputs, seq=sequence.id)
        keeps = end in sequence.checkpoints.survivors(cuts)
        if keeps and target.states:
            target.states.make_room()  # while the device computes
        if scored is not None:  # row i says what follows the part's first i + 1 tokens
            n_best = sequence.request.answer.n_logprobs or 0
            for row, token in enumerate(prompt[start + 1 : end + 1]):
                scored.append(top_logprobs(target.logits(row), token, n_best))
        sequence.batch, sequence.entry = part, 0
        if sequence.drafting and self.head.contexts:
            with timed("prompt_sync", *(one.time_s for one in sequence.counts)):
                self.head.decoded([sequence], [len(part)])
        sequence.tokens += prompt[start:end]
        sequence.request.answer.telemetry.n_left = len(prompt) - end
        if keeps:
            last = target.keep(len(part) - 1) if end == len(prompt) else None
            self.prefixes.remember(sequence, last)
        self.intact = True
        return len(part) - 1 if end == len(prompt) else None

    def _prefill_image(self, sequence: Sequence, placed: PlacedImage) -> None:
        """Process the next rows of an image: one decode. The MTP head takes the same rows."""
        start, request, image = len(sequence.tokens), sequence.request, placed.image
        end, first = min(placed.end, start + self.target.n_batch), sequence.position(placed.start)
        part = slice(start - placed.start, end - placed.start)
        with timed("image", *(one.time_s for one in sequence.counts)):
            after = first + image.n_positions
            rows, positions = image.rows[part], first + image.positions[part]
            self.target.decode_rows(rows, positions, after, sequence.id)
            sequence.tokens += request.prompt[start:end]
            if start == placed.start:
                sequence.images.append(placed)
            if end == placed.end:
                self.prefixes.remember(sequence)  # another question about it may come
                self.target.synchronize()  # or the time of the rows would count as the text's
        request.answer.telemetry.n_left = len(request.prompt) - end
        self.intact = True

    def _cuts(self, sequence: Sequence, start: int, shared: int) -> list[int]:
        """Where the prompt from `start` on is cut, of which another text has had the first `shared`
        tokens. A part is cut off only for a checkpoint that stays until the prompt's end."""
        target, request, turns = self.target, sequence.request, None
        prompt = request.prompt
        images = [image.end for image in request.images if start < image.end < len(prompt)]
        sizes = start, len(prompt), target.n_batch, target.n_ubatch
        if not sequence.checkpoints.limit:
            return boundaries(*sizes[:3], target.n_batch, images)
        if self.chats:
            part = prompt[start:-1]
            ends = {token for token in {*part} if token >= 0 and self.model.is_end(token)}
            turns = [i for i, token in enumerate(part, start + 1) if token in ends]
        parts = partings(start, len(prompt), shared, turns)
        stay = sequence.checkpoints.survivors(boundaries(*sizes, sorted({*parts, *images})))
        return boundaries(*sizes, sorted({*stay.intersection(parts), *images}))

    # -- a round -------------------------------------------------------------------------------

    def verify(self, sequences: list[Sequence]) -> None:
        """One pass of the target over the newest token and the k drafts of each sequence.

        Row i of a sequence says what follows its first i drafts. All rows are outputs. Where a lone
        sequence's drafts are forced, only the last row is (unless log probabilities are kept), and
        nothing is rolled back.
        """
        target, n_rows = self.target, 1 + max(len(one.drafts.tokens) for one in sequences)
        kept = sequences[0].request.answer.n_logprobs is not None
        forced = len(sequences) == 1 and sequences[0].drafts.forced and not kept
        self._prepare_rows(sequences)
        tokens, positions, seqs = list[int](), list[int](), list[int]()
        for one in sequences:
            if self._replays and n_rows > 1 and not forced:  # the copy stays on the device
                one.state_before = target.save_state(True, one.id, on_device=True)
            start, drafts = one.position(len(one.tokens)), one.drafts.tokens
            one.entry = len(tokens)
            tokens += [one.newest, *drafts, *[one.newest] * (n_rows - 1 - len(drafts))]
            positions += range(start, start + n_rows)
            seqs += [one.id] * n_rows
        ids: Ints
        ids, at, of = np.array([tokens, positions, seqs], dtype=np.int32)
        outputs = np.ones(len(ids), dtype=np.int8)
        if forced:
            outputs[:-1] = 0
        batch = Batch(ids, at, of, outputs)
        if any(one.drafts.to_come for one in sequences):
            target.draft_and_decode(batch, n_rows - 1)
        else:
            target.decode_batch(batch)
            target.synchronize()
        for one in sequences:
            one.batch = batch.tokens[one.entry : one.entry + n_rows]
            if one.drafts.to_come:
                one.drafts = Drafts(one.batch[1:].tolist())

    def _prepare_rows(self, sequences: list[Sequence]) -> None:
        """Have the next decode leave rows that all samplers can use: the best token, some best
        tokens, or all logits, which log probabilities need, too. A draft context needs the hidden
        rows of texts that are drafted for."""
        few, most = rows_wanted([one.request for one in sequences])
        self.target.set_greedy(few)
        self.target.set_candidates(most if few else 0)
        if self.head.contexts:
            self.target.set_tap(any(one.drafting for one in sequences))

    def roll_back(self, sequences: list[Sequence]) -> None:
        """Keep the newest token and the accepted drafts of each sequence, drop the rest."""
        drafted = [one for one in sequences if one.drafting]
        self.head.decoded(drafted, [len(one.chosen) for one in drafted])
        for one in sequences:
            n = len(one.chosen)
            if n < len(one.batch):
                self._take_back(one, n)
            one.tokens += one.batch[:n].tolist()

    def _take_back(self, one: Sequence, n_keep: int) -> None:
        """Keep the first `n_keep` tokens of a sequence's part of the last pass."""
        start, target = one.position(len(one.tokens)), self.target
        if self._replays:
            go_back(target, one.state_before, start, one.id)
            none = np.zeros(n_keep, dtype=np.int8)
            target.decode(one.batch[:n_keep], start, none, seq=one.id)
        elif not target.remove(start + n_keep, one.id):
            raise FatalDecodeError(
                f"llama.cpp cannot take back {len(one.batch) - n_keep} positions: "
                f"the context keeps {target.n_rs_seq} snapshots"
            )

    # -- figures -------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every decode has finished."""
        for context in self._contexts():
            context.synchronize()

    def _contexts(self) -> list[Context]:
        return [self.target, *self.head.contexts]

    def _output_bytes(self) -> int:
        return sum(context.output_bytes for context in self._contexts())

    def count_traffic(self, telemetry: Telemetry) -> None:
        """Note the bytes copied and the time waited since :meth:`begin`, the number of threads, and
        how the MTP head was kept in step."""
        if any(context.closed for context in self._contexts()):
            return
        telemetry.output_bytes = self._output_bytes() - self._outputs_before
        telemetry.waited_s = waited_for_core() - self._waited_before
        telemetry.n_threads = self.target.n_threads
        if any(one.drafting for one in self.sequences):
            telemetry.prompt_sync = self.prompt_sync

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes in use, by purpose.

        weights; target_context (caches, states and snapshots, the MTP head's among them, and a
        draft head); target_compute (graph buffers, and the CPU's work buffer); draft_context and
        draft_compute, if drafting is upstream's; checkpoints; stored_prompts
        (:class:`.PromptStore`).

        Args:
            device: as for :meth:`.Context.memory`.
        """
        target = self.target.memory(device)
        draft = {"context": 0, "compute": 0}
        for context in self.head.contexts:
            draft = context.memory(device)
        on_host = device is None or device == native.load().ffi.NULL
        return {
            "weights": target["model"],
            "target_context": target["context"],
            "target_compute": target["compute"],
            "draft_context": draft["context"],
            "draft_compute": draft["compute"],
            "checkpoints": sum(one.checkpoints.n_bytes for one in self.sequences) if on_host else 0,
            "stored_prompts": self.prefixes.store.n_bytes if on_host else 0,
        }
