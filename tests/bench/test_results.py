"""bench/benchkit/results.py: a result names the commit that was measured."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchkit import ROOT, results


@pytest.mark.parametrize("changed", ["pyllama_mtp/answer.py", "bindings/llama/llama-mtp.h"])
def test_another_install_is_told(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout in which a file of the package, or of our C++, is not the one that was built."""
    assert results.is_installed() and "installed" not in results.project_commit()
    for name in ("pyllama_mtp", "patches", "bindings"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "vendor").symlink_to(ROOT / "vendor")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.is_installed()
    (tmp_path / changed).write_bytes(b"\n")
    assert results.project_commit() == "unknown, **but another one is installed**"
