"""Tables: the figures of the cells, ratios to no-MTP, and labels that cannot be overlooked."""

from __future__ import annotations

import io
from typing import Any

from pyllama_mtp.bench import Results
from pyllama_mtp.measure.figures import LEAST_DRAFTS, Cell
from pyllama_mtp.measure.table import (
    llama_bench,
    markdown_table,
    matrix_columns,
    print_matrix,
)
from pyllama_mtp.measure.table import (
    matrix_rows as rows_of,
)

from ..cells import made_cell, made_sample


def matrix_rows(cells: list[Cell]) -> list[list[str]]:
    return rows_of(cells, matrix_columns(cells))


def cell(depth: int, prefill: float, decode: float, n_prompt: int = 512, **changes: Any) -> Cell:
    """9, 8, ... of 10 drafts accepted."""
    accepted = [*range(9, 9 - depth, -1)]
    rounds = {"rounds": 10, "mean_acceptance_length": 1 + sum(accepted) / 10}
    drafts = {"drafted": [10] * depth, "accepted": accepted, **rounds}
    machine = {"cpu": "a CPU", "cores": 2, "devices": []}
    one = made_sample(n_prompt, 20, prefill, decode, **drafts)
    return made_cell(depth, [one], n_prompt=n_prompt, max_tokens=20, machine=machine, **changes)


CELLS = [cell(0, 2000, 100), cell(3, 1900, 150), cell(2, 500, 50, n_prompt=1024)]


def with_switches(rows: str, sync: str, prefill: float, **changes: Any) -> Cell:
    axes = {"prompt_rows": rows, "prompt_sync": sync, **changes.pop("axes", {})}
    made = cell(3, prefill, 50, axes=axes, **changes)
    made.samples[0].prompt_sync = {"auto": "kv"}.get(sync, sync)
    made.samples[0].time_s = {"prompt_sync": 0.02}
    return made


STATES = [
    cell(0, 2000, 100),
    with_switches("all", "full", 1000),
    with_switches("last", "full", 1600),
    with_switches("last", "kv", 1960),
]


def test_auto_is_shown_as_what_it_came_down_to() -> None:
    left_out = with_switches("last", "auto", 1000)
    left_out.samples, left_out.skipped = [], "too long"
    cells = [with_switches("last", "auto", 1000), left_out]
    assert "sync" not in [column.title for column in matrix_columns(cells)]


def printed(cells: list[Cell], width: int | None) -> str:
    file = io.StringIO()
    print_matrix(cells, file, width)
    return file.getvalue()


def test_eighty_columns_are_enough_for_every_switch() -> None:
    """Columns that do not fit are left out and named; each cell has one line."""
    rates = {"synthetic_acceptance": [0.8, 0.7, 0.6]}
    cells = [
        cell(0, 2000, 100),
        with_switches("all", "full", 1500, **rates),
        with_switches("last", "kv", 1500, axes={"hidden": "pre-norm"}, **rates),
    ]
    for chosen in (CELLS, STATES, cells[:2], cells):
        text = printed(chosen, 80)
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80, text
        assert [line.split()[0] for line in lines if line.split()[:1] in (["512"], ["1024"])] == [
            str(one.n_prompt) for one in chosen
        ]
        for heading in ("no-MTP", "at 1,2,...", "decode"):
            assert heading in text, text
    assert not printed(CELLS, 80).splitlines()[6].strip(), "a line between prompt sizes"
    assert "narrow terminal: sync %, elapsed s;" in " ".join(printed(STATES, 80).split())
    wide = printed(cells, None)
    assert "left out" not in wide and "elapsed" in wide and "pre " in wide


def test_a_position_that_adaptive_depth_hardly_drafted_at_has_no_rate() -> None:
    """Two drafts of one sample make no percentage; a fixed depth drafts in every round."""
    chosen = cell(4, 1900, 150, adaptive=True)
    chosen.samples[0].drafted = [LEAST_DRAFTS + 20, LEAST_DRAFTS, LEAST_DRAFTS - 1, 0]
    chosen.samples[0].accepted = [LEAST_DRAFTS, LEAST_DRAFTS // 2, 0, 0]
    fixed = cell(3, 1900, 150)
    assert [row[8] for row in matrix_rows([chosen, fixed])] == ["50 50 - -", "90 80 70"]
    chosen.samples[0].drafted = [LEAST_DRAFTS] * 4
    assert matrix_rows([chosen])[0][8] == "100 50 0 0"


def test_whose_acceptance_was_imposed_stands_above_every_table() -> None:
    """Of rates that were published their name and source, also of the first ones of them."""
    for rates, name in (([0.93, 0.8], "golden:qwen3.5 (0.93, 0.8): "), ([0.9, 0.8], "0.9, 0.8: ")):
        cells = [cell(0, 2000, 100), cell(2, 1900, 150, synthetic_acceptance=rates)]
        tables = printed(cells, None), markdown_table(cells), llama_bench(cells)
        for text in (*tables, Results(cells).markdown()):
            before, said, after = text.partition(f"SYNTHETIC ACCEPTANCE {name}")
            assert said and "2 SYN" not in before and "mtp2" not in before, text
            assert ("InferenceX" in after.partition("\n")[0]) == name.startswith("golden"), text


def test_rows_of_axes_are_in_order() -> None:
    """In whatever order the samples came: numbers by size, "auto" last."""
    sequences = [(3, 8), (0, 16), (3, 16), (0, 8), (3, 1), (0, 1)]
    cells = [cell(depth, 100, 10, axes={"n_sequences": n}) for depth, n in sequences]
    cells.insert(0, cell(6, 100, 10, adaptive=True, axes={"n_sequences": 1}))
    lines = [line.split(" | ") for line in markdown_table(cells).splitlines() if "TP" in line]
    found = [(words[1], int(words[2])) for words in lines if words[0] == "| 512"]
    modes = [("no-MTP", 1), ("no-MTP", 8), ("no-MTP", 16)]
    assert found == [*modes, ("MTP 3", 1), ("MTP 3", 8), ("MTP 3", 16), ("MTP auto", 1)]
