"""The speed matrix: the cells of a plan, interleaved, a fresh session per sample.

All cells of a group get the same text and are measured side by side: their sessions are open
together, as many as memory holds, process the prompt one after the other, and decode by turns, some
tokens each. So a machine that grows slower or busier slows all of them alike, and their ratios
stay. Other programs get the same text before or after, one at a time.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.measure.images import ImageText, Imaging
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.plan import SWITCHES, Key, Kind, Plan, padded_context
from pyllama_mtp.measure.prompts import Prompts
from pyllama_mtp.measure.records import (
    Line,
    Measured,
    Run,
    Skipped,
    as_read,
    now,
)
from pyllama_mtp.measure.request import MatrixRequest, without_folders
from pyllama_mtp.measure.runner import InterruptedSample, SideBySide, Task, filling
from pyllama_mtp.measure.sample import Sample
from pyllama_mtp.settings import Settings

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model

#: The fields of `Settings` for which every cell has its own value.
OWN_SETTINGS = ("n_ctx", "draft_n_max", "synthetic_acceptance", *SWITCHES)


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
#: Rest before another process gets its turn: OpenMP's threads spin that long after their last work.
SETTLE_S = 0.02


@dataclass(frozen=True)
class MatrixEvent:
    """Progress: a sample begins, its prompt is processed, it is done, or its cell is skipped."""

    kind: Literal["start", "prefilled", "done", "skipped"]
    key: Key
    repeat: int
    sample: Sample | None = None


class Matrix:
    """Runs a plan.

    Args:
        model: for the prompts, and its context length.
        request: what was asked for.
        plan, settings: what the model can do of it, and the settings of all cells; see
            :class:`.MatrixRequest` for the fields that each cell replaces.
        run: the run so far; its samples are not measured again, nor are its skipped cells, but for
            those of other programs, which may work by now.
        runners: by the plan's names of libraries and peers.
        imaging: for the class "image".
    """

    def __init__(
        self,
        model: Model,
        request: MatrixRequest,
        plan: Plan,
        settings: Settings,
        run: Run,
        runners: Mapping[str, SideBySide],
        imaging: Imaging | None = None,
    ) -> None:
        self.plan = plan
        #: Called at every step; must not raise.
        self.on_event: Callable[[MatrixEvent], None] = lambda event: None
        #: True once the run was interrupted.
        self.interrupted = False
        self._end = math.inf
        self._model, self._request, self._settings, self._run = model, request, settings, run.id
        self._runners = runners
        texts = None if request.text is None else [request.text]
        self._prompts = Prompts(model, texts, request.questions, imaging)
        self._groups = plan.groups()
        kinds = [(repeat, keys[0].kind) for repeat, keys in self._groups]
        questions = (self._prompt(kind, repeat) for repeat, kind in kinds if not kind[0])
        self._longest = max(map(len, questions), default=0)
        cells = run.cells.items()
        self._measured = set(run.measured)
        self._skipped = {key for key, c in cells if c.skipped and c.program not in plan.peers}
        self._numbers = {
            key: number for kind in plan.kinds() for number, key in enumerate(plan.cells(*kind))
        }

    def check(self) -> None:
        """Make the shortest prompts and open a session of every way to measure, beside the one that
        fills its context, so that a run fails before it begins, not half-way.

        Raises:
            UsageError: settings that this library or model cannot do; the message names them. A
                class of prompts that needs more tokens than the smallest size.
            InsufficientMemoryError: the longest context cannot be filled.
        """
        shortest = min(filter(None, self.plan.sizes), default=0)
        for repeat, keys in self._groups:
            if keys[0].n_prompt == shortest:
                self._prompt(keys[0].kind, repeat)
        todo = [key for group in self._groups for key in self.to_do(*group)]
        longest, least = max((key.n_context for key in todo), default=0), min(self.plan.sizes)
        for key in dict.fromkeys(replace(one, n_prompt=least, prompt_class="") for one in todo):
            if key.n_context < longest:
                continue
            filled = self._filling(self.plan.filler(key)) if longest else None
            try:
                check = self._runners[key.build].check
                check(self._cell_settings(key), key.n_sequences, filled)
            except UsageError as error:
                raise UsageError(f"{self.plan.label(key)}: {error}") from None
            except InsufficientMemoryError as error:
                if longest:  # else the cell says so, and the others are measured
                    raise InsufficientMemoryError(
                        f"a context of {longest:,} tokens cannot be filled: {error}; use shorter "
                        "ones (--at), a smaller cache type (q8_0, q4_0) or fewer axes"
                    ) from None

    # -- order -------------------------------------------------------------------------------------

    def run(self) -> Iterator[Line]:
        """Yield a record of every sample as soon as it is finished, and of every skipped cell.

        After the time budget no further group begins, nor a longer context of a group. Ctrl-C ends
        the run, and sets `interrupted`.
        """
        if self._request.budget_s is not None:
            self._end = time.monotonic() + self._request.budget_s
        try:
            for repeat, keys in self._groups:
                if self._is_late(repeat):
                    return
                if self.to_do(repeat, keys):
                    yield from self._measure_group(repeat, keys)
        except (KeyboardInterrupt, DecodeAborted, InterruptedSample):
            self.interrupted = True

    def _is_late(self, repeat: int) -> bool:
        """Whether the budget is spent, and something was measured for it."""
        began = bool(self._measured or self._skipped)
        return began and repeat >= self._request.least_repeats and time.monotonic() > self._end

    def _prompt(self, kind: Kind, repeat: int, number: int = 0) -> list[int] | ImageText:
        """The prompt of a group, or of the sequence of this number."""
        size, prompt_class = kind
        text = repeat + number * self.plan.repeat
        return self._prompts.prompt(prompt_class, size + self.plan.contexts[-1], text)

    def to_do(self, repeat: int, keys: Sequence[Key]) -> list[Key]:
        """The cells of a group that are still to be measured, in the order of their turns."""
        return [
            key for key in keys if key not in self._skipped and (key, repeat) not in self._measured
        ]

    @property
    def n_to_do(self) -> int:
        """Samples that are still to be measured, those that the budget leaves out included."""
        return sum(len(self.to_do(*group)) for group in self._groups)

    # -- measuring a group -------------------------------------------------------------------------

    def _measure_group(self, repeat: int, keys: Sequence[Key]) -> Iterator[Line]:
        """Every cell that is still to be measured, as many at once as memory holds."""
        waiting = self.to_do(repeat, keys)
        n_sequences = max(key.n_sequences for key in waiting)
        prompts = [self._prompt(keys[0].kind, repeat, number) for number in range(n_sequences)]
        try:
            while waiting:
                together, refused = self._begin(waiting, repeat, prompts)
                waiting = waiting[len(together) + len(refused) :]
                for key, why in refused.items():
                    yield self._skip(key, repeat, why)
                yield from self._finish(together, repeat)
                if self.plan.contexts[-1] and self._is_late(repeat):
                    return
        finally:
            for runner in self._runners.values():
                runner.drop()

    def _begin(
        self, keys: Sequence[Key], repeat: int, prompts: Sequence[list[int] | ImageText]
    ) -> tuple[list[Key], dict[Key, str]]:
        """Open and warm up sessions in the order of `keys` until memory is full, or what is in the
        context changes. The cells whose sessions are open, and those that do not fit by themselves,
        with the reason."""
        together: list[Key] = []
        refused: dict[Key, str] = {}
        for key in keys:
            if together and {key.build, together[0].build} & {*self.plan.peers}:
                break  # another program is measured alone
            at, longest = key.n_context, self.plan.contexts[-1]
            if together and at != together[0].n_context:
                break
            settings, own = self._cell_settings(key), prompts[: key.n_sequences]
            if longest:
                own = [prompt[: at + key.n_prompt] for prompt in own if isinstance(prompt, list)]
            warm_up = min(len(own[0]) - at, settings.n_batch)
            task = Task(
                *(settings, self._request.sampling, own, key.max_tokens, warm_up),
                n_context=at,
                filled=self._filling(self.plan.filler(key)) if at else None,
                stop_at_end=self.plan.stop_at_end,
            )
            self.on_event(MatrixEvent("start", key, repeat))
            if key.build in self.plan.peers:
                time.sleep(SETTLE_S)
            try:
                self._runners[key.build].begin(self._numbers[key], task)
            except (InsufficientMemoryError, PeerError) as error:
                if together:
                    break  # it may fit when the others are closed
                refused[key] = str(error)
            else:
                together.append(key)
        return together, refused

    def _finish(self, keys: Sequence[Key], repeat: int) -> Iterator[Line]:
        """Process the prompts one after the other, then decode by turns; yield records as
        generations end."""
        last = ""

        def turn(key: Key, goal: int) -> int:
            nonlocal last
            if key.build != last and len(self._runners) > 1:
                time.sleep(SETTLE_S)
            last = key.build
            return self._runners[last].advance(self._numbers[key], goal)

        tokens = {}
        for key in keys:
            tokens[key] = turn(key, 1)
            self.on_event(MatrixEvent("prefilled", key, repeat))
        while tokens:
            key = min(tokens, key=lambda one: tokens[one])
            goal = min(tokens[key] + TURN_TOKENS, key.max_tokens)
            tokens[key] = turn(key, goal)
            if tokens[key] >= key.max_tokens or tokens[key] < goal:
                del tokens[key]
                sample, memory = self._runners[key.build].finish(self._numbers[key])
                self._measured.add((key, repeat))
                yield Measured(**self._of_cell(key), repeat=repeat, sample=sample, memory=memory)
                self.on_event(MatrixEvent("done", key, repeat, sample))

    # -- records -----------------------------------------------------------------------------------

    def _of_cell(self, key: Key) -> dict[str, Any]:
        """What all lines of a cell have."""
        settings = self._cell_settings(key)
        names = dict.fromkeys((*OWN_SETTINGS, *key.settings))
        own = {name: getattr(settings, name) for name in names}
        own["synthetic_acceptance"] = own["synthetic_acceptance"] or None
        own["draft_vocab"] = without_folders(str(own["draft_vocab"]))
        return {"run": self._run, "time": now(), "cell": key, "settings": as_read(own)}

    def _skip(self, key: Key, repeat: int, reason: str) -> Skipped:
        self._skipped.add(key)
        self.on_event(MatrixEvent("skipped", key, repeat))
        return Skipped(**self._of_cell(key), reason=brief(reason))

    def _cell_settings(self, key: Key) -> Settings:
        """The settings of one cell; :class:`.MatrixRequest` says which fields are replaced."""
        own: dict[str, Any] = {"synthetic_acceptance": self._settings.synthetic_acceptance}
        own |= {**SWITCHES, **key.settings}
        if own["synthetic_acceptance"] and not key.adaptive:
            own["synthetic_acceptance"] = own["synthetic_acceptance"][: key.n_max] or None
        vocabulary = own["draft_vocab"]
        own["draft_vocab"] = self._request.vocabularies.get(vocabulary, vocabulary)
        n_ctx = self._n_ctx(key.n_prompt, key.n_context)
        return dataclasses.replace(self._settings, n_ctx=n_ctx, draft_n_max=key.depth, **own)

    def _filling(self, filler: Key) -> Settings:
        """Of the session that fills contexts in the way of a cell."""
        n_ctx = self._n_ctx(filler.n_prompt, self.plan.contexts[-1])
        return filling(self._cell_settings(filler), n_ctx, self._model)

    def _n_ctx(self, size: int, n_context: int) -> int:
        """The context of the cells of a size after so many tokens."""
        needed = n_context + self.plan.context_needed(size or self._longest)
        return self._settings.n_ctx or padded_context(needed, self._model.n_ctx_train)
