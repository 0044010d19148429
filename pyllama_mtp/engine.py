"""The two contexts of a generation and what is in them: prefill, draft, verify, keep.

Invariant between calls: the target cache holds exactly ``cached``; the draft cache is in step with
it, or after plain rounds a few tokens behind, until :meth:`Engine.catch_up`; the newest token,
which the target has chosen, is in neither.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import native
from .checkpoints import Checkpoint, Checkpoints, boundaries
from .context import Context, ContextOptions
from .errors import UsageError
from .hidden import Hidden, Ints, Tap, TapRows, Traffic, traffic
from .model import Model
from .models.memory import padded
from .owned import Exclusive
from .settings import Settings
from .sizing import choose_n_ctx, n_outputs, refuse_without_tap, settings_for
from .speculative.choice import DraftChoice
from .speculative.drafter import Drafter, Drafts, Propose
from .speculative.heads import Heads
from .speculative.rejection import point
from .speculative.rollback import go_back, make_rollback
from .telemetry import Telemetry

log = logging.getLogger("pyllama_mtp")

#: Tokens per graph of the draft context on a CPU. The block is one layer: larger graphs cost memory
#: (44 MiB at 512 on the 0.8B shape) and sync the prompt no faster.
DRAFT_UBATCH_CPU = 128


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Engine:
    """Target context, draft context when `settings.depth_limit` > 0, and their contents.

    An exception (Ctrl-C among them) may break it anywhere between the start of a prefill or round
    and its end. The engine is then not intact, and the next prefill starts from empty caches.

    Attributes:
        cached: tokens in the target cache, position 0 first.
        intact: False between the start of a prefill or round and its end.
        on_device: hidden rows are handed over in the tap, not through arrays.
        choice: chooses what each round drafts.
        heads: the draft head, if drafts are made and the library can have one.
        drafting: whether the text at hand is drafted for; if not, MTP costs nothing.
        turn: changes with every prefill and reset; a generation that finds another one has been
            overtaken.
        alone: held while a thread changes the contents; another one is refused meanwhile.
    """

    def __init__(
        self, model: Model, settings: Settings, n_sequences: int = 1, n_checkpoints: int = 0
    ) -> None:
        """Raises UsageError, InsufficientMemoryError: see :class:`Context`.

        Args:
            n_sequences: sequences that both contexts have room for, each as long as `settings` say.
                Prefill and rounds of this class are about the first one; for all of them see
                :class:`pyllama_mtp.batchengine.BatchEngine`.
            n_checkpoints: most checkpoints that are kept elsewhere; they count in memory.
        """
        settings = settings_for(model, settings)
        self.model, self.settings, self.n_sequences = model, settings, n_sequences
        self.cached: list[int] = []
        self.drafting = settings.depth_limit > 0
        self.turn = 0
        self.alone = Exclusive("a session")
        self.intact = True
        self._outputs_before = 0
        self._traffic = Traffic(0, 0, False)
        self.checkpoints = Checkpoints(settings.checkpoints if model.is_recurrent else 0)
        depth = settings.depth_limit
        self.choice = DraftChoice(settings)
        has_tap = native.load().has_tap
        if not has_tap:
            refuse_without_tap(settings)
        self.prompt_sync = "full" if settings.prompt_sync == "full" or not has_tap else "kv"
        self.on_device = has_tap and settings.handoff != "host"
        # llama.cpp keeps a sequence's last depth + 1 tokens in one graph, and asserts room for one.
        least = max(depth + 2 if depth else 1, n_sequences * (depth + 1))
        if min(settings.n_batch, settings.n_ubatch) < least:
            of = f" of {n_sequences} sequences" if n_sequences > 1 else ""
            raise UsageError(
                f"n_batch is {settings.n_batch} and n_ubatch {settings.n_ubatch}; "
                f"verifying {depth} drafts{of} in one graph needs at least {least} of both"
            )
        n_ctx = max(
            choose_n_ctx(model, settings, n_sequences, n_checkpoints), least
        )  # llama.cpp cuts n_batch down to n_ctx
        if n_sequences > 1:
            n_ctx = n_sequences * padded(n_ctx)
        n_batch = min(settings.n_batch, n_ctx)
        options = ContextOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(settings.n_ubatch, n_batch),
            n_threads=settings.threads,
            type_k=settings.cache_type_k,
            type_v=settings.cache_type_v,
            flash_attn=settings.flash_attn,
            rope=settings.rope,
            need_embd_pre_norm=depth > 0 and has_tap,
            hidden=settings.hidden,
            tap="all" if depth and not has_tap else "off",
            n_outputs_max=n_outputs(settings, n_sequences, n_batch),
            n_rs_seq=depth if settings.rollback != "replay" else 0,
            n_seq_max=n_sequences,
            unified=n_sequences > 1,
        )
        self.heads: Heads | None = None
        self.target = Context(model, options)
        self.drafter: Drafter | None = None
        try:
            if depth:
                self.drafter = self._make_drafter(options)
                self.rollback = make_rollback(self.target, depth, settings.rollback)
        except BaseException:
            self.close()
            raise

    def _make_drafter(self, options: ContextOptions) -> Drafter:
        n_ubatch, n_sequences = options.n_ubatch, self.n_sequences
        if not self.model.on_gpu:
            rows = n_sequences * self.settings.depth_limit  # a chain, and what is synced after it
            n_ubatch = min(n_ubatch, max(DRAFT_UBATCH_CPU, rows))
        s, has_tap = self.settings, options.need_embd_pre_norm
        stepwise = s.drafting == "stepwise" or s.draft_sampling
        chained = has_tap and not stepwise
        options = replace(
            options,
            mtp_head=True,
            n_rs_seq=0,
            n_batch=n_ubatch,
            n_ubatch=n_ubatch,
            n_outputs_max=n_sequences * (s.depth_limit if chained else 1),
            need_embd_pre_norm=has_tap and not chained,
            tap="off" if has_tap else "outputs",
            full_block=self.prompt_sync == "full",
        )
        context = Context(self.model, options, target=self.target)
        if chained and not context.can_chain(s.depth_limit):
            if s.drafting == "chain":
                context.close()
                raise UsageError(
                    f"a chain of {s.depth_limit} drafts has no room in a graph of this model; use "
                    "a smaller draft_n_max, or drafting 'stepwise'"
                )
            chained, context.tap = False, Tap(context)
        if has_tap:
            self.heads = Heads(context, self.model, s)
        if self.on_device and traffic(self.target, context).leaves_device:
            log.warning(
                "the MTP block is not on the device that computes its input: hidden rows are copied"
            )
        return Drafter(context, self.target if self.on_device else None, chained)

    @property
    def closed(self) -> bool:
        """Whether a context is closed, or was lost in a failure."""
        return self.target.closed or (self.drafter is not None and self.drafter.context.closed)

    def close(self) -> None:
        """Free both contexts. May be called again."""
        if self.drafter:
            self.drafter.context.close()
        self.target.close()

    def reset(self) -> None:
        """Empty both caches."""
        self.target.clear()
        if self.drafter:
            self.drafter.context.clear()
            self.drafter.reset()
        self.checkpoints.clear()
        self.cached = []
        self.intact = True
        self.turn += 1

    # -- prefill -------------------------------------------------------------------------------

    def prefill(self, prompt: Sequence[int], telemetry: Telemetry, drafting: bool = True) -> int:
        """Bring both caches to the end of `prompt`; what they hold already is reused.

        Args:
            prompt: token ids, at least one.
            drafting: False: what follows will not be drafted for, so only the target is run.

        Returns:
            The batch entry of the last decode that holds the last token's logits.
        """
        if not self.intact:
            self.reset()
        self.turn += 1
        self.catch_up()
        self.intact = False
        self.drafting = drafting and self.drafter is not None
        self.target.set_tap(self.drafting)
        self.target.set_snapshots(False)  # nobody goes back within a prompt token by token
        self.start_counting()
        start = self._reuse(prompt)
        telemetry.n_prompt, telemetry.n_cached = len(prompt), start
        cuts = self._cuts(start, len(prompt))
        keep = self.checkpoints.survivors(cuts)
        behind: tuple[Ints, int, TapRows] | None = None
        for begin, end in itertools.pairwise([start, *cuts]):
            chunk = np.array(prompt[begin:end], dtype=np.int32)
            outputs = np.zeros(len(chunk), dtype=np.int8)
            outputs[-1] = end == len(prompt)
            if self.settings.prompt_rows == "all":
                outputs[:] = 1
            self.target.decode(chunk, begin, outputs)
            if self.drafting:
                rows = self._hidden(len(chunk))
                with telemetry.timed("prompt_sync"):
                    # Rows in the tap outlive one more batch: the draft context follows one batch
                    # behind, so that a GPU has the target's next batch before it waits for this.
                    if behind:
                        self._sync(*behind)
                    behind = (chunk, begin, rows) if isinstance(rows, TapRows) else None
                    if not behind:
                        self._sync(chunk, begin, rows)
            if end in keep:
                self._checkpoint(end, len(chunk))
        if behind:
            with telemetry.timed("prompt_sync"):
                self._sync(*behind)
        self.cached = list(prompt)
        self.intact = True
        if self.drafting:
            self.choice.begin(prompt)
            self.follow(prompt, telemetry, prompt=True)
        return len(chunk) - 1

    def _cuts(self, start: int, stop: int) -> list[int]:
        target = self.target
        if self.checkpoints.limit:
            return boundaries(start, stop, target.n_batch, target.n_ubatch)
        return [*range(start + target.n_batch, stop, target.n_batch), stop]

    def _hidden(self, n: int) -> Hidden:
        """Hidden rows of the first `n` tokens of the target's last batch."""
        return self.target.hidden(self.on_device).part(0, n)

    def _sync(self, tokens: Ints, start: int, hidden: Hidden, n_keep: int | None = None) -> None:
        """Bring the draft cache in step with what the target has decoded and keeps."""
        assert self.drafter
        self.drafter.sync(tokens, start, hidden, n_keep)

    def catch_up(self) -> None:
        """Bring the draft cache in step with the target's after plain rounds."""
        if self.drafter and self.intact and not self.closed:
            self.intact = False
            self.drafter.catch_up()
            self.intact = True

    def _checkpoint(self, n_past: int, n_batch: int) -> None:
        """The target has just decoded `n_batch` tokens, up to `n_past`."""
        state = self.target.save_state(recurrent_only=True)
        slot, carry = self.checkpoints.free_slot(), None
        if self.drafting:
            carry = self._hidden(n_batch).part(n_batch - 1, n_batch).keep(slot)
        self.checkpoints.add(Checkpoint(n_past, state, carry, slot))

    def _reuse(self, prompt: Sequence[int]) -> int:
        """Cut the caches down to what `prompt` shares with them; the first position to process."""
        shared = min(common_prefix(self.cached, prompt), len(prompt) - 1)
        self.checkpoints.drop_above(shared)
        drafter = self.drafter
        if drafter:
            drafter.truncate(min(shared, drafter.n_past))
        # With drafts the draft cache must be continued too; it may end earlier than the target's.
        goal = min(shared, drafter.n_past) if self.drafting and drafter else shared
        # The row that pairs with position `goal` is h_{goal-1}. If nobody kept it, the target must
        # compute it once more.
        unknown = self.drafting and drafter is not None and drafter.carry is None
        if goal == len(self.cached) and not unknown:
            return goal
        start = goal - 1 if unknown else goal
        if start > 0 and self.target.remove(start):
            return start
        checkpoint = self.checkpoints.closest(goal, need_carry=self.drafting)
        if not checkpoint:
            self.reset()
            return 0
        go_back(self.target, checkpoint.state, checkpoint.n_past)
        if self.drafting and drafter and checkpoint.carry is not None:
            drafter.resume(checkpoint.n_past, checkpoint.carry)
        return checkpoint.n_past

    def synchronize(self) -> None:
        """Wait until both contexts have computed what they were given."""
        self.target.synchronize()
        if self.drafter:
            self.drafter.context.synchronize()

    def _output_bytes(self) -> int:
        contexts = [self.target, *([self.drafter.context] if self.drafter else [])]
        return sum(context.output_bytes for context in contexts)

    def start_counting(self) -> None:
        """Count what is copied from here on."""
        if self.drafting and self.drafter:
            self._traffic = traffic(self.target, self.drafter.context)
        self._outputs_before = self._output_bytes()

    def count_traffic(self, telemetry: Telemetry) -> None:
        """Say what was copied since :meth:`start_counting`, and how the MTP block got hidden
        states."""
        if self.closed:
            return
        telemetry.output_bytes = self._output_bytes() - self._outputs_before
        if self.drafting and self.drafter:
            now = traffic(self.target, self.drafter.context)
            telemetry.prompt_sync = self.prompt_sync
            telemetry.handoff = "host" if now.leaves_device or not self.on_device else "device"
            telemetry.hidden_bytes = now.since(self._traffic)

    def follow(self, tokens: Sequence[int], *telemetries: Telemetry, prompt: bool = False) -> None:
        """The text goes on with `tokens`, for :class:`.Heads`."""
        if self.heads and self.drafting:
            self.heads.see(tokens, telemetries, prompt)

    # -- one round -----------------------------------------------------------------------------

    def room(self) -> int:
        """Tokens that the context can still take, the newest one included."""
        return self.target.n_ctx - len(self.cached)

    def draft(self, token: int, n_max: int, propose: Propose | None = None) -> Drafts:
        """Up to `n_max` drafts for what follows `token`, the newest token: the head's best ones, or
        what `propose` draws; or, where that promises more, what followed earlier in the text."""
        if not self.drafter or not self.drafting:
            return Drafts()
        looked_up = self.choice.look_up(token, n_max)
        if looked_up:
            q = [point(token) for token in looked_up] if propose else []
            return Drafts(looked_up, q, looked_up=True)
        n_max = self.choice.depth(n_max)
        if n_max < 1:
            return Drafts()
        self.intact = False
        return self.drafter.draft(token, n_max, self.settings.p_min, propose)

    def learn(self, drafts: Drafts, tokens: Sequence[int], draft_s: float, total_s: float) -> None:
        """The outcome of a round, for the choice of the next ones; see :class:`.DraftChoice`.

        What catching up with plain rounds took is charged to the drafts that called for it."""
        if self.drafting:
            self.choice.learn(drafts, tokens, draft_s, total_s)

    def verify(self, token: int, drafts: Sequence[int]) -> None:
        """One pass of the target over the newest token and the drafts; every entry is an output."""
        self.intact = False
        self.target.set_snapshots(bool(drafts))
        if drafts:
            self.rollback.before()
        self._token, self._batch = token, np.array([token, *drafts], dtype=np.int32)
        outputs = np.ones(len(self._batch), dtype=np.int8)
        self.target.decode(self._batch, len(self.cached), outputs)
        self.target.synchronize()

    def keep(self, n_accepted: int, telemetry: Telemetry) -> None:
        """Keep the newest token and the first `n_accepted` drafts of the pass; drop the rest."""
        with telemetry.timed("sync"):
            start, n_keep = len(self.cached), n_accepted + 1
            if self.drafter and self.drafting:
                if len(self._batch) == 1 and self.on_device and self.target.tap:
                    self.drafter.sync_later(self._token, start, self.target.tap.first_row())
                else:
                    # All: K and V of rejected tokens cost less than a graph of another shape.
                    rows = self._hidden(len(self._batch))
                    self.drafter.sync(self._batch, start, rows, n_keep)
            if len(self._batch) > 1:
                self.rollback.after(self._batch, start, n_keep)
            self.cached += self._batch[:n_keep].tolist()
            self.intact = True

    def memory(self, device: Any = None) -> dict[str, int]:
        """Bytes in use, by what they are for.

        weights; target_context and draft_context (caches, states and their snapshots, a draft
        head); target_compute and draft_compute (graph buffers); hidden_rows (taps); checkpoints.

        Args:
            device: as for :meth:`.Context.memory`.
        """
        target = self.target.memory(device)
        draft = {"context": 0, "compute": 0}
        if self.drafter:
            draft = self.drafter.context.memory(device)
        taps = [
            context.tap.n_bytes if context and context.tap and context.tap.is_on(device) else 0
            for context in (self.target, self.drafter.context if self.drafter else None)
        ]
        return {
            "weights": target["model"],
            "target_context": target["context"] - taps[0],
            "target_compute": target["compute"],
            "draft_context": draft["context"] - taps[1],
            "draft_compute": draft["compute"],
            "hidden_rows": sum(taps),
            "checkpoints": 0 if device else self.checkpoints.n_bytes,
        }
