"""The options of the command line, with two workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp.measure.records import read_file

from ..processes import Cli, Program

PROMPT = "def add(a, b):"


def test_matrix_names_the_workers(
    in_process: Program, two_workers: tuple[str, str], tmp_path: Path
) -> None:
    """Both libraries use the same workers, one of them in its own process."""
    file = tmp_path / "m.jsonl"
    done = in_process(
        *("matrix", "--rpc", ",".join(two_workers), "--tensor-split", "1,1"),
        *("--variants", "patched,upstream", "--threads", "1", "--depths", "0,2", "--repeat", "1"),
        *("--prompt-sizes", "40", "--max-tokens", "8", "--n-ctx", "256", "--output", str(file)),
    )
    header = json.loads(file.read_text().splitlines()[0])
    assert header["workers"] == [*two_workers]
    assert {build["backend"] for build in header["builds"].values()} == {"RPC*2"}
    (measured,) = read_file(file).runs.values()
    assert len(measured.cells) == 4
    assert not any(cell.skipped for cell in measured.cells.values())
    assert b"RPC*2" in done.stdout


@pytest.mark.parametrize("command", ["generate", "matrix", "accept", "tune"])
def test_every_command_that_loads(command: str, cli: Cli) -> None:
    """The option reaches the model: nobody listens at 127.0.0.1:1."""
    # With a size of prompts matrix is no first look, which would write a model.
    prompt = {"generate": ["x"], "matrix": ["-p", "32"]}.get(command, [])
    for address, said in (("nowhere", "HOST:PORT"), ("127.0.0.1:1", "no worker can be reached at")):
        done = cli(command, "--rpc", address, "--threads", "1", *prompt)
        assert done.code == 2 and said in done.err


def test_no_peers_beside_workers(cli: Cli) -> None:
    done = cli("matrix", "--rpc", "127.0.0.1:1", "--peers", "llama-server", "--no-output")
    assert done.code == 2 and "--rpc is for this program only" in done.err
