"""Images on the command line. The encoder has random weights, so the words do not matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pyllama_mtp import Model
from pyllama_mtp.models.mmproj import write_synthetic_mmproj

from ..processes import Program

Image = pytest.importorskip("PIL.Image")
QUICK = ("--threads", "1", "--n-ctx", "2048", "--temperature", "0", "-n", "8")


@pytest.fixture
def seeing(demo_file: Path, demo: Model, tmp_path: Path) -> Path:
    """The demo model with an encoder beside it, and two pictures of 15 tokens each."""
    for name, colour in (("one.png", "red"), ("two of them.jpg", "blue")):
        Image.new("RGB", (160, 96), colour).save(tmp_path / name)
    write_synthetic_mmproj(tmp_path / "mmproj-F16.gguf", demo.n_embd_inp)
    return Path(shutil.copy(demo_file, tmp_path))


def test_chat_shows_images(in_process: Program, seeing: Path) -> None:
    """/image is for the next question; /retry shows it again, a bad one is refused at once."""
    script = (
        f"/image {seeing.parent}/one.png\n/image '{seeing.parent}/two of them.jpg'\nWhat?\n"
        f"And now?\n/image {seeing.parent}/none.png\n/image {seeing}\n/image\nSo?\n"
        f"/reset\n/image {seeing.parent}/one.png\n/reset\nBlind?\n"
        f"/image {seeing.parent}/one.png\nSeen?\n/retry\n"
    )
    done = in_process("chat", "-m", seeing, *QUICK, "--stats", input=script.encode(), code=2)
    err = done.stderr.decode()
    assert len(done.stdout.splitlines()) == 6, "an answer to each question"
    assert [line.split()[1] for line in err.splitlines() if line.startswith("images")] == [
        *("30", "30", "30"),  # the conversation keeps them
        *("15", "15"),
    ]
    assert err.count("encoded in") == 1, "of the second conversation, too, they are known"
    assert "none.png cannot be read" in err and "not an image of the formats" in err
    assert "which image? /image FILE" in err


def test_chat_says_what_is_missing(in_process: Program, seeing: Path, demo: Model) -> None:
    """Without an encoder the conversation goes on, to code 2; a bad one that was named ends it."""
    script = f"/image {seeing.parent}/one.png\nWhat?\n".encode()
    done = in_process("chat", "-m", seeing, *QUICK, "--mmproj", "none", input=script, code=2)
    assert b"and --mmproj is none" in done.stderr and done.stdout.strip()
    other = write_synthetic_mmproj(seeing.parent / "other.gguf", demo.n_embd_inp + 1)
    done = in_process("chat", "-m", seeing, *QUICK, "--mmproj", other, code=2)
    assert f"models of width {demo.n_embd_inp + 1}".encode() in done.stderr


def test_generate_shows_images(in_process: Program, seeing: Path) -> None:
    options = ("-m", seeing, *QUICK, "--json", "--image", seeing.parent / "one.png")
    for words in (("What?",), ("--chat", "What?")):
        done = in_process("generate", *options, *words)
        telemetry = json.loads(done.stdout)["telemetry"]
        assert telemetry["n_image_tokens"] == 15 < telemetry["n_prompt"]
        assert telemetry["encode_s"] > 0
    (seeing.parent / "mmproj-F16.gguf").unlink()
    refused = in_process("generate", *options, "What?", code=2)
    assert b"has no mmproj*.gguf for this model" in refused.stderr


def test_inspect_says_with_what_a_model_sees(
    in_process: Program, seeing: Path, demo: Model
) -> None:
    """With which of several files; or why it does not see."""

    def told() -> tuple[str, object]:
        lines = in_process("inspect", seeing).stdout.decode().splitlines()
        (line,) = (line for line in lines if line.startswith("images"))
        return line, json.loads(in_process("inspect", seeing, "--json").stdout)["mmproj"]

    folder = seeing.parent
    best = folder / "mmproj-F16.gguf"
    shutil.copy(best, folder / "mmproj-BF16.gguf")
    assert told() == (f"images          seen with {best}", str(best))
    write_synthetic_mmproj(best, demo.n_embd_inp + 1, force=True)
    line, path = told()
    assert f"not seen: {best} is for models of width {demo.n_embd_inp + 1}" in line and not path
    best.write_bytes(b"GGUF")
    line, path = told()
    assert f"not seen: {best}" in line and path is None
    for file in folder.glob("mmproj*"):
        file.unlink()
    assert "not seen: no mmproj*.gguf" in told()[0]
