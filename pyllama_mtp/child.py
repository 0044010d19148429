"""Child processes: a function of this package in a Python of its own; each ends with its parent.

:class:`Workers` are children that are kept, for calls that must be ended when they take too much.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # here, so that a forked child has it already
#: A child's exit code when what it was asked for cannot be.
REFUSED = 3
_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; "  # not what lies here
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from pyllama_mtp import child; child.run(*sys.argv[2:])"
)


def end_with_parent() -> None:
    """Have the system end this process when the process that started it is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def command(function: str, request: dict[str, Any]) -> list[str]:
    """The command of a process that calls a function and exits with the code that it returns.

    Args:
        function: "MODULE:NAME"; of this process no module need be imported for it.
        request: the function's only argument; goes through JSON.
    """
    given = json.dumps(sys.path), function, json.dumps(request)
    return [sys.executable, "-c", _CHILD, *given]


def run(function: str, request: str) -> None:
    """What :func:`command` runs in the child."""
    end_with_parent()
    module, _, name = function.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(json.loads(request)))


def last_words(said: str, most: int = 2000) -> str:
    """The end of a process's output, for a message."""
    return said.strip()[-most:] or "it said nothing"


# -- calls with limits -----------------------------------------------------------------------------

#: Bytes of address space that a worker may take beyond those that it begins with.
MEMORY = 1 << 30
#: Seconds of computing after which a call that goes on gives way to everything else.
PATIENCE_S = 0.5
#: A call that goes on beside others may take so many times as long as it may compute.
SLOWEST = 10
#: Seconds that a call waits for a worker while others have them all.
WAIT_S = 5.0
#: A worker's exit code when its memory is at an end.
NO_MEMORY = 1
#: Of the environment of workers, besides this process's: the native library that it has loaded.
variables = dict[str, str]()
_LENGTH = struct.Struct("=Q")


class CallError(Exception):
    """A call of a worker has no result; the message says why."""


class BusyError(CallError):
    """No worker could be had; the next call may have a result."""


class Workers:
    """Processes that call a function for this one, so that a call can be limited, and ended.

    For what strangers have written, and libraries compute without a limit that holds. A worker is
    started when it is needed and kept; one that is ended takes nobody else's call with it.
    """

    def __init__(self, function: str, seconds: float, memory: int = MEMORY, most: int = 4) -> None:
        """Args:
        function: "MODULE:NAME"; its arguments and its result go through JSON.
        seconds: of computing, in which a call must end; time in which others compute is free.
        memory: see :data:`MEMORY`.
        most: workers at once; a further call waits, for :data:`WAIT_S` at most.
        """
        self.function, self.seconds, self.memory, self._most = function, seconds, memory, most
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def _forget(self) -> None:
        """Workers answer the process that has started them, and not one that is forked from it."""
        self._idle: list[subprocess.Popen[bytes]] = []
        self._room = threading.Semaphore(self._most)

    def call(self, *arguments: Any) -> Any:
        """The function's result.

        Raises:
            CallError: the call takes too long or too much memory, the function has raised an
                exception, no process can be started, or all are busy.
        """
        try:
            data = json.dumps([self.seconds, arguments]).encode()
        except Exception as reason:  # of any class of the caller's
            raise CallError(f"it cannot be handed to another process: {reason}") from None
        if not self._room.acquire(timeout=WAIT_S):
            raise BusyError(f"{self._most} others are computing; try again later")
        try:
            worker, is_new = self._take()
            answer = self._ask(worker, data)
            if answer is None and worker.returncode == NO_MEMORY and not is_new:
                worker, _ = self._take(new=True)  # which has as much as it may have
                answer = self._ask(worker, data)
        finally:
            self._room.release()
        if answer is None:
            raise CallError(self._why(worker.returncode))
        if "error" in answer:
            raise CallError(answer["error"])
        return answer["result"]

    def _take(self, new: bool = False) -> tuple[subprocess.Popen[bytes], bool]:
        """A worker that waits, if not `new`, or a new one; and whether it is new."""
        while self._idle and not new:
            with suppress(IndexError):  # another thread has taken it
                worker = self._idle.pop()
                if worker.poll() is None:
                    return worker, False
        request = {"function": self.function, "memory": self.memory}
        try:
            worker = subprocess.Popen(
                command(f"{__name__}:answer_calls", request),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C is for its parent
            )
        except (OSError, TypeError) as reason:  # TypeError: this Python does not know its program
            raise BusyError(f"no process can be started: {reason}") from None
        assert worker.stdout
        if _receive(worker.stdout) is None:
            worker.communicate()
            raise BusyError("a process has ended at its start")
        return worker, True

    def _ask(self, worker: subprocess.Popen[bytes], data: bytes) -> Any:
        """The answer; None: the worker has ended instead. One that was fast enough is kept."""
        assert worker.stdin and worker.stdout
        slow, answer = True, None
        try:
            began = _computed_s(worker.pid)
            with suppress(BrokenPipeError):
                _send(worker.stdin, data)
            said = select.poll()  # not select.select, which knows 1,024 files
            said.register(worker.stdout, select.POLLIN)
            slow = False
            while not (slow or said.poll(1000 * PATIENCE_S)):
                if slow := _computed_s(worker.pid) - began > PATIENCE_S:
                    os.setpriority(os.PRIO_PROCESS, worker.pid, 19)  # it cannot be raised again
            if not slow or said.poll(1000 * SLOWEST * self.seconds):
                answer = _receive(worker.stdout)
        except BaseException:  # Ctrl-C: the worker would answer too late
            slow = True
            raise
        finally:
            if answer is not None and not slow:
                self._idle.append(worker)
            else:
                if slow:
                    worker.kill()
                worker.communicate()
        return None if answer is None else json.loads(answer)

    def _why(self, code: int) -> str:
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it computes for more than {self.seconds:g} s"
        return f"it takes more than {self.memory >> 20} MiB of memory, or ends the process ({code})"

    def close(self) -> None:
        """End the workers that nobody waits for. May be called again."""
        while self._idle:
            worker = self._idle.pop()
            worker.kill()
            worker.communicate()


def _computed_s(process: int) -> float:
    """Seconds that a child process has computed (man proc: utime and stime)."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _send(file: IO[bytes], data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def _receive(file: IO[bytes]) -> bytes | None:
    """The next message; None: the other side has ended."""
    length = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(length)) if len(length) == _LENGTH.size else None


def answer_calls(request: dict[str, Any]) -> None:
    """What a worker runs, until its parent has ended: whatever it computes, SIGIO ends it then."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)  # which is for the end of a thread of the parent, too
    calls, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + request["memory"]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    fcntl.fcntl(calls, fcntl.F_SETOWN, os.getpid())
    waits = fcntl.fcntl(calls, fcntl.F_GETFL)
    _send(answers, b"ready")
    while (data := _receive(calls)) is not None:
        fcntl.fcntl(calls, fcntl.F_SETFL, waits | os.O_ASYNC)
        try:
            seconds, arguments = json.loads(data)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = json.dumps({"result": function(*arguments)})
        except MemoryError:
            os._exit(NO_MEMORY)
        except Exception as error:
            answer = json.dumps({"error": str(error) or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        fcntl.fcntl(calls, fcntl.F_SETFL, waits)
        _send(answers, answer.encode())
