"""A measured program ends in every case, with all that it has started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from pyllama_mtp.measure.peers import PeerError, Program

Ended = Callable[[int], bool]
WAIT = "import time; time.sleep(600)"


def python(code: str) -> Program:
    return Program("the program", [sys.executable, "-c", code])


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def test_it_never_waits_for_a_reader() -> None:
    """The program writes more than a pipe holds, to stdout and to stderr."""
    with python("import sys; sys.stdout.write('a' * 10**6); sys.stderr.write('b' * 10**6)") as one:
        assert len(one.wait(60)) == 10**6
        assert one.stderr() == "b" * 10**6
        assert len(one.last_words()) == 2000


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_ends_with_the_block(error: type[BaseException], ended: Ended) -> None:
    with pytest.raises(error), python(WAIT) as program:
        pid = program._process.pid
        raise error
    assert ended(pid)


def test_one_that_ignores_sigterm_ends_too(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllama_mtp.measure.peers._STOP_S", 0.2)
    ignores = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True);"
    with python(ignores + WAIT) as program:
        assert until(lambda: bool(program.stdout()))
    assert ended(program._process.pid) and program.exit_code == -signal.SIGKILL


def test_what_it_has_started_ends_too(ended: Ended) -> None:
    start = "import subprocess as s; print(s.Popen(['sleep', '600']).pid, flush=True);"
    with python(start + WAIT) as program:
        assert until(lambda: program.stdout().endswith("\n"))
        child = int(program.stdout())
    assert ended(program._process.pid) and until(lambda: ended(child))


def test_ctrl_c_of_the_terminal_does_not_reach_it() -> None:
    with python(WAIT) as program:
        assert os.getpgid(program._process.pid) == program._process.pid != os.getpgrp()


def test_failures_say_what_it_said() -> None:
    failed = pytest.raises(PeerError, match=r"the program failed \(1\): no such model")
    with python("import sys; sys.exit('no such model')") as program, failed:
        program.wait(60)
    late = pytest.raises(PeerError, match="not done after 0 s: it said nothing")
    with python(WAIT) as program, late:
        program.wait(0.1)
    with pytest.raises(PeerError, match=r"the program cannot be started: .*No such file"):
        Program("the program", ["/nowhere/llama-server"])


def test_settings_of_either_side_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    monkeypatch.setenv("PYLLAMA_MTP_LIB", "upstream")
    with python("import os; print([n for n in os.environ if 'LLAMA' in n])") as program:
        assert program.wait(60) == "[]\n"
