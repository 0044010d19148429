"""What MTP gains on a file and machine, or why it does not pay: the same words in `tune`,
`inspect`, the matrix and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllama_mtp.drafting.depth import needed_acceptance
from pyllama_mtp.measure.figures import OURS, Cell, Ratio, base_of, ratio_to
from pyllama_mtp.measure.plan import AXES, axis_name, axis_words
from pyllama_mtp.measure.text import ENOUGH_TOKENS, counted, percent
from pyllama_mtp.models.quantize import WEIGHT_TYPES

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.llama.native import Library
    from pyllama_mtp.models.modelinfo import GGUFInfo

#: MTP will hardly pay where types without a fast path are this share of what a step reads.
MUCH = 0.5
#: Changes of the prompt's time that are not told if noise can be the reason.
SMALL = 0.05
#: Ratios this close to 1 are called equal.
EQUAL = 0.02
#: Repeats below which figures are called rough.
FEW = 3
#: In a plain step of fewer seconds, the costs beside the model weigh most.
SHORT_STEP_S = 0.002


@dataclass(frozen=True)
class Round:
    """The times of a round of `depth` drafts in plain decode steps: verification, and in all."""

    depth: int
    verify: float
    total: float


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


def slow_types_of(model: Model) -> dict[str, float]:
    """:func:`slow_types` of a loaded model; {} where the model is on a GPU."""
    from pyllama_mtp.llama import native

    return {} if model.on_gpu else slow_types(model.info, native.load())


def verdict(rounds: Sequence[Round], slow: Mapping[str, float], accepted: str = "") -> str:
    """Why MTP does not pay, in sentences; "" where nothing speaks against it.

    Args:
        rounds: as measured; empty: not measured.
        slow: see :func:`slow_types`.
        accepted: the acceptance that there is, in words, to stand beside what is needed.
    """
    part = sum(slow.values())
    if not rounds and part < MUCH:
        return ""
    text = "MTP will hardly pay on this CPU."
    if rounds:
        needed = (needed_acceptance(one.total, one.depth) for one in rounds)
        least = min((rate for rate in needed if rate is not None), default=None)
        wanted = f"only if more than {percent(least or 0)} of the drafts are accepted"
        pays = f"MTP pays here {wanted}{f' ({accepted})' if accepted else ''}"
        text = (
            f"{'MTP cannot pay here' if least is None else pays}: verifying "
            f"{' / '.join(str(one.depth + 1) for one in rounds)} rows takes "
            f"{' / '.join(f'{one.verify:.2f}' for one in rounds)} plain steps, with the drafts "
            f"{' / '.join(f'{one.total:.2f}' for one in rounds)}, for at most as many tokens as "
            "rows."
        )
    return text + _slow_words(slow)


def _slow_words(slow: Mapping[str, float]) -> str:
    """A sentence about types without a fast path, where they are many."""
    part = sum(slow.values())
    if part < MUCH / 5:
        return ""
    kinds = ", ".join(f"{kind} {percent(share)}" for kind, share in slow.items())
    return (
        f" {percent(part)} of what a step reads is in types without a fast path for a few "
        f"rows here, where n rows cost nearly as much as n steps: {kinds}."
    )


@dataclass(frozen=True)
class _Gain:
    """A way of drafting at all prompt sizes, classes and contexts: its cells, their cells without
    MTP, and the ratios of both."""

    cells: list[Cell]
    bases: list[Cell]
    decode: list[Ratio]
    prefill: list[Ratio]

    @property
    def typical(self) -> float:
        """Decode speed against no MTP, the geometric mean over sizes and classes."""
        return math.exp(sum(math.log(one.value) for one in self.decode) / len(self.decode))

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
        return sum((cell.tokens_per_round or 0) * cell.rounds for cell in self.cells) / rounds


def _gains(cells: Sequence[Cell]) -> list[_Gain]:
    """The ways of drafting that were measured with MTP and without, the fastest first."""
    found: dict[tuple[object, ...], dict[tuple[int, str, int], Cell]] = {}
    axes = [name for name in AXES if name != "n_context"]
    for cell in cells:
        if cell.program == OURS and cell.n_max and cell.rounds:
            key = (cell.variant, cell.adaptive, cell.n_max, *map(cell.axis, axes))
            found.setdefault(key, {})[cell.n_prompt, cell.prompt_class, cell.n_context] = cell
    gains = []
    for way in found.values():
        rows = [
            (cell, base, decode, prefill)
            for cell in way.values()
            if (base := base_of(cell, cells))
            and (decode := ratio_to(cell, base, "decode_tps"))
            and (prefill := ratio_to(cell, base, "prefill_tps"))
        ]
        if rows:
            gains.append(_Gain(*map(list, zip(*rows, strict=True))))
    return sorted(gains, key=lambda one: (-len(one.cells), -one.typical))


def summary(cells: Sequence[Cell]) -> str:
    """What the fastest way of drafting gains, in plain words; "" where there is nothing to compare.

    Args:
        cells: of one model and machine.
    """
    if not (gains := _gains(cells)):
        return ""
    fewest = min(ratio.n for ratio in gains[0].decode)
    shortest = min(cell.max_tokens for cell in gains[0].cells)
    if shortest < ENOUGH_TOKENS:
        return (
            f"{counted(shortest, 'generated token')} say too little of the speed for a verdict; "
            f"take --max-tokens {ENOUGH_TOKENS} or more."
        )
    if fewest < 2:
        return (
            f"About {gains[0].typical:.1f} times as fast with MTP ({gains[0].name}), one sample: "
            "it says nothing of the noise, so there is no verdict; take --repeat 3 or more."
        )
    rough = f" From {counted(fewest, 'repeat')}, so figures are rough."
    return _summary(gains) + (rough if fewest < FEW else "")


def _summary(gains: Sequence[_Gain]) -> str:
    best = gains[0]
    chosen = next((one for one in gains if one.cells[0].adaptive), best)
    ratios = [one.value for one in best.decode]
    between = any(one.holds_one for one in best.decode) and max(ratios) < 1.1
    auto = "" if chosen is best else f"; auto, the default: {_times(chosen.typical)} times"
    how = f"{best.name}, {best.tokens:.1f} tokens per pass{auto}"
    imposed = any(cell.synthetic_acceptance for cell in best.cells)
    start = "At the imposed acceptance, with MTP" if imposed else "With MTP"
    if best.typical >= 1 + EQUAL and not between:
        return f"{start} decode is {_range(ratios)} times as fast here ({how}); {_prompt(best)}."
    if best.typical > 1 - EQUAL or between:
        text = f"{start} decode is about as fast as without here ({how}); {_prompt(best)}."
        return text + _tiny(best)
    steps = [
        base.decode_tps * sum(sample.decode_s for sample in cell.samples) / cell.rounds
        for cell, base in zip(best.cells, best.bases, strict=True)
        if base.decode_tps
    ]
    return (
        f"{start} decode is slower here: {_range(ratios)} times as fast at best ({how}), because "
        f"a pass with its drafts takes as long as {_range(steps)} steps without MTP; "
        f"{_prompt(best)}.{_slow_words(best.cells[0].slow_types)}{_tiny(best)}"
    )


def _tiny(gain: _Gain) -> str:
    """A warning if the model is too small to judge by."""
    step_s = 1 / max(base.decode_tps or math.inf for base in gain.bases)
    if not 0 < step_s < SHORT_STEP_S:
        return ""
    return (
        f" The model is tiny: a step takes {1000 * step_s:.1f} ms, and what a pass costs beside it "
        "weighs most. Judge by a model of the size that you use."
    )


def summaries(cells: Sequence[Cell]) -> list[str]:
    """:func:`summary` of each model, with its name where there are several."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = [(model, summary([cell for cell in cells if cell.model == model])) for model in models]
    return [f"{model}: {text}" if len(models) > 1 else text for model, text in found if text]


def _prompt(gain: _Gain) -> str:
    """How long the prompt takes with MTP, in words."""
    if all(one.holds_one and abs(one.value - 1) < SMALL for one in gain.prefill):
        return "the prompt takes about as long"
    longer = [100 / one.value - 100 for one in gain.prefill]
    low, high = round(min(longer)), round(max(longer))
    if low == high == 0:
        return "the prompt takes as long"
    if low >= 0:
        return f"the prompt takes {low if low == high else f'{low} to {high}'} % longer"
    if high <= 0:
        return f"the prompt takes {-low if low == high else f'{-high} to {-low}'} % less time"
    return f"the prompt takes {-low} % less to {high} % more time"


def _range(values: Sequence[float]) -> str:
    """ "1.6", or "1.4 to 1.6"."""
    low, high = _times(min(values)), _times(max(values))
    return low if low == high else f"{low} to {high}"


def _times(value: float) -> str:
    return f"{value:.1f}" if value >= 1.095 else f"{value:.2f}"
