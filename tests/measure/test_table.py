"""Tables: the figures of the cells, ratios to no-MTP, and labels that cannot be overlooked."""

from __future__ import annotations

import io
from typing import Any

from pyllama_mtp.measure.cells import Cell, Sample
from pyllama_mtp.measure.table import (
    HEADINGS,
    markdown_table,
    matrix_notes,
    matrix_rows,
    print_matrix,
    telemetry_lines,
)
from pyllama_mtp.telemetry import Telemetry


def cell(depth: int, prefill: float, decode: float, n_prompt: int = 512, **changes: Any) -> Cell:
    one = Sample(
        n_prompt=n_prompt,
        n_generated=20,
        prefill_s=n_prompt / prefill,
        decode_s=20 / decode,
        elapsed_s=n_prompt / prefill + 20 / decode,
        prefill_tps=prefill,
        decode_tps=decode,
        drafted=[10] * depth,
        accepted=list(range(9, 9 - depth, -1)),
        rounds=10,
        tokens_per_round=1 + sum(range(9, 9 - depth, -1)) / 10,
    )
    made = Cell(
        model="m.gguf",
        variant="patched",
        upstream_commit="0123456789abcdef",
        series="feedc0dedeadbeef",
        backend="CPU",
        mode="draft-mtp" if depth else "no-mtp",
        n_max=depth,
        n_prompt=n_prompt,
        max_tokens=20,
        repeat=1,
        samples=[one],
        machine={"cpu": "a CPU", "cores": 2, "devices": []},
    )
    made.summarize()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


CELLS = [cell(0, 2000, 100), cell(3, 1900, 150), cell(2, 500, 50, n_prompt=1024)]


def test_ratios_are_to_no_mtp_of_the_same_size() -> None:
    rows = [dict(zip(range(9), row, strict=True)) for row in matrix_rows(CELLS)]
    assert [rows[1][i] for i in range(6)] == [
        "512",
        "MTP 3",
        "1,900",
        "0.95x",
        "150.0",
        "1.50x",
    ]
    assert rows[0][3] == rows[0][5] == "1.00x"
    assert rows[2][3] == rows[2][5] == "-", "there is no no-MTP cell of 1024 tokens"
    assert rows[1][7] == "90 80 70"
    assert rows[0][7] == "-"
    assert rows[1][8] == "3.40"


def test_the_order_of_the_cells_does_not_matter_for_ratios() -> None:
    assert matrix_rows(CELLS[::-1])[1][3] == "0.95x"


def test_markdown_is_a_table_with_notes() -> None:
    lines = markdown_table(CELLS).splitlines()
    assert lines[0].startswith("| prompt tokens | mode | prefill tok/s | vs no-MTP |")
    assert all(line.count("|") == len(HEADINGS) + 1 for line in lines[:5])
    assert "patched build of llama.cpp 012345678, patches feedc0dedead" in lines[6]


def test_imposed_acceptance_is_said_in_every_row_and_below() -> None:
    cells = [cell(0, 2000, 100), cell(2, 1900, 150, synthetic_acceptance=[0.8, 0.7])]
    assert matrix_rows(cells)[1][1] == "MTP 2 SYNTHETIC"
    assert matrix_rows(cells)[0][1] == "no-MTP"
    assert any(note.startswith("SYNTHETIC ACCEPTANCE 0.8, 0.7:") for note in matrix_notes(cells))
    assert not any("SYNTHETIC" in note for note in matrix_notes(CELLS))


def test_a_skipped_cell_has_a_row_and_a_reason() -> None:
    left_out = Cell(
        "m", "patched", "c", "s", "CPU", "draft-mtp", 2, 9000, 20, 3, skipped="too long"
    )
    cells = [*CELLS, left_out]
    assert matrix_rows(cells)[3][2:] == ["-"] * 7
    assert "skipped: 9000 MTP 2: too long" in matrix_notes(cells)


def test_nothing_measured() -> None:
    assert matrix_notes([]) == ["nothing was measured"]


def test_nothing_is_cut_off_when_it_does_not_fit() -> None:
    """In a narrow terminal lines run over its edge; figures stay whole."""
    for width in (None, 80, 20):
        file = io.StringIO()
        print_matrix(CELLS, file, width)
        text = file.getvalue()
        assert "…" not in text
        for value in ("1,900", "0.95x", "150.0", "90 80 70", "3.40"):
            assert value in text, (width, text)


def test_statistics_of_one_generation() -> None:
    telemetry = Telemetry(n_prompt=100, n_cached=20, n_generated=21, prefill_s=0.5, decode_s=2.0)
    telemetry.count_round(2, 1)
    telemetry.count_round(1, 1)
    text = "\n".join(telemetry_lines(telemetry))
    assert "100 tokens, 20 of them cached; prefill 0.500 s, 160.0 tok/s" in text
    assert "21 tokens; decode 2.000 s, 10.0 tok/s" in text
    assert "2; 2.00 tokens per round, 1.00 accepted drafts per round" in text
    assert "draft 1    1.00 = 2 accepted of 2" in text
    assert "draft 2    0.00 = 0 accepted of 1" in text
