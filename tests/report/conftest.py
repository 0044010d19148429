"""Cells made up for the tests of `compare`, `report` and the Python interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pyllama_mtp.measure.figures import Cell, Sample
from pyllama_mtp.measure.records import to_line

from ..cells import made_cell, made_sample
from ..cli.conftest import folder, nothing_loads, watched  # noqa: F401 (fixtures)
from ..measure import records

MEASURED = Path(__file__).parents[1] / "data" / "matrix.jsonl"
MACHINE = {"cpu": "Testcore", "cores": 2, "devices": [], "os": "Linux 6.1", "python": "3.11.7"}


def _sample(depth: int, size: int, prefill: float, decode: float) -> Sample:
    drafted = [40 - 5 * position for position in range(depth)]
    accepted = [count * (8 - position) // 10 for position, count in enumerate(drafted)]
    rounds = {"rounds": 40, "mean_acceptance_length": 1.0 + 0.6 * depth}
    return made_sample(size, 64, prefill, decode, drafted=drafted, accepted=accepted, **rounds)


def make_cell(
    depth: int = 0,
    size: int = 512,
    prefill: Sequence[float] = (200.0, 210.0, 190.0),
    decode: Sequence[float] = (40.0, 42.0, 38.0),
    **changes: Any,
) -> Cell:
    """A cell of samples with these speeds; `changes`: fields of Cell."""
    values: dict[str, Any] = {
        **{"n_prompt": size, "max_tokens": 64, "time": "2026-11-20T23:31:02+00:00"},
        "settings": {"draft_n_max": depth, "n_threads": 2},
    }
    samples = [_sample(depth, size, *both) for both in zip(prefill, decode, strict=True)]
    return made_cell(depth, samples, **{**values, "machine": dict(MACHINE), **changes})


def make_matrix(
    seed: int,
    noise: float | Callable[[int], float] = 0.025,
    repeat: int = 7,
    sizes: Sequence[int] = (512, 2048, 8192),
    depths: Sequence[int] = (0, 2, 3, 4),
    **changes: Any,
) -> list[Cell]:
    """Cells of every size and depth.

    Samples are normally distributed in their logarithm, independent, with standard deviation
    `noise`, or `noise(size)`.
    """
    random = Random(seed)

    def speeds(center: float, size: int) -> list[float]:
        width = noise(size) if callable(noise) else noise
        return [center * random.lognormvariate(0, width) for _ in range(repeat)]

    return [
        make_cell(
            depth,
            size,
            speeds(220 - size / 200 - depth, size),
            speeds(40 + 8 * depth - size / 1000, size),
            **changes,
        )
        for size in sizes
        for depth in depths
    ]


@pytest.fixture
def write_cells(tmp_path: Path) -> Callable[[str, Sequence[Cell]], Path]:
    """`write_cells("old.jsonl", cells)`: a file of records from which these cells come."""

    def write(name: str, cells: Sequence[Cell]) -> Path:
        path = tmp_path / name
        runs = dict.fromkeys(cell.run for cell in cells)
        parts = ([cell for cell in cells if cell.run == run] for run in runs)
        path.write_bytes(b"".join(to_line(record) for part in parts for record in _records(part)))
        return path

    return write


def _records(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The records of one run; each variant is a build of it."""
    first, named = cells[0], ("program", "variant", "upstream_commit", "series", "backend")
    builds = {cell.variant: {name: getattr(cell, name) for name in named} for cell in cells}
    about = {"model": {"name": first.model}, "machine": first.machine, "time": first.time}
    run = first.run or "a"
    yield records.run(run, builds=builds, settings={}, sampling={}, **about)
    for cell in cells:
        apart = ("n_prompt", "prompt_class", "n_max", "max_tokens", "adaptive")
        key = {"build": cell.variant, **{name: getattr(cell, name) for name in apart}}
        for repeat, sample in zip(cell.repeats, cell.samples, strict=True):
            made = records.sample(repeat, run=run, **msgspec.structs.asdict(sample))
            del made["memory"]
            yield {**made, "cell": key, "settings": cell.settings, "time": cell.time}
