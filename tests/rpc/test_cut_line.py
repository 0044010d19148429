"""The line to a worker breaks at every kind of message: an error each time, and life goes on.

To break as it does when the worker's process dies, is stopped, or talks nonsense.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..processes import RunPython

SCRIPT = Path(__file__).with_name("cut_the_line.py")
#: Commands in a generation (ggml-rpc.cpp): ALLOC_BUFFER, GET_BASE, FREE_BUFFER, BUFFER_CLEAR,
#: SET_TENSOR, GET_TENSOR, GRAPH_COMPUTE, GET_DEVICE_MEMORY, GET_ALLOC_SIZE.
COMMANDS = {0, 3, 4, 5, 6, 8, 10, 11, 13}


@pytest.mark.long
def test_at_every_kind_of_message(
    run_python: RunPython, demo_file: Path, two_workers: tuple[str, str]
) -> None:
    env = {"GGML_NO_BACKTRACE": "1"}  # a debugger would take its time
    done = run_python(SCRIPT.read_text(), demo_file, *two_workers, 30, env=env)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    text, afterwards = lines.pop()["local"]
    assert len(text) > 5 and afterwards == text
    asked, asked_again = lines.pop()["sizes"]
    assert asked == asked_again > 0
    whole = [line for line in lines if line["at"] is None]
    assert [line["text"] for line in whole] == [text] * 3
    broken = [line for line in lines if line["at"] is not None]
    assert len(broken) > 30
    assert {line["command"] for line in broken} - {None} >= COMMANDS
    assert {line["how"] for line in broken} == {"cut", "garbled", "mute"}
    last = max(line["at"] for line in broken)
    for line in broken:
        if line.get("text"):  # broken when everything was done
            assert line["text"] == text and line["at"] > 0.75 * last, line
        else:
            assert (line["error"], line["named"]) == ("WorkerLostError", True), line
