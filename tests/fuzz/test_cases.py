"""A few hundred cases of bench/fuzz.py, and that it recognises findings."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz
import pytest
from fuzzkit.cases import ENDED, FINDING, FORGED, KINDS, NATIVE, REFUSED, WORKS, Cases
from fuzzkit.pool import Case, Limits, Pool

from pyllama_mtp.llama import native
from pyllama_mtp.models.ggufheader import TENSOR_TYPES

from ..architectures import write_model as with_a_head
from ..plain import write_model
from ..processes import every_core

JOBS, LIMITS = 2, Limits(seconds=300)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "n"),
    [("model", 240), ("head", 60), ("split", 60), ("prompt", 40), ("mmproj", 30), ("image", 40)],
)
def test_every_case_ends_in_an_error_or_works(kind: str, n: int, demo_file: Path) -> None:
    with Pool(demo_file, JOBS, LIMITS) as pool:
        outcomes = list(pool.run(Case(kind, 9_000_000 + i) for i in range(n)))
    assert [o for o in outcomes if o.outcome == FINDING] == []
    counts = Counter(o.outcome for o in outcomes)
    assert sum(counts.values()) == n
    # What never gets past the first check, or what always works, would try nothing.
    assert counts[REFUSED] > n / 10 and counts[WORKS] > n / 20
    assert kind != "model" or counts[NATIVE] > 0


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama", "gemma3", "glm4moe"])
def test_what_llama_cpp_stops_at_in_other_architectures(arch: str, tmp_path: Path) -> None:
    """A failed assertion is an error, or it ends the process that tries the file first."""
    edit = {"op": "set", "key": f"{arch}.attention.layer_norm_rms_epsilon", "type": 6, "value": -1}
    cases = [Case("model", 0, [edit]), *(Case("model", 9_000_000 + i) for i in range(12))]
    path = tmp_path / "m.gguf"
    written = with_a_head(arch, path) if arch == "glm4moe" else write_model(path, arch)
    with every_core(), Pool(written, JOBS, LIMITS) as pool:
        outcomes = list(pool.run(cases))
    assert [o for o in outcomes if o.outcome == FINDING] == []
    assert len(outcomes) == len(cases)
    (first,) = [o for o in outcomes if o.case.edits]
    assert first.outcome in (ENDED, NATIVE)


def test_another_text_is_a_finding_unless_a_state_is_forged(
    demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = Cases(demo_file, tmp_path)
    assert cases.run("prompt", []).outcome == WORKS
    numbers = {"op": "bytes", "at": 43004, "text": "\x00\x00\x20\x46", "times": 1000}
    edits: list[dict[str, Any]] = [{"op": "section", "name": "target", "edit": numbers}]
    assert cases.run("prompt", edits).outcome == FORGED
    forged = cases._edited_prompt(edits)
    monkeypatch.setattr(Cases, "_edited_prompt", lambda *_: forged)
    assert cases.run("prompt", []).outcome == FINDING


def test_a_seed_is_a_case(demo_file: Path, tmp_path: Path) -> None:
    one, other = Cases(demo_file, tmp_path), Cases(demo_file, tmp_path)
    for kind in KINDS:
        made = [one.edits(kind, seed) for seed in range(20)]
        assert made == [other.edits(kind, seed) for seed in range(20)]
        assert len({str(edits) for edits in made}) > 15


def test_a_worker_that_dies_is_a_finding_and_is_replaced(demo_file: Path) -> None:
    with Pool(demo_file, jobs=1) as pool:
        outcomes = [*pool.run([Case("model", 1, [])])]
        (worker,) = multiprocessing.active_children()
        os.kill(int(worker.pid or 0), signal.SIGABRT)
        worker.join()
        outcomes += pool.run([Case("model", 2, []), Case("model", 3, [])])
    assert [o.outcome for o in outcomes] == ["loaded and generated", "finding", outcomes[0].outcome]
    assert "Aborted" in outcomes[1].detail


def test_a_case_of_too_much_memory_is_a_finding(demo_file: Path) -> None:
    with Pool(demo_file, 1, Limits(peak_mib=0)) as pool:
        (outcome,) = pool.run([Case("model", 1, [])])
    assert outcome.outcome == "finding" and "MiB of memory" in outcome.detail


def test_sizes_of_tensor_types_are_those_of_the_library() -> None:
    """A wrong size would refuse good files, and let the loader read beyond the end of others."""
    folder = native.load().folder
    (library,) = [*folder.glob("libggml-base.so*"), *folder.parent.glob("libggml-base.so*")][:1]
    base = ctypes.CDLL(str(library))
    base.ggml_type_name.restype = ctypes.c_char_p
    base.ggml_type_size.restype = ctypes.c_size_t
    base.ggml_blck_size.restype = ctypes.c_int64
    theirs = {
        n: (base.ggml_type_name(n).decode().upper(), base.ggml_blck_size(n), base.ggml_type_size(n))
        for n in range(43)  # GGML_TYPE_COUNT
        if base.ggml_blck_size(n)
    }
    assert {n: (name.upper(), *size) for n, (name, *size) in TENSOR_TYPES.items()} == theirs


@pytest.mark.long
def test_the_program_counts_and_repeats(
    demo_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz.main(["--seed", "4", "--count", "model=3,prompt=1", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    counted = [(row[1].strip(), row[-2].strip()) for row in rows[2:]]
    assert counted == [("model", "3"), ("prompt", "1")]
    assert fuzz.main(["--seed", "4", "--only", "model:2", "--jobs", "1"]) == 0
    again = capsys.readouterr().out
    assert again.startswith("--seed 4 --only model:2") and "edits: [" in again
