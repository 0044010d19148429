"""A program that is measured, as a process: it is ended in every case, and never has to wait.

It leads a process group of its own: Ctrl-C in the terminal does not reach it, and the processes
that it has started end with it. Its output goes to files, so that it never waits for a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from pyllama_mtp.measure.peers import PeerError

_STOP_S = 3.0  # a server in the middle of an answer does not end by itself
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def child_environment() -> dict[str, str]:
    """This process's environment without the variables that are settings of either side."""
    prefixes = ("LLAMA_ARG_", "PYLLAMA_MTP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def end_with_parent() -> None:
    """Have the system end this process when the process that started it is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def last_words(said: str) -> str:
    """The end of a process's output, for a message."""
    return said.strip()[-2000:] or "it said nothing"


class Program:
    """A running program. A context manager that ends it.

    Args:
        name: for messages.
        stdin: the text of its standard input.

    Raises:
        PeerError: the program cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], stdin: str = "") -> None:
        self.name = name
        with contextlib.ExitStack() as files:
            self._stdout: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            self._stderr: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
            given = files.enter_context(tempfile.TemporaryFile())
            given.write(stdin.encode())
            given.seek(0)
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    env=child_environment(),
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise PeerError(f"{name} cannot be started: {error}") from None
            given.close()
            self._files = files.pop_all()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> str:
        """Wait for the end of the program, and return what it has written to stdout.

        Raises:
            PeerError: the program failed, or took longer.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"{self.name} was not done after {timeout_s:.0f} s: {self.last_words()}"
            ) from None
        if code:
            raise PeerError(f"{self.name} failed ({code}): {self.last_words()}")
        return self.stdout()

    def stdout(self) -> str:
        """What it has written to stdout so far."""
        return _read(self._stdout)

    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return _read(self._stderr)

    def last_words(self) -> str:
        """The end of its output, for a message."""
        return last_words(self.stderr().strip() or self.stdout())

    def stop(self) -> None:
        """End the program and all that it has started, by force if it does not end by itself."""
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_S)
        finally:  # also after Ctrl-C in the meantime
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._files.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _read(file: IO[bytes]) -> str:
    # pread leaves the file's position alone, where the process writes.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
