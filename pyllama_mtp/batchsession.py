"""Several prompts at once: each gets the text that it gets alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from .arguments import listed, refusal, stop_strings
from .batchengine import BatchEngine
from .batchgenerate import BatchTelemetry, Request, run_all
from .errors import UsageError
from .generate import Limits
from .model import Model
from .owned import Owned
from .sampling import Sampler
from .session import Answer, Prompt, prompt_tokens, usable_sampling, usable_settings
from .settings import Sampling, Settings
from .telemetry import Telemetry

Value = TypeVar("Value")


class BatchGeneration:
    """One generation for several prompts; iterate over it, or :meth:`run` it.

    Iterating gives (index of the prompt, piece of its text) as text comes.

    Attributes:
        results: an :class:`Answer` for each prompt: text, tokens, finish_reason, telemetry. Times
            in its telemetry are those of the prefill of its prompt, and of the rounds in which it
            took part.
        telemetry: of all prompts together.
    """

    def __init__(self, engine: BatchEngine, requests: Sequence[Request]) -> None:
        self.results = [request.answer for request in requests]
        self.telemetry = BatchTelemetry(
            synthetic_acceptance=engine.engine.settings.synthetic_acceptance
        )
        self._engine = engine
        self._pieces = self._generate(requests)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._pieces

    def run(self) -> BatchGeneration:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def _generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, str]]:
        try:
            yield from run_all(self._engine, requests, self.telemetry)
        finally:
            for answer in self.results:
                answer.finish_reason = answer.finish_reason or "interrupted"
            self._engine.engine.count_traffic(self.telemetry)


class BatchSession(Owned):
    """Contexts for several sequences on a model. A context manager.

    Prompts are processed one after the other, as places become free; the sequences in places are
    then drafted for and verified together, in one decode each per round. Nothing is kept from one
    generation to the next. With ``draft_n_max="auto"`` the depth is chosen for every number of
    sequences by itself: with many of them drafting may not pay, and then stops.
    """

    def __init__(
        self, model: Model, settings: Settings | None = None, n_sequences: int = 4
    ) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`; without an MTP head, ``draft_n_max=0``. `n_ctx` is
                the length of each sequence, and memory is taken for all of them, with n_sequences *
                (drafts + 1) recurrent states where rollback goes by snapshots ("auto": up to
                AUTO_DEPTH drafts). `n_batch` and `n_ubatch` must hold as many tokens.
                `checkpoints` has no effect.
            n_sequences: most sequences at once, 1 to 256; more prompts wait for a place.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        self.model, self.settings = model, usable_settings(model, settings)
        self._engine = BatchEngine(model, self.settings, n_sequences)
        self.n_sequences = len(self._engine.places)

    @property
    def n_ctx(self) -> int:
        """Length that each sequence may have, in tokens."""
        return self._engine.n_ctx

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        max_tokens: int | Sequence[int] = 256,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        stop: Iterable[str] | None = (),
        ignore_eos: bool = False,
    ) -> BatchGeneration:
        """Start a generation; nothing is computed until it is iterated or run.

        Another one that is started before it has ended takes its places: it then cannot go on.

        Args:
            prompts: at least one; each is text (control tokens such as ``<|im_start|>`` are
                recognised) or token ids, a sequence or an array. They may differ in length.
            max_tokens: most tokens to generate, at least 1; for all prompts, or one for each.
            sampling: default greedy; for all prompts, or one for each.
            stop: strings that end a sequence, none of them empty; not part of the text.
                None: no strings.
            ignore_eos: go on after an end token (speed measurements).

        Raises:
            UsageError: no prompt, an empty one, one that is longer than `n_ctx`, lists of another
                length than `prompts`, or a bad argument.
        """
        if isinstance(prompts, str | bytes | bytearray):
            raise UsageError("prompts is one text; give a list of prompts")
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise refusal("prompts", prompts, "a list of prompts")
        chosen = list(prompts)
        if not chosen:
            raise UsageError("there is no prompt; give at least one")
        limits = [Limits(n, ignore_eos) for n in _for_each("max_tokens", max_tokens, len(chosen))]
        samplings = [usable_sampling(one) for one in _for_each("sampling", sampling, len(chosen))]
        stops = stop_strings(stop)
        requests = [
            self._request(index, prompt, samplings[index], limits[index], stops)
            for index, prompt in enumerate(chosen)
        ]
        return BatchGeneration(self._engine, requests)

    def _request(
        self,
        index: int,
        prompt: Prompt,
        sampling: Sampling,
        limits: Limits,
        stop: Sequence[str],
    ) -> Request:
        telemetry = Telemetry(synthetic_acceptance=self.settings.synthetic_acceptance)
        answer = Answer(self.model, limits, stop, telemetry)
        try:
            tokens = prompt_tokens(self.model, prompt, self.n_ctx)
            return Request(tokens, Sampler(self.model, sampling, tokens), limits, answer)
        except UsageError as error:
            raise UsageError(f"prompts[{index}]: {error}") from None

    def memory(self) -> dict[str, int]:
        """Bytes in use, by what they are for; see :meth:`Engine.memory`."""
        return self._engine.engine.memory()

    def close(self) -> None:
        """Free the contexts. May be called again."""
        self._engine.engine.close()


def _for_each(name: str, given: Value | Sequence[Value], n: int) -> list[Value]:
    """A value for each of `n` prompts: the one that was given, or each its own."""
    values = listed(given)
    if values is None:
        return [given] * n  # type: ignore[list-item]
    if len(values) != n:
        raise UsageError(f"{name} has {len(values)} values for {n} prompts; give one for each")
    return values
