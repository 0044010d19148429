"""Make vendor/ importable, and give each test an archive, a pin and folders of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vendor"))

import fake_sdist
import fetch


@dataclass(frozen=True)
class Place:
    """Where one test works."""

    archive: Path
    pin: Path
    dest: Path
    cache: Path

    @property
    def leftovers(self) -> list[str]:
        """Everything that stands beside the destination."""
        return sorted(p.name for p in self.dest.parent.iterdir() if p != self.dest)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A fake archive with its pin; pip and cache see nothing outside the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYLLAMA_MTP_SDIST", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    index = tmp_path / "index"
    index.mkdir()
    archive = fake_sdist.make_sdist(index / f"{fake_sdist.TOP}.tar.gz")
    pin = fake_sdist.make_pin(tmp_path / "llama-cpp.pin", archive)
    monkeypatch.setattr(fetch, "PIN_FILE", pin)
    (tmp_path / "out").mkdir()
    return Place(archive, pin, tmp_path / "out" / "llama.cpp", tmp_path / "cache" / "pyllama-mtp")
