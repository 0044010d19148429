"""Cells as flat records, one dict each: for CSV files, data frames and scripts."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from typing import Any

from pyllama_mtp.measure import series
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.plan import SWITCHES
from pyllama_mtp.measure.ratios import SPEEDS, Figure, ratio_to_plain
from pyllama_mtp.measure.recordfile import Records

#: What a record has as the cell has it.
_SAME = (
    *("program", "variant", "upstream_commit", "series", "backend", "mode", "n_max", "adaptive"),
    *("n_prompt", "prompt_class", "max_tokens"),
)


def records(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """See :meth:`.Results.records`."""
    depth = max((len(cell.acceptance_per_position) for cell in cells), default=0)
    axes = list(dict.fromkeys(name for cell in cells for name in cell.axes))
    return [_record(cell, cells, depth, axes) for cell in cells]


def _record(cell: Cell, cells: Sequence[Cell], depth: int, axes: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": cell.model,
        "machine": series.machine_words(cell),
        **{name: getattr(cell, name) for name in _SAME},
        **{name: series.switch_of(cell, name) or None for name in SWITCHES},
        **{name: cell.axes.get(name) for name in axes},
        "synthetic": bool(cell.synthetic_acceptance),
        "n_samples": len(cell.samples),
    }
    for figure in SPEEDS.values():
        ratio = ratio_to_plain(cell, cells, figure)
        bounds = (ratio.value, ratio.low, ratio.high) if ratio else None
        found |= _spread(figure, spread_of(cell, figure))
        found |= _spread(figure.replace("_tps", "_ratio"), bounds)
    rates = [*cell.acceptance_per_position, *[None] * depth][:depth]
    return {
        **found,
        "elapsed_s": cell.elapsed_s,
        "prompt_sync_share": cell.prompt_sync_share,
        "tokens_per_round": cell.tokens_per_round if cell.n_max else None,
        **{f"acceptance_{position}": rate for position, rate in enumerate(rates, start=1)},
        "time": cell.time,
        "run": cell.run,
        "skipped": cell.skipped,
    }


def _spread(name: str, spread: tuple[float, float, float] | None) -> dict[str, float | None]:
    names = (name, f"{name}_low", f"{name}_high")
    return dict(zip(names, spread or (None, None, None), strict=True))


def spread_of(cell: Cell, figure: Figure) -> tuple[float, float, float] | None:
    """Median, lowest and highest of the samples; None where nothing was measured."""
    speeds = [value for sample in cell.samples if (value := getattr(sample, figure)) > 0]
    middle = getattr(cell, figure)
    return (middle, min(speeds), max(speeds)) if speeds and middle else None


def run_commands(found: Records) -> dict[str, str]:
    """The command of every run by the run's id, as it was typed (paths without folders)."""
    return {run.id: shlex.join(run.header["command"]) for run in found.runs.values()}


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The records as CSV with a header line; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
