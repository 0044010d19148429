"""The commands with the real library and the demo model, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.llama import native
from pyllama_mtp.measure.ratios import base_of
from pyllama_mtp.measure.recordfile import read_cells
from pyllama_mtp.measure.verdict import slow_types, step_shares
from pyllama_mtp.models import demo
from pyllama_mtp.models.ggufinfo import read_gguf

Program = Callable[..., "subprocess.CompletedProcess[bytes]"]
PROMPT = "def add(a, b):\n"


#: More would spin at every barrier where the cores are shared with other work.
ONE_THREAD = ("--threads", "1")


@pytest.fixture
def model() -> str:
    return str(demo.demo_path())


def report_of(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr.decode()
    return dict(json.loads(done.stdout))


def start(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C reaches, even where the tests run in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "pyllama_mtp", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def refused(done: subprocess.CompletedProcess[bytes], message: str) -> None:
    err = done.stderr.decode()
    assert done.returncode == 2, (done.returncode, err)
    assert err.startswith("pyllama-mtp: error: ") and message in err
    assert "Traceback" not in err


# -- generate --------------------------------------------------------------------------------------


def test_generate_with_the_bundled_model(program: Program) -> None:
    done = program("generate", *ONE_THREAD, "--max-tokens", "24", "--stats", PROMPT)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip()
    assert "tokens from each" in done.stderr.decode()


def test_greedy_text_does_not_depend_on_mtp(program: Program, model: str) -> None:
    texts = []
    for depth in ("0", "3"):
        options = ("--json", "--model", model, "--max-tokens", "40", "--draft-n-max", depth)
        report = report_of(program("generate", *ONE_THREAD, *options, PROMPT))
        texts.append(report["text"])
        assert len(report["telemetry"]["drafted"]) == int(depth)
    assert texts[0] == texts[1] and texts[0]


def test_logged_pairs_agree_with_the_counts(program: Program, model: str, tmp_path: Path) -> None:
    log = tmp_path / "pairs.jsonl"
    options = ("--json", "--model", model, "--max-tokens", "64", "--ignore-eos")
    report = report_of(program("generate", *ONE_THREAD, *options, "--log-pairs", str(log), PROMPT))
    pairs = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert sum(pair["accepted"] for pair in pairs) == sum(report["telemetry"]["accepted"]) > 0
    assert all(pair["accepted"] == (pair["drafted"] == pair["actual"]) for pair in pairs)
    assert all(isinstance(pair["drafted_text"], str) for pair in pairs)


def test_stop_string(program: Program, model: str) -> None:
    options = (
        "generate",
        *ONE_THREAD,
        "--json",
        "--model",
        model,
        "--max-tokens",
        "60",
        "--ignore-eos",
    )
    text = report_of(program(*options, PROMPT))["text"]
    stop = text[len(text) // 3 :][:4]
    report = report_of(program(*options, "--stop", stop, PROMPT))
    assert report["finish_reason"] == "stop"
    assert report["text"] == text[: text.index(stop)]


def test_chat_uses_the_template(program: Program, model: str) -> None:
    options = ("generate", *ONE_THREAD, "--json", "--model", model, "--max-tokens", "4")
    plain = report_of(program(*options, "What is a list?"))["telemetry"]["n_prompt"]
    chat = report_of(program(*options, "--chat", "What is a list?"))["telemetry"]["n_prompt"]
    assert chat > plain


def test_ctrl_c_keeps_the_partial_text(model: str, tmp_path: Path) -> None:
    options = ("--model", model, "--stats", "--max-tokens", "4000", "--ignore-eos")
    process = start("generate", *ONE_THREAD, *options, PROMPT, cwd=tmp_path)
    assert process.stdout
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert first and (first + rest).endswith(b"\n")
    assert "Traceback" not in err.decode() and "per second" in err.decode()


def test_a_reader_that_goes_away_is_no_error(model: str, tmp_path: Path) -> None:
    options = ("--model", model, "--max-tokens", "4000", "--ignore-eos")
    process = start("generate", *ONE_THREAD, *options, PROMPT, cwd=tmp_path)
    assert process.stdout and process.stderr
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_logs_of_the_library_come_when_asked_for(program: Program, model: str) -> None:
    command = ("generate", *ONE_THREAD, "--model", model, "--draft-n-max", "0", "--max-tokens", "2")
    assert program(*command, PROMPT).stderr == b""
    assert b"pyllama_mtp.llama.native: DEBUG: " in program("-vv", *command, PROMPT).stderr


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("generate", "x"), ("matrix", "--no-output")])
def test_bad_model_files(program: Program, model: str, tmp_path: Path, command: Any) -> None:
    text, short = tmp_path / "text.gguf", tmp_path / "short.gguf"
    text.write_text("not a model")
    short.write_bytes(Path(model).read_bytes()[:200_000])
    cases = [(tmp_path / "nowhere.gguf", "no such"), (text, "not a GGUF"), (short, "truncated")]
    for path, message in cases:
        refused(program(*command, "--model", str(path)), message)


def test_a_prompt_longer_than_the_context(program: Program, model: str, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("import os\n" * 20_000)
    refused(program("generate", "--model", model, "--prompt-file", str(path)), "and the context")


def test_a_context_larger_than_memory(program: Program, model: str) -> None:
    refused(program("generate", "--model", model, "--n-ctx", "2000000000", "x"), "available")


def test_a_library_folder_without_a_library(program: Program, model: str, tmp_path: Path) -> None:
    for command in (("generate", "x"), ("matrix", "--no-output")):
        done = program(*command, "--model", model, "--lib", str(tmp_path))
        refused(done, str(tmp_path))


# -- matrix ----------------------------------------------------------------------------------------

SMALL = ("--prompt-sizes", "48,300", "--depths", "0,1,3", "--max-tokens", "8", "--repeat", "2")


@pytest.mark.parametrize("variant", ["patched", "upstream"])
def test_matrix_measures_every_cell(
    program: Program, model: str, tmp_path: Path, variant: str
) -> None:
    options = ("matrix", *ONE_THREAD, "--model", model, "--lib", variant, *SMALL)
    done = program(*options, "--profile", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    cells = read_cells(tmp_path / "matrix.jsonl")
    order = [(cell.n_prompt, cell.n_max) for cell in cells]
    assert order == [(size, depth) for size in (48, 300) for depth in (0, 1, 3)]
    info = read_gguf(model)
    slow = slow_types(info, native.load()) if variant == "patched" else step_shares(info)
    for cell in cells:
        assert cell.slow_types == {kind: round(share, 4) for kind, share in slow.items()}
        assert cell.variant == variant and len(cell.upstream_commit) == 40
        assert [sample.n_prompt for sample in cell.samples] == [cell.n_prompt] * 2
        assert [sample.n_generated for sample in cell.samples] == [8] * 2
        assert cell.prefill_tps and cell.decode_tps and cell.elapsed_s
        assert len(cell.drafted) == len(cell.accepted) == cell.n_max
        assert cell.settings["draft_n_max"] == cell.n_max and cell.memory["weights"] > 0
        for sample in cell.samples:
            assert 0 < sum(sample.cpu_s.values()) <= 1.05 * sample.elapsed_s + 0.02
        if cell.n_max:
            assert cell.drafted[0] > 0 and cell.accepted[0] <= cell.drafted[0]
    out = done.stdout.decode()
    assert f"{variant} build of llama.cpp" in out
    profiled = [(cell.n_prompt, cell.n_max) for cell in cells if cell.profile]
    assert profiled == [(size, depth) for size in (48, 300) for depth in (0, 1)]
    assert out.count("| products of weights |") == 2 and "MTP 1: %" in out


def test_several_sequences_are_an_axis(program: Program, model: str, tmp_path: Path) -> None:
    """Each sequence has a text of its own, all are counted, and each number its own base."""
    done = program(
        *("matrix", "--model", model, "-p", "32", "-n", "8", "--repeat", "1", *ONE_THREAD),
        *("--depths", "0,2", "--axis", "n-sequences=1,3", "--output", str(tmp_path / "m.jsonl")),
    )
    assert done.returncode == 0, done.stderr.decode()
    cells = read_cells(tmp_path / "m.jsonl")
    assert [(c.n_max, c.axes["n_sequences"]) for c in cells] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    found = [(c.samples[0].n_prompt, c.samples[0].n_generated) for c in cells]
    assert found == [(32, 8), (96, 24)] * 2
    assert [c.rounds for c in cells[:2]] == [7, 21]
    assert [base_of(c, cells) for c in cells[2:]] == cells[:2]
    assert cells[3].drafted[0] > cells[2].drafted[0] > 0


def test_the_states_of_the_prefill(program: Program, model: str, tmp_path: Path) -> None:
    """What upstream's library cannot do is refused before anything is measured."""
    small = ("--prompt-sizes", "48", "--depths", "0,2", "--max-tokens", "4", "--repeat", "1")
    options = ("matrix", *ONE_THREAD, "--model", model, *small, "--rows", "all,last")
    done = program(*options, "--sync", "full,kv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    cells = read_cells(tmp_path / "matrix.jsonl")
    used = [(c.settings["prompt_rows"], c.samples[0].prompt_sync) for c in cells]
    assert used[1:] == [("all", "full"), ("all", "kv"), ("last", "full"), ("last", "kv")]
    shares = [c.prompt_sync_share or 0 for c in cells[1:]]
    assert shares[1] == shares[3] == 0 and 0 < shares[0] < 1 and 0 < shares[2] < 1
    output = ("--lib", "upstream", "--output", "upstream.jsonl")
    done = program(*options, *output, "--sync", "full,kv", cwd=tmp_path)
    refused(done, "depth 2, rows all, sync kv: prompt_sync 'kv' is not in upstream's library")
    assert not (tmp_path / "upstream.jsonl").exists()


def test_imposed_acceptance(program: Program, model: str, tmp_path: Path) -> None:
    """All or nothing, so that no chance is involved."""
    for rates, expected in (("1,1", 2.0), ("0,0", 0.0)):
        options = ("--depths", "2", "--prompt-sizes", "32", "--max-tokens", "31", "--repeat", "1")
        file = tmp_path / f"{rates}.jsonl"
        done = program(
            *("matrix", *ONE_THREAD, "--model", model, *options, "--output", str(file)),
            *("--synthetic-acceptance", rates),
        )
        assert done.returncode == 0, done.stderr.decode()
        (cell,) = read_cells(file)
        assert cell.mean_accepted_length == pytest.approx(expected, abs=0.01)
        assert "SYNTHETIC ACCEPTANCE" in done.stdout.decode()


def test_ctrl_c_keeps_finished_cells(model: str, tmp_path: Path) -> None:
    file = tmp_path / "matrix.jsonl"
    options = ("--prompt-sizes", "32,3000", "--depths", "0,2", "--max-tokens", "16")
    process = start(
        "matrix", *ONE_THREAD, "--model", model, *options, "--repeat", "9", cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and any(len(cell.repeats) > 1 for cell in read_cells(file)[:1]):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    cells = read_cells(file)
    assert [cell.n_prompt for cell in cells] == [32, 32, 3000, 3000]
    assert len(cells[0].samples) >= 2 and len(cells[2].samples) < 9
    assert "MTP 2" in out.decode() and "Traceback" not in err.decode()


def test_a_size_beyond_the_context_is_skipped(program: Program, model: str, tmp_path: Path) -> None:
    options = ("--prompt-sizes", "1000000,32", "--depths", "0", "--max-tokens", "8")
    done = program("matrix", *ONE_THREAD, "--model", model, *options, "--repeat", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    skipped, measured = read_cells(tmp_path / "matrix.jsonl")
    assert skipped.skipped and not measured.skipped and measured.samples


# -- doctor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["patched", "upstream"])
def test_doctor_finds_nothing_wrong(program: Program, variant: str) -> None:
    done = program("doctor", "--lib", variant)
    out = done.stdout.decode()
    assert done.returncode == 0, out
    assert "everything is in order" in out and "drafts accepted" in out
    assert f"{variant}, loaded from" in out
