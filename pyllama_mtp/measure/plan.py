"""The plan of a matrix: its cells, the order in which they are measured, and what a time budget
leaves out. Pure.

A *group* is one repeat of one prompt size and class: every variant once, on the same text, side by
side. Groups of the first repeat come first, so that a run that is cut short has samples of all
cells.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from msgspec import Struct

from pyllama_mtp.arguments import as_index, listed, whole
from pyllama_mtp.errors import UsageError
from pyllama_mtp.settings import AUTO_DEPTH, MOST_TOKENS, STORE, Settings

#: Other programs that can be measured, and whether they can draft with the MTP head.
PEERS = {"llama-server": True, "llama-bench": False}
#: The fields of `Settings` on which the cost of MTP depends, with their defaults. They have options
#: of their own.
SWITCHES = {
    name: str(getattr(Settings, name))
    for name in ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
}
#: Axes that other programs have, too.
SHARED_AXES = ("n_batch", "n_ubatch", "n_threads", "flash_attn", "cache_type_k", "cache_type_v")
#: Axes that are no fields of `Settings`: sequences that are generated at once, and tokens in the
#: context before the prompt.
OWN_AXES = ("n_sequences", "n_context")
#: Axes that matter without MTP, too.
PLAIN_AXES = (*SHARED_AXES, "checkpoints", *OWN_AXES)
#: All axes of a plan.
AXES = (
    *SWITCHES,
    *PLAIN_AXES,
    *sorted(
        {field.name for field in fields(Settings)}
        - {"n_ctx", "rope", "draft_n_max", *SWITCHES, *PLAIN_AXES, *STORE}
    ),
)


#: The class of prompts that begin with the plan's image.
IMAGE = "image"


class ImageFile(Struct, frozen=True, omit_defaults=True):
    """The image of a plan.

    Attributes:
        name: of its file, without the folder; "": it came from no file.
        sha256: of the file; where there is none, of the pixels.
        width, height: in pixels, before the encoder scales it.
        n_tokens: that it has in a prompt.
        mmproj, mmproj_sha256: the encoder's file.
    """

    name: str
    sha256: str
    width: int
    height: int
    n_tokens: int = 0
    mmproj: str = ""
    mmproj_sha256: str = ""

    @property
    def words(self) -> str:
        """ "photo.jpg (640 x 480 pixels)"."""
        return f"{self.name or self.sha256[:12]} ({self.width} x {self.height} pixels)"


@dataclass(frozen=True)
class Variant:
    """A cell, but for its prompt size and class.

    Attributes:
        depth: drafts per round; 0: no MTP; "auto": adaptive.
        axes: its values on those of the plan's axes that matter to it.
        library: one of the plan's native libraries or peers.
    """

    depth: int | str
    axes: tuple[tuple[str, Any], ...] = ()
    library: str = ""

    @property
    def n_sequences(self) -> int:
        """Sequences that are generated at once."""
        return int(dict(self.axes).get("n_sequences", 1))

    @property
    def n_context(self) -> int:
        """Tokens in the context before the prompt."""
        return int(dict(self.axes).get("n_context", 0))

    @property
    def settings(self) -> dict[str, Any]:
        """The axes that are fields of `Settings`."""
        return {name: value for name, value in self.axes if name not in OWN_AXES}

    @property
    def way(self) -> Variant:
        """What the variants have in common that process a text in the same way."""
        axes = tuple(one for one in self.axes if one[0] != "n_context")
        return replace(self, depth=min(self.depth != 0, 1), axes=axes)


@dataclass(frozen=True)
class Group:
    """One repeat of one prompt size and class."""

    size: int
    prompt_class: str
    repeat: int

    @property
    def kind(self) -> tuple[int, str]:
        """The size and the class, which its repeats have in common."""
        return self.size, self.prompt_class


class Plan(Struct, frozen=True, omit_defaults=True):
    """What to measure: every size and class `repeat` times, with another text each time. A repeat
    measures every variant side by side on the same text. Who makes it checks single values.

    Sizes, classes and libraries are all combined. Every depth above 0 is measured with all
    combinations of the axes, but only "auto" with those of `ngram`; depth 0 with those of
    PLAIN_AXES. Other programs, by their names in `PEERS`, are measured without MTP; those that can
    draft, also at the depths that are numbers.

    Attributes:
        sizes: of prompts, in tokens; 0: questions as they are, without text before them.
        depths: drafts per round; 0 is no MTP, "auto" chosen while generating.
        max_tokens: generated per sample.
        stop_at_end: an answer ends where the model ends it; otherwise end tokens are ignored.
        repeats: of size 0, by class; other sizes have `repeat`.
        axes: values of further fields of :class:`.Settings`, and of OWN_AXES, by name.
        classes: kinds of prompts: "text", "code", "factual", "thinking", "instruction"; "image":
            text after the image.
        libraries, peers: this project's libraries and other programs; names in `builds`.
        prompt_step: prompts were processed by turns of so many tokens; 0: one after the other.
        prompts: where the text of the prompts came from.
        image: of the class "image", whose prompts begin with it; its tokens are among their size.
    """

    sizes: tuple[int, ...]
    depths: tuple[int | str, ...]
    max_tokens: int
    repeat: int
    axes: dict[str, tuple[Any, ...]] = {}
    classes: tuple[str, ...] = ("text",)
    libraries: tuple[str, ...] = ("",)
    peers: tuple[str, ...] = ()
    prompt_step: int = 0
    prompts: str = ""
    stop_at_end: bool = False
    repeats: dict[str, int] = {}
    image: ImageFile | None = None

    def __post_init__(self) -> None:
        """Refuse plans that measure nothing, or the same cell twice."""
        own = {"classes": self.classes, "libraries": self.libraries}
        values_of = {"prompt sizes": self.sizes, "depths": self.depths, **self.axes, **own}
        for name, values in values_of.items():
            if not values:
                raise UsageError(f"no {name} given")
            _check_distinct(name, values)
        _check_distinct("peers", self.peers)
        _check_distinct("libraries and peers", (*self.libraries, *self.peers))
        ways = self.axes.get("prompt_sync", ())
        if len(ways) > 1 and "auto" in ways:
            raise UsageError(
                f"prompt_sync {', '.join(ways)} name one value twice: auto is kv or full; leave it "
                "out"
            )
        if self.peers and "n_sequences" in self.axes:
            raise UsageError("other programs are measured with one sequence; leave n_sequences out")
        if "n_context" in self.axes:
            self._check_contexts()
        if self.prompt_step and "n_sequences" in self.axes:
            raise UsageError("prompts of several sequences have no steps; leave one of them out")
        if (self.image is not None) != (IMAGE in self.classes):
            raise UsageError(
                "prompts of the class 'image' need an image (--image FILE), and an image needs "
                f"that class; the classes are {', '.join(self.classes)}"
            )

    def _check_contexts(self) -> None:
        """Refuse what cannot be measured after a context that was filled before."""
        for wrong, why in (
            ("n_sequences" in self.axes, "several sequences have empty contexts"),
            (len(self.sizes) > 1, "they are measured with one prompt size (-p)"),
            (
                {*self.classes} - {"text", "source"},
                "they are filled with text that the prompt continues: classes text and source",
            ),
        ):
            if wrong:
                raise UsageError(f"lengths of the context (--at): {why}; leave one of them out")

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens in the context before the prompt, ascending."""
        return tuple(sorted(self.axes.get("n_context", (0,))))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The cells of one size and class, in the order of the table."""
        own = [
            Variant(depth, chosen, library)
            for library in self.libraries
            for depth in self.depths
            for chosen in self._combinations(depth)
        ]
        return (*own, *self._peer_variants())

    def _combinations(
        self, depth: int | str, among: Container[str] = AXES
    ) -> list[tuple[tuple[str, Any], ...]]:
        """Every combination of values on those axes that matter at this depth."""
        axes = [
            [(name, value) for value in self.axes[name]]
            for name in sorted(self.axes, key=AXES.index)
            if name in among and (depth != 0 or name in PLAIN_AXES)
            if name != "ngram" or depth == "auto"
        ]
        return [*itertools.product(*axes)]

    def _peer_variants(self) -> tuple[Variant, ...]:
        """The cells of other programs, which have few of the axes."""
        among = (*SHARED_AXES, "synthetic_acceptance", "n_context")
        return tuple(
            Variant(depth, chosen, name)
            for name in self.peers
            for depth in ((self.fixed_depths or (0,)) if PEERS[name] else (0,))
            for chosen in self._combinations(depth, among)
        )

    @property
    def fixed_depths(self) -> tuple[int, ...]:
        """The depths that are numbers."""
        return tuple(depth for depth in self.depths if isinstance(depth, int))

    def filler(self, variant: Variant) -> Variant:
        """In whose way the context of a variant is filled: without MTP, in that of one with it, if
        there is any that is like it otherwise. A copy leaves out what MTP has in the context."""
        if variant.depth or variant.library in self.peers:
            return variant
        alike = (
            one
            for one in self.variants
            if one.depth and one.library == variant.library
            if tuple(axis for axis in one.axes if axis[0] in PLAIN_AXES) == variant.axes
        )
        return next(alike, variant)

    def kinds(self) -> list[tuple[int, str]]:
        """(size, class) of every group of one repeat, in their order."""
        return [(size, kind) for kind in self.classes for size in self.sizes]

    def groups(self) -> list[Group]:
        """All groups in the order in which they are measured: those of a repeat, then the next."""
        kinds = self.kinds()
        most = max(self.repeats_of(*kind) for kind in kinds)
        return [
            Group(*kind, repeat)
            for repeat in range(most)
            for kind in kinds
            if repeat < self.repeats_of(*kind)
        ]

    def repeats_of(self, size: int, prompt_class: str) -> int:
        """How many repeats a size and class has."""
        return self.repeat if size else self.repeats.get(prompt_class, self.repeat)

    def prompt_variants(self, libraries: Container[str]) -> list[tuple[tuple[int, str], Variant]]:
        """(size, class) of every prompt with each variant of these libraries that processes it in
        another way: of the variants that differ only in a depth above 0, the first."""
        first: dict[Variant, Variant] = {}
        for variant in self.variants:
            if variant.library in libraries:
                first.setdefault(variant.way, variant)
        return [*itertools.product(self.kinds(), first.values())]

    def order(self, repeat: int) -> tuple[Variant, ...]:
        """The variants of a group in the order in which they take their turns.

        Every pair of repeats begins with another variant, and the second of a pair goes backwards,
        so that no variant gains by being first or by its neighbours. Other programs stay together,
        before or after the libraries. Longer contexts come later.
        """
        variants, order = self.variants, list[Variant]()
        ours = variants[: len(variants) - len(self._peer_variants())]
        for n_context in self.contexts:
            turned = list[Variant]()
            for own in (ours, variants[len(ours) :]):
                block = tuple(one for one in own if one.n_context == n_context)
                start = repeat // 2 % len(block) if block else 0
                turned += block[start:] + block[:start]
            order += turned[::-1] if repeat % 2 else turned
        return tuple(order)

    @property
    def n_samples(self) -> int:
        """Samples of the whole plan."""
        return len(self.groups()) * len(self.variants)

    def label(self, variant: Variant) -> str:
        """The variant in words, as far as the plan varies it: "depth 3, rows all"."""
        several = len(self.libraries) > 1 or variant.library in self.peers
        words = [variant.library] if several else []
        words.append(f"depth {variant.depth}" if variant.depth else "no MTP")
        for name, value in variant.axes:
            if len(self.axes[name]) > 1:
                words.append(f"{axis_name(name)} {axis_words(value)}")
        return ", ".join(words)

    def context_needed(self, size: int) -> int:
        """Tokens of context that the cells of one size need beside what is before the prompt; the
        same for all variants."""
        adaptive = len(self.fixed_depths) < len(self.depths)
        deepest = max(*self.fixed_depths, AUTO_DEPTH if adaptive else 0, 0)
        return size + self.max_tokens + deepest + 1

    def work(self, size: int, variants: Iterable[Variant], doubled: float = math.inf) -> float:
        """Rough time of these variants of a group, in tokens of prefill in an empty context.

        A decoded token costs about 10 of prefill, and the warm-up processes the prompt once more.
        Each :meth:`filler` fills a context, from one length to the next; another program fills one
        for each sample.

        Args:
            doubled: tokens in the context at which a token takes twice as long.
        """
        work, filled = 0.0, dict[Variant, int]()
        for variant in sorted(variants, key=lambda one: one.n_context):
            n = variant.n_context
            filler = self.filler(variant).way
            before = 0 if variant.library in self.peers else filled.get(filler, 0)
            filled[filler] = n
            work += size + (size + 10 * self.max_tokens) * (1 + n / doubled)
            work += (n - before) * (1 + (n + before) / (2 * doubled))
        return work


def switches_of(settings: Settings) -> dict[str, tuple[Any, ...]]:
    """The axes of a plan whose only values are those that the settings have: the SWITCHES that are
    not at their defaults."""
    values = {name: str(getattr(settings, name)) for name in SWITCHES}
    return {name: (value,) for name, value in values.items() if value != SWITCHES[name]}


def padded_context(needed: int, limit: int) -> int:
    """The context for `needed` tokens, at most `limit`: llama.cpp pads contexts to 256 tokens."""
    return min(-(-needed // 256) * 256, limit)


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if len(set(map(repr, values))) != len(values):
        raise UsageError(f"{name} {', '.join(map(str, values))} name one value twice")


def axis_name(name: str) -> str:
    """The name of an axis in a table."""
    if name == "synthetic_acceptance":
        return "acceptance"
    return name.removeprefix("prompt_").removeprefix("n_").replace("_", " ")


def axis_words(value: Any) -> str:
    """A value of an axis in words: "on", "q8_0", "0.8^6" (0.8 to the power of the position)."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, list | tuple):
        return "none" if value is None else str(value)
    if len(value) > 1 and list(value) == powers(value[0], len(value)):
        return f"{value[0]:g}^{len(value)}"
    return "/".join(f"{rate:g}" for rate in value)


def axis_value(name: str, word: str) -> Any:
    """The inverse of :func:`axis_words`, for this axis.

    Raises:
        UsageError: the word is none of its values.
    """
    usual = getattr(Settings, name, None)
    try:
        if isinstance(usual, bool):
            return {"on": True, "off": False, "true": True, "false": False}[word]
        if name == "synthetic_acceptance":
            rate, power, n = word.partition("^")
            if power:
                return tuple(powers(float(rate), int(n)))
            return None if word == "none" else tuple(float(rate) for rate in word.split("/"))
        if name == "n_threads" and word == usual:
            return word
        kind = int if usual is None or name == "n_threads" else type(usual)
        return kind(word)
    except (KeyError, ValueError):
        raise UsageError(f"{word!r} is no value of the axis {name}") from None


def powers(rate: float, n: int) -> list[float]:
    """Unconditional acceptance of `n` positions, `rate` being the conditional one at each."""
    return [round(rate**position, 4) for position in range(1, n + 1)]


# -- from arguments of Python ----------------------------------------------------------------------


def make_plan(
    sizes: Any,
    depths: Any,
    max_tokens: Any,
    repeat: Any,
    classes: Any,
    axes: Mapping[str, Any],
    source: str,
    image: ImageFile | None = None,
) -> Plan:
    """The plan of these arguments of :func:`pyllama_mtp.bench.matrix`, which take one value or
    several; `source`: of the prompts, in words.

    Raises:
        UsageError: an unknown name or a value out of range; the message names the argument.
    """
    from pyllama_mtp.measure.prompts import check_class

    for name in axes:
        if name not in AXES:
            raise UsageError(
                f"matrix() has no argument {name!r}; the axes are {', '.join(AXES)}; prompt_sizes "
                "are sizes, draft_n_max is depths; other fields of Settings go into settings=, "
                "those of Sampling into sampling="
            )
    varied = {name: axis_values(name, given) for name, given in axes.items()}
    usual = usual_classes(classes, image, "n_context" in axes)
    kinds = _several("classes", usual, "('text', 'code')")
    for kind in kinds:
        check_class(kind)
    return Plan(
        tuple(_whole("sizes", size) for size in _several("sizes", sizes, "(512, 2048)")),
        tuple(map(_depth, _several("depths", depths, "(0, 3, 'auto')"))),
        _whole("max_tokens", max_tokens),
        _whole("repeat", repeat),
        varied,
        kinds,
        prompts=source,
        image=image,
    )


def usual_classes(given: Any, image: object, filled: bool) -> Any:
    """The classes that were given; None: the image where there is one, or text; but for `filled`
    contexts source, of which there is enough, so that short and long ones hold the same kind."""
    if given is not None:
        return given
    return ("source" if filled else "text",) if image is None else (IMAGE,)


def axis_values(name: str, given: Any) -> tuple[Any, ...]:
    """The values of an axis, given as a sequence or as one value. Raises UsageError for a value
    that the axis does not take."""
    if name == "synthetic_acceptance":
        several = any(rates is None or listed(rates) for rates in listed(given) or ())
        values = tuple(given) if several else (given,)
    elif isinstance(given, bool | float):
        values = (given,)
    else:
        values = _several(name, given, f"({getattr(Settings, name, 2)!r},)")
    if name == "n_context":
        return tuple(whole(name, n, 0, MOST_TOKENS, "0 or more tokens") for n in values)
    if name == "n_sequences":
        from pyllama_mtp.session import MOST_SEQUENCES

        return tuple(whole(name, n, 1, MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}") for n in values)
    checked = []
    for value in values:
        if name in SWITCHES and not isinstance(value, str | int):
            raise UsageError(f"{name} has {value!r}, which is not a word")
        field_of_settings: dict[str, Any] = {name: value}
        checked.append(getattr(Settings(**field_of_settings), name))  # raises UsageError
    return tuple(map(str, checked)) if name in SWITCHES else tuple(checked)


def _several(name: str, argument: Any, example: str) -> tuple[Any, ...]:
    """The values of a sequence; a word or a number is the only value."""
    if isinstance(argument, Iterable) and not isinstance(argument, str | bytes | Mapping):
        return tuple(argument)
    if isinstance(argument, str) or as_index(argument) is not None:
        return (argument,)
    raise UsageError(f"{name} is {argument!r}; it must be a sequence, such as {example}")


def _whole(name: str, value: Any) -> int:
    return whole(name, value, 1, MOST_TOKENS, "1 or more")


def _depth(value: Any) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    several = "0 or more, or 'auto'; several are given as (0, 3, 'auto')"
    return whole("depths", value, 0, MOST_TOKENS, several)


# -- time ------------------------------------------------------------------------------------------


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Kind = tuple[int, str]


def parse_duration(text: str) -> float:
    """Seconds of "90s", "10m", "1.5h"; a plain number is seconds.

    Raises:
        UsageError: anything else, or nothing above 0.
    """
    words = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)", text.strip().lower())
    seconds = float(words[1]) * _UNITS[words[2] or "s"] if words else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is no length of time; give 90s, 10m or 1h")
    return seconds


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "2 min 05 s", "1 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def estimate(
    measured: Mapping[Kind, Sequence[float]], work: Callable[[int], float]
) -> Callable[[Group], float] | None:
    """Seconds that a group will take; None before anything was measured.

    Args:
        measured: seconds of the finished groups, by size and class.
        work: rough work of a size, in any unit.
    """
    known = {kind: median(times) for kind, times in measured.items() if times}
    if not known:
        return None
    per_work = median(seconds / work(size) for (size, _), seconds in known.items())
    return lambda group: known.get(group.kind, per_work * work(group.size))


def to_drop(
    pending: Sequence[Group],
    done: Mapping[Kind, int],
    cost: Callable[[Group], float],
    left_s: float,
) -> set[Group]:
    """The groups to leave out so that the others fit into `left_s` seconds.

    The n-th repeat of a cell lowers the variance of its figures from 1 / (n - 1) to 1 / n, by
    1 / (n (n - 1)). The last repeat that lowers it the least per second is left out first. The only
    repeat of a size is left out last, the longest first.

    Args:
        pending: groups that are not measured yet.
        done: finished repeats, by size and class.
        cost: seconds of a group.
    """
    kept: dict[Kind, list[Group]] = {}
    for group in sorted(pending, key=lambda group: group.repeat):
        kept.setdefault(group.kind, []).append(group)
    total, dropped = sum(map(cost, pending)), set()
    while total > left_s and any(kept.values()):

        def waste(kind: Kind) -> tuple[bool, float]:
            n = done.get(kind, 0) + len(kept[kind])
            return n > 1, cost(kept[kind][-1]) * (n * (n - 1) if n > 1 else 1)

        worst = max((kind for kind in kept if kept[kind]), key=waste)
        group = kept[worst].pop()
        dropped.add(group)
        total -= cost(group)
    return dropped
