"""A measured program ends in every case, with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO

import pytest

from pyllama_mtp.measure.peers import PeerError, output, running

Ended = Callable[[int], bool]
WAIT = "import time; time.sleep(600)"


def python(code: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return running("the program", [sys.executable, "-c", code], stdout=subprocess.PIPE)


def line(program: subprocess.Popen[str]) -> str:
    stdout: IO[str] | None = program.stdout
    return stdout.readline() if stdout else ""


def said(code: str, timeout_s: float = 60) -> tuple[str, str]:
    return output("the program", sys.executable, "-c", code, timeout_s=timeout_s)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_ends_with_the_block(error: type[BaseException], ended: Ended) -> None:
    with pytest.raises(error), python(WAIT) as program:
        assert os.getpgid(program.pid) == program.pid != os.getpgrp(), "Ctrl-C does not reach it"
        raise error
    assert ended(program.pid)


def test_it_ends_with_what_it_has_started_even_where_it_ignores_sigterm(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_mtp.measure.peers._STOP_S", 0.2)
    ignores = "import signal, subprocess as s; signal.signal(15, signal.SIG_IGN);"
    start = "print(s.Popen(['sleep', '600']).pid, flush=True);"
    with python(ignores + start + WAIT) as program:
        child = int(line(program))
    assert ended(program.pid) and program.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not ended(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(child)


def test_its_output_and_its_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, on both streams; settings of either side do not reach it."""
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    monkeypatch.setenv("PYLLAMA_MTP_LIB", "upstream")
    both = "import os, sys; sys.stdout.write('a' * 10**6); sys.stderr.write('b' * 10**6);"
    out, err = said(both + "print([n for n in os.environ if 'LLAMA' in n])")
    assert (out, err) == ("a" * 10**6 + "[]\n", "b" * 10**6)
    with pytest.raises(PeerError, match=r"the program failed \(1\): no such model"):
        said("import sys; sys.exit('no such model')")
    with pytest.raises(PeerError, match="not done after 0 s"):
        said(WAIT, 0.1)
    with pytest.raises(PeerError, match=r"the program cannot be started: .*No such file"):
        output("the program", "/nowhere/llama-server", timeout_s=1)
