"""Files of measurements: reading, refusing bad lines, writing whole lines, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.records import (
    Run,
    RunHeader,
    Sample,
    Writer,
    check_output,
    last_run,
    read_cells,
    refuse_another_run,
    to_line,
)

from . import records

#: Of the checkout; an installation has none.
RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.jsonl"


def write(path: Path, *lines: Any, end: bytes = b"") -> None:
    path.write_bytes(b"".join(map(to_line, lines)) + end)


# -- reading ---------------------------------------------------------------------------------------


def test_the_mean_acceptance_length_of_older_files_has_another_name(path: Path) -> None:
    older = records.sample(tokens_per_round=2.5)
    del older["sample"]["mean_acceptance_length"]
    write(path, records.run(), older)
    (cell,) = read_cells(path)
    assert cell.mean_acceptance_length == 2.5
    written = json.loads(msgspec.json.encode(cell.samples[0]))
    assert written["mean_acceptance_length"] == 2.5 and "tokens_per_round" not in written


def test_samples_become_cells(path: Path) -> None:
    write(
        path,
        records.run(slow_types={"Q4_K": 0.6}),
        records.sample(1, 0, decode_tps=3.0),
        records.sample(1),
        records.sample(0, decode_tps=5.0),
        records.sample(0, 0),
        records.skipped(3),
        records.older("dropped", budget_s=60.0, groups=[{"n_prompt": 10, "repeat": 2}]),
        records.older("profile", cell=records.cell(), settings={}, profile={"n_prompt": 10}),
    )
    plain, mtp, left_out = read_cells(path)
    assert mtp.mean_acceptance_length == 2 and b"tokens_per_round" not in path.read_bytes()
    assert (plain.n_max, plain.mode, plain.repeats) == (0, "no-mtp", [1, 0])
    assert (mtp.n_max, mtp.mode, mtp.repeats) == (2, "draft-mtp", [1, 0])
    assert (mtp.decode_tps, mtp.drafted, mtp.repeat) == (4.5, [8, 8], 3)
    assert mtp.settings == {
        "n_batch": 64,
        "n_ctx": 256,
        "draft_n_max": 2,
        "sampling": {"temperature": 0.0},
    }
    assert (mtp.model, mtp.variant, mtp.series, mtp.program) == (
        *("m.gguf", "patched", "s"),
        "pyllama-mtp",
    )
    assert mtp.samples[0] == Sample(**records.FIGURES)
    assert (mtp.run, mtp.prompt_class, mtp.memory) == ("a", "text", {"weights": 7})
    assert mtp.slow_types == {"Q4_K": 0.6}
    assert (left_out.skipped, left_out.samples) == ("no memory", [])


def test_older_files_have_switches_among_the_settings(path: Path) -> None:
    """They are axes, as in newer ones; those of a line without MTP do not matter."""
    plan = {**records.run()["plan"], "axes": {"prompt_rows": ["last", "all"]}}
    lines = [
        {**records.sample(0, depth), "settings": {"prompt_rows": rows, "hidden": "post-norm"}}
        for depth, rows in ((0, "last"), (2, "last"), (2, "all"))
    ]
    newer = {**lines[2], "repeat": 1, "cell": {**records.cell(), "axes": {"prompt_rows": "all"}}}
    write(path, records.run(plan=plan), *lines, newer)
    found = [(cell.axes, cell.repeats) for cell in read_cells(path)]
    assert found == [({}, [0]), ({"prompt_rows": "last"}, [0]), ({"prompt_rows": "all"}, [0, 1])]


def test_runs_in_one_file_have_cells_of_their_own(path: Path) -> None:
    write(
        path,
        records.run("a"),
        records.sample(run="a"),
        records.run("b"),
        records.sample(run="b"),
        records.sample(1, run="a"),
    )
    assert [(c.run, len(c.samples)) for c in read_cells(path)] == [("a", 2), ("b", 1)]


def test_unknown_keys_are_ignored(path: Path) -> None:
    more = records.sample(joules=5)
    write(path, records.run(mood="good"), {**more, "watts": 3})
    assert len(read_cells(path)[0].samples) == 1


@pytest.mark.parametrize("results", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_published_results_are_read(results: Path) -> None:
    """In golden.jsonl, --no-ngram is a setting of the header, and an axis where it is read."""
    cells = read_cells(results)
    assert cells and all(cell.samples or cell.skipped for cell in cells)
    ngram = {cell.axis("ngram") for cell in cells if cell.adaptive}
    assert results.stem != "golden" or ngram == {"off"}


def test_a_line_that_does_not_fit_is_refused_by_file_and_number(path: Path) -> None:
    """The bad line stands in the middle of a file, and at its end."""
    for line, message in (
        (b"not json", "damaged, not a line of JSON"),
        (b"\xff\xfe", "damaged"),
        (b"[1, 2]", "not a record of a matrix: no object with"),
        (b'{"a": 1}', "not a record of a matrix: no object with a schema$"),
        (b'{"schema": 1, "kind": "run"}', "schema 1 is unknown; this version reads 2"),
        (b'{"schema": 2, "kind": "party"}', r"Invalid value 'party' - at `\$.kind`"),
        (records.sample(run="b"), "run b has not begun"),
        (records.sample(0), "repeat 0 of this cell is there already"),
        (records.run(), "run a has begun already"),
        ({**records.sample(1), "repeat": -1}, r"Expected `int` >= 0 - at `\$.repeat`"),
        ({**records.sample(1), "cell": {**records.cell(), "build": "x"}}, "no build 'x'"),
        (json.dumps(records.sample(1)).replace("4.0", "NaN").encode(), "damaged, not a line"),
        ({**records.sample(1), "sample": {}}, r"missing required field `n_prompt`"),
    ):
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        for after in ([], [records.sample(2)]):
            write(path, records.run(), records.sample(0))
            write(path, end=path.read_bytes() + data + b"\n" + b"".join(map(to_line, after)))
            with pytest.raises(UsageError, match=rf"^{path}, line 3: .*{message}"):
                read_cells(path)


def test_an_unfinished_last_line_is_left_out_wherever_it_was_cut(path: Path) -> None:
    last = to_line(records.sample(1))
    for cut in range(1, len(last) - 1):
        write(path, records.run(), records.sample(0), end=last[:cut])
        assert [cell.repeats for cell in read_cells(path)] == [[0]], cut
    write(path, records.run(), records.sample(0), end=last[:-1])
    assert [cell.repeats for cell in read_cells(path)] == [[0, 1]], "only its line break is missing"


def test_a_last_line_of_something_else_is_not_taken_for_an_unfinished_one(path: Path) -> None:
    write(path, records.run(), end=b"my notes")
    with pytest.raises(UsageError, match="line 2: damaged"):
        read_cells(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_cells(tmp_path)


# -- writing ---------------------------------------------------------------------------------------


def test_the_header_comes_with_the_first_record(path: Path) -> None:
    with Writer(path, records.run()) as writer:
        assert not path.exists()
        writer.write(records.sample(0))
        assert len(read_cells(path)[0].samples) == 1, "it is in the file when write returns"
        writer.write(records.sample(1))
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["run", "sample", "sample"]


def test_appending_keeps_what_is_there_and_cuts_off_what_is_unfinished(path: Path) -> None:
    write(path, records.run(), records.sample(0), end=to_line(records.sample(1))[:50])
    whole = path.read_bytes()[:-50]
    with Writer(path, None) as writer:
        writer.write(records.sample(1))
    assert path.read_bytes() == whole + to_line(records.sample(1))


def test_a_line_without_its_line_break_is_closed(path: Path) -> None:
    write(path, records.run(), end=to_line(records.sample(0))[:-1])
    with Writer(path, None) as writer:
        writer.write(records.sample(1))
    assert read_cells(path)[0].repeats == [0, 1]


def test_two_processes_do_not_write_to_one_file(path: Path) -> None:
    with Writer(path, records.run()) as first, Writer(path, None) as second:
        first.write(records.sample(0))
        with pytest.raises(UsageError, match="another process is measuring into"):
            second.write(records.sample(1))
    with Writer(path, None) as second:
        second.write(records.sample(1))
    assert read_cells(path)[0].repeats == [0, 1]


def test_output_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no such folder" / "x.jsonl"):
        with pytest.raises(UsageError, match=r"cannot write .*; choose another file$"):
            check_output(path)


@pytest.mark.parametrize("text", ["# Not cells\n", "# Not cells", "{}\n"])
def test_output_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"line 1: .*; name another file"):
        check_output(path)
    assert path.read_text() == text


def test_a_good_output_is_left_as_it_was(tmp_path: Path) -> None:
    new, old, empty = tmp_path / "new.jsonl", tmp_path / "old.jsonl", tmp_path / "empty.jsonl"
    write(old, records.run(), records.sample(), end=to_line(records.sample(1))[:40])
    empty.touch()
    before = old.read_bytes()
    for path in (new, old, empty):
        check_output(path)
    assert not new.exists()
    assert old.read_bytes() == before


def header(name: str = "new", **changes: Any) -> RunHeader:
    made: RunHeader = msgspec.convert(records.run(name, **changes), RunHeader)
    return made


# -- going on --------------------------------------------------------------------------------------


def test_the_last_run_goes_on(path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        last_run(path, "m.gguf")
    write(
        path, records.run("a"), records.sample(run="a"), records.run("b"), records.skipped(0, "b")
    )
    found = last_run(path, "m.gguf")
    assert found is not None and found.id == "b"
    assert found.measured == set()
    assert [cell.skipped for cell in found.cells.values()] == ["no memory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": {**records.run()["plan"], "repeat": 9}}, "plan.repeat was 3 .* and is 9 now"),
        ({"model": {**records.run()["model"], "bytes": 6}}, "model.bytes was 5 .* is 6"),
        ({"settings": {"n_batch": 32}}, "settings.n_batch was 64 .* is 32"),
        ({"builds": {}}, "builds.patched was "),
        ({"workers": ["a:1"]}, "run.workers was \\[\\] .* and is \\['a:1'\\] now"),
        ({"machine": {"cpu": "b", "cores": 2, "devices": [], "arch": "x86_64"}}, "machine.cpu"),
    ],
)
def test_another_measurement_is_refused_and_the_field_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^--resume: {message}"):
        refuse_another_run(Run(header("old")), header("new", **change))


def test_what_does_not_matter_may_differ() -> None:
    other = {**records.run()["machine"], "python": "3.99", "os": "Linux 9"}
    changes = {"machine": other, "time": "later", "version": "2", "command": ["x"]}
    refuse_another_run(Run(header("old")), header("new", **changes))
