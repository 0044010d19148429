"""``pyllama-mtp quantize`` as a program: what it writes and says, and Ctrl-C in the middle."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.synth import write_synthetic

Program = Callable[..., "subprocess.CompletedProcess[bytes]"]


def test_the_types_are_said_at_the_end(program: Program, tmp_path: Path) -> None:
    write_synthetic(tmp_path / "m.gguf", "tiny", "f16")
    words = ("quantize", "m.gguf", "q.gguf", "--type", "Q4_0", "--head-type", "Q5_1")
    done = program(*words)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode()
    assert said.startswith("q.gguf: q4_0, ") and " Q4_0 " in said.replace("(", " ")
    assert "Q5_1" in validate_model_file(tmp_path / "q.gguf").tensor_types
    again = program(*words)
    assert again.returncode == 2 and b"q.gguf exists" in again.stderr


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """While the library works on a large tensor: nothing is left, not even its process."""
    write_synthetic(tmp_path / "m.gguf", "tiny", "f16", n_vocab=60000, n_embd=1024)
    command = [sys.executable, "-m", "pyllama_mtp", "quantize", "m.gguf", "q.gguf"]
    with subprocess.Popen([*command, "--type", "iq4_xs"], cwd=tmp_path, stderr=-1) as process:
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
