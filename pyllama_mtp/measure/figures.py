"""Cells, and the figures that are made of their samples: medians, rates, ratios and intervals.

A cell is all samples of one prompt size, class and variant. Timings are medians of the samples.
Counts (drafted, accepted, rounds) are summed over the samples, and every rate is a total over a
total.

Samples of one repeat are measured next to each other in time, so sample r of one cell is compared
with sample r of the other: a machine that is slow for a while slows both, and their ratio stays.

A series is what a line of a plot is: cells that differ in nothing but the prompt size. What can
tell two series apart are their dimensions (program, mode, library variant, ...); a label names the
mode, and of the others those that vary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from pyllama_mtp.measure.intervals import Ratio, typical_ratio
from pyllama_mtp.measure.plan import AXES, COPY, DRAFT_AXES, PLAIN_AXES, Key, axis_name, axis_words
from pyllama_mtp.measure.text import counted

if TYPE_CHECKING:
    from pyllama_mtp.measure.plan import ImageFile
    from pyllama_mtp.telemetry import Telemetry

#: Raised when the meaning of a field changes; see records.py.
SCHEMA: Literal[2] = 2
#: The `program` of this project's own measurements.
OURS = "pyllama-mtp"
#: At adaptive depth, a position with fewer drafts than this has no acceptance rate.
LEAST_DRAFTS = 20
#: The fields of a sample that are compared: tokens per second (of a prompt also with the time to
#: encode its images), and the whole time in seconds.
Figure = Literal["prefill_tps", "prompt_tps", "decode_tps", "elapsed_s"]
#: The speeds among them, by the names that users give and see.
SPEEDS: dict[str, Figure] = {"prefill": "prefill_tps", "decode": "decode_tps"}


class Sample(Struct, omit_defaults=True):
    """One generation as it was measured: seconds, tokens per second, tokens.

    An empty field is not known.

    Attributes:
        drafted, accepted: one count per draft position 1..n_max, without n-gram drafts.
        mean_acceptance_length: 1 + accepted drafts per verification pass, n-gram drafts among
            them; older files have it as `tokens_per_round`.
        time_s: seconds of each phase, "prompt_sync" among them; "image" is the part of the prefill
            in which the rows of images were processed.
        prompt_sync: how the prompt was synced: "kv" or "full".
        waited_s: seconds that all threads together waited for a core, in "prefill" and "decode".
        looked_up: counts of n-gram drafts.
        n_image_tokens: of the prompt, rows of images; encode_s: seconds in which these were
            encoded, which `prefill_s` does not contain, but `elapsed_s` does. Other programs count
            them into `prefill_s`.
    """

    n_prompt: int
    n_generated: int
    prefill_s: float
    decode_s: float
    elapsed_s: float
    prefill_tps: float
    decode_tps: float
    drafted: list[int]
    accepted: list[int]
    rounds: int
    mean_acceptance_length: float = 0.0
    time_s: dict[str, float] = {}
    prompt_sync: str = ""
    waited_s: dict[str, float] = {}
    looked_up: dict[str, int] = {}
    n_image_tokens: int = 0
    encode_s: float = 0.0
    tokens_per_round: float = 0.0

    def __post_init__(self) -> None:
        """Take the mean acceptance length by its older name."""
        self.mean_acceptance_length = self.mean_acceptance_length or self.tokens_per_round
        self.tokens_per_round = 0.0

    @property
    def prompt_tps(self) -> float:
        """Tokens of the prompt per second of prefill and encoding together."""
        whole = self.prefill_s + self.encode_s
        return self.prefill_tps * self.prefill_s / whole if whole > 0 else 0.0

    @classmethod
    def from_telemetry(cls, telemetry: Telemetry) -> Sample:
        """The driver's telemetry, as far as a sample keeps it."""
        apart = ("waited_s", "mean_acceptance_length")
        names = [name for name in cls.__struct_fields__ if name not in apart]
        return cls(**{name: copy(getattr(telemetry, name)) for name in names})


@dataclass
class Cell:
    """One cell of a matrix: what was measured, the samples, and their figures as properties.

    Rates and times are None where nothing was measured.

    Attributes:
        model: file name without its folder.
        series: hash of the patch series.
        key: what was measured; its fields are attributes of the cell, too.
        repeat: samples that were planned; an interrupted cell has fewer.
        repeats: the number of each sample's repeat; samples of the same repeat are paired.
        memory: bytes by use.
        skipped: why nothing was measured.
        program: the program that measured.
        run: id of the run.
        slow_types: tensor types without a fast path for a few rows on the CPU, and their shares of
            what a plain step reads; empty: not looked at.
        image: with which the prompts begin, or None.
        loaded: of the model, see :class:`.RunHeader`.
    """

    model: str
    variant: str
    upstream_commit: str
    series: str
    backend: str
    key: Key
    repeat: int
    samples: list[Sample] = field(default_factory=list)
    synthetic_acceptance: list[float] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    time: str = ""
    skipped: str | None = None
    program: str = OURS
    repeats: list[int] = field(default_factory=list)
    run: str = ""
    slow_types: dict[str, float] = field(default_factory=dict)
    image: ImageFile | None = None
    loaded: dict[str, Any] = field(default_factory=dict)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt; 0: questions as they are."""
        return self.key.n_prompt

    @property
    def prompt_class(self) -> str:
        """The kind of text of the prompts."""
        return self.key.prompt_class

    @property
    def n_max(self) -> int:
        """Drafts per round, of adaptive depth the most; 0 is no MTP."""
        return self.key.n_max

    @property
    def adaptive(self) -> bool:
        """Whether the depth was chosen while generating, from 0 to `n_max`."""
        return self.key.adaptive

    @property
    def max_tokens(self) -> int:
        """Tokens to generate."""
        return self.key.max_tokens

    @property
    def n_context(self) -> int:
        """Tokens in the context before the prompt."""
        return self.key.n_context

    @property
    def axes(self) -> dict[str, Any]:
        """The values of the settings that the plan varies, by name."""
        return self.key.axes

    @property
    def from_text(self) -> bool:
        """Whether all drafts came from earlier in the text, since the model has no MTP head."""
        chosen = self.adaptive and self.program == OURS and bool(self.samples)
        return chosen and not any(sample.prompt_sync for sample in self.samples)

    @property
    def mode(self) -> str:
        """ "draft-mtp" or "no-mtp"."""
        return "draft-mtp" if self.n_max else "no-mtp"

    @property
    def prefill_tps(self) -> float | None:
        """Tokens of the prompt per second, the median."""
        return self._median("prefill_tps")

    @property
    def decode_tps(self) -> float | None:
        """Tokens after the first per second, the median."""
        return self._median("decode_tps")

    @property
    def prefill_s(self) -> float | None:
        """Seconds of the prompt, the median."""
        return self._median("prefill_s")

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of prompt and answer, the median."""
        return self._median("elapsed_s")

    @property
    def encode_s(self) -> float | None:
        """Seconds to encode the image, the median; None without one, and where they are not known
        apart."""
        times = [sample.encode_s for sample in self.samples if sample.encode_s]
        return median(times) if times else None

    @property
    def image_s(self) -> float | None:
        """Seconds of the prefill that the rows of the image took, the median; None as above."""
        times = [sample.time_s["image"] for sample in self.samples if "image" in sample.time_s]
        return median(times) if times else None

    def _median(self, figure: str) -> float | None:
        return median(getattr(one, figure) for one in self.samples) if self.samples else None

    def spread(self, figure: Figure) -> tuple[float, float, float] | None:
        """Median, lowest and highest of the samples; None where nothing was measured."""
        values = [float(getattr(sample, figure)) for sample in self.samples]
        speeds = [value for value in values if value > 0]
        middle = median(values) if values else 0.0
        return (middle, min(speeds), max(speeds)) if speeds and middle else None

    @property
    def prompt_sync_share(self) -> float | None:
        """Part of the prefill's time that the MTP block took; None without MTP."""
        prefill_s = sum(sample.prefill_s for sample in self.samples)
        if not (self.n_max and prefill_s > 0 and self.program == OURS) or self.from_text:
            return None
        return sum(sample.time_s.get("prompt_sync", 0.0) for sample in self.samples) / prefill_s

    @property
    def drafted(self) -> list[int]:
        """Drafts of the head by position."""
        return _sum_positions(sample.drafted for sample in self.samples)

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of the head by position."""
        return _sum_positions(sample.accepted for sample in self.samples)

    @property
    def rounds(self) -> int:
        """Verification passes."""
        return sum(sample.rounds for sample in self.samples)

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """Accepted / drafted; None where nothing was drafted."""
        return _rates(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verification pass gains: 1 + accepted drafts."""
        emitted = sum(sample.mean_acceptance_length * sample.rounds for sample in self.samples)
        return emitted / self.rounds if self.rounds else None

    def axis(self, name: str) -> str:
        """The value on an axis in words, as it was asked for; of one of drafts that the plan does
        not have the default; "" where the axis does not matter."""
        matters = self.n_max and name in DRAFT_AXES and (name != "ngram" or self.adaptive)
        if name in self.axes or not matters or self.program != OURS:
            return self.key.axis(name)
        return axis_words(self.settings.get(name, DRAFT_AXES[name]))  # of older files: there alone

    def to_json(self) -> str:
        """The cell as one line of JSON, without the newline."""
        figures: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        return msgspec.json.encode({**figures, "schema": SCHEMA}).decode()


#: All fields and figures of a cell.
FIELDS = (
    *(name for name in Cell.__dataclass_fields__ if name != "key"),
    *(name for name, member in vars(Cell).items() if isinstance(member, property)),
)


def _sum_positions(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sum counts position by position; shorter sequences count as 0 beyond their end."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _rates(accepted: Sequence[int], drafted: Sequence[int]) -> list[float | None]:
    return [hits / tries if tries else None for hits, tries in zip(accepted, drafted, strict=True)]


def shown_rates(cells: Iterable[Cell]) -> list[float | None]:
    """Acceptance by draft position of cells of one series, total over total; None: not shown.

    At adaptive depth a rate needs `LEAST_DRAFTS` drafts. A fixed depth drafts at every position in
    every round, so all its positions have as many drafts as the first.
    """
    cells = list(cells)
    drafted = _sum_positions(cell.drafted for cell in cells)
    rates = _rates(_sum_positions(cell.accepted for cell in cells), drafted)
    least = LEAST_DRAFTS if any(cell.adaptive for cell in cells) else 0
    return [rate if n >= least else None for rate, n in zip(rates, drafted, strict=True)]


# -- ratios ----------------------------------------------------------------------------------------


def paired_ratios(cell: Cell, base: Cell, figure: Figure) -> list[float]:
    """cell / base of every repeat that both have a sample of, in the order of the repeats.

    For `elapsed_s` this is a ratio of times: below 1 is faster. Samples without a rate (0: nothing
    was decoded) are left out.
    """
    ours, theirs = _by_repeat(cell, figure), _by_repeat(base, figure)
    return [ours[repeat] / theirs[repeat] for repeat in sorted(ours) if repeat in theirs]


def threads_of(cell: Cell) -> int:
    """CPU threads of a cell, the most where they are chosen while it is measured; 0: not known."""
    n = cell.settings.get("n_threads")
    return n if isinstance(n, int) else int(cell.machine.get("cores") or 0)


def waited_share(cells: Iterable[Cell]) -> float:
    """The part of their time, 0 to 1, that threads waited for a core, for other programs. Threads
    that do not compute can wait, too: 1 is the most that is said."""
    waited = whole = 0.0
    for cell in cells:
        for sample in cell.samples:
            if sample.waited_s and (threads := threads_of(cell)):
                waited += sum(sample.waited_s.values())
                whole += sample.elapsed_s * threads
    return min(1.0, waited / (whole or 1.0))


def _by_repeat(cell: Cell, figure: Figure) -> dict[int, float]:
    figures = [float(getattr(sample, figure)) for sample in cell.samples]
    return {repeat: value for repeat, value in zip(cell.repeats, figures, strict=True) if value > 0}


def ratio_to(cell: Cell, base: Cell | None, figure: Figure) -> Ratio | None:
    """The typical ratio of a cell to `base`; None where no repeat was measured in both."""
    paired = paired_ratios(cell, base, figure) if base else []
    return typical_ratio(paired) if paired else None


def averaged(cells: Iterable[Cell]) -> list[Cell]:
    """The cells that means are made of: text that is copied, where nearly every draft is right, is
    none of them, unless there is nothing else."""
    cells = list(cells)
    return [cell for cell in cells if cell.prompt_class != COPY] or cells


def ratio_to_plain(cell: Cell, cells: Sequence[Cell], figure: Figure) -> Ratio | None:
    """The typical ratio of a cell with MTP to its cell without; None where there is none."""
    return ratio_to(cell, base_of(cell, cells), figure) if cell.n_max else None


def base_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """The cell without MTP that `cell` is compared with; None if none was measured.

    Both have the same run, model, program, library variant, prompt size and class, number of
    generated tokens, and values on the axes that matter without MTP. Where several cells fit, the
    closest in `cells` is taken.
    """
    own = next((number for number, other in enumerate(cells) if other is cell), 0)
    wanted = cell.run, cell.model, cell.program, cell.variant, cell.key.plain
    fitting = [
        (abs(number - own), number)
        for number, other in enumerate(cells)
        if other.samples
        if (other.run, other.model, other.program, other.variant, other.key) == wanted
    ]
    return cells[min(fitting)[1]] if fitting else None


# -- series ----------------------------------------------------------------------------------------


def mode_words(cell: Cell) -> str:
    """ "no-MTP", "MTP 3" or "MTP auto"; "n-grams" of a model without a head."""
    if cell.from_text:
        return "n-grams"
    return f"MTP {'auto' if cell.adaptive else cell.n_max}" if cell.n_max else "no-MTP"


def machine_words(cell: Cell) -> str:
    """ "AMD EPYC, 2 cores": processor, cores and accelerators."""
    machine = cell.machine
    words = [str(machine.get("cpu") or "unknown machine"), *machine.get("devices", ())]
    if cores := machine.get("cores"):
        words.append(counted(cores, "core"))
    return ", ".join(words)


def imposed_words(cell: Cell) -> str:
    """The imposed acceptance rates, "0.84 0.76"; "" where the model's own counted."""
    rates = cell.synthetic_acceptance or ()
    return cell.axis("synthetic_acceptance") or " ".join(f"{rate:g}" for rate in rates)


@dataclass(frozen=True)
class Dimension:
    """Something that tells series apart.

    Attributes:
        value: what a cell has there.
        within: a label names the value only if it varies among cells that are equal in these
            dimensions: a peer has a build of its own, which its program's name says already.
        words: a value as part of a label.
    """

    name: str
    value: Callable[[Cell], str]
    within: tuple[str, ...] = ()
    words: str = "{}"


def _axis(name: str) -> Dimension:
    within = () if name in PLAIN_AXES else ("program", "mode")
    return Dimension(name, partial(Cell.axis, name=name), within, axis_name(name) + " {}")


#: In the order in which a label names them.
DIMENSIONS = (
    Dimension("model", lambda cell: cell.model),
    Dimension("machine", machine_words),
    Dimension("program", lambda cell: cell.program),
    Dimension("mode", mode_words),
    Dimension("variant", lambda cell: cell.variant, within=("program",)),
    Dimension(
        "upstream", lambda cell: cell.upstream_commit[:9], ("program", "variant"), "llama.cpp {}"
    ),
    Dimension("patches", lambda cell: cell.series[:7], ("program", "variant"), "patches {}"),
    Dimension("backend", lambda cell: cell.backend, within=("program",)),
    *(_axis(name) for name in AXES if name != "synthetic_acceptance"),
    Dimension("imposed", imposed_words, within=("mode",), words="acceptance {}"),
    Dimension("class", lambda cell: cell.prompt_class),
    Dimension("image", lambda cell: cell.image.words if cell.image else "", within=("class",)),
    Dimension("generated", lambda cell: str(cell.max_tokens), words="{} generated"),
)

#: The values of all dimensions, in their order.
SeriesKey = tuple[str, ...]


def series_key(cell: Cell, ignored: Collection[str] = ()) -> SeriesKey:
    """The values of a cell in all dimensions but the ignored ones; equal in a series."""
    return tuple(one.value(cell) for one in DIMENSIONS if one.name not in ignored)


def varying(cells: Iterable[Cell]) -> dict[str, set[tuple[str, ...]]]:
    """The names of the dimensions that tell series of these cells apart, each with the values of
    its `within` dimensions where it has several values."""
    names = [dimension.name for dimension in DIMENSIONS]
    keys = [dict(zip(names, key, strict=True)) for key in {series_key(cell) for cell in cells}]
    different = {}
    for dimension in DIMENSIONS:
        values: dict[tuple[str, ...], set[str]] = {}
        for key in keys:
            group = tuple(key[name] for name in dimension.within)
            values.setdefault(group, set()).add(key[dimension.name])
        if several := {group for group, different in values.items() if len(different) > 1}:
            different[dimension.name] = several
    return different


class Labels:
    """Words for the series of some cells: the mode, and what else tells them apart.

    Args:
        ignored: names of dimensions to leave out.
    """

    def __init__(self, cells: Iterable[Cell], ignored: Collection[str] = ()) -> None:
        self._named = {
            name: groups for name, groups in varying(cells).items() if name not in ignored
        }

    def __call__(self, cell: Cell) -> str:
        """ "MTP 3, upstream"."""
        values = {dimension.name: dimension.value(cell) for dimension in DIMENSIONS}
        mode, words = mode_words(cell), []
        for dimension in DIMENSIONS:
            value = values[dimension.name]
            group = tuple(values[name] for name in dimension.within)
            named = value and group in self._named.get(dimension.name, ())
            if not named or dimension.name == "mode":
                continue
            if dimension.name != "program":
                words.append(dimension.words.format(value))
            elif value != OURS:
                mode = f"{value} {mode}"
        return ", ".join([mode, *words])


def latest(cells: Iterable[Cell]) -> list[Cell]:
    """One cell per series and prompt size, in the order of first appearance: the last cell with
    samples, if any has some. A file is appended to, so it may hold the same cell twice."""
    kept: dict[tuple[SeriesKey, int], Cell] = {}
    for cell in cells:
        place = (series_key(cell), cell.n_prompt)
        if place not in kept or cell.samples or not kept[place].samples:
            kept[place] = cell
    return list(kept.values())


def sections(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of each model, machine and class of prompts, which may share a plot, in order of
    appearance."""
    parts: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        parts.setdefault((cell.model, machine_words(cell), cell.prompt_class), []).append(cell)
    return [*parts.values()]
