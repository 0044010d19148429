"""Sessions of several sequences, which are decoded together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from .answer import Answer
from .arguments import listed, refusal
from .errors import UsageError
from .generate import Limits
from .llama.model import Model
from .scheduler import BatchGeneration
from .session import Options, Places, Prompt, usable
from .settings import Sampling, Settings

Value = TypeVar("Value")


class BatchSession(Places):
    """Contexts for several sequences on a model. A context manager.

    Prompts are processed one after the other, as places become free. The sequences in places are
    drafted for and verified together, in one decode each per round. As in a :class:`Session`, a
    place keeps its text for a prompt that continues it. With ``draft_n_max="auto"`` each number of
    sequences has a depth of its own: with many sequences drafting may not pay, and then stops.
    """

    def __init__(
        self, model: Model, settings: Settings | None = None, n_sequences: int = 4
    ) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`. `n_ctx` is the length of each sequence. Memory is
                taken for all sequences, with n_sequences * (drafts + 1) recurrent states where
                rollback goes by snapshots ("auto": up to AUTO_DEPTH drafts). `n_batch` and
                `n_ubatch` must hold as many tokens. Each sequence has its own `checkpoints`.
            n_sequences: most sequences at once, 1 to 256; more prompts wait for a place.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        super().__init__(model, settings, n_sequences)
        self.n_sequences = len(self._engine.places)

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        max_tokens: int | Sequence[int] = 256,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        stop: Iterable[str] | None = (),
        ignore_eos: bool = False,
        draft: bool = True,
        log_pairs: bool = False,
        log_ties: bool = False,
        logprobs: int | None = None,
        on_progress: Callable[[int, int, int], None] | None = None,
    ) -> BatchGeneration:
        """Start a generation; nothing is computed until it is iterated or run.

        A generation that is started before this one has ended takes its places, and ends it.

        Args:
            prompts: at least one; each as for :meth:`Session.generate`. Lengths may differ.
            max_tokens: most tokens to generate, at least 1; for all prompts, or one for each.
            sampling: default greedy; for all prompts, or one for each.
            stop, ignore_eos, draft, log_pairs, log_ties, logprobs: see :meth:`Session.generate`.
            on_progress: called while prompts are processed, after each `n_batch` tokens, with
                (index of the prompt, tokens done, tokens in all). An exception from it ends the
                generation.

        Raises:
            UsageError: no prompt, an empty prompt, a prompt longer than `n_ctx`, lists of another
                length than `prompts`, or a bad argument.
        """
        if isinstance(prompts, str | bytes | bytearray):
            raise UsageError("prompts is one text; give a list of prompts")
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise refusal("prompts", prompts, "a list of prompts")
        chosen = list(prompts)
        if not chosen:
            raise UsageError("there is no prompt; give at least one")
        most = _for_each("max_tokens", max_tokens, len(chosen))
        limits = [Limits(n, ignore_eos, draft) for n in most]
        each = _for_each("sampling", sampling, len(chosen))
        samplings = [usable("sampling", one, Sampling) for one in each]
        given = Options(stop, log_pairs, log_ties, logprobs).check(self.model)
        if on_progress is not None and not callable(on_progress):
            raise refusal("on_progress", on_progress, "a function, or None")
        requests = []
        for i, one in enumerate(zip(chosen, limits, samplings, strict=True)):
            if on_progress:
                given = dataclasses.replace(given, on_progress=partial(on_progress, i))
            try:
                requests.append(self._request(Answer, *one, given)[0])
            except UsageError as error:
                raise UsageError(f"prompts[{i}]: {error}") from None
        return BatchGeneration(self._engine, requests)


def _for_each(name: str, given: Value | Sequence[Value], n: int) -> list[Value]:
    """A value for each of `n` prompts: the single value given, or each prompt's own."""
    values = listed(given)
    if values is None:
        return [given] * n  # type: ignore[list-item]
    if len(values) != n:
        raise UsageError(f"{name} has {len(values)} values for {n} prompts; give one for each")
    return values
