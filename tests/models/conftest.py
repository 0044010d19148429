"""Synthetic models small enough to write for every test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_mtp.models.synth import write_synthetic


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("models") / "dense.gguf", "tiny", "q8_0")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("models") / "moe.gguf", "tiny-moe", "f16")
