"""`python -m pytest` in a checkout tests the installed package, as `pytest` does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from .. import conftest
from ..processes import environment


def test_the_sources_of_the_checkout_are_not_imported(tmp_path: Path) -> None:
    for name, text in (
        ("pyllama_mtp/__init__.py", "raise SystemExit('the sources')"),
        ("tests/test_it.py", "import pyllama_mtp\n\n\ndef test_it(): pass\n"),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    shutil.copy(conftest.__file__, tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "no:langsmith_plugin", "-p", "no:anyio"]  # they take their time
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
