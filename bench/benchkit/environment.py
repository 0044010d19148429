"""An environment with the pinned llama-cpp-python and no native library of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchkit import ROOT
from pyllama_mtp.measure.peers import PeerError

sys.path.insert(0, str(ROOT / "vendor"))

import fetch


def source_archive(given: Path | None = None) -> Path:
    """Its source archive, verified; None: it is downloaded. Raises FetchError."""
    return fetch.verified_archive(fetch.read_pin(fetch.DROP_IN_PIN_FILE), given)


def make(folder: Path, archive: Path, requirements: Sequence[str]) -> Path:
    """Make the environment once; returns its interpreter.

    Args:
        requirements: what to install beside llama-cpp-python.

    Raises:
        PeerError: it cannot be made.
    """
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        print("making an environment with llama-cpp-python ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)], {})
        without = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
        _run([str(python), "-m", "pip", "install", "-q", str(archive), *requirements], without)
        (folder / "complete").touch()
    return python


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise PeerError(f"{' '.join(command[:4])} ... failed:\n{said}")
