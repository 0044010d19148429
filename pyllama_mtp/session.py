"""Sessions: prompts in, streamed text out, of one sequence or several; processed prefixes stay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from . import promptfile
from .answer import Answer
from .arguments import (
    as_index,
    file_name,
    flag,
    instance,
    refusal,
    stop_strings,
    token_ids,
    whole,
    words,
)
from .chats.options import ChatOptions, call_form
from .chats.thinking import Splitter, opened
from .chats.tools import Messages, Tools
from .drafting.sampling import Sampler
from .engine import Engine
from .errors import UsageError
from .generate import Limits, OnProgress, Request
from .llama.hiddenstates import POINTS, ROWS, HiddenStates
from .llama.model import Model
from .llama.owned import Owned
from .llama.trace import NodeTimes
from .scheduler import Generation, choose_place
from .settings import MOST_TOKENS, Sampling, Settings
from .telemetry import Telemetry

MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
#: Text, or token ids.
Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]
Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Answer)


def tokens_of(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: of text, in which control tokens are recognised, or ids as they are.
    Raises UsageError: neither text nor token ids, or an id that is not in the vocabulary."""
    if isinstance(prompt, str):
        return model.tokenize(prompt, add_special=True, parse_special=True)
    tokens = token_ids("prompt", prompt, "text, or ")
    model.check_tokens(tokens)
    return tokens


def prompt_tokens(model: Model, prompt: Prompt, n_ctx: int) -> list[int]:
    """:func:`tokens_of` a prompt. Raises UsageError also for no token, or more than `n_ctx`."""
    tokens = tokens_of(model, prompt)
    if not tokens:
        raise UsageError("the prompt is empty; give at least one token of text")
    if len(tokens) > n_ctx:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens and the context {n_ctx}; "
            "shorten it or use a longer n_ctx (--n-ctx)"
        )
    return tokens


def usable_settings(model: Model, settings: Settings | None) -> Settings:
    """The settings of a session; None: the default ones. Raises UsageError for another type."""
    instance("model", model, Model, "a Model; open a file with Model(path)")
    return usable("settings", settings, Settings)


def usable(name: str, given: Value | None, kind: type[Value]) -> Value:
    """`given`, or what `kind` is by default. Raises UsageError for another type."""
    if given is None:
        return kind()
    return instance(name, given, kind, f"{kind.__name__}(...), or None")


@dataclass(frozen=True)
class Options:
    """Options of a generation; see :meth:`Session.generate`."""

    stop: Iterable[str] | None
    log_pairs: bool
    log_ties: bool
    logprobs: int | None
    on_progress: OnProgress | None = None
    split: bool = False  # tell thought from answer
    tools: Tools | None = None

    def check(self, model: Model) -> Options:
        """The options in the form that is used. Raises UsageError for a bad value."""
        if self.on_progress is not None and not callable(self.on_progress):
            raise refusal("on_progress", self.on_progress, "a function, or None")
        n = self.logprobs
        if n is not None:
            n = whole("logprobs", n, 0, model.n_vocab, "from 0 to the vocabulary's size, or None")
        flags: dict[str, Any] = {
            name: flag(name, getattr(self, name)) for name in ("log_pairs", "log_ties")
        }
        if self.log_ties and not model._library.has_tap:
            raise UsageError("log_ties needs the patched library; this is upstream's")
        return dataclasses.replace(self, stop=stop_strings(self.stop), logprobs=n, **flags)


class Places(Owned):
    """Contexts with places for conversations on a model. A context manager."""

    def __init__(
        self,
        model: Model,
        settings: Settings | None,
        n_sequences: int,
        room: int = 0,
        times: NodeTimes | None = None,
    ) -> None:
        self.model, self.settings = model, usable_settings(model, settings)
        n = whole("n_sequences", n_sequences, 1, MOST_SEQUENCES, f"from 1 to {MOST_SEQUENCES}")
        room = whole("room", room, 0, MOST_TOKENS, f"from 0 (not known) to {MOST_TOKENS} tokens")
        resolved = self.settings.resolve(model, n, room)
        self._engine = Engine(model, resolved, times)
        self._hidden_states = HiddenStates(model, resolved.target)

    @property
    def n_ctx(self) -> int:
        """Length that each sequence may have, in tokens."""
        return self._engine.n_ctx

    def _request(
        self, kind: type[Kind], prompt: Prompt, limits: Limits, sampling: Sampling, o: Options
    ) -> tuple[Request, Kind]:
        """A request for this prompt, and its answer, still empty."""
        tokens = prompt_tokens(self.model, prompt, self.n_ctx)
        telemetry = Telemetry(
            synthetic_acceptance=self._engine.settings.synthetic_acceptance,
            pairs=[] if o.log_pairs else None,
            near_ties=[] if o.log_ties and sampling.plain_greedy else None,
        )
        splitter = Splitter(opened(self.model, tokens)) if o.split else None
        stop = [*(o.stop or ())]
        calls = o.tools.reader(call_form(self.model.chat_template)) if o.tools else None
        answer = kind(self.model, limits.ignore_eos, stop, telemetry, o.logprobs, splitter, calls)
        sampler = Sampler(self.model, sampling, tokens, telemetry.near_ties)
        return Request(tokens, sampler, limits, answer, o.on_progress), answer

    def process(
        self, prompt: Prompt, *, draft: bool = True, on_progress: OnProgress | None = None
    ) -> Telemetry:
        """Process a prompt ahead of time; a later prompt that begins with it starts from its end.

        The last token is left to the generation, which needs its logits.

        Args:
            prompt: text or token ids.
            draft: False: the generations after it will not draft, so MTP costs nothing.
            on_progress: see :meth:`Session.generate`.

        Returns:
            Figures of the prefill.
        """
        draft = flag("draft", draft)
        tokens, engine = prompt_tokens(self.model, prompt, self.n_ctx)[:-1], self._engine
        telemetry = Telemetry()
        if tokens:
            began = time.perf_counter()
            with engine.alone:
                engine.begin()
                place = choose_place(engine, engine.places, tokens, draft)
                engine.enter(place, tokens, telemetry, draft)
                entry = None
                while entry is None:
                    entry = engine.prefill(place, tokens, telemetry)
                    if on_progress:
                        on_progress(len(place.cached), len(tokens))
                engine.begin_drafting(place, tokens, telemetry)
                engine.synchronize()
            telemetry.prefill_s = time.perf_counter() - began
            engine.count_traffic(telemetry)
        return telemetry

    def hidden_states(
        self, prompt: Prompt, *, point: str = "post-norm", rows: str = "all"
    ) -> npt.NDArray[np.float32]:
        """The trunk's hidden states of a prompt, without logits; see docs/python.md for the cost.

        They are computed in a context of their own, made by the first call for as many tokens as
        the prompt has, and kept for further calls. So the text of this session stays as it is.

        Args:
            prompt: text or token ids.
            point: "post-norm": after the model's final norm, as the LM head takes them; "pre-norm":
                before it.
            rows: "all" tokens; or the "last" one only, which has seen all others.

        Returns:
            [n, n_embd] float32, n the number of tokens, or 1; yours to keep.

        Raises:
            UsageError: a prompt that is empty or longer than :attr:`n_ctx`; a bad argument; or no
                such states: upstream's library, some other architectures.
            InsufficientMemoryError: there is no room for the context.
        """
        words(*POINTS).check("point", point)
        words(*ROWS).check("rows", rows)
        tokens = prompt_tokens(self.model, prompt, self.n_ctx)
        with self._engine.alone:
            self._engine.target.handle  # noqa: B018 - refused if the session is closed
            return self._hidden_states.of(tokens, point, rows)

    def save(self, path: str | os.PathLike[str], sequence: int = 0) -> None:
        """Write prompt and answer so far, as processed, to a file, with the MTP head's state.

        Args:
            sequence: number of the place, where there are several.

        Raises:
            UsageError: nothing was processed.
            DiskFullError: the file could not be written; an earlier file of the name is unharmed.
        """
        with self._engine.alone:
            place = self._engine.places[self._sequence(sequence)]
            promptfile.save(self._engine, place, file_name("path", path))

    def restore(self, path: str | os.PathLike[str], sequence: int = 0) -> int:
        """Continue from a file of :meth:`save`; MTP works at once. Returns the number of tokens.

        Read only files of people you trust: the states in them go to native code.

        Args:
            sequence: number of the place that takes the file, where there are several.

        Raises:
            PromptFileError: not such a file, damaged, or made with another model or settings.
            UsageError: more tokens than the context has room for.
        """
        with self._engine.alone:
            place = self._engine.places[self._sequence(sequence)]
            return promptfile.restore(self._engine, place, file_name("path", path))

    def _sequence(self, sequence: int) -> int:
        most = len(self._engine.places) - 1
        return whole("sequence", sequence, 0, most, f"from 0 to {most}")

    def reset(self) -> None:
        """Forget all processed text."""
        with self._engine.alone:
            self._engine.reset()

    def memory(self) -> dict[str, int]:
        """Bytes in use, by purpose; see :meth:`.Engine.memory`."""
        return self._engine.memory()

    def close(self) -> None:
        """Free the contexts. May be called again."""
        self._hidden_states.close()
        self._engine.close()


class Session(Places):
    """Contexts for one conversation on a model. A context manager.

    Of a prompt that continues the text processed before (the previous prompt with its answer), only
    the new part is processed.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings | None = None,
        *,
        room: int = 0,
        times: NodeTimes | None = None,
    ) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`.
            room: tokens of prompt and answer, for an `n_ctx` of 0; 0: not known.
            times: measures the costs of graph nodes; see :func:`pyllama_mtp.bench.profile`.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        super().__init__(model, settings, 1, room, times)

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
        logprobs: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Start a generation; nothing is computed until it is iterated or run.

        Args:
            prompt: text (control tokens such as ``<|im_start|>`` are recognised) or token ids:
                a sequence or an array of whole numbers.
            max_tokens: most tokens to generate, at least 1.
            sampling: default greedy.
            stop: strings, none of them empty, that end the generation and are not part of the text.
            ignore_eos: go on after an end token (speed measurements).
            draft: False: without drafts this once. In upstream's way (prompt_sync "full") a later
                generation that drafts processes this text again.
            log_pairs: keep every (drafted, actual) pair of the head in the telemetry.
            log_ties: keep near ties of greedy text in the telemetry: tokens at which other batches
                may give another text, unless `Model.same_bits`. Needs the patched library.
            logprobs: keep the log probability of each token, and of so many best tokens, in the
                answer's `logprobs`. Fetches all logits.
            on_progress: called while the prompt is processed, after each `n_batch` tokens, with
                (tokens done, tokens in all). An exception from it ends the generation.

        Raises:
            UsageError: an empty prompt, a prompt longer than the context, or a bad argument.
        """
        limits = Limits(max_tokens, ignore_eos, draft)
        given = Options(stop, log_pairs, log_ties, logprobs, on_progress)
        return self._start(prompt, limits, sampling, given)

    def _start(
        self, prompt: Prompt, limits: Limits, sampling: Sampling | None, given: Options
    ) -> Generation:
        chosen, given = usable("sampling", sampling, Sampling), given.check(self.model)
        request, generation = self._request(Generation, prompt, limits, chosen, given)
        generation._pieces = generation._generate(self._engine, request)
        return generation

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        thinking: bool | int | None = None,
        options: ChatOptions | None = None,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[str] | None = (),
        draft: bool = True,
        logprobs: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Start the model's next turn of a conversation, by the chat template of its file.

        Pieces of thought have `thought` True, and are the answer's `reasoning`; pieces that are a
        :class:`.CallPiece` are parts of its `tool_calls`; `text` is the rest.

        Args:
            messages: as in OpenAI's API, ``{"role": ..., "content": ...}`` each. The next call
                takes them with `answer.message`, the tools' results (``{"role": "tool",
                "tool_call_id": ..., "content": ...}``), and the next question.
            tools: functions that the model may call: ``{"type": "function", "function": {"name":
                ..., "description": ..., "parameters": JSON schema}}`` each.
            tool_choice: None or "auto": the model calls tools or not; a broken call is text.
                "required": it must call one. A function's name: it must call this one. Either call
                follows a grammar, and its parts come as they are written. "none": no calls.
            parallel_tool_calls: whether the model may make several calls.
            thinking: whether the model thinks first; a number: it thinks for at most so many
                tokens; None: as `options` and the template say.
            options: more options of the template.
            max_tokens: None: as many as the context has room for.
            sampling: default `model.sampling`: as the model file says.
            stop, draft, logprobs, on_progress: see :meth:`generate`.

        Raises:
            UsageError: no template, or it refuses the messages; a conversation longer than the
                context; or a bad argument.
        """
        offered = Tools.of(tools, tool_choice, parallel_tool_calls)
        options = instance("options", options or ChatOptions(), ChatOptions, "ChatOptions(...)")
        if isinstance(thinking, bool):
            options = dataclasses.replace(options, thinking=thinking)
        elif thinking is not None:
            if as_index(thinking) is None:
                raise refusal("thinking", thinking, "True, False, None, or a number of tokens")
            options = dataclasses.replace(options, thinking=True, budget=thinking)
        self._engine.chats = True
        prompt = options.prompt(self.model, messages, offered)
        room = max(1, self.n_ctx - len(prompt))
        limits = Limits(room if max_tokens is None else max_tokens, draft=draft)
        chosen = usable("sampling", sampling or self.model.sampling, Sampling)
        chosen = options.sampling(chosen, self.model, offered)
        given = Options(stop, False, False, logprobs, on_progress, split=True, tools=offered)
        return self._start(prompt, limits, chosen, given)


def stream(model: Model | str | os.PathLike[str], prompt: Prompt, **options: Any) -> Iterator[str]:
    """Stream the continuation of `prompt` as text; MTP is on if the model has a head.

    Args:
        model: an open model, or the path of a GGUF file, which is then loaded for this call.
        prompt: text or token ids.
        options: arguments of :class:`Settings`, :class:`Sampling` and :meth:`Session.generate`, by
            name.

    Raises:
        UsageError: an unknown or a bad option. For the rest see :class:`Model`, :class:`Session`.
    """

    def take(kind: type[Any]) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)} & options.keys()
        return {name: options.pop(name) for name in names}

    settings, sampling = take(Settings), Sampling(**take(Sampling))
    unknown = options.keys() - {"max_tokens", "stop", "ignore_eos", "draft", "on_progress"}
    if unknown:
        raise UsageError(f"unknown option {sorted(unknown)[0]!r}")
    max_tokens = Limits(options.get("max_tokens", 256)).max_tokens
    Settings(**settings)  # refused before the model is loaded
    with contextlib.ExitStack() as stack:
        if not isinstance(model, Model):
            depth = settings.get("draft_n_max")
            mtp = None if depth in (None, "auto") else depth != 0
            model = stack.enter_context(Model(model, mtp=mtp))
        prompt = tokens_of(model, prompt)
        room = len(prompt) + max_tokens
        session = stack.enter_context(Session(model, Settings(**settings), room=room))
        yield from session.generate(prompt, sampling=sampling, **options)
