"""Bad models, options and libraries, through the installed command: exit code 2, one message."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_mtp.llama import native
from pyllama_mtp.models.demo import demo_path

from ..processes import Program

Refused = Callable[..., None]


@pytest.fixture
def refused(program: Program, in_process: Program) -> Refused:
    """`refused(message, *arguments)`: the command ends with this message."""

    def run(message: str, *arguments: object) -> None:
        run = program if "--lib" in arguments else in_process  # which has a library
        err = run(*arguments, code=2).stderr.decode()
        assert err.startswith("pyllama-mtp: error: ") and message in err, err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --prompt-file long.txt", "and the context"),
        ("tune --prompt-size 100000", "exceed the model's context, 4096"),
        ("generate --n-ctx 2000000000 x", "available"),
        ("generate --lib empty x", "empty"),
        (
            "matrix --lib upstream --threads 1 --depths 2 --sync full,kv",
            "kv: prompt_sync 'kv' is not in up",
        ),
        ("generate --device CUDA9 x", "device 'CUDA9' is not there; there is"),
        ("generate --override-tensor ffn x", "it must be PATTERN=DEVICE"),
        ("generate --lora-scaled a.gguf x", "'a.gguf' is not FILE:SCALE"),
        ("generate --rope-scale 0.5 x", "0.5 is not allowed"),
    ],
)
def test_what_cannot_be(refused: Refused, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "long.txt").write_text("import os\n" * 20_000)
    command, *options = arguments.split()
    model = [] if "--model" in options else ["--model", demo_path()]
    refused(message, command, *model, *options)
    assert not (tmp_path / "matrix.jsonl").exists()


def test_a_library_for_another_cpu(refused: Refused, tmp_path: Path) -> None:
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
    refused("CPU features that this machine lacks", "generate", "--lib", folder, "x")
