"""Which cells belong together, and how they are called."""

from __future__ import annotations

from pyllama_mtp.measure.figures import Cell, Labels, latest, machine_words, sections, series_key

from .conftest import make_cell


def names(cells: list[Cell]) -> list[str]:
    return [*map(Labels(cells), cells)]


def test_a_label_names_only_what_varies() -> None:
    assert names([make_cell(0), make_cell(3), make_cell(3, 1024)]) == ["no-MTP", "MTP 3", "MTP 3"]
    two = [make_cell(0), make_cell(3), make_cell(3, variant="upstream", series="x")]
    assert names(two) == ["no-MTP, patched", "MTP 3, patched", "MTP 3, upstream"]


def test_two_patch_series_of_one_variant() -> None:
    cells = [make_cell(3), make_cell(3, series="0badcafe00")]
    assert names(cells) == ["MTP 3, patches feedc0d", "MTP 3, patches 0badcaf"]


def test_a_switch_is_named_where_it_varies() -> None:
    cells = [
        make_cell(0),
        make_cell(2, settings={"prompt_rows": "last"}),
        make_cell(2, settings={"prompt_rows": "all"}),
        make_cell(2, settings={}),  # from before the switch was there: its default
    ]
    assert names(cells) == ["no-MTP", "MTP 2, rows last", "MTP 2, rows all", "MTP 2, rows last"]
    assert series_key(cells[1]) == series_key(cells[3])


def test_a_peer_is_named_by_its_program_not_by_its_build() -> None:
    peer = make_cell(3, program="llama-server", variant="release", series="", backend="cpu")
    assert names([make_cell(3), peer]) == ["MTP 3", "llama-server MTP 3"]


def test_the_last_measurement_counts_unless_it_was_skipped() -> None:
    first, second = make_cell(3, time="1"), make_cell(3, time="2")
    skipped = make_cell(3, prefill=[], decode=[], skipped="too long")
    assert latest([first, make_cell(0), second]) == [second, make_cell(0)]
    assert latest([first, skipped]) == [first]
    assert latest([skipped]) == [skipped]


def test_sections_are_of_one_model_machine_and_class() -> None:
    other = {"cpu": "Other", "cores": 8, "devices": ["GPU X"]}
    cells = [
        make_cell(0),
        make_cell(0, model="n.gguf"),
        make_cell(3),
        make_cell(0, machine=other),
        make_cell(0, prompt_class="code"),
        make_cell(3, variant="upstream"),
    ]
    found = sections(cells)
    assert [(s[0].model, machine_words(s[0]), s[0].prompt_class, len(s)) for s in found] == [
        ("m.gguf", "Testcore, 2 cores", "text", 3),
        ("n.gguf", "Testcore, 2 cores", "text", 1),
        ("m.gguf", "Other, GPU X, 8 cores", "text", 1),
        ("m.gguf", "Testcore, 2 cores", "code", 1),
    ]
