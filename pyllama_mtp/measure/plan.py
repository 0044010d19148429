"""What a matrix measures, and in which order. Pure: nothing is measured here.

A *group* is what one repeat measures of one prompt size and class: every variant once, on the same
text, side by side. Groups of the first repeat come first, so that a run that is cut short has
something of everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.peers import PEERS
from pyllama_mtp.settings import AUTO_DEPTH, Settings

#: The fields of `Settings` that say what MTP costs, with their defaults: options of their own.
SWITCHES = {
    name: str(getattr(Settings, name))
    for name in ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
}
#: Other programs know these as well.
SHARED_AXES = ("n_batch", "n_ubatch", "n_threads", "flash_attn", "cache_type_k", "cache_type_v")
#: What makes a difference without MTP, too. `n_sequences` is no field of `Settings`.
PLAIN_AXES = (*SHARED_AXES, "checkpoints", "n_sequences")
#: What a plan may vary.
AXES = (
    *SWITCHES,
    *PLAIN_AXES,
    *sorted(
        {field.name for field in fields(Settings)}
        - {"n_ctx", "rope", "draft_n_max", *SWITCHES, *PLAIN_AXES}
    ),
)
#: "text": the prompt is a piece of text. "code": a chat that asks for long code after it.
OUTPUT_MODES = ("text", "code")


@dataclass(frozen=True)
class Variant:
    """What a cell does at its size.

    Attributes:
        depth: drafts per round; 0: no MTP; "auto": adaptive.
        axes: what it has on the plan's axes that matter to it.
        library: one of the native libraries of the plan, or one of its peers.
    """

    depth: int | str
    axes: tuple[tuple[str, Any], ...] = ()
    library: str = ""

    @property
    def n_sequences(self) -> int:
        """Sequences that are generated at once."""
        return int(dict(self.axes).get("n_sequences", 1))

    @property
    def settings(self) -> dict[str, Any]:
        """Its fields of `Settings`."""
        return {name: value for name, value in self.axes if name != "n_sequences"}


@dataclass(frozen=True)
class Group:
    """One repeat of one prompt size and class."""

    size: int
    prompt_class: str
    repeat: int

    @property
    def kind(self) -> tuple[int, str]:
        """What its repeats have in common."""
        return self.size, self.prompt_class


@dataclass(frozen=True)
class Plan:
    """What to measure: prompt sizes and generated tokens in tokens, depths in drafts per round, or
    "auto" for as many as pay.

    `axes` has the values of fields of `Settings`, and of `n_sequences`, by name. Each depth above 0
    is measured with every combination of them; depth 0 with those of PLAIN_AXES, and else with the
    defaults; `ngram` is of depth "auto" alone. `libraries` are labels of native libraries,
    `classes` kinds of text; everything is measured with each. `peers` are other programs, by their
    names in `PEERS`: each is measured without MTP, and at the depths that are numbers if it can
    draft. `prompt_step`: prompts are processed by turns of so many tokens; 0: one after the other.
    """

    sizes: tuple[int, ...]
    depths: tuple[int | str, ...]
    max_tokens: int
    repeat: int
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ("text",)
    libraries: tuple[str, ...] = ("",)
    output_mode: str = "text"
    peers: tuple[str, ...] = ()
    prompt_step: int = 0

    def __post_init__(self) -> None:
        """Refuse plans that measure nothing, or the same cell twice."""
        if wrong := [size for size in self.sizes if size < 1]:
            raise UsageError(f"prompt sizes must be 1 or more, not {wrong[0]}")
        for depth in self.depths:
            if depth != "auto" and not (isinstance(depth, int) and depth >= 0):
                raise UsageError(f"depths must be 0 or more, or auto, not {depth}")
        for name, values in (("prompt sizes", self.sizes), ("depths", self.depths)):
            if not values:
                raise UsageError(f"no {name} given")
            _check_distinct(name, values)
        for name, given in self._named():
            if not given:
                raise UsageError(f"no {name} given")
            _check_distinct(name, given)
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
        if self.prompt_step and "n_sequences" in self.axes:
            raise UsageError("prompts of several sequences have no steps; leave one of them out")
        if self.max_tokens < 1 or self.repeat < 1:
            raise UsageError(
                f"max_tokens ({self.max_tokens}) and repeat ({self.repeat}) must be 1 or more"
            )

    def _named(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The axes, classes and libraries by name. Raises UsageError for an unknown axis."""
        for name, values in self.axes.items():
            if name not in AXES:
                raise UsageError(f"there is no axis {name!r}; there are {', '.join(AXES)}")
            yield name, values
        yield "classes", self.classes
        yield "libraries", self.libraries

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The cells of one size and class, in the order in which they are shown."""
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
        plain = depth == 0
        axes = [
            [(name, value) for value in self.axes[name]]
            for name in sorted(self.axes, key=AXES.index)
            if name in among and not (plain and name not in PLAIN_AXES)
            if name != "ngram" or depth == "auto"
        ]
        return [*itertools.product(*axes)]

    def _peer_variants(self) -> tuple[Variant, ...]:
        """The cells of other programs, which have few of our settings."""
        among = (*SHARED_AXES, "synthetic_acceptance")
        return tuple(
            Variant(depth, chosen, name)
            for name in self.peers
            for depth in ((self.fixed_depths or (0,)) if PEERS[name].drafts else (0,))
            for chosen in self._combinations(depth, among)
        )

    @property
    def fixed_depths(self) -> tuple[int, ...]:
        """The depths that are numbers."""
        return tuple(depth for depth in self.depths if isinstance(depth, int))

    def kinds(self) -> list[tuple[int, str]]:
        """(size, class) of every group of one repeat, in their order."""
        return [(size, kind) for kind in self.classes for size in self.sizes]

    def groups(self) -> list[Group]:
        """Everything, in the order in which it is measured: all of a repeat, then the next."""
        return [Group(*kind, repeat) for repeat in range(self.repeat) for kind in self.kinds()]

    def prompts(self, libraries: Container[str]) -> list[tuple[tuple[int, str], Variant]]:
        """(size, class) of every prompt with each way in which these libraries process it: of the
        variants that differ in a depth above 0 alone, the first."""
        first: dict[Variant, Variant] = {}
        for variant in self.variants:
            if variant.library in libraries:
                first.setdefault(replace(variant, depth=min(variant.depth != 0, 1)), variant)
        return [*itertools.product(self.kinds(), first.values())]

    def order(self, repeat: int) -> tuple[Variant, ...]:
        """The variants of a group in the order in which they take their turns.

        Another one is first in every pair of repeats, and the second of a pair goes backwards, so
        that being first, or next to a certain other one, is nobody's advantage. Other programs
        stay together, before ours or after, so that ours are beside each other with them as
        without.
        """
        variants, peers = self.variants, self._peer_variants()
        blocks = []
        for block in (variants[: len(variants) - len(peers)], peers):
            start = repeat // 2 % len(block) if block else 0
            blocks.append(block[start:] + block[:start])
        turned = (*blocks[0], *blocks[1])
        return turned[::-1] if repeat % 2 else turned

    @property
    def n_samples(self) -> int:
        """Samples of the whole plan."""
        return len(self.kinds()) * len(self.variants) * self.repeat

    def label(self, variant: Variant, *, short: bool = False) -> str:
        """The variant in words, as far as the plan varies it: "depth 3, rows all"; short: "all"."""
        several = len(self.libraries) > 1 or variant.library in self.peers
        words = [variant.library] if several else []
        words.append(f"depth {variant.depth}" if variant.depth else "no MTP")
        for name, value in variant.axes:
            if len(self.axes[name]) > 1:
                said = axis_words(value)
                words.append(said if short else f"{axis_name(name)} {said}")
        return ", ".join(words)

    def context_needed(self, size: int) -> int:
        """Tokens of context of the cells of one size; the same for all variants."""
        adaptive = len(self.fixed_depths) < len(self.depths)
        deepest = max(*self.fixed_depths, AUTO_DEPTH if adaptive else 0, 0)
        return size + self.max_tokens + deepest + 1

    def work(self, size: int) -> int:
        """Rough weight of one sample: a decoded token costs about 10 of prefill, and the warm-up
        processes the prompt once more."""
        return 2 * size + 10 * self.max_tokens


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise UsageError(f"{name} {', '.join(map(str, values))} name one value twice")


def axis_name(name: str) -> str:
    """What an axis is called in a table."""
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
        kind = type(1 if usual is None else usual)
        return kind(word)
    except (KeyError, ValueError):
        raise UsageError(f"{word!r} is no value of the axis {name}") from None


def powers(rate: float, n: int) -> list[float]:
    """Unconditional acceptance of `n` positions, each accepted as often if all before it were."""
    return [round(rate**position, 4) for position in range(1, n + 1)]
