"""Child processes: a function of this package in a Python of its own; each ends with its parent."""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # here, so that a forked child has it already
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
