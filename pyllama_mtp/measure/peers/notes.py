"""The notes below a table about other programs: what they are, and how ours compares."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_mtp.measure.cells import OURS, Cell
from pyllama_mtp.measure.columns import mode_words
from pyllama_mtp.measure.peers import PEERS
from pyllama_mtp.measure.plan import axis_words
from pyllama_mtp.measure.ratios import Figure, ratio_to

_FIGURES: tuple[tuple[str, Figure], ...] = (("prefill", "prefill_tps"), ("decode", "decode_tps"))


def peer_notes(cells: Sequence[Cell]) -> list[str]:
    """Lines about every program beside ours."""
    notes = []
    for name in dict.fromkeys(cell.program for cell in cells if cell.program != OURS):
        own = [cell for cell in cells if cell.program == name and cell.samples]
        if not own:
            continue
        notes.append(_build(own[0]))
        if name in PEERS:
            notes.append(PEERS[name].note)
        if any(cell.synthetic_acceptance for cell in own):
            notes.append(
                f"{name}: acceptance imposed by its --spec-synth-rates, drawn at random anew in "
                "each sample, so that its tokens per round scatter"
            )
        notes += _comparison(name, own, cells)
    return notes


def _build(cell: Cell) -> str:
    commit = f" of llama.cpp {cell.upstream_commit[:9]}" if cell.upstream_commit else ""
    patches = f", patches {cell.series[:12]}" if cell.series else ""
    return f"{cell.program}: {cell.variant}{commit}{patches}, {cell.backend}"


def _comparison(name: str, own: Sequence[Cell], cells: Sequence[Cell]) -> list[str]:
    """Our speed as a multiple of theirs, size by size, from the ratios within a repeat."""
    parts: dict[str, list[str]] = {}
    for theirs in own:
        ours = next((cell for cell in cells if _comparable(cell, theirs)), None)
        if ours is None:
            continue
        mode = " ".join([mode_words(theirs), *map(axis_words, theirs.axes.values())])
        speeds = [
            f"{words} {ratio.value:.2f}x"
            for words, figure in _FIGURES
            if (ratio := ratio_to(ours, theirs, figure))
        ]
        if speeds:
            kind = f"{theirs.n_prompt} {theirs.prompt_class}"
            parts.setdefault(kind, []).append(f"{mode} {', '.join(speeds)}")
    if not parts:
        return []
    sizes = [f"{kind}: {'; '.join(found)}" for kind, found in parts.items()]
    return [f"ours to {name}, from the ratios within a repeat, prompt {' | '.join(sizes)}"]


def _comparable(ours: Cell, theirs: Cell) -> bool:
    """Whether a cell of ours did the same work."""
    same = ("run", "model", "prompt_class", "n_prompt", "max_tokens", "n_max", "adaptive")
    alike = all(getattr(ours, name) == getattr(theirs, name) for name in same)
    alike &= all(ours.axes.get(name) == value for name, value in theirs.axes.items())
    return alike and ours.program == OURS and bool(ours.samples)
