"""What a matrix measures, and in which order. Pure: nothing is measured here.

A *group* is what one repeat measures of one prompt size and class: every variant once, on the same
text, side by side. Groups of the first repeat come first, so that a run that is cut short has
something of everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.peers import PEERS
from pyllama_mtp.settings import AUTO_DEPTH, Settings

#: The fields of `Settings` that a plan may vary, with their defaults.
SWITCHES = {
    name: str(getattr(Settings, name))
    for name in ("prompt_rows", "prompt_sync", "hidden", "draft_vocab")
}
#: "text": the prompt is a piece of text. "code": a chat that asks for long code after it.
OUTPUT_MODES = ("text", "code")


@dataclass(frozen=True)
class Variant:
    """What a cell does at its size: drafts per round (0: no MTP; "auto": adaptive), and fields of
    `Settings`.

    `library` names one of the native libraries of the plan, or one of its peers.
    """

    depth: int | str
    prompt_rows: str = SWITCHES["prompt_rows"]
    prompt_sync: str = SWITCHES["prompt_sync"]
    hidden: str = SWITCHES["hidden"]
    draft_vocab: str = SWITCHES["draft_vocab"]
    library: str = ""


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

    `prompt_rows` to `draft_vocab` are values of those fields of `Settings`; each depth above 0 is
    measured with every combination of them, depth 0 once, with the defaults. `libraries` are labels
    of native libraries, `classes` kinds of text; everything is measured with each. `peers` are
    other programs, by their names in `PEERS`: each is measured without MTP, and at the depths that
    are numbers if it can draft.
    """

    sizes: tuple[int, ...]
    depths: tuple[int | str, ...]
    max_tokens: int
    repeat: int
    prompt_rows: tuple[str, ...] = (SWITCHES["prompt_rows"],)
    prompt_sync: tuple[str, ...] = (SWITCHES["prompt_sync"],)
    hidden: tuple[str, ...] = (SWITCHES["hidden"],)
    draft_vocab: tuple[str, ...] = (SWITCHES["draft_vocab"],)
    classes: tuple[str, ...] = ("text",)
    libraries: tuple[str, ...] = ("",)
    output_mode: str = "text"
    peers: tuple[str, ...] = ()

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
        for name in (*SWITCHES, "classes", "libraries"):
            if not getattr(self, name):
                raise UsageError(f"no {name} given")
            _check_distinct(name, getattr(self, name))
        _check_distinct("peers", self.peers)
        _check_distinct("libraries and peers", (*self.libraries, *self.peers))
        if len(self.prompt_sync) > 1 and "auto" in self.prompt_sync:
            raise UsageError(
                f"prompt_sync {', '.join(self.prompt_sync)} name one value twice: auto is kv or "
                "full; leave it out"
            )
        if self.max_tokens < 1 or self.repeat < 1:
            raise UsageError(
                f"max_tokens ({self.max_tokens}) and repeat ({self.repeat}) must be 1 or more"
            )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The cells of one size and class, in the order in which they are shown."""
        combinations = [*itertools.product(*(getattr(self, name) for name in SWITCHES))]
        own = [
            replace(Variant(depth, *switches), library=library)
            for library in self.libraries
            for depth in self.depths
            for switches in (combinations if depth else [()])
        ]
        return (*own, *self._peer_variants())

    def _peer_variants(self) -> tuple[Variant, ...]:
        """The cells of other programs, which have none of our switches."""
        return tuple(
            Variant(depth, library=name)
            for name in self.peers
            for depth in ((self.fixed_depths or (0,)) if PEERS[name].drafts else (0,))
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
        if not variant.depth:
            return ", ".join([*words, "no MTP"])
        if variant.library in self.peers:
            return ", ".join([*words, f"depth {variant.depth}"])
        varied = [name for name in SWITCHES if len(getattr(self, name)) > 1]
        said = [name.removeprefix("prompt_").replace("_", " ") for name in varied]
        names = ["" if short else name + " " for name in said]
        switches = [name + getattr(variant, of) for name, of in zip(names, varied, strict=True)]
        return ", ".join([*words, f"depth {variant.depth}", *switches])

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
