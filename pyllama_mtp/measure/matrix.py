"""The speed matrix: prompt sizes x classes x variants, interleaved, a fresh session per sample.

A variant is no MTP or a draft depth, with its values on the plan's axes, on one of the native
libraries. All variants of a repeat get the same text and are measured side by side: their sessions
are open together, as many as memory holds, process the prompt one after the other, and decode by
turns, some tokens each. So a machine that grows slower or busier slows all of them alike, and their
ratios stay. Other programs get the same text before or after, one at a time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.measure import budget
from pyllama_mtp.measure.classprompts import Prompts
from pyllama_mtp.measure.header import OWN_SETTINGS, Request, brief, now, without_folders
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.plan import SWITCHES, Group, Variant, padded_context
from pyllama_mtp.measure.profile import InterruptedSample, Profile
from pyllama_mtp.measure.recordfile import Record, Run, cell_key
from pyllama_mtp.measure.runner import Measured, SideBySide, Task
from pyllama_mtp.settings import Settings

if TYPE_CHECKING:
    from pyllama_mtp import Model

#: Tokens of a turn. A turn begins with the CPU's caches full of the other sessions' data, so short
#: turns raise the ratios (the demo model's by 0.1 with 4 tokens against 16); in long turns, noise
#: of the machine does not slow all variants alike.
TURN_TOKENS = 32
#: Rest before another process gets its turn: OpenMP's threads spin that long after their last work.
SETTLE_S = 0.02


@dataclass(frozen=True)
class Event:
    """Progress: a sample begins, its prompt is processed, it is done, or its cell is skipped.

    Attributes:
        left_s: estimated seconds for the rest of the run; None: not known yet.
    """

    kind: Literal["start", "prefilled", "done", "skipped"]
    group: Group
    variant: Variant
    measured: Measured | None = None
    left_s: float | None = None


class Matrix:
    """Runs the plan of a request.

    Args:
        model: for the prompts, and its context length.
        run: the run so far; its samples and profiles are not measured again, nor are its skipped
            cells, but for those of other programs, which may work by now.
        runners: by the plan's names of libraries and peers.
        profilers: by the plan's names of libraries; they time the nodes of each prompt in the end.
    """

    def __init__(
        self,
        model: Model,
        request: Request,
        run: Run,
        runners: Mapping[str, SideBySide],
        profilers: Mapping[str, Callable[[Settings, list[int]], Profile]] = {},
    ) -> None:
        plan = self.plan = request.plan
        #: Called at every step; must not raise.
        self.on_event: Callable[[Event], None] = lambda event: None
        #: True once the run is interrupted, here or by the caller; it then ends.
        self.interrupted = False
        #: True while a KeyboardInterrupt loses only samples that are not finished.
        self.measuring = False
        #: Groups that the time budget left out.
        self.dropped: list[Group] = []
        self._model, self._request, self._run = model, request, run.id
        self._runners, self._profilers = runners, profilers
        self._prompts = Prompts(model, request.texts, plan.output_mode)
        self._measured, cells = set(run.measured), run.cells.items()
        self._skipped = {key for key, c in cells if c.skipped and c.program not in plan.peers}
        self._profiled = {key for key, cell in cells if cell.profile}
        self._times: dict[budget.Kind, list[float]] = {}
        self._identities = {
            (kind, variant): self._identify(*kind, variant)
            for kind in plan.kinds()
            for variant in plan.variants
        }
        self._keys = {name: cell_key(record) for name, record in self._identities.items()}

    def check(self) -> None:
        """Make the shortest prompts and open a session of every variant, so that a run fails before
        it begins, not half-way.

        Raises:
            UsageError: settings that this library or model cannot do; the message names them. A
                class of prompts that needs more tokens than the smallest size.
        """
        for kind in self.plan.classes:
            for repeat in range(self.plan.repeat):
                self._prompts.prompt(kind, min(self.plan.sizes), repeat)
        for variant in self.plan.variants:
            settings = self._cell_settings(min(self.plan.sizes), variant)
            try:
                self._runners[variant.library].check(settings, variant.n_sequences)
            except UsageError as error:
                raise UsageError(f"{self.plan.label(variant)}: {error}") from None
            except InsufficientMemoryError:
                pass  # the cell says so, and the others are measured

    # -- order -------------------------------------------------------------------------------------

    def run(self) -> Iterator[Record]:
        """Yield a record of every sample as soon as it is finished, and of every skipped cell.

        Ctrl-C ends the run, and sets `interrupted`.
        """
        began = time.monotonic()
        try:
            while not self.interrupted and (group := self._next_group(began)):
                with closing(self._measure_group(group)) as records:
                    for record in records:
                        self.measuring = False
                        yield record
                        if self.interrupted:
                            return
                        self.measuring = True
                self.measuring = False
            yield from self._profiles()
        except (KeyboardInterrupt, DecodeAborted, InterruptedSample):
            self.measuring, self.interrupted = False, True
            return
        finally:
            self.measuring = False
        if self.dropped and not self.interrupted:
            groups = [
                {"n_prompt": one.size, "prompt_class": one.prompt_class, "repeat": one.repeat}
                for one in self.dropped
            ]
            yield self._record("dropped", {}, budget_s=self._request.budget_s, groups=groups)

    def _profiles(self) -> Iterator[Record]:
        """A profile of every prompt, for each way to process it, that has none yet."""
        for kind, variant in self.plan.prompts(self._profilers):
            group, key = Group(*kind, 0), self._keys[kind, variant]
            if self.interrupted or key in self._skipped or key in self._profiled:
                continue
            self.measuring = True
            self.on_event(Event("start", group, variant))
            prompt = self._prompts.prompt(group.prompt_class, group.size, 0)
            measure = self._profilers[variant.library]
            found = measure(self._cell_settings(group.size, variant), prompt).to_dict()
            self.measuring = False
            yield self._record("profile", self._identities[kind, variant], profile=found)

    def _next_group(self, began: float) -> Group | None:
        """The next group that has samples to measure, and for which there is time."""
        groups = self.plan.groups()
        pending = [group for group in groups if self._to_do(group)]
        cost = budget.estimate(self._times, self.plan.work)
        dropped: set[Group] = set()
        if self._request.budget_s is not None and cost is not None:
            left_s = self._request.budget_s - (time.monotonic() - began)
            done = Counter(group.kind for group in groups if group not in pending)
            dropped = budget.to_drop(pending, done, cost, left_s)
        self.dropped = [group for group in pending if group in dropped]
        return next((group for group in pending if group not in dropped), None)

    def _to_do(self, group: Group) -> list[Variant]:
        """Variants of a group that are still to be measured, in the order of their turns."""
        keys = {variant: self._key(group, variant) for variant in self.plan.order(group.repeat)}
        return [
            variant
            for variant, key in keys.items()
            if key not in self._skipped and (key, group.repeat) not in self._measured
        ]

    @property
    def n_to_do(self) -> int:
        """Samples that are still to be measured, those that the budget leaves out included."""
        return sum(len(self._to_do(group)) for group in self.plan.groups())

    def left_s(self) -> float | None:
        """Estimated seconds for the rest of the run; None before anything was measured."""
        cost = budget.estimate(self._times, self.plan.work)
        if cost is None:
            return None
        rest = sum(
            cost(group) * len(todo) / self._n_measurable(group)
            for group in self.plan.groups()
            if group not in self.dropped and (todo := self._to_do(group))
        )
        return max(0.0, rest)

    def _n_measurable(self, group: Group) -> int:
        """Variants that are not skipped."""
        return sum(self._key(group, one) not in self._skipped for one in self.plan.variants)

    # -- measuring a group -------------------------------------------------------------------------

    def _measure_group(self, group: Group) -> Generator[Record, None, None]:
        """Every variant that is still to be measured, as many at once as memory holds."""
        self.measuring = True
        began, todo = time.monotonic(), self._to_do(group)
        waiting, n_measured = todo, 0
        if reason := self._too_long(group.size):
            yield from (self._skip(group, variant, reason) for variant in todo)
            return
        prompts = [
            self._prompts.prompt(
                group.prompt_class, group.size, group.repeat + n * self.plan.repeat
            )
            for n in range(max(variant.n_sequences for variant in todo))
        ]
        try:
            while waiting:
                together, refused = self._begin(group, waiting, prompts)
                waiting = waiting[len(together) + len(refused) :]
                for variant, why in refused.items():
                    yield self._skip(group, variant, why)
                for record in self._finish(group, together):
                    n_measured += record["kind"] == "sample"
                    yield record
        finally:
            for runner in self._runners.values():
                runner.drop()
        if n_measured:
            whole = (time.monotonic() - began) * self._n_measurable(group) / n_measured
            self._times.setdefault(group.kind, []).append(whole)

    def _begin(
        self, group: Group, variants: list[Variant], prompts: list[list[int]]
    ) -> tuple[list[Variant], dict[Variant, str]]:
        """Open and warm up sessions in the order of `variants` until memory is full. The variants
        that are open, and those that do not fit by themselves, with the reason."""
        together: list[Variant] = []
        refused: dict[Variant, str] = {}
        for variant in variants:
            if together and {variant.library, together[0].library} & {*self.plan.peers}:
                break  # another program is measured alone
            settings = self._cell_settings(group.size, variant)
            warm_up, own = min(group.size, settings.n_batch), prompts[: variant.n_sequences]
            task = Task(settings, self._request.sampling, own, self.plan.max_tokens, warm_up)
            self.on_event(Event("start", group, variant, left_s=self.left_s()))
            if variant.library in self.plan.peers:
                time.sleep(SETTLE_S)
            try:
                self._runners[variant.library].begin(self._number(variant), task)
            except (InsufficientMemoryError, PeerError) as error:
                if together:
                    break  # the variant may fit when the others are closed
                refused[variant] = str(error)
            else:
                together.append(variant)
        return together, refused

    def _finish(self, group: Group, variants: list[Variant]) -> Iterator[Record]:
        """Process the prompts one after the other, or by turns, then decode by turns; yield records
        as generations end."""
        if not variants:
            return  # none of them can be measured
        last = ""

        def runner(variant: Variant) -> SideBySide:
            nonlocal last
            if variant.library != last and len(self._runners) > 1:
                time.sleep(SETTLE_S)
            last = variant.library
            return self._runners[last]

        def turn(variant: Variant, goal: int) -> int:
            return runner(variant).advance(self._number(variant), goal)

        step = self.plan.prompt_step or group.size
        for number, end in enumerate(range(step, group.size, step)):
            first = number % len(variants)  # another variant in every step
            for variant in [*variants[first:], *variants[:first]]:
                runner(variant).read(self._number(variant), end)
        tokens = {}
        for variant in variants:
            tokens[variant] = turn(variant, 1)
            self.on_event(Event("prefilled", group, variant, left_s=self.left_s()))
        while tokens:
            variant = min(tokens, key=lambda one: tokens[one])
            goal = min(tokens[variant] + TURN_TOKENS, self.plan.max_tokens)
            tokens[variant] = turn(variant, goal)
            if tokens[variant] >= self.plan.max_tokens or tokens[variant] < goal:
                del tokens[variant]
                measured = self._runners[variant.library].finish(self._number(variant))
                self._measured.add((self._key(group, variant), group.repeat))
                identity = {**self._identities[group.kind, variant], "repeat": group.repeat}
                sample = dataclasses.asdict(measured.sample)
                yield self._record("sample", identity, memory=measured.memory, sample=sample)
                self.on_event(Event("done", group, variant, measured, self.left_s()))

    def _number(self, variant: Variant) -> int:
        return self.plan.variants.index(variant)

    def _too_long(self, size: int) -> str | None:
        """Why a prompt of this size cannot be measured; None: it can."""
        needed = size + self.plan.max_tokens
        limit, whose = self._model.n_ctx_train, "the model's context"
        if 0 < self._request.settings.n_ctx < limit:
            limit, whose = self._request.settings.n_ctx, "the context asked for"
        if needed <= limit:
            return None
        return (
            f"prompt {size} + {self.plan.max_tokens} generated = {needed} tokens "
            f"exceed {whose}, {limit}"
        )

    # -- records -----------------------------------------------------------------------------------

    def _record(self, kind: str, identity: Record, **more: Any) -> Record:
        return {"kind": kind, "run": self._run, **identity, "time": now(), **more}

    def _skip(self, group: Group, variant: Variant, reason: str) -> Record:
        self._skipped.add(self._key(group, variant))
        self.on_event(Event("skipped", group, variant, left_s=self.left_s()))
        return self._record("skipped", self._identities[group.kind, variant], reason=brief(reason))

    def _key(self, group: Group, variant: Variant) -> str:
        return self._keys[group.kind, variant]

    def _identify(self, size: int, prompt_class: str, variant: Variant) -> Record:
        """`cell` and `settings` of a record."""
        settings = self._cell_settings(size, variant)
        names = dict.fromkeys((*OWN_SETTINGS, *variant.settings))
        own = {name: getattr(settings, name) for name in names}
        rates = own["synthetic_acceptance"]
        own["synthetic_acceptance"] = list(rates) if rates else None
        own["draft_vocab"] = without_folders(str(own["draft_vocab"]))
        cell = {
            "build": variant.library,
            "n_prompt": size,
            "prompt_class": prompt_class,
            "n_max": settings.depth_limit,
            "max_tokens": self.plan.max_tokens,
        }
        if settings.draft_n_max == "auto":
            cell["adaptive"] = True
        if more := {name: value for name, value in variant.axes if name not in SWITCHES}:
            cell["axes"] = json.loads(json.dumps(more))  # as a reader sees it: lists for tuples
        return {"cell": cell, "settings": own}

    def _cell_settings(self, size: int, variant: Variant) -> Settings:
        """The settings of one cell; see :class:`.Request` for the fields that are replaced."""
        settings, depth = self._request.settings, variant.depth
        needed = self.plan.context_needed(size)
        given = {"synthetic_acceptance": settings.synthetic_acceptance, **variant.settings}
        if given["synthetic_acceptance"] and isinstance(depth, int):
            given["synthetic_acceptance"] = given["synthetic_acceptance"][:depth] or None
        return dataclasses.replace(
            settings,
            n_ctx=settings.n_ctx or padded_context(needed, self._model.n_ctx_train),
            draft_n_max=depth,
            **{**SWITCHES, **given},
        )
