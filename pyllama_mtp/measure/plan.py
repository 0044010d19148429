"""The plan of a matrix: its cells, and the order in which they are measured. Pure.

A *group* is one repeat of one prompt size and class: every variant once, on the same text, side by
side. Groups of the first repeat come first, so that a run that is cut short has samples of all
cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.peers import PEERS
from pyllama_mtp.settings import AUTO_DEPTH, Settings

#: The fields of `Settings` on which the cost of MTP depends, with their defaults. They have options
#: of their own.
SWITCHES = {
    name: str(getattr(Settings, name))
    for name in ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
}
#: Axes that other programs have, too.
SHARED_AXES = ("n_batch", "n_ubatch", "n_threads", "flash_attn", "cache_type_k", "cache_type_v")
#: Axes that matter without MTP, too. `n_sequences` is no field of `Settings`.
PLAIN_AXES = (*SHARED_AXES, "checkpoints", "n_sequences")
#: All axes of a plan.
AXES = (
    *SWITCHES,
    *PLAIN_AXES,
    *sorted(
        {field.name for field in fields(Settings)}
        - {"n_ctx", "rope", "draft_n_max", *SWITCHES, *PLAIN_AXES}
    ),
)


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
    def settings(self) -> dict[str, Any]:
        """The axes that are fields of `Settings`."""
        return {name: value for name, value in self.axes if name != "n_sequences"}


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


@dataclass(frozen=True)
class Plan:
    """What to measure, with the fields of :class:`.recordtypes.Plan`. Who makes it checks single
    values.

    Sizes, classes and libraries are all combined. Every depth above 0 is measured with all
    combinations of the axes, but only "auto" with those of `ngram`; depth 0 with those of
    PLAIN_AXES. Other programs, by their names in `PEERS`, are measured without MTP; those that can
    draft, also at the depths that are numbers.
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
        own = {"classes": self.classes, "libraries": self.libraries}
        given = {"prompt sizes": self.sizes, "depths": self.depths, **self.axes, **own}
        for name, values in given.items():
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
        if self.prompt_step and "n_sequences" in self.axes:
            raise UsageError("prompts of several sequences have no steps; leave one of them out")

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
        """All groups in the order in which they are measured: those of a repeat, then the next."""
        return [Group(*kind, repeat) for repeat in range(self.repeat) for kind in self.kinds()]

    def prompts(self, libraries: Container[str]) -> list[tuple[tuple[int, str], Variant]]:
        """(size, class) of every prompt with each variant of these libraries that processes it in
        another way: of the variants that differ only in a depth above 0, the first."""
        first: dict[Variant, Variant] = {}
        for variant in self.variants:
            if variant.library in libraries:
                first.setdefault(replace(variant, depth=min(variant.depth != 0, 1)), variant)
        return [*itertools.product(self.kinds(), first.values())]

    def order(self, repeat: int) -> tuple[Variant, ...]:
        """The variants of a group in the order in which they take their turns.

        Every pair of repeats begins with another variant, and the second of a pair goes backwards,
        so that no variant gains by being first or by its neighbours. Other programs stay together,
        before or after the libraries.
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
        """The variant in words, as far as the plan varies it: "depth 3, rows all"; short: "depth 3,
        all"."""
        several = len(self.libraries) > 1 or variant.library in self.peers
        words = [variant.library] if several else []
        words.append(f"depth {variant.depth}" if variant.depth else "no MTP")
        for name, value in variant.axes:
            if len(self.axes[name]) > 1:
                said = axis_words(value)
                words.append(said if short else f"{axis_name(name)} {said}")
        return ", ".join(words)

    def context_needed(self, size: int) -> int:
        """Tokens of context that the cells of one size need; the same for all variants."""
        adaptive = len(self.fixed_depths) < len(self.depths)
        deepest = max(*self.fixed_depths, AUTO_DEPTH if adaptive else 0, 0)
        return size + self.max_tokens + deepest + 1

    def work(self, size: int) -> int:
        """Rough weight of one sample: a decoded token costs about 10 of prefill, and the warm-up
        processes the prompt once more."""
        return 2 * size + 10 * self.max_tokens


def padded_context(needed: int, limit: int) -> int:
    """The context for `needed` tokens, at most `limit`: llama.cpp pads contexts to 256 tokens."""
    return min(-(-needed // 256) * 256, limit)


def _check_distinct(name: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
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
        kind = type(1 if usual is None else usual)
        return kind(word)
    except (KeyError, ValueError):
        raise UsageError(f"{word!r} is no value of the axis {name}") from None


def powers(rate: float, n: int) -> list[float]:
    """Unconditional acceptance of `n` positions, `rate` being the conditional one at each."""
    return [round(rate**position, 4) for position in range(1, n + 1)]
