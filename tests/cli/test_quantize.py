"""``pyllama-mtp quantize`` as a program: what it writes and says, and Ctrl-C in the middle."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.synth import write_synthetic

from ..processes import Program, start


def test_the_types_are_said_at_the_end(program: Program, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "m.gguf", "tiny", "f16")
    words = ("quantize", "m.gguf", "q.gguf", "--type", "Q4_0", "--head-type", "Q5_1")
    done = program(*words)
    said = done.stdout.decode()
    assert said.startswith("q.gguf: q4_0, ") and " Q4_0 " in said.replace("(", " ")
    assert "Q5_1" in validate_model_file(tmp_path / "q.gguf").tensor_types
    assert b"q.gguf exists" in program(*words, code=2).stderr


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """Ctrl-C comes while the library works on a large tensor; no file and no process are left."""
    write_synthetic(tmp_path / "m.gguf", "tiny", "f16", n_vocab=60000, n_embd=1024)
    with start("quantize", "m.gguf", "q.gguf", "--type", "iq4_xs", cwd=tmp_path) as process:
        while not list(tmp_path.glob("*.part")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130, said.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path).encode() not in status.read_bytes()
        except OSError:
            continue  # it has just ended
