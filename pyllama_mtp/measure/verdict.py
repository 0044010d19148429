"""What MTP gains on a file and machine, or why it does not pay: the same words in `tune`,
`inspect`, the matrix and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllama_mtp.measure.figures import OURS, Cell, averaged, base_of, paired_ratios, waited_share
from pyllama_mtp.measure.intervals import CONFIDENCE, Ratio, typical_ratio
from pyllama_mtp.measure.plan import AXES, axis_name, axis_words
from pyllama_mtp.measure.text import (
    ENOUGH_TOKENS,
    WAITED_MUCH,
    between,
    counted,
    gain_words,
    percent,
)
from pyllama_mtp.models.quantize import WEIGHT_TYPES

if TYPE_CHECKING:
    from pyllama_mtp.llama.native import Library
    from pyllama_mtp.models.modelinfo import GGUFInfo

#: MTP will hardly pay where types without a fast path are this share of what a step reads.
MUCH = 0.5
#: Repeats below which an interval is wide for want of them.
MANY = 7


def step_shares(info: GGUFInfo) -> dict[str, float]:
    """The share of each tensor type, 0 to 1, in what a plain decode step reads, largest first."""
    total = sum(info.step_types.values()) or 1
    return {kind: n / total for kind, n in info.step_types.items()}


def slow_types(info: GGUFInfo, library: Library) -> dict[str, float]:
    """:func:`step_shares` of the types without a fast path for a few rows on this CPU."""
    return {
        kind: share
        for kind, share in step_shares(info).items()
        if not library.few_columns(WEIGHT_TYPES[kind.lower()])
    }


def slow_verdict(slow: Mapping[str, float]) -> str:
    """That MTP will hardly pay because of :func:`slow_types`; "" where they are not most."""
    if sum(slow.values()) < MUCH:
        return ""
    return f"MTP will hardly pay on this CPU.{slow_words(slow)}"


def slow_words(slow: Mapping[str, float]) -> str:
    """A sentence about types without a fast path, where they are many; begins with a space."""
    part = sum(slow.values())
    if part < MUCH / 5:
        return ""
    kinds = ", ".join(f"{kind} {percent(share)}" for kind, share in slow.items())
    return (
        f" {percent(part)} of what a step reads is in types without a fast path for a few "
        f"rows here, where n rows cost nearly as much as n steps: {kinds}."
    )


@dataclass(frozen=True)
class Gain:
    """A way of drafting at all prompt sizes, classes and contexts: its cells, their cells without
    MTP, and the paired ratios of both."""

    cells: list[Cell]
    bases: list[Cell]
    decode: list[list[float]]
    prefill: list[list[float]]

    @property
    def name(self) -> str:
        """The depth and axes in words."""
        first = self.cells[0]
        depth = "auto" if first.adaptive else f"depth {first.n_max}"
        axes = (
            f"{axis_name(name)} {axis_words(value)}"
            for name, value in first.axes.items()
            if name != "n_context"
        )
        return ", ".join([depth, *axes])

    @property
    def tokens(self) -> float:
        """Tokens per pass, total over total."""
        rounds = sum(cell.rounds for cell in self.cells)
        return sum((cell.mean_acceptance_length or 0) * cell.rounds for cell in self.cells) / rounds


def gains(cells: Sequence[Cell]) -> list[Gain]:
    """The ways of drafting that were measured with MTP and without, the fastest first."""
    ways: dict[tuple[object, ...], dict[tuple[int, str, int], Cell]] = {}
    axes = [name for name in AXES if name != "n_context"]
    for cell in cells:
        if cell.program == OURS and cell.n_max and cell.rounds:
            key = (cell.variant, cell.adaptive, cell.n_max, *map(cell.axis, axes))
            ways.setdefault(key, {})[cell.n_prompt, cell.prompt_class, cell.n_context] = cell
    found = []
    for way in ways.values():
        rows = [
            (cell, base, decode, prefill)
            for cell in way.values()
            if (base := base_of(cell, cells))
            and (decode := paired_ratios(cell, base, "decode_tps"))
            and (prefill := paired_ratios(cell, base, "prefill_tps"))
        ]
        if rows:
            found.append(Gain(*map(list, zip(*rows, strict=True))))
    return sorted(found, key=lambda one: (-len(one.cells), -typical_ratio(*one.decode).value))


def summary(cells: Sequence[Cell]) -> str:
    """What drafting gains, in plain words: with the depth that is chosen while generating, or, if
    only fixed ones were measured, the fastest. "": there is nothing to compare.

    The fastest of several is so by luck in part: its interval is that of as many comparisons.

    Args:
        cells: of one model and machine.
    """
    if not (ways := gains(averaged(cells))):
        return ""
    auto = next((one for one in ways if one.cells[0].adaptive), None)
    chosen, confidence = auto or ways[0], 1 - (1 - CONFIDENCE) / (1 if auto else len(ways))
    shortest = min(cell.max_tokens for cell in chosen.cells)
    if shortest < ENOUGH_TOKENS:
        return (
            f"{counted(shortest, 'generated token')} say too little of the speed for a verdict; "
            f"take --max-tokens {ENOUGH_TOKENS} or more."
        )
    imposed = any(cell.synthetic_acceptance for cell in chosen.cells)
    start = "At the imposed acceptance, with" if imposed else "With"
    way = "drafts from the text (n-grams)" if chosen.cells[0].from_text else "MTP"
    how = f"{chosen.name}, {chosen.tokens:.1f} tokens per pass"
    decode, prefill = (
        typical_ratio(*rows, confidence=confidence) for rows in (chosen.decode, chosen.prefill)
    )
    sizes = [typical_ratio(row).value for row in chosen.decode]
    if between(min(sizes), max(sizes)) != between(decode.value, decode.value):
        how += f"; {between(min(sizes), max(sizes))} times from prompt to prompt"
    slower = decode.high is not None and decode.high < 1
    why = slow_words(chosen.cells[0].slow_types) if slower else ""
    said = gain_or_doubt(chosen, decode, f" ({how})")
    return f"{start} {way} decode is {said}. Prefill is {gain_or_doubt(chosen, prefill)}.{why}"


def gain_or_doubt(
    gain: Gain,
    ratio: Ratio,
    how: str = "",
    noun: str = "repeat",
    more: str = f"take --repeat {MANY}",
) -> str:
    """What a ratio says; where it cannot be told which side is faster, why, and what to do.

    Args:
        how: was drafted.
        noun: what the pairs of samples are called; `more`: what to do if they are few.
    """
    said = f"{gain_words(ratio)}{how}"
    if not ratio.unclear:
        return said
    reasons, advice = list[str](), list[str]()
    if (n := min(map(len, gain.decode))) < MANY:
        reasons.append(f"there {'is' if n == 1 else 'are'} {counted(n, noun)} only")
        advice.append(more)
    if waited_share([*gain.cells, *gain.bases]) >= WAITED_MUCH:
        reasons.append("other programs kept the machine busy")
        advice.append("close them")
    why = "the samples scatter; take more of them, or more --max-tokens"
    if reasons:
        why = f"{' and '.join(reasons)}; {' and '.join(advice)}"
    return f"{said}, so it cannot be told whether that is faster: {why}"


def summaries(cells: Sequence[Cell]) -> list[str]:
    """:func:`summary` of each model, with its name where there are several."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = [(model, summary([cell for cell in cells if cell.model == model])) for model in models]
    return [f"{model}: {text}" if len(models) > 1 else text for model, text in found if text]
