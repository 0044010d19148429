"""Ctrl-C is heard while a worker is silent: it may answer for a while, then it is given up.

Each case runs in an interpreter of its own, which must not hang; `--rpc-timeout` is far away.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp.llama import native, rpc

from ..marks import usual
from ..processes import environment, start
from ..workers import running_worker

SCRIPT = Path(__file__).with_name("give_up.py")
LIMIT_S = 60  # far above what it takes, and below every timeout


def steps(what: str, demo_file: Path) -> dict[str, dict[str, Any]]:
    """Run the script; returns what it printed, by step."""
    with running_worker() as (worker, address):
        arguments = (what, str(demo_file), address, str(worker.pid))
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            env=environment(OMP_NUM_THREADS="1"),
            timeout=LIMIT_S,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines[-1]["step"] == "end", (lines, done.stderr[-3000:])
    assert lines[-1]["parked"] is False, "nothing is left for somebody else's call"
    return {line.pop("step"): line for line in lines}


@pytest.mark.parametrize(
    ("what", "error"),
    usual(
        ("twice", "KeyboardInterrupt"),
        long=[("patience", "KeyboardInterrupt"), ("handler", "TimeoutError")],
    ),
)
def test_it_is_given_up(demo_file: Path, what: str, error: str) -> None:
    """At the second Ctrl-C, or PATIENCE_S after the first; the handler's exception is raised."""
    found = steps(what, demo_file)
    assert found["interrupted"]["error"] == error
    assert len(found["whole"]["result"]) == 60
    assert found["again"]["error"] == "WorkerLostError"
    assert "(given up before it answered)" in found["again"]["message"]
    assert "result" in found["anew"], found["anew"]


@pytest.mark.long
def test_one_that_answers_is_not_harmed(demo_file: Path) -> None:
    """One Ctrl-C in each of two calls is not a second Ctrl-C."""
    found = steps("answers", demo_file)
    for step in ("interrupted", "interrupted once more"):
        assert found[step]["error"] == "KeyboardInterrupt"
        assert found[step]["seconds"] > 1.9, "it was waited for"
    assert found["again"]["result"] == found["and again"]["result"] == found["whole"]["result"]


@pytest.mark.parametrize("what", usual("reading", long=["read", "between"]))
def test_while_loading_or_closing(demo_file: Path, what: str) -> None:
    found = steps(what, demo_file)
    assert found["interrupted"]["error"] == "KeyboardInterrupt"
    assert "result" in found["anew"], found["anew"]


@pytest.mark.long
def test_the_server_ends(demo_file: Path) -> None:
    """One signal is enough; another thread than the waiting one gets it."""
    pytest.importorskip("uvicorn")
    code = "import sys; from pyllama_mtp import cli, native; native.PATIENCE_S = 1.0; "
    code += "sys.exit(cli.entry())"
    options = ("--n-ctx", "1024", "--n-sequences", "1", "--threads", "1", "--grace", "0")
    with running_worker() as (worker, address):
        command = ["serve", "--model", demo_file, "--rpc", address, "--port", "0", *options]
        env = environment(OMP_NUM_THREADS="1")
        process = start(*command, program=("-c", code), text=True, env=env)
        assert process.stdout
        url = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        body = {"prompt": "x = 1\n", "max_tokens": 900, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            url.rstrip("/").removesuffix("/v1") + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                assert answer.readline().startswith(b"data: ")
                os.killpg(worker.pid, signal.SIGSTOP)
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err


def test_only_calls_that_raise_what_is_parked_are_interrupted() -> None:
    library = native.load()
    lib, poll = library.lib, library.ffi.cast("void *", library.lib.pyllama_on_wait)
    native.pending.interrupted = (0.0, 0.0)
    try:
        assert native.pyllama_on_wait(None) == 1
        assert not lib.pyllama_wait_poll(b"w", 0, poll)
        rpc.give_up_waiting(0.0)
        assert lib.pyllama_wait_poll(b"w", 0, poll)
    finally:
        rpc.give_up_waiting(math.inf)
        native.pending.interrupted = ()
    assert not lib.pyllama_wait_poll(b"w", 0, poll)


def test_each_worker_has_its_own_limit() -> None:
    library = native.load()
    for worker, seconds in ((b"1.1.1.1:1", 2), (b"1.1.1.1:2", 0)):
        library.lib.pyllama_limit_silence(worker, seconds)

    def reason(worker: bytes, silent_s: float) -> str:
        found = library.lib.pyllama_wait_poll(worker, int(silent_s * 1e6), library.ffi.NULL)
        return library.text(found) if found else ""

    assert reason(b"1.1.1.1:1", 1.9) == reason(b"1.1.1.1:2", 1e6) == reason(b"1.1.1.1:3", 1e6) == ""
    assert reason(b"1.1.1.1:1", 2.0) == "no answer in 2 s"
