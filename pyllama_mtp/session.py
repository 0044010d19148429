"""A conversation with a model: prompts in, streamed text out, the processed prefix kept."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import prompts
from .arguments import file_name, flag, instance, stop_strings, token_ids
from .engine import Engine
from .errors import UsageError
from .generate import Limits, generate
from .model import Model
from .models.ggufinfo import read_gguf
from .owned import Owned
from .sampling import Sampler
from .settings import Sampling, Settings
from .telemetry import Telemetry

#: Text, or token ids.
Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]


class TextStream:
    """Token bytes to text: holds back half characters, and what may become a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes, final: bool = False) -> str:
        """Text that is safe to emit; sets `stopped` when a stop string has come (it is dropped)."""
        self._held += self._decoder.decode(data, final)
        cuts = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if cuts:
            self.stopped = True
            out, self._held = self._held[: min(cuts)], ""
            return out
        keep = 0 if final else self._possible_stop()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _possible_stop(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        longest = 0
        for s in self._stop:
            for n in range(1, min(len(s), len(self._held) + 1)):
                if self._held.endswith(s[:n]):
                    longest = max(longest, n)
        return longest


class Answer:
    """What is generated after one prompt.

    Attributes:
        text, tokens: what was generated so far; tokens include the end token, text does not.
        finish_reason: "length" (max_tokens or a full context), "eos", "stop", "interrupted" (an
            exception or the consumer ended it), or None while it runs.
        telemetry: see :class:`Telemetry`; complete when the generation is.
        ended: "eos" or "stop" once no token may follow, by the text itself.
    """

    def __init__(
        self, model: Model, limits: Limits, stop: Sequence[str], telemetry: Telemetry
    ) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.telemetry = telemetry
        self.ended: str | None = None
        self._model, self._limits, self._stream = model, limits, TextStream(stop)

    def take(self, token: int) -> str:
        """The next token. The text that can be emitted now; "" for none."""
        self.tokens.append(token)
        end = self._model.is_end(token) and not self._limits.ignore_eos
        piece = self._stream.feed(b"" if end else self._model.piece(token))
        self.text += piece
        if end or self._stream.stopped:
            self.ended = "eos" if end else "stop"
        return piece

    def rest(self) -> str:
        """No token follows: the text that was held back; "" for none."""
        piece = "" if self._stream.stopped else self._stream.feed(b"", final=True)
        self.text += piece
        return piece


class Generation(Answer):
    """One generation; iterate over it for text as it comes, or :meth:`run` it."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        sampling: Sampling,
        limits: Limits,
        stop: Sequence[str],
        log_pairs: bool,
        log_ties: bool,
    ) -> None:
        telemetry = Telemetry(
            synthetic_acceptance=engine.settings.synthetic_acceptance,
            pairs=[] if log_pairs else None,
            near_ties=[] if log_ties and sampling.plain_greedy else None,
        )
        super().__init__(engine.model, limits, stop, telemetry)
        self._engine, self._prompt, self._sampling = engine, prompt, sampling
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def run(self) -> Generation:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def _generate(self) -> Iterator[str]:
        ties = self.telemetry.near_ties
        sampler = Sampler(self._model, self._sampling, self._prompt, ties)
        reason = "interrupted"
        try:
            tokens = generate(self._engine, self._prompt, sampler, self._limits, self.telemetry)
            for token in tokens:
                piece = self.take(token)
                if piece:
                    yield piece
                if self.ended:
                    break
            reason = self.ended or "length"
            rest = self.rest()
            if rest:
                yield rest
        finally:
            self.finish_reason = reason
            self._engine.count_traffic(self.telemetry)
            sampler.close()


def tokens_of(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: of text, in which control tokens are recognised, or ids as they are.

    Raises:
        UsageError: neither text nor token ids, or one that is not in the vocabulary.
    """
    if isinstance(prompt, str):
        return model.tokenize(prompt, add_special=True, parse_special=True)
    tokens = token_ids("prompt", prompt, "text, or ")
    model.check_tokens(tokens)
    return tokens


def prompt_tokens(model: Model, prompt: Prompt, n_ctx: int) -> list[int]:
    """:func:`tokens_of` a prompt, which must have some.

    Raises:
        UsageError: also no token, or more than `n_ctx`.
    """
    tokens = tokens_of(model, prompt)
    if not tokens:
        raise UsageError("the prompt is empty; give at least one token of text")
    if len(tokens) > n_ctx:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens and the context {n_ctx}; "
            "shorten it or use a longer n_ctx"
        )
    return tokens


def usable_settings(model: Model, settings: Settings | None) -> Settings:
    """The settings of a session, or the default ones. Raises UsageError for what is neither."""
    instance("model", model, Model, "a Model; open a file with Model(path)")
    if settings is None:
        return Settings(draft_n_max=Settings.draft_n_max if model.has_mtp else 0)
    return instance("settings", settings, Settings, "Settings(...), or None")


def usable_sampling(sampling: Sampling | None) -> Sampling:
    """How a generation samples, by default greedily. Raises UsageError for what is neither."""
    if sampling is None:
        return Sampling()
    return instance("sampling", sampling, Sampling, "Sampling(...), or None")


class Session(Owned):
    """Contexts for one conversation on a model. A context manager.

    A prompt that continues what was processed before (the previous prompt with its answer) is
    processed from there on only.
    """

    def __init__(self, model: Model, settings: Settings | None = None) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`; without an MTP head, ``draft_n_max=0``.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        self.model, self.settings = model, usable_settings(model, settings)
        self._engine = Engine(model, self.settings)

    @property
    def n_ctx(self) -> int:
        """Context length in tokens."""
        return self._engine.target.n_ctx

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Iterable[str] | None = (),
        ignore_eos: bool = False,
        draft: bool = True,
        log_pairs: bool = False,
        log_ties: bool = False,
    ) -> Generation:
        """Start a generation; nothing is computed until it is iterated or run.

        Args:
            prompt: text (control tokens such as ``<|im_start|>`` are recognised) or token ids:
                a sequence or an array of whole numbers.
            max_tokens: most tokens to generate, at least 1.
            sampling: default greedy.
            stop: strings that end the generation, none of them empty; not part of the text. None:
                no strings.
            ignore_eos: go on after an end token (speed measurements).
            draft: False: without MTP this once, which then costs nothing. A later generation that
                drafts processes this text again, as far back as the draft cache needs.
            log_pairs: keep every (drafted, actual) pair of the head in the telemetry.
            log_ties: keep the near ties of greedy text in the telemetry: where the text may differ
                from that of other batches, unless `Model.same_bits`. Needs the patched library.

        Raises:
            UsageError: empty prompt, one that is longer than the context, or a bad argument.
        """
        limits = Limits(max_tokens, ignore_eos, draft)
        sampling, stops = usable_sampling(sampling), stop_strings(stop)
        log_pairs, log_ties = flag("log_pairs", log_pairs), flag("log_ties", log_ties)
        if log_ties and not self.model._library.has_tap:
            raise UsageError("log_ties needs the patched library; this is upstream's")
        tokens = prompt_tokens(self.model, prompt, self.n_ctx)
        return Generation(self._engine, tokens, sampling, limits, stops, log_pairs, log_ties)

    def process(self, prompt: Prompt, *, draft: bool = True) -> Telemetry:
        """Process a prompt ahead of time; a prompt that begins with it then starts from its end.

        The last token is left to the generation, which needs its logits.

        Args:
            prompt: text or token ids, as for :meth:`generate`.
            draft: False: the generations that follow will not draft, so MTP costs nothing.

        Returns:
            Figures of the prefill.
        """
        draft = flag("draft", draft)
        tokens = prompt_tokens(self.model, prompt, self.n_ctx)
        telemetry = Telemetry()
        if len(tokens) > 1:
            began = time.perf_counter()
            with self._engine.alone:
                self._engine.prefill(tokens[:-1], telemetry, draft)
                self._engine.synchronize()
            telemetry.prefill_s = time.perf_counter() - began
            self._engine.count_traffic(telemetry)
        return telemetry

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was processed (prompt and answer so far) to a file, draft cache included.

        Raises:
            UsageError: nothing was processed.
            DiskFullError: the file could not be written; an earlier one of the name is unharmed.
        """
        with self._engine.alone:
            prompts.save(self._engine, file_name("path", path))

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Continue from a file of :meth:`save`; MTP works at once. Returns its number of tokens.

        Read files of people you trust only: the states in them go to native code.

        Raises:
            PromptFileError: not such a file, damaged, or made with another model or settings.
            UsageError: longer than the context.
        """
        with self._engine.alone:
            return prompts.restore(self._engine, file_name("path", path))

    def reset(self) -> None:
        """Forget what was processed."""
        with self._engine.alone:
            self._engine.reset()

    def memory(self) -> dict[str, int]:
        """Bytes in use, by what they are for; see :meth:`Engine.memory`."""
        return self._engine.memory()

    def close(self) -> None:
        """Free the contexts. May be called again."""
        self._engine.close()


def stream(model: Model | str | os.PathLike[str], prompt: Prompt, **options: Any) -> Iterator[str]:
    """Stream the continuation of `prompt` as text; MTP is on if the model has a head.

    Args:
        model: an open model, or the path of a GGUF file, which is then loaded for this call.
        prompt: text or token ids.
        options: arguments of :class:`Settings`, :class:`Sampling` and :meth:`Session.generate`, by
            name. The context is made just long enough unless ``n_ctx`` is given.

    Raises:
        UsageError: an unknown or a bad option. For the rest see :class:`Model`, :class:`Session`.
    """

    def take(kind: type[Any]) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)} & options.keys()
        return {name: options.pop(name) for name in names}

    settings, sampling = take(Settings), Sampling(**take(Sampling))
    unknown = options.keys() - {"max_tokens", "stop", "ignore_eos", "draft"}
    if unknown:
        raise UsageError(f"unknown option {sorted(unknown)[0]!r}")
    max_tokens = Limits(options.get("max_tokens", 256)).max_tokens
    Settings(**settings)  # refused before the model is loaded
    with contextlib.ExitStack() as stack:
        if not isinstance(model, Model):
            depth = settings.get("draft_n_max")
            mtp = read_gguf(model).has_mtp if depth is None else depth != 0
            model = stack.enter_context(Model(model, mtp=mtp))
        settings.setdefault("draft_n_max", Settings.draft_n_max if model.has_mtp else 0)
        if "n_ctx" not in settings:
            settings["n_ctx"] = len(tokens_of(model, prompt)) + max_tokens + 1
        session = stack.enter_context(Session(model, Settings(**settings)))
        yield from session.generate(prompt, sampling=sampling, **options)
