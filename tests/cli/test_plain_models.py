"""The commands on models without an MTP head, of other architectures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp import bench
from pyllama_mtp.measure.records import read_cells
from pyllama_mtp.models.ggufinfo import read_gguf

from ..plain import N_VOCAB, write_model
from ..processes import Program

pytestmark = pytest.mark.usefixtures("at_once")
ONE_THREAD = ("--threads", "1")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("plain") / "llama.gguf", "llama"))


@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_generate(arch: str, in_process: Program, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", arch)
    done = in_process("generate", "-m", str(path), *ONE_THREAD, "-n", "8", "--json", "hello")
    report = json.loads(done.stdout)
    assert report["text"] and not report["telemetry"]["drafted"]
    said = b"pyllama-mtp: the model has no MTP head; drafts come from the text itself"
    assert done.stderr.startswith(said) and done.stderr.count(b"\n") == 1


def test_chat(in_process: Program, llama: str) -> None:
    done = in_process("chat", "-m", llama, *ONE_THREAD, "-n", "4", "--stats", input=b"hello\n")
    assert done.stdout and b"4 tokens written" in done.stderr


def test_matrix(in_process: Program, llama: str, tmp_path: Path) -> None:
    small = ("--prompt-sizes", "32", "--max-tokens", "8", "--repeat", "1", *ONE_THREAD)
    done = in_process("matrix", "-m", llama, "--depths", "0", *small)
    assert b"no-MTP" in done.stdout and b"MTP head" not in done.stderr
    done = in_process(
        "matrix", "-m", llama, *small, "--rows", "last,all", "--output", "usual.jsonl"
    )
    assert b"pyllama-mtp: the model has no MTP head; drafts come from the text" in done.stderr
    depths = [cell.key.depth for cell in read_cells(str(tmp_path / "usual.jsonl"))]
    assert depths == [0, "auto"], "switches of MTP are no axes of it"
    done = in_process("matrix", "-m", llama, *small, "--depths", "0,2,auto", code=2)
    assert b"give --depths 0" in done.stderr
    few = {"sizes": 32, "max_tokens": 8, "repeat": 1}
    assert [cell.key.depth for cell in bench.matrix(llama, **few)] == [0, "auto"]
    assert [cell.n_max for cell in bench.matrix(llama, **few, ngram=False)] == [0]


def test_accept_and_tune_measure_drafts_from_the_text(
    in_process: Program, llama: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"class": "mine", "prompt": "la la la la", "chat": false}\n')
    mine = ("--prompts", prompts, "--context-lengths", "none", "-n", "8")
    done = in_process("accept", "-m", llama, *mine, *ONE_THREAD)
    assert b"n-grams" in done.stdout and b"MTP auto" not in done.stdout
    done = in_process("tune", "-m", llama, "--prompt-size", "32", "--repeat", "1", *ONE_THREAD)
    assert b"n-grams" in done.stdout and b"there is no depth to tune" in done.stderr


def test_inspect(in_process: Program, tmp_path: Path, llama: str) -> None:
    text = in_process("inspect", llama).stdout.decode()
    for part in ("llama (without MTP)", "layers          6\n", "none", "(enough)"):
        assert part in text
    mamba = str(write_model(tmp_path / "m.gguf", "mamba"))
    assert "checkpoints                not known" in in_process("inspect", mamba).stdout.decode()
    found = json.loads(in_process("inspect", "--json", llama, "--n-ctx", "1024").stdout)
    (host,) = found["memory"]["no_mtp"]["devices"].values()
    # K and V of 2 heads of 16, 6 layers, in f16.
    assert host["target_context"] == 2 * 2 * 16 * 6 * 1024 * 2
    assert "attention_layers" not in found and not found["has_mtp"]
    assert found["memory"]["unknown"] is None


def test_quantize(in_process: Program, tmp_path: Path, llama: str) -> None:
    target = tmp_path / "q.gguf"
    in_process("quantize", llama, target, "--type", "q8_0")
    assert read_gguf(target).tensor_types.keys() == {"Q8_0", "F32"}
    assert read_gguf(target).n_vocab == N_VOCAB
    in_process("generate", "-m", target, *ONE_THREAD, "-n", "4", "x")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--draft-n-max", "2", "-m", "MODEL", "x"),
        ("serve", "--draft-n-max", "2", "-m", "MODEL", "--port", "0"),
        ("draft-vocab", "-m", "MODEL", "--text", "MODEL", "-o", "r.json"),
        ("head", "extract", "MODEL", "-o", "x.gguf"),
        ("head", "drop", "MODEL", "-o", "x.gguf"),
        ("quantize", "MODEL", "x.gguf", "--type", "q4_k_m", "--head-type", "q8_0"),
    ],
)
def test_what_needs_a_head_is_refused(
    command: tuple[str, ...], in_process: Program, program: Program, llama: str
) -> None:
    run = program if command[0] == "serve" else in_process
    done = run(*(llama if word == "MODEL" else word for word in command), code=2)
    assert b"error: " in done.stderr and b"the model has no MTP head" in done.stderr
