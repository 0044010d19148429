"""A worker that dies or stalls is an error that names it: no abort, no hang, and life goes on.
At every kind of message, those of loading among them: test_cut_line.py.

Each case runs in an interpreter of its own, because an abort is what would go wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..marks import usual
from ..processes import environment
from ..workers import running_worker, worker

SCRIPT = Path(__file__).with_name("lose_a_worker.py")
LIMIT_S = 60  # far above what it takes; a hang would take for ever
IN_USE = ["prefill, computing", "decode, computing", "decode, stalled"]
LONG = ["prefill, computed by nobody", "decode of a context", "decode, computed by nobody"]
LONG += ["between"]


def json_line(line: str) -> bool:
    """Whether the script printed the line, not a debugger."""
    return line.startswith("{")


@pytest.fixture(scope="module")
def second() -> Iterator[str]:
    """The address of the worker that is not lost."""
    with worker() as address:
        yield address


def lose(when: str, demo_file: Path, second: str, *and_then: str) -> dict[str, dict[str, Any]]:
    """Run the script with two workers; returns what it printed, by step, and the lost address."""
    with ExitStack() as stack:
        lost, first = stack.enter_context(running_worker())
        arguments = (when, str(demo_file), first, second, str(lost.pid), *and_then)
        script = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a debugger would take its time
            env=environment(OMP_NUM_THREADS="1", GGML_NO_BACKTRACE="1"),
        )
        stack.enter_context(script)  # which waits for it
        stack.callback(script.kill)
        watch = threading.Timer(LIMIT_S, script.kill)
        watch.start()
        stack.callback(watch.cancel)
        assert script.stdout
        lines = []
        for line in filter(json_line, script.stdout):
            lines.append(json.loads(line))
            if lines[-1]["step"] == "restart":
                lost.communicate()
                again = running_worker("--port", first.split(":")[1])
                assert stack.enter_context(again)[1] == first
                break
        out, err = script.communicate("\n")
        lines += map(json.loads, filter(json_line, out.splitlines()))
        last = (script.returncode, lines, err[-3000:])
        assert script.returncode == 0 and lines[-1]["step"] == "end", last
        return {line.pop("step"): line for line in [*lines, {"step": "first", "address": first}]}


def assert_lost(found: dict[str, dict[str, Any]], *steps: str) -> None:
    address = found["first"]["address"]
    for step in steps:
        line = found[step]
        assert line.get("error") == "WorkerLostError", (step, line)
        assert line["address"] == address and address in line["message"]
        assert line["seconds"] < 20


@pytest.mark.parametrize("when", usual(*IN_USE, long=LONG))
def test_in_use(demo_file: Path, second: str, when: str) -> None:
    and_then = ["and then"] if when == "decode, computing" else []
    found = lose(when, demo_file, second, *and_then)
    assert_lost(found, "lost", "again", "new session", "lost address")
    assert ("no answer in 2 s" in found["lost"]["message"]) == ("stalled" in when)
    assert found["unasked"]["error"] == "FatalDecodeError"
    # A token made of the lost worker's zeros would be another one.
    text = found["beside"]["result"]
    said = found["partly"]["result"] if "partly" in found else []
    assert len(text) == 60 and text[: len(said)] == said
    # The worker may be quick enough for a first token, or its row was kept.
    if when not in ("prefill, computing", "between"):
        assert bool(said) == when.startswith("decode,")
    assert bool(found["whole"]["result"]) == ("prefill" not in when)
    assert found["whole"]["result"] in (None, text)
    assert found["close"]["result"] is None
    for step in ["local", *(["other worker", "same address"] if and_then else [])]:
        assert found[step]["result"] == text
