"""The speed matrix: prompt sizes x classes x variants, interleaved, a fresh session per sample.

A variant is no MTP or a draft depth, with its values on the plan's axes, on one of the native
libraries. All variants of a repeat get the same text and are measured side by side: their sessions
are open together, as many as memory holds, process the prompt one after the other, and decode by
turns, some tokens each. So a machine that grows slower or busier slows all of them alike, and their
ratios stay. Other programs get the same text before or after, one at a time.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.measure.images import ImageText, Imaging, Picture
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.plan import (
    SWITCHES,
    Group,
    Kind,
    Plan,
    Variant,
    duration,
    estimate,
    padded_context,
    to_drop,
)
from pyllama_mtp.measure.profile import WARM_UP_TOKENS, InterruptedSample
from pyllama_mtp.measure.prompts import Prompt, Prompts
from pyllama_mtp.measure.records import (
    NAME_ANOTHER,
    CellKey,
    Dropped,
    DroppedGroup,
    Line,
    Measured,
    Profile,
    Profiled,
    Run,
    Sample,
    Skipped,
    as_read,
    key_of,
    now,
)
from pyllama_mtp.measure.runner import KEPT, LONG_FILLING_S, SideBySide, Task, filling
from pyllama_mtp.measure.text import counted
from pyllama_mtp.memory import HOST, gigabytes, resolve, simulate
from pyllama_mtp.settings import Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.models.modelinfo import GGUFInfo

#: The fields of `Settings` for which every cell has its own value.
OWN_SETTINGS = ("n_ctx", "draft_n_max", "synthetic_acceptance", *SWITCHES)


@dataclass
class MatrixRequest:
    """A checked request for a matrix.

    Attributes:
        settings, sampling: of every cell; `draft_n_max` and the switches are set to the variant's,
            `n_ctx` 0 to what the cells of a size need, and synthetic rates are cut to the depth.
        command: as it was given; paths lose their folders in the records.
        libraries: as given, one for each label of the plan; "" is the library that is loaded.
        placement: arguments of `Model`, for the processes of further libraries.
        texts: to cut prompts from; None: the package's own.
        questions: of the user, for classes of their own.
        picture: of the prompts of the class "image".
        log_misses: keep every rejected draft in the records.
        budget_s: seconds after which nothing further begins; None: no limit.
        least_repeats: repeats that are measured whatever the budget.
        output: the file; None: no file.
        advice: what to do about a file that cannot be written.
        resume: go on with the last run in the file.
        profile: time the nodes of the prompts in the end.
        usual_depths: the depths are the default; without an MTP head only 0 is measured.
        usual_sizes: the sizes are the default; those beyond the context are left out.
        peer_dir: see :func:`.peers.find`.
    """

    plan: Plan
    settings: Settings
    sampling: Sampling
    command: Sequence[str]
    libraries: tuple[str, ...] = ("",)
    placement: Mapping[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None
    questions: Sequence[Prompt] = ()
    picture: Picture | None = None
    log_misses: bool = False
    budget_s: float | None = None
    least_repeats: int = 0
    output: str | None = None
    advice: str = NAME_ANOTHER
    resume: bool = False
    profile: bool = False
    usual_depths: bool = False
    usual_sizes: bool = False
    peer_dir: str | None = None


def without_folders(word: str) -> str:
    """An argument without the folders of its paths: "--model=m.gguf", "patched,folder"."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + ",".join(Path(part).name or part for part in value.split(","))


def brief(reason: str) -> str:
    """A reason for the records: of a traceback the last line, of paths the last part."""
    head, traceback, rest = reason.partition("Traceback (most recent call last):")
    if traceback and rest.strip():
        reason = head + rest.strip().splitlines()[-1]
    return re.sub(r"(?:/[^\s/:;,'\"()]+)+/(?=[^\s/:;,'\"()])", "", reason)


# -- the order of the samples ----------------------------------------------------------------------


#: Tokens of a turn. A turn begins with the CPU's caches full of the other sessions' data, so short
#: turns raise the ratios (the demo model's by 0.1 with 4 tokens against 16); in long turns, noise
#: of the machine does not slow all variants alike.
TURN_TOKENS = 32
#: Tokens from whose time that of a run is guessed.
PROBE_TOKENS = 128
#: Rest before another process gets its turn: OpenMP's threads spin that long after their last work.
SETTLE_S = 0.02


def _doubled(info: GGUFInfo) -> float:
    """Tokens in the context at which attention has as many operations as the weights, roughly: a
    weight has one product a token, and a layer two for each head, dimension and earlier token."""
    experts = (1 - info.n_expert_used / info.n_expert) if info.n_expert else 0.0
    weights = sum(
        math.prod(tensor.shape) * (1 - experts * ("_exps" in tensor.name))
        for tensor in info.tensors
        if "token_embd" not in tensor.name
    )
    attention = len(info.attention_layers) * info.n_head * (info.head_dim_k + info.head_dim_v)
    return weights / attention if attention else math.inf


@dataclass(frozen=True)
class MatrixEvent:
    """Progress: a sample begins, its prompt is processed, it is done, or its cell is skipped.

    Attributes:
        left_s: estimated seconds for the rest of the run; None: not known yet.
    """

    kind: Literal["start", "prefilled", "done", "skipped"]
    group: Group
    variant: Variant
    sample: Sample | None = None
    left_s: float | None = None


class Matrix:
    """Runs the plan of a request.

    Args:
        model: for the prompts, and its context length.
        run: the run so far; its samples and profiles are not measured again, nor are its skipped
            cells, but for those of other programs, which may work by now.
        runners: by the plan's names of libraries and peers.
        profilers: by the plan's names of libraries; they time the nodes of each prompt in the end.
        imaging: for the class "image".
    """

    def __init__(
        self,
        model: Model,
        request: MatrixRequest,
        run: Run,
        runners: Mapping[str, SideBySide],
        profilers: Mapping[str, Callable[[Settings, list[int]], Profile]] = {},
        imaging: Imaging | None = None,
    ) -> None:
        plan = self.plan = request.plan
        #: Called at every step; must not raise.
        self.on_event: Callable[[MatrixEvent], None] = lambda event: None
        #: True once the run is interrupted, here or by the caller; it then ends.
        self.interrupted = False
        #: True while a KeyboardInterrupt loses only samples that are not finished.
        self.measuring = False
        #: Groups that the time budget left out, or of which it left out the longest contexts.
        self.dropped: list[Group] = []
        self._cut: set[Group] = set()
        self._rates: dict[str, float] = {}
        self._end = math.inf
        self._model, self._request, self._run = model, request, run.id
        self._kept = f"{request.output}.{run.id}" if request.output else ""
        self._runners, self._profilers = runners, profilers
        self._prompts = Prompts(model, request.texts, request.questions, imaging)
        questions = (self._prompt(group) for group in plan.groups() if not group.size)
        self._longest = max(map(len, questions), default=0)
        self._measured, cells = set(run.measured), run.cells.items()
        self._skipped = {key for key, c in cells if c.skipped and c.program not in plan.peers}
        self._profiled = {key for key, cell in cells if cell.profile}
        self._times: dict[Kind, list[float]] = {}
        self._doubled = _doubled(model.info)
        self._identities = {
            (kind, variant): self._identify(*kind, variant)
            for kind in plan.kinds()
            for variant in plan.variants
        }
        self._keys = {name: key_of(*identity) for name, identity in self._identities.items()}

    def check(self) -> None:
        """Make the shortest prompts and open a session of every variant, so that a run fails before
        it begins, not half-way.

        Raises:
            UsageError: settings that this library or model cannot do; the message names them. A
                class of prompts that needs more tokens than the smallest size.
        """
        shortest = min(filter(None, self.plan.sizes), default=0)
        for group in self.plan.groups():
            if group.size == shortest:
                self._prompt(group)
        todo = [one for group in self.plan.groups() for one in self._to_do(group)]
        longest = max((one.n_context for one in todo), default=0)
        for variant in dict.fromkeys(todo):
            if variant.n_context < longest:
                continue
            settings = self._cell_settings(min(self.plan.sizes), variant)
            try:
                self._runners[variant.library].check(settings, variant.n_sequences)
            except UsageError as error:
                raise UsageError(f"{self.plan.label(variant)}: {error}") from None
            except InsufficientMemoryError:
                pass  # the cell says so, and the others are measured

    def needs(self) -> str:
        """What filled contexts need, in words: memory, and roughly the time of the samples that are
        to be measured; "" where contexts are empty.

        Raises:
            InsufficientMemoryError: the longest one, with the session that is measured after it.
        """
        plan, longest = self.plan, self.plan.contexts[-1]
        if not (longest and self.n_to_do):
            return ""
        ours = (one for one in plan.variants if one.library not in plan.peers)
        ways = {one.way: one for one in ours if one.n_context == longest}.values()
        settings = [self._cell_settings(plan.sizes[0], one) for one in ways]
        fillings = {one: self._filling(plan.sizes[0], plan.filler(one)) for one in ways}
        filled = [*{(one.library, repr(its)): its for one, its in fillings.items()}.values()]
        with self._model.without_memory() as twin:
            each = [simulate(twin, resolve(one, twin)) for one in (*filled, *settings)]
        needed = []
        for memories in zip(*each, strict=True):
            own = [one.total - one.parts["weights"] for one in memories]
            total = sum(own[: len(filled)]) + max(own[len(filled) :])
            name, free = memories[0].name, memories[0].free
            if name == HOST:  # a state on its way, and what is left of it without MTP
                state = max(sum(one.parts["target_context"] for one in way) for way in each)
                total += state * (1 + (len(filled) < len(settings)))
            needed.append(f"{gigabytes(total)} of {name}")
            if total > free:
                raise InsufficientMemoryError(
                    f"contexts of {longest:,} tokens need {needed[-1]} ({len(filled)} to "
                    f"fill and one to measure), and {gigabytes(free)} are available; use "
                    "shorter ones (--at), a smaller cache type (q8_0, q4_0) or fewer axes"
                )
        per_token, kept = self._probe(settings[0]), ""
        if self._kept and per_token * longest >= LONG_FILLING_S:
            n_bytes = sum(
                sum(one.parts["target_context"] for one in way) for way in each[: len(filled)]
            )
            kept = (
                f", and up to {gigabytes(2 * n_bytes)} on disk for --resume, until it is complete"
            )
        work = (plan.work(one.size, self._to_do(one), self._doubled) for one in plan.groups())
        return (
            f"contexts of up to {longest:,} tokens, filled {counted(len(filled), 'time')} per "
            f"repeat: at least {', '.join(needed)}, "
            f"roughly {duration(per_token * sum(work))} in all{kept}"
        )

    def _probe(self, settings: Settings) -> float:
        """Seconds of a token of prefill in an empty context, roughly."""
        from pyllama_mtp import Session

        prompt = self._prompt(self.plan.groups()[0])
        assert isinstance(prompt, list)
        n_ctx = padded_context(PROBE_TOKENS + 1, self._model.n_ctx_train)
        with Session(self._model, dataclasses.replace(settings, n_ctx=n_ctx)) as session:
            session.process(prompt[: WARM_UP_TOKENS + 1])
            session.reset()
            return 1 / session.process(prompt[: PROBE_TOKENS + 1]).prefill_tps

    def remove_contexts(self) -> None:
        """Remove the files of filled contexts, once nothing is left to be measured."""
        if self._kept and not self.n_to_do:
            path = Path(self._kept)
            for file in path.parent.glob(f"{glob.escape(path.name)}.*{KEPT}"):
                file.unlink(missing_ok=True)

    # -- order -------------------------------------------------------------------------------------

    def run(self) -> Iterator[Line]:
        """Yield a record of every sample as soon as it is finished, and of every skipped cell.

        Ctrl-C ends the run, and sets `interrupted`.
        """
        if self._request.budget_s is not None:
            self._end = time.monotonic() + self._request.budget_s
        try:
            while not self.interrupted and (group := self._next_group()):
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
            groups = [DroppedGroup(one.size, one.prompt_class, one.repeat) for one in self.dropped]
            seconds = self._request.budget_s or 0.0
            yield Dropped(run=self._run, time=now(), budget_s=seconds, groups=groups)

    def _prompt(self, group: Group, number: int = 0) -> list[int] | ImageText:
        """The prompt of a group, or of the sequence of this number."""
        repeat, size = group.repeat + number * self.plan.repeat, group.size
        return self._prompts.prompt(group.prompt_class, size + self.plan.contexts[-1], repeat)

    def _profiles(self) -> Iterator[Line]:
        """A profile of every prompt, for each way to process it, that has none yet."""
        for kind, variant in self.plan.prompt_variants(self._profilers):
            group, key = Group(*kind, 0), self._keys[kind, variant]
            if self.interrupted or key in self._skipped or key in self._profiled:
                continue
            prompt = self._prompt(group)
            if isinstance(prompt, ImageText):
                continue  # its nodes are not timed
            self.measuring = True
            self.on_event(MatrixEvent("start", group, variant))
            measure = self._profilers[variant.library]
            profile = measure(self._cell_settings(group.size, variant), prompt)
            self.measuring = False
            yield Profiled(**self._of_cell(group, variant), profile=profile)

    def _next_group(self) -> Group | None:
        """The next group that has samples to measure, and for which there is time."""
        groups = self.plan.groups()
        pending = [group for group in groups if self._to_do(group)]
        cost = estimate(self._times, self._whole_work)
        dropped = {*self._cut}
        if self._end < math.inf and cost is not None:
            left_s = self._end - time.monotonic()
            done = Counter(group.kind for group in groups if group not in pending)
            certain = [one for one in pending if one.repeat < self._request.least_repeats]
            others = [one for one in pending if one.repeat >= self._request.least_repeats]
            dropped |= to_drop(others, done, cost, left_s - sum(map(cost, certain)))
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

    def contexts_left(self, group: Group) -> list[int]:
        """The lengths of the context at which samples of a group are still to be measured."""
        return sorted({one.n_context for one in self._to_do(group)})

    @property
    def n_to_do(self) -> int:
        """Samples that are still to be measured, those that the budget leaves out included."""
        return sum(len(self._to_do(group)) for group in self.plan.groups())

    def left_s(self) -> float | None:
        """Estimated seconds for the rest of the run; None before anything was measured."""
        cost = estimate(self._times, self._whole_work)
        if cost is None:
            return None
        rest = sum(
            cost(group) * self._work(group, todo)
            for group in self.plan.groups()
            if group not in self.dropped and (todo := self._to_do(group))
        )
        return max(0.0, rest)

    def _whole_work(self, size: int) -> float:
        return self.plan.work(size, self.plan.variants, self._doubled)

    def _work(self, group: Group, variants: Sequence[Variant]) -> float:
        """The work of some variants of a group, as a part of that of all that are not skipped."""
        possible = [one for one in self.plan.variants if self._key(group, one) not in self._skipped]
        some, whole = (
            self.plan.work(group.size, those, self._doubled) for those in (variants, possible)
        )
        return some / whole

    # -- measuring a group -------------------------------------------------------------------------

    def _measure_group(self, group: Group) -> Generator[Line, None, None]:
        """Every variant that is still to be measured, as many at once as memory holds."""
        self.measuring = True
        began, todo = time.monotonic(), self._to_do(group)
        waiting, measured = todo, list[Variant]()
        times = self._times.setdefault(group.kind, [])
        n_times = len(times)
        n_sequences = max(variant.n_sequences for variant in todo)
        prompts = [self._prompt(group, number) for number in range(n_sequences)]
        try:
            while waiting:
                if self._is_late(group, waiting, measured):
                    self._cut.add(group)
                    return
                before = time.monotonic()
                together, refused = self._begin(group, waiting, prompts)
                waiting = waiting[len(together) + len(refused) :]
                for variant, why in refused.items():
                    yield self._skip(group, variant, why)
                yield from self._finish(group, together)
                if together:
                    work = self._further_work(group, measured, together)
                    self._rates[together[0].library] = (time.monotonic() - before) / work
                if measured := measured + together:
                    whole = (time.monotonic() - began) / self._work(group, measured)
                    times[n_times:] = [whole]
        finally:
            for runner in self._runners.values():
                runner.drop()

    def _is_late(self, group: Group, waiting: list[Variant], measured: list[Variant]) -> bool:
        """Whether there is no time for the next length of the context, at the rate of the one
        before."""
        if self._end == math.inf or not self._rates or not self.plan.contexts[-1]:
            return False
        first = waiting[0]
        alike = [
            one
            for one in waiting
            if one.n_context == first.n_context and one.library == first.library
        ]
        rate = self._rates.get(first.library, max(self._rates.values()))
        needed_s = rate * self._further_work(group, measured, alike)
        return time.monotonic() + needed_s > self._end

    def _further_work(self, group: Group, done: list[Variant], more: list[Variant]) -> float:
        """The work of `more` variants of a group when others are `done`."""
        before, after = (
            self.plan.work(group.size, those, self._doubled) for those in (done, done + more)
        )
        return after - before

    def _begin(
        self, group: Group, variants: list[Variant], prompts: Sequence[list[int] | ImageText]
    ) -> tuple[list[Variant], dict[Variant, str]]:
        """Open and warm up sessions in the order of `variants` until memory is full, or what is in
        the context changes. The variants that are open, and those that do not fit by themselves,
        with the reason."""
        together: list[Variant] = []
        refused: dict[Variant, str] = {}
        for variant in variants:
            if together and {variant.library, together[0].library} & {*self.plan.peers}:
                break  # another program is measured alone
            at, longest = variant.n_context, self.plan.contexts[-1]
            if together and at != together[0].n_context:
                break
            settings, own = self._cell_settings(group.size, variant), prompts[: variant.n_sequences]
            if longest:
                own = [prompt[: at + group.size] for prompt in own if isinstance(prompt, list)]
            warm_up = min(len(own[0]) - at, settings.n_batch)
            task = Task(
                *(settings, self._request.sampling, own, self.plan.max_tokens, warm_up),
                n_context=at,
                filled=self._filling(group.size, self.plan.filler(variant)) if at else None,
                kept=self._kept,
                stop_at_end=self.plan.stop_at_end,
                log_misses=self._request.log_misses,
            )
            self.on_event(MatrixEvent("start", group, variant, left_s=self.left_s()))
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

    def _finish(self, group: Group, variants: list[Variant]) -> Iterator[Line]:
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

        step = self.plan.prompt_step or group.size or 1
        at = variants[0].n_context
        for number, end in enumerate(range(at + step, at + group.size, step)):
            first = number % len(variants)  # another variant in every step
            for variant in [*variants[first:], *variants[:first]]:
                runner(variant).read(self._number(variant), end)
        tokens = {}
        for variant in variants:
            tokens[variant] = turn(variant, 1)
            self.on_event(MatrixEvent("prefilled", group, variant, left_s=self.left_s()))
        while tokens:
            variant = min(tokens, key=lambda one: tokens[one])
            goal = min(tokens[variant] + TURN_TOKENS, self.plan.max_tokens)
            tokens[variant] = turn(variant, goal)
            if tokens[variant] >= self.plan.max_tokens or tokens[variant] < goal:
                del tokens[variant]
                sample, memory = self._runners[variant.library].finish(self._number(variant))
                self._measured.add((self._key(group, variant), group.repeat))
                yield Measured(
                    **self._of_cell(group, variant),
                    repeat=group.repeat,
                    sample=sample,
                    memory=memory,
                )
                self.on_event(MatrixEvent("done", group, variant, sample, self.left_s()))

    def _number(self, variant: Variant) -> int:
        return self.plan.variants.index(variant)

    # -- records -----------------------------------------------------------------------------------

    def _of_cell(self, group: Group, variant: Variant) -> dict[str, Any]:
        """What all lines of a cell have."""
        cell, settings = self._identities[group.kind, variant]
        return {"run": self._run, "time": now(), "cell": cell, "settings": settings}

    def _skip(self, group: Group, variant: Variant, reason: str) -> Skipped:
        self._skipped.add(self._key(group, variant))
        self.on_event(MatrixEvent("skipped", group, variant, left_s=self.left_s()))
        return Skipped(**self._of_cell(group, variant), reason=brief(reason))

    def _key(self, group: Group, variant: Variant) -> bytes:
        return self._keys[group.kind, variant]

    def _identify(
        self, size: int, prompt_class: str, variant: Variant
    ) -> tuple[CellKey, dict[str, Any]]:
        """The key of a cell, and its own settings."""
        settings = self._cell_settings(size, variant)
        names = dict.fromkeys((*OWN_SETTINGS, *variant.settings))
        own = {name: getattr(settings, name) for name in names}
        own["synthetic_acceptance"] = own["synthetic_acceptance"] or None
        own["draft_vocab"] = without_folders(str(own["draft_vocab"]))
        axes = {name: value for name, value in variant.axes if name not in SWITCHES}
        key = CellKey(
            build=variant.library,
            n_prompt=size,
            prompt_class=prompt_class,
            n_max=settings.depth_limit,
            max_tokens=self.plan.max_tokens,
            adaptive=settings.draft_n_max == "auto",
            axes=as_read(axes),
        )
        return key, as_read(own)

    def _cell_settings(self, size: int, variant: Variant) -> Settings:
        """The settings of one cell; :class:`.MatrixRequest` says which fields are replaced."""
        settings, depth = self._request.settings, variant.depth
        own = {"synthetic_acceptance": settings.synthetic_acceptance, **variant.settings}
        if own["synthetic_acceptance"] and isinstance(depth, int):
            own["synthetic_acceptance"] = own["synthetic_acceptance"][:depth] or None
        return dataclasses.replace(
            settings,
            n_ctx=self._n_ctx(size, variant.n_context),
            draft_n_max=depth,
            **{**SWITCHES, **own},
        )

    def _filling(self, size: int, filler: Variant) -> Settings:
        """Of the session that fills contexts in the way of a variant."""
        settings = self._cell_settings(size, filler)
        return filling(settings, self._n_ctx(size, self.plan.contexts[-1]), self._model)

    def _n_ctx(self, size: int, n_context: int) -> int:
        """The context of the cells of a size after so many tokens."""
        needed = n_context + self.plan.context_needed(size or self._longest)
        return self._request.settings.n_ctx or padded_context(needed, self._model.n_ctx_train)
