"""Cells made up for the tests of `compare`, `report` and the Python interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama_mtp.cli import main
from pyllama_mtp.measure.cells import Cell, Sample
from pyllama_mtp.measure.recordfile import Record, to_line

MakeCell = Callable[..., Cell]
MACHINE = {"cpu": "Testcore", "cores": 2, "devices": [], "os": "Linux 6.1", "python": "3.11.7"}


def _sample(depth: int, size: int, prefill: float, decode: float) -> Sample:
    drafted = [40 - 5 * position for position in range(depth)]
    return Sample(
        n_prompt=size,
        n_generated=64,
        prefill_s=size / prefill,
        decode_s=64 / decode,
        elapsed_s=size / prefill + 64 / decode,
        prefill_tps=prefill,
        decode_tps=decode,
        drafted=drafted,
        accepted=[count * (8 - position) // 10 for position, count in enumerate(drafted)],
        rounds=40,
        tokens_per_round=1.0 + 0.6 * depth,
    )


@pytest.fixture
def make_cell() -> MakeCell:
    """`make_cell(depth, size, prefill=[...], decode=[...], **fields of Cell)`."""

    def make(
        depth: int = 0,
        size: int = 512,
        prefill: Sequence[float] = (200.0, 210.0, 190.0),
        decode: Sequence[float] = (40.0, 42.0, 38.0),
        **changes: Any,
    ) -> Cell:
        values: dict[str, Any] = {
            "model": "m.gguf",
            "variant": "patched",
            "upstream_commit": "0123456789abcdef",
            "series": "feedc0dedeadbeef",
            "backend": "CPU",
            "mode": "draft-mtp" if depth else "no-mtp",
            "max_tokens": 64,
            "repeat": len(prefill),
            "repeats": list(range(len(prefill))),
            "machine": dict(MACHINE),
            "settings": {"draft_n_max": depth, "n_threads": None},
            "time": "2026-11-20T23:31:02+00:00",
            **changes,
        }
        made = Cell(
            n_max=depth,
            n_prompt=size,
            samples=[
                _sample(depth, size, fast, slow) for fast, slow in zip(prefill, decode, strict=True)
            ],
            **values,
        )
        made.summarize()
        return made

    return make


@pytest.fixture
def make_matrix(make_cell: MakeCell) -> Callable[..., list[Cell]]:
    """`make_matrix(seed, noise=0.025, repeat=7)`: no MTP and depths 2 to 4 at three sizes.

    Samples are normally distributed in their logarithm, independent, with standard deviation
    `noise`, or `noise(size)`.
    """

    def make(
        seed: int,
        noise: float | Callable[[int], float] = 0.025,
        repeat: int = 7,
        sizes: Sequence[int] = (512, 2048, 8192),
        depths: Sequence[int] = (0, 2, 3, 4),
        **changes: Any,
    ) -> list[Cell]:
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

    return make


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


def _records(cells: Sequence[Cell]) -> Iterator[Record]:
    """The records of one run; of its builds each variant is one."""
    first, named = cells[0], ("program", "variant", "upstream_commit", "series", "backend")
    yield {
        **{"kind": "run", "run": first.run or "a run", "time": first.time, "version": "1"},
        **{"command": ["pyllama-mtp", "matrix"], "model": {"name": first.model}},
        "builds": {cell.variant: {name: getattr(cell, name) for name in named} for cell in cells},
        "machine": first.machine,
        "plan": {
            **{"sizes": [], "classes": [], "depths": []},
            **{"max_tokens": first.max_tokens, "repeat": first.repeat},
        },
        **{"settings": {}, "sampling": {}},
    }
    for cell in cells:
        apart = ("n_prompt", "prompt_class", "n_max", "max_tokens", "adaptive")
        about = {name: getattr(cell, name) for name in apart}
        for repeat, sample in zip(cell.repeats, cell.samples, strict=True):
            yield {
                **{"kind": "sample", "run": cell.run or "a run", "time": cell.time},
                "cell": {"build": cell.variant, **about},
                **{"settings": cell.settings, "repeat": repeat, "sample": asdict(sample)},
            }


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """`cli("compare", ...)` -> code, out, err."""

    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run
