"""The options of the command line, and the example, with two workers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.cli import FAILED, main
from pyllama_mtp.measure.recordfile import read_file

from ..processes import environment

PROMPT = "def add(a, b):"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m`` something, as a user does it."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
        env=environment(OMP_NUM_THREADS="1"),
    )


@pytest.mark.parametrize("apart", [False, True])
def test_generate(demo: Model, two_workers: tuple[str, str], apart: bool) -> None:
    """Two workers, the head on the same one as the output layer or on another."""
    shares = f"{demo.info.n_layer + 0.5},1.5" if apart else "1,1"
    done = run(
        *("pyllama_mtp", "generate", "--rpc", ",".join(two_workers), "--tensor-split", shares),
        *("--threads", "1", "--draft-n-max", "3", "--max-tokens", "24", "--stats", PROMPT),
    )
    with Session(demo, Settings(n_ctx=256, n_threads=1, draft_n_max=3)) as session:
        expected = session.generate(PROMPT, max_tokens=24).run().text
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert "kept in step with every decode" in done.stderr


def test_matrix_names_the_workers(two_workers: tuple[str, str], tmp_path: Path) -> None:
    """Both libraries at once, one of them in a process of its own, on the same workers."""
    file = tmp_path / "m.jsonl"
    done = run(
        *("pyllama_mtp", "matrix", "--rpc", ",".join(two_workers), "--tensor-split", "1,1"),
        *("--variants", "patched,upstream", "--threads", "1", "--depths", "0,2", "--repeat", "1"),
        *("--prompt-sizes", "40", "--max-tokens", "8", "--n-ctx", "256", "--output", str(file)),
    )
    assert done.returncode == 0, done.stderr
    header = json.loads(file.read_text().splitlines()[0])
    assert header["workers"] == [*two_workers]
    assert {build["backend"] for build in header["builds"].values()} == {"RPC*2"}
    (measured,) = read_file(file).runs.values()
    assert len(measured.cells) == 4 and not measured.skipped
    assert "RPC*2" in done.stdout


@pytest.mark.parametrize("command", ["generate", "matrix", "accept", "tune"])
def test_every_command_that_loads(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["x"] if command == "generate" else []
    assert main([command, "--rpc", "nowhere", *prompt]) == FAILED
    assert "HOST:PORT" in capsys.readouterr().err
    # A port that nobody listens at: the option gets as far as to the model.
    assert main([command, "--rpc", "127.0.0.1:1", "--threads", "1", *prompt]) == FAILED
    assert "no worker can be reached at 127.0.0.1:1" in capsys.readouterr().err


def test_no_peers_beside_workers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["matrix", "--rpc", "127.0.0.1:1", "--peers", "llama-server", "--no-output"]
    assert main(arguments) == FAILED
    assert "--rpc is for this program only" in capsys.readouterr().err


def test_the_example() -> None:
    done = run("pyllama_mtp.examples.rpc")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "here:" and lines[2].startswith("on 127.0.0.1:")
    assert all("tokens per round" in lines[i] for i in (1, 3))
    assert lines[4] == "the same text:" and len(lines[5]) > 5
