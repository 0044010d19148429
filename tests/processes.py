"""Interpreters and commands that tests start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyllama_mtp

#: Runs `code` in a new interpreter: (code, *arguments, env={...}) -> the finished process.
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**more: str) -> dict[str, str]:
    """This process's, with the package that is tested here, wherever it was imported from."""
    root = str(Path(pyllama_mtp.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, **more}
