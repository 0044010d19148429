"""Why MTP does not pay on a file and machine: one wording, for `tune`, `inspect` and the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.peers.notes import OURS
from pyllama_mtp.measure.ratios import base_of
from pyllama_mtp.models.quantize import WEIGHT_TYPES
from pyllama_mtp.speculative.costs import needed_acceptance

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.models.ggufinfo import GGUFInfo
    from pyllama_mtp.native import Library

#: Share of what a step reads, in types without a fast path, from which MTP will hardly pay.
MUCH = 0.5


@dataclass(frozen=True)
class Round:
    """A round of `depth` drafts, in plain decode steps: its verification, and all of it."""

    depth: int
    verify: float
    total: float


def step_shares(info: GGUFInfo) -> dict[str, float]:
    """Of what a plain decode step reads: the share in each tensor type, 0 to 1, largest first."""
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
    """:func:`slow_types` of a loaded model; {} where it is not computed on this CPU."""
    from pyllama_mtp import native

    return {} if model.on_gpu else slow_types(model.info, native.load())


def verdict(rounds: Sequence[Round], slow: Mapping[str, float], accepted: str = "") -> str:
    """Why MTP does not pay, in sentences; "" where nothing says that it does not.

    Args:
        rounds: as measured; empty: not measured.
        slow: see :func:`slow_types`; what is known of a file that was not measured.
        accepted: which acceptance there is, in words, to stand beside the one that is needed.
    """
    part = sum(slow.values())
    if not rounds and part < MUCH:
        return ""
    sentences = []
    if rounds:
        needed = (needed_acceptance(one.total, one.depth) for one in rounds)
        least = min((rate for rate in needed if rate is not None), default=None)
        wanted = f"only if more than {percent(least or 0)} of the drafts are accepted"
        sentences += [
            "MTP cannot pay here"
            if least is None
            else f"MTP pays here {wanted}{f' ({accepted})' if accepted else ''}",
            f": verifying {_listed(str(one.depth + 1) for one in rounds)} rows takes "
            f"{_listed(f'{one.verify:.2f}' for one in rounds)} plain steps, with the drafts "
            f"{_listed(f'{one.total:.2f}' for one in rounds)}, for at most as many tokens as rows.",
        ]
    else:
        sentences.append("MTP will hardly pay on this CPU.")
    if part >= MUCH / 5:
        kinds = ", ".join(f"{kind} {percent(share)}" for kind, share in slow.items())
        sentences.append(
            f" {percent(part)} of what a step reads is in types without a fast path for a few "
            f"rows here, where n rows cost nearly as much as n steps: {kinds}."
        )
    return "".join(sentences)


def matrix_verdicts(cells: Sequence[Cell]) -> list[str]:
    """For every prompt size at which no fixed depth was faster than no MTP: why."""
    found: dict[int, dict[int, tuple[Round, Cell]]] = {}
    faster = set()
    for cell in cells:
        base = base_of(cell, cells)
        if cell.program != OURS or cell.adaptive or not (cell.n_max and cell.rounds and base):
            continue
        if not (base.decode_tps and cell.decode_tps) or cell.variant == "upstream":
            continue
        if cell.decode_tps > base.decode_tps:
            faster.add(cell.n_prompt)
        one = _round(cell, base.decode_tps)
        rounds = found.setdefault(cell.n_prompt, {})
        if cell.n_max not in rounds or one.total < rounds[cell.n_max][0].total:
            rounds[cell.n_max] = (one, cell)
    notes = []
    for n_prompt, by_depth in found.items():
        if n_prompt not in faster:
            rounds_of = [one for _, (one, _) in sorted(by_depth.items())]
            cell = by_depth[min(by_depth)][1]
            first = cell.acceptance_per_position[0] or 0.0
            words = f"{percent(first)} of the first ones were"
            prefix = f"{n_prompt} tokens: " if len(found) > 1 else ""
            notes.append(prefix + verdict(rounds_of, cell.slow_types, words))
    return notes


def _round(cell: Cell, plain_tps: float) -> Round:
    """The mean round of a cell; `plain_tps` plain steps take a second."""
    verify = sum(sample.time_s.get("verify", 0.0) for sample in cell.samples)
    total = sum(sample.decode_s for sample in cell.samples)
    return Round(cell.n_max, *(plain_tps * time / cell.rounds for time in (verify, total)))


def _listed(words: Iterable[str]) -> str:
    return " / ".join(words)


def percent(share: float) -> str:
    """A share of 1, in words of a sentence."""
    return f"{100 * share:.0f} %"
