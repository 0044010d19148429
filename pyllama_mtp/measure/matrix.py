"""The speed matrix: prompt sizes x variants, interleaved, one fresh session per sample.

A variant is no MTP, or a draft depth with the switches that a prompt's cost depends on. For each
size the variants take turns (A B C D A B C D), so that a machine that grows slower or busier in the
meantime slows all of them alike. All variants of one repeat get the same text.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.measure.cells import DRAFT_MTP, NO_MTP, Cell, Sample
from pyllama_mtp.measure.machine import describe_machine
from pyllama_mtp.measure.workload import Workload
from pyllama_mtp.settings import Settings

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Session, Telemetry
    from pyllama_mtp.native import Library

#: Tokens of the prompt, and tokens generated, of the warm-up before each sample.
WARM_UP_PROMPT = 32
WARM_UP_TOKENS = 8
_CONTEXT_STEP = 256  # llama.cpp pads contexts to this many tokens


#: Opens a session with the settings of one cell; it is closed before the next one is opened.
OpenSession = Callable[["Settings"], "Session"]

#: The fields of `Settings` that a plan may vary, with their defaults.
SWITCHES = {
    name: str(getattr(Settings, name))
    for name in ("prompt_rows", "prompt_sync", "hidden", "drafting", "draft_vocab")
}


@dataclass(frozen=True)
class Variant:
    """What a cell does at its size: drafts per round (0: no MTP), and fields of `Settings`."""

    depth: int
    prompt_rows: str = SWITCHES["prompt_rows"]
    prompt_sync: str = SWITCHES["prompt_sync"]
    hidden: str = SWITCHES["hidden"]
    drafting: str = SWITCHES["drafting"]
    draft_vocab: str = SWITCHES["draft_vocab"]


@dataclass(frozen=True)
class Plan:
    """What to measure: prompt sizes and generated tokens in tokens, depths in drafts per round.

    `prompt_rows` and what follows are values of those fields of `Settings`; each depth above 0 is
    measured with every combination of them, depth 0 once, with the defaults.
    """

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    max_tokens: int
    repeat: int
    prompt_rows: tuple[str, ...] = (SWITCHES["prompt_rows"],)
    prompt_sync: tuple[str, ...] = (SWITCHES["prompt_sync"],)
    hidden: tuple[str, ...] = (SWITCHES["hidden"],)
    drafting: tuple[str, ...] = (SWITCHES["drafting"],)
    draft_vocab: tuple[str, ...] = (SWITCHES["draft_vocab"],)

    def __post_init__(self) -> None:
        """Refuse plans that measure nothing, or the same cell twice."""
        for name, values, least in (("prompt sizes", self.sizes, 1), ("depths", self.depths, 0)):
            if not values:
                raise UsageError(f"no {name} given")
            if min(values) < least:
                raise UsageError(f"{name} must be {least} or more, not {min(values)}")
            _check_distinct(name, values)
        for name in SWITCHES:
            if not getattr(self, name):
                raise UsageError(f"no {name} given")
            _check_distinct(name, getattr(self, name))
        for name, words, meaning in (
            ("prompt_sync", self.prompt_sync, "kv or full"),
            ("drafting", self.drafting, "chain or stepwise"),
        ):
            if len(words) > 1 and "auto" in words:
                raise UsageError(
                    f"{name} {', '.join(words)} name one value twice: auto is {meaning}; "
                    "leave it out"
                )
        if self.max_tokens < 1 or self.repeat < 1:
            raise UsageError(
                f"max_tokens ({self.max_tokens}) and repeat ({self.repeat}) must be 1 or more"
            )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The cells of one size, in their order."""
        combinations = [*itertools.product(*(getattr(self, name) for name in SWITCHES))]
        return tuple(
            Variant(depth, *switches)
            for depth in self.depths
            for switches in (combinations if depth else [()])
        )

    def schedule(self) -> list[tuple[int, Variant]]:
        """(repeat, variant) of every sample of one size, in the order they are measured."""
        return [(repeat, variant) for repeat in range(self.repeat) for variant in self.variants]

    def label(self, variant: Variant, *, short: bool = False) -> str:
        """The variant in words, as far as the plan varies it: "depth 3, rows all"; short: "all"."""
        if not variant.depth:
            return "no MTP"
        varied = [name for name in SWITCHES if len(getattr(self, name)) > 1]
        said = [name.removeprefix("prompt_").replace("_", " ") for name in varied]
        names = ["" if short else name + " " for name in said]
        words = [name + getattr(variant, of) for name, of in zip(names, varied, strict=True)]
        return ", ".join([f"depth {variant.depth}", *words])

    def context_needed(self, size: int) -> int:
        """Tokens of context of the cells of one size; the same for all variants."""
        return size + self.max_tokens + max(self.depths) + 1

    def work(self, size: int) -> int:
        """Rough weight of one sample, for progress: a decoded token costs about 10 of prefill."""
        return size + 10 * self.max_tokens


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise UsageError(f"{name} {', '.join(map(str, values))} name one value twice")


@dataclass(frozen=True)
class Build:
    """What the cells say of the library and the machine it ran on."""

    variant: str
    upstream_commit: str
    series: str
    backend: str
    machine: dict[str, Any]

    @classmethod
    def of(cls, library: Library, n_gpu_layers: int) -> Build:
        """Read it from the loaded `Library`; without GPU layers the backend is the CPU."""
        stamp = library.stamp
        accelerators = [d for d in library.devices() if n_gpu_layers and "gpu" in d.kind]
        names = sorted({device.name.rstrip("0123456789") for device in accelerators})
        return cls(
            variant=library.variant,
            upstream_commit=str(stamp.get("upstream_commit", "")),
            series=str(stamp.get("series", "")),
            backend="+".join(names) or "CPU",
            machine=describe_machine([device.description for device in accelerators]),
        )


@dataclass(frozen=True)
class Event:
    """Progress: a sample begins, a sample is done (or left out), a size is done."""

    kind: Literal["start", "done", "size"]
    size: int
    variant: Variant | None = None
    repeat: int = 0
    cell: Cell | None = None


class _InterruptedError(Exception):
    """The driver ended a generation because the user asked for it."""


class Matrix:
    """Runs a plan.

    Args:
        model: the model; sessions come from `open_session`, so it is only tokenized and named.
        plan: what to measure.
        settings: settings of every cell; `draft_n_max` and the switches are set to the variant's,
            `n_ctx` 0 to what the cells of a size need, and synthetic rates are cut to the depth.
        sampling: sampling of every cell.
        open_session: opens a session with given settings.
        prompts: where prompts come from.
        build: library and machine, for the record.
        on_event: told of every step; must not raise.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        settings: Settings,
        sampling: Sampling,
        open_session: OpenSession,
        prompts: Workload,
        build: Build,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.plan = plan
        #: True once the run is interrupted, here or by the caller; it then ends after this size.
        self.interrupted = False
        #: True while a KeyboardInterrupt costs a sample and no more.
        self.measuring = False
        self._model = model
        self._settings = settings
        self._sampling = sampling
        self._open = open_session
        self._prompts = prompts
        self._build = build
        self._on_event = on_event

    def check(self) -> None:
        """Open a session of every variant, so that no run fails half-way for what it could know.

        Raises:
            UsageError: settings that this library or model cannot do; the message names them.
        """
        for variant in self.plan.variants:
            try:
                self._open(self._cell_settings(min(self.plan.sizes), variant)).close()
            except UsageError as error:
                raise UsageError(f"{self.plan.label(variant)}: {error}") from None
            except InsufficientMemoryError:
                pass  # the cell says so, and the others are measured

    def run(self) -> Iterator[Cell]:
        """Yield the cells of a size as soon as they are finished, in the order of the variants.

        After an interruption (Ctrl-C) the cells that have at least one sample still come, then
        the run ends and `interrupted` is true.
        """
        for size in self.plan.sizes:
            cells = {variant: self._cell(size, variant) for variant in self.plan.variants}
            try:
                self.measuring = True
                self._measure_size(size, cells)
                self.measuring = False
            except (KeyboardInterrupt, DecodeAborted, _InterruptedError):
                self.measuring, self.interrupted = False, True
            for cell in cells.values():
                cell.summarize()
                if cell.samples or cell.skipped:
                    yield cell
            if self.interrupted:
                return

    def _measure_size(self, size: int, cells: dict[Variant, Cell]) -> None:
        reason = self._too_long(size)
        for repeat, variant in self.plan.schedule():
            cell = cells[variant]
            self._on_event(Event("start", size, variant, repeat))
            if reason:
                cell.skipped = reason
            if not cell.skipped:
                try:
                    self._measure(cell, self._cell_settings(size, variant), repeat)
                except InsufficientMemoryError as error:
                    if not cell.samples:
                        cell.skipped = str(error)
            self._on_event(Event("done", size, variant, repeat, cell))
        self._on_event(Event("size", size))

    def _measure(self, cell: Cell, settings: Settings, repeat: int) -> None:
        """Add one sample: fresh session, warm-up, prefill and decode, close."""
        prompt = self._prompts.prompt(cell.n_prompt, repeat)
        with self._open(settings) as session:
            self._generate(session, prompt[:WARM_UP_PROMPT], WARM_UP_TOKENS)
            session.reset()
            telemetry = self._generate(session, prompt, self.plan.max_tokens)
            cell.memory = dict(session.memory())
        cell.samples.append(Sample.from_telemetry(telemetry))
        cell.time = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def _generate(self, session: Session, prompt: list[int], max_tokens: int) -> Telemetry:
        generation = session.generate(
            prompt, max_tokens=max_tokens, sampling=self._sampling, ignore_eos=True
        )
        generation.run()
        if generation.finish_reason == "interrupted":
            raise _InterruptedError
        return generation.telemetry

    def _too_long(self, size: int) -> str | None:
        """Why a prompt of this size cannot be measured at all, if so."""
        needed = size + self.plan.max_tokens
        limit, whose = self._model.n_ctx_train, "the model's context"
        if 0 < self._settings.n_ctx < limit:
            limit, whose = self._settings.n_ctx, "the context asked for"
        if needed <= limit:
            return None
        return (
            f"prompt {size} + {self.plan.max_tokens} generated = {needed} tokens "
            f"exceed {whose}, {limit}"
        )

    def _cell_settings(self, size: int, variant: Variant) -> Settings:
        """The settings of one cell; see the class for what is changed."""
        needed = -(-self.plan.context_needed(size) // _CONTEXT_STEP) * _CONTEXT_STEP
        rates, depth = self._settings.synthetic_acceptance, variant.depth
        return dataclasses.replace(
            self._settings,
            n_ctx=self._settings.n_ctx or min(needed, self._model.n_ctx_train),
            draft_n_max=depth,
            synthetic_acceptance=rates[:depth] if rates and depth else None,
            **{name: getattr(variant, name) for name in SWITCHES},
        )

    def _cell(self, size: int, variant: Variant) -> Cell:
        settings, depth = self._cell_settings(size, variant), variant.depth
        rates = settings.synthetic_acceptance
        return Cell(
            model=os.path.basename(self._model.path),  # noqa: PTH119 - also takes plain strings
            variant=self._build.variant,
            upstream_commit=self._build.upstream_commit,
            series=self._build.series,
            backend=self._build.backend,
            mode=DRAFT_MTP if depth else NO_MTP,
            n_max=depth,
            n_prompt=size,
            max_tokens=self.plan.max_tokens,
            repeat=self.plan.repeat,
            synthetic_acceptance=list(rates) if rates else None,
            settings={**_record(settings), "sampling": _record(self._sampling)},
            machine=self._build.machine,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _record(options: Any) -> dict[str, Any]:
    """The fields of a dataclass of settings."""
    return dict(dataclasses.asdict(options))
