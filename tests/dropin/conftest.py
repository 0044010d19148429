"""llama-cpp-python as it is released, without a build of its own: unpacked from its archive."""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from pathlib import Path

import pytest

VENDOR = Path(__file__).resolve().parents[2] / "vendor"


@pytest.fixture(scope="session")
def llama_cpp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds the package `llama_cpp` of the pinned release.

    The archive is the one that this package was built from; its hash is checked.
    """
    sys.path.insert(0, str(VENDOR))
    try:
        spec = importlib.util.spec_from_file_location("vendor_fetch", VENDOR / "fetch.py")
        assert spec and spec.loader
        fetch = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fetch)
    finally:
        sys.path.remove(str(VENDOR))
    folder = tmp_path_factory.mktemp("llama-cpp-python")
    with tarfile.open(fetch.verified_archive(fetch.read_pin(fetch.PIN_FILE))) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if path.startswith("llama_cpp/"):
                member.name = path
                archive.extract(member, folder, filter="data")
            elif path.startswith("vendor/"):
                break  # the rest of the archive is llama.cpp: 75 MB
    return folder
