"""Sessions: prompts in, streamed text out, of one sequence or several; processed prefixes stay."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from . import promptfile
from .answer import Answer
from .arguments import as_index, file_name, flag, instance, listed, whole, words
from .calibration import open_engine
from .chats.options import ChatOptions
from .chats.thinking import Piece
from .chats.tools import Messages, Tools
from .engine import Engine
from .errors import UsageError, refusal
from .images import ImageSource
from .llama.hiddenstates import POINTS, ROWS, HiddenStates
from .llama.model import Model
from .llama.native import Owned
from .llama.vision import ImagePrompt, Vision, with_images
from .memory import resolve
from .promptfile import ProcessedPrompt
from .request import Limits, OnProgress, Options, Prompt, Request, make_request, tokens_of
from .scheduler import run_all
from .settings import MOST_TOKENS, Sampling, Settings
from .telemetry import BatchTelemetry, Telemetry, timed

MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
Item = TypeVar("Item")
Value = TypeVar("Value")


async def _from_thread(pieces: Iterator[Item], stop: Callable[[], None]) -> AsyncIterator[Item]:
    """The items as they come, computed in a thread of their own beside the event loop.

    Args:
        stop: called in the thread when the consumer has stopped; then the session is free again.
    """
    import asyncio  # whoever has an event loop has it; others need not wait for it

    loop, end = asyncio.get_running_loop(), object()
    with ThreadPoolExecutor(1, "pyllama-mtp generation") as thread:
        try:
            while (item := await loop.run_in_executor(thread, next, pieces, end)) is not end:
                yield item  # type: ignore[misc]
        finally:
            await asyncio.shield(loop.run_in_executor(thread, stop))


class _Running(Generic[Item]):
    """A generation that gives items: iterate over it (`for`, `async for`), or run it."""

    telemetry: Telemetry
    _requests: list[Request]
    _pieces: Generator[Item, None, None]

    def _item(self, request: Request, piece: Piece) -> Item:
        """What iterating gives for a piece of a request's text."""
        raise NotImplementedError

    def _generate(self, engine: Engine, total: BatchTelemetry) -> Generator[Item, None, None]:
        try:
            for progress in run_all(engine, self._requests, total):
                for piece in progress.pieces:
                    yield self._item(progress.request, piece)
        finally:
            engine.count_traffic(self.telemetry)
            self._requests = []  # an answer that is kept does not keep prompts and images

    def __iter__(self) -> Iterator[Item]:
        return self._pieces

    def __next__(self) -> Item:
        return next(self._pieces)

    def __aiter__(self) -> AsyncIterator[Item]:
        return _from_thread(self._pieces, self.stop)

    def _finish(self) -> None:
        for _ in self._pieces:
            pass

    def stop(self) -> None:
        """End the generation between two pieces; the session can go on from here. Incomplete
        answers are "interrupted"."""
        requests = self._requests
        self._pieces.close()
        for answer in (request.answer for request in requests):
            answer.finish_reason = answer.finish_reason or "interrupted"


class Generation(_Running[Piece], Answer):
    """One generation; iterate over it for text as it comes (`for` or `async for`), or run it."""

    def run(self) -> Generation:
        """Generate to the end."""
        self._finish()
        return self

    @staticmethod
    def of(engine: Engine, request: Request) -> Generation:
        """The generation that answers this request."""
        made = request.answer
        assert isinstance(made, Generation)
        made._requests = [request]
        made._pieces = made._generate(engine, BatchTelemetry())
        return made

    def _item(self, request: Request, piece: Piece) -> Piece:
        return piece


class Answers(list[Answer]):
    """An :class:`Answer` for each prompt: text, tokens, finish_reason, telemetry.

    The telemetry's times are of the prompt's prefill, and of the rounds that the sequence was in.

    Attributes:
        telemetry: of all prompts together.
    """

    telemetry: BatchTelemetry

    @property
    def results(self) -> Answers:
        """The answers."""
        return self


class BatchGeneration(_Running[tuple[int, Piece]]):
    """One generation for several prompts; iterate over it (`for`, `async for`), or :meth:`run` it.

    Iterating gives (index of the prompt, piece of its text) as text comes.

    Attributes:
        results: the :class:`Answers`.
        telemetry: of all prompts together.
    """

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.results = Answers(request.answer for request in requests)
        self.telemetry = BatchTelemetry(synthetic_acceptance=engine.settings.synthetic_acceptance)
        self.results.telemetry = self.telemetry
        self._requests = requests
        self._pieces = self._generate(engine, self.telemetry)

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        """Raises UsageError: the generation has ended."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:
            raise UsageError("this generation has ended; its answers are `results`")
        return self._pieces

    def run(self) -> Answers:
        """Generate to the end: the answers."""
        self._finish()
        return self.results

    def _item(self, request: Request, piece: Piece) -> tuple[int, Piece]:
        return self._requests.index(request), piece


class Session(Owned):
    """Contexts for a conversation on a model, or for several (:class:`BatchSession`). A context
    manager.

    Of a prompt that continues the text processed before (the previous prompt with its answer), only
    the new part is processed.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings | None = None,
        *,
        room: int = 0,
        vision: Vision | None = None,
        n_sequences: int = 1,
    ) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`.
            room: tokens of prompt and answer, for an `n_ctx` of 0; 0: not known.
            vision: the model's image encoder, for prompts with images; the caller closes it.
            n_sequences: see :class:`BatchSession`.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        self.vision = vision if vision is None else instance("vision", vision, Vision, "a Vision")
        self.model = instance("model", model, Model, "a Model; open a file with Model(path)")
        settings = Settings() if settings is None else settings
        self.settings = instance("settings", settings, Settings, "Settings(...), or None")
        n = whole("n_sequences", n_sequences, 1, MOST_SEQUENCES, f"from 1 to {MOST_SEQUENCES}")
        room = whole("room", room, 0, MOST_TOKENS, f"from 0 (not known) to {MOST_TOKENS} tokens")
        resolved = resolve(self.settings, model, n, room)
        self._engine = open_engine(model, resolved)
        self._hidden_states = HiddenStates(model, resolved.target)
        self.n_sequences = n

    @property
    def n_ctx(self) -> int:
        """Length that each sequence may have, in tokens."""
        return self._engine.n_ctx

    def _prompt(self, prompt: Prompt | ImagePrompt, draft: bool) -> ImagePrompt:
        """A prompt's entries. Raises UsageError: none, more than there is room for, or see
        :func:`.tokens_of`."""
        if not isinstance(prompt, ImagePrompt):
            prompt = ImagePrompt(tokens_of(self.model, prompt))
        elif draft:
            self._engine.head.check_images()
        self._engine.check_length(len(prompt.entries))
        return prompt

    def _request(
        self,
        prompt: Prompt | ImagePrompt,
        limits: Limits,
        sampling: Sampling | None,
        told: Options,
        kind: type[Answer] = Answer,
    ) -> Request:
        """The request for a prompt; see :func:`.make_request`."""
        text = self._prompt(prompt, limits.draft)
        return make_request(self.model, text, limits, sampling, told, kind)

    def _turn(
        self,
        messages: Messages,
        options: ChatOptions,
        max_tokens: int | None,
        sampling: Sampling | None,
        draft: bool,
        told: Options,
        kind: type[Answer] = Answer,
    ) -> Request:
        """The request for the model's next turn in a conversation, with the tools of `told`."""
        self._engine.chats = True
        model, tools = self.model, told.tools
        prompt = options.turn(model, messages, tools, self.vision, self._engine.check_length)
        room = max(1, self.n_ctx - len(prompt))
        limits = Limits(room if max_tokens is None else max_tokens, draft=draft)
        chosen = sampling or model.sampling
        instance("sampling", chosen, Sampling, "Sampling(...), or None")
        return self._request(prompt, limits, options.sampling(chosen, model, tools), told, kind)

    def process(
        self,
        prompt: Prompt | ImagePrompt,
        *,
        draft: bool = True,
        on_progress: OnProgress | None = None,
    ) -> Telemetry:
        """Process a prompt ahead of time; a later prompt that begins with it starts from its end.

        The last token is left to the generation, which needs its logits.

        Args:
            prompt: text or token ids; or a prompt of :meth:`.Vision.prompt`.
            draft: False: the generations after it will not draft, so MTP costs nothing.
            on_progress: see :meth:`Session.generate`.

        Returns:
            Figures of the prefill.
        """
        limits = Limits(1, draft=flag("draft", draft))
        text, engine = self._prompt(prompt, limits.draft), self._engine
        tokens = text.entries[:-1]
        request = make_request(self.model, replace(text, entries=tokens), limits)
        telemetry = request.answer.telemetry
        if tokens:
            with engine.alone, timed("prefill_s", vars(telemetry)):
                engine.begin()
                place, n = engine.prefixes.find(engine.sequences, request), len(tokens)
                sequence = place.sequence
                if sequence.tokens == tokens and engine.head.reach(sequence, n) == (n, n):
                    telemetry.n_prompt = telemetry.n_cached = n
                else:
                    engine.enter(place)
                    while len(sequence.tokens) < n:
                        engine.prefill(sequence)
                        if on_progress:
                            on_progress(len(sequence.tokens), n)
                    engine.drafting.begin(sequence)
                    engine.synchronize()
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
                such states: upstream's library, or another architecture than qwen35, qwen35moe and
                qwen3next.
            InsufficientMemoryError: there is no room for the context.
        """
        words(*POINTS).check("point", point)
        words(*ROWS).check("rows", rows)
        if isinstance(prompt, ImagePrompt):
            raise UsageError("prompts with images are not taken here; give text or token ids")
        tokens = self._prompt(prompt, draft=False).entries
        with self._engine.alone:
            self._engine.target.handle  # noqa: B018 - refused if the session is closed
            return self._hidden_states.of(tokens, point, rows)

    def save(self, path: str | os.PathLike[str], sequence: int = 0) -> None:
        """Write prompt and answer so far, as processed, to a file, with the MTP head's state.

        Args:
            sequence: its number, where there are several.

        Raises:
            UsageError: nothing was processed.
            DiskFullError: the file could not be written; an earlier file of the name is unharmed.
        """
        file, number = file_name("path", path), self._number(sequence)
        with self._engine.alone:
            promptfile.write(file, self._engine.processed(self._engine.sequences[number]))

    def restore(self, path: str | os.PathLike[str], sequence: int = 0) -> int:
        """Continue from a file of :meth:`save`; MTP works at once. Returns the number of tokens.

        Read only files of people you trust: the states in them go to native code.

        Args:
            sequence: number of the one that takes the file, where there are several.

        Raises:
            PromptFileError: not such a file, damaged, or made with another model or settings.
            UsageError: more tokens than the context has room for.
        """
        file, number, engine = file_name("path", path), self._number(sequence), self._engine
        with engine.alone:
            text = promptfile.read(file, engine.prefixes.identity())
            text.check_tokens(self.model)
            return engine.put_back(engine.sequences[number], text, os.fspath(file))

    def copy(self) -> ProcessedPrompt:
        """Prompt and answer so far, as processed, in memory, for :meth:`copy_from` of several
        sessions; of several sequences, it is that of the first. Raises as that does."""
        with self._engine.alone:
            return self._engine.processed(self._engine.sequences[0])

    def copy_from(self, other: Session | ProcessedPrompt) -> int:
        """Continue from the text of another session, or its :meth:`copy`, as from a file of
        :meth:`save`. A session without MTP takes that of one with it, too. Returns the number of
        tokens.

        Raises:
            PromptFileError: a session of another model or settings.
            UsageError: it holds nothing, or more tokens than the context has room for.
            InsufficientMemoryError: there is no room for the states.
        """
        copy = other.copy() if isinstance(other, Session) else other
        engine, name = self._engine, "the other session"
        with engine.alone:
            engine.prefixes.check_fits(copy, name, drafts=bool(engine.prompt_sync))
            return engine.put_back(engine.sequences[0], copy, name)

    def _number(self, sequence: int) -> int:
        most = len(self._engine.sequences) - 1
        return whole("sequence", sequence, 0, most, f"from 0 to {most}")

    def reset(self) -> None:
        """Forget all processed text that is not in files."""
        with self._engine.alone:
            self._engine.reset()
            self._engine.prefixes.store.forget()

    def memory(self) -> dict[str, int]:
        """Bytes in use, by purpose, without the context of :meth:`hidden_states`; see
        :meth:`.Engine.memory`."""
        return self._engine.memory()

    def close(self) -> None:
        """Free the contexts. May be called again."""
        self._hidden_states.close()
        self._engine.close()

    def generate(
        self,
        prompt: Prompt | ImagePrompt,
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
        images: Sequence[ImageSource] = (),
    ) -> Generation:
        """Start a generation; nothing but images is computed until it is iterated or run.

        Args:
            prompt: text (control tokens such as ``<|im_start|>`` are recognised) or token ids:
                a sequence or an array of whole numbers; or a prompt of :meth:`.Vision.prompt`.
            max_tokens: most tokens to generate, at least 1; -1: as many as there is room for.
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
            images: each stands where the text has :data:`.IMAGE_MARKER`: paths, bytes, data URLs,
                arrays (height, width, 3) of uint8, or PIL images.

        Raises:
            UsageError: an empty prompt, a prompt longer than the context, an image that cannot be
                used, or a bad argument.
        """
        limits = Limits(max_tokens, ignore_eos, draft)
        told = Options(stop, log_pairs, log_ties, logprobs, on_progress)
        if not isinstance(images, tuple | list) or images:
            check = self._engine.check_length
            prompt = with_images(self.vision, prompt, images, check_length=check)
        request = self._request(prompt, limits, sampling, told, Generation)
        return Generation.of(self._engine, request)

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
            messages: as in OpenAI's API, ``{"role": ..., "content": ...}`` each; content may be a
                list of parts, with images as in :mod:`.images`. The next call
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
        options = _chat_options(options, thinking)
        told = Options(stop, False, False, logprobs, on_progress, split=True, tools=offered)
        turn = self._turn(messages, options, max_tokens, sampling, draft, told, Generation)
        return Generation.of(self._engine, turn)


class BatchSession(Session):
    """A session for several prompts at once.

    Prompts are processed one after the other, as sequences become free. The sequences in use are
    drafted for and verified together, in one decode each per round. As in a :class:`Session`, a
    sequence keeps its text for a prompt that continues it. With ``draft_n_max="auto"`` each number
    of sequences has a depth of its own: with many sequences drafting may not pay, and then stops.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings | None = None,
        n_sequences: int = 4,
        *,
        vision: Vision | None = None,
    ) -> None:
        """Make the contexts.

        Args:
            settings: default :class:`Settings`. `n_ctx` is the length of each sequence. Memory is
                taken for all sequences, with n_sequences * (drafts + 1) recurrent states where
                rollback goes by snapshots ("auto": up to AUTO_DEPTH drafts). `n_batch` and
                `n_ubatch` must hold as many tokens. Each sequence has its own `checkpoints`.
            n_sequences: most sequences at once, 1 to 256; more prompts wait for one to end.
            vision: the model's image encoder, for chats with images; the caller closes it.

        Raises:
            UsageError: settings that do not go together, or not with this model.
            InsufficientMemoryError: caches and buffers do not fit into memory.
        """
        super().__init__(model, settings, vision=vision, n_sequences=n_sequences)

    def generate(  # type: ignore[override]
        self,
        prompts: Iterable[Prompt | ImagePrompt],
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

        A generation that is started before this one has ended takes its sequences, and ends it.

        Args:
            prompts: at least one; each as for :meth:`Session.generate`, or of
                :meth:`.Vision.prompt`, with images. Lengths may differ.
            max_tokens: most tokens to generate, at least 1, or -1: as many as there is room for;
                for all prompts, or one for each.
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
        each = _for_each("sampling", sampling, len(chosen))
        told = Options(stop, log_pairs, log_ties, logprobs, on_progress)  # type: ignore[arg-type]

        def request(i: int, prompt: Prompt | ImagePrompt) -> Request:
            tell = partial(on_progress, i) if on_progress else None
            limits, own = Limits(most[i], ignore_eos, draft), replace(told, on_progress=tell)
            return self._request(prompt, limits, each[i], own)

        return self._start("prompts", chosen, request)

    def _start(
        self, name: str, given: list[Item], request: Callable[[int, Item], Request]
    ) -> BatchGeneration:
        requests = list[Request]()
        for i, one in enumerate(given):
            try:
                requests.append(request(i, one))
            except UsageError as error:
                raise UsageError(f"{name}[{i}]: {error}") from None
        return BatchGeneration(self._engine, requests)

    def chat(  # type: ignore[override]
        self,
        conversations: Iterable[Messages],
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
    ) -> BatchGeneration:
        """Start the model's next turn of several conversations; see :meth:`Session.chat`.

        Args:
            conversations: at least one, each a list of messages.

        Raises:
            UsageError: see :meth:`Session.chat`; the message names the conversation.
        """
        offered = Tools.of(tools, tool_choice, parallel_tool_calls)
        options = _chat_options(options, thinking)
        told = Options(stop, logprobs=logprobs, split=True, tools=offered)
        asked = listed(conversations)
        if not asked:
            raise refusal("conversations", conversations, "a list of conversations, at least one")

        def request(i: int, messages: Messages) -> Request:
            return self._turn(messages, options, max_tokens, sampling, draft, told)

        return self._start("conversations", asked, request)


def _chat_options(options: ChatOptions | None, thinking: bool | int | None) -> ChatOptions:
    """`options` with `thinking`, as :meth:`Session.chat` takes it."""
    options = instance("options", options or ChatOptions(), ChatOptions, "ChatOptions(...)")
    if thinking is None or isinstance(thinking, bool):
        return options if thinking is None else replace(options, thinking=thinking)
    if as_index(thinking) is None:
        raise refusal("thinking", thinking, "True, False, None, or a number of tokens")
    return replace(options, thinking=True, budget=thinking)


def _for_each(name: str, given: Value | Sequence[Value], n: int) -> list[Value]:
    """A value for each of `n` prompts: the single value given, or each prompt's own."""
    values = listed(given)
    if values is None:
        return [given] * n  # type: ignore[list-item]
    if len(values) != n:
        raise UsageError(f"{name} has {len(values)} values for {n} prompts; give one for each")
    return values


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
        room = min(len(prompt) + max_tokens, MOST_TOKENS)
        session = stack.enter_context(Session(model, Settings(**settings), room=room))
        yield from session.generate(prompt, sampling=sampling, **options)
