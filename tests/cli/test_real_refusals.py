"""What must be refused, through the installed command: exit code 2 and one line."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.synth import write_synthetic

Program = Callable[..., "subprocess.CompletedProcess[bytes]"]
QWEN = struct.pack("<Q", 6) + b"qwen35"


def refused(done: subprocess.CompletedProcess[bytes], message: str) -> None:
    err = done.stderr.decode()
    assert done.returncode == 2, (done.returncode, err)
    assert err.startswith("pyllama-mtp: error: ") and message in err
    assert "Traceback" not in err


def with_type(data: bytes, name: bytes, number: int) -> bytes:
    """`data` of a GGUF file with another type number for the one-dimensional tensor `name`."""
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "architecture": (lambda d: d.replace(QWEN, QWEN[:-2] + b"99", 1), "'qwen99'"),
    "unknown type": (lambda d: with_type(d, b"output_norm.weight", 99), "unknown type 99"),
    "integer weights": (lambda d: with_type(d, b"output_norm.weight", 26), "type I32"),
    "no tokenizer": (lambda d: d.replace(b"gpt2", b"none", 1), "'none'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model(program: Program, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    data = demo_path().read_bytes()
    assert change(data) != data
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(data))
    refused(program("generate", "--model", str(path), "x"), message)


def test_a_model_without_a_head(program: Program, tmp_path: Path) -> None:
    path = str(write_synthetic(tmp_path / "plain.gguf", "tiny", "f16", n_mtp=0))
    refused(program("generate", "--model", path, "--draft-n-max", "2", "x"), "no MTP head")
    plain = ("--draft-n-max", "0", "--threads", "1", "--max-tokens", "4")
    done = program("generate", "--model", path, *plain, "x")
    assert done.returncode == 0 and b"MTP" not in done.stderr
    # "auto" drafts what pays, which comes from the text itself, and says so.
    auto = program("generate", "-m", path, "--threads", "1", "-n", "4", "--json", "x")
    assert auto.returncode == 0 and b"no MTP head (one that is published" in auto.stderr
    assert b"drafts come from the text itself" in auto.stderr
    assert json.loads(auto.stdout)["text"] == done.stdout.decode().rstrip("\n")


def test_a_prompt_longer_than_the_model_was_trained_for(program: Program) -> None:
    refused(
        program("tune", "-m", demo_path(), "--prompt-size", "100000"),
        "the model was trained for 4096",
    )


def test_a_library_for_another_cpu(program: Program, tmp_path: Path) -> None:
    """Refused by the stamp, before any of its code could raise SIGILL."""
    source = native.load().folder
    shutil.copytree(source.parent, tmp_path / "lib")
    folder = tmp_path / "lib" / source.name
    library = next(folder.glob("libllama.so.*"))
    data = library.read_bytes()
    features = native.load().stamp["cpu_features"].split()
    if not features:
        pytest.skip("this build is for every CPU")
    stamp = native.STAMP.search(data)
    assert stamp
    other = stamp[0].replace(features[-1].encode(), b"x" * len(features[-1]))
    library.write_bytes(data.replace(stamp[0], other))
    refused(program("generate", "--lib", str(folder), "x"), "CPU features that this machine lacks")
