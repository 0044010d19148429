"""ggml called directly, with every kernel of ours on before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyllama_mtp.llama import native

from .attentioncalls import Attention


@pytest.fixture(scope="session")
def ggml() -> Attention:
    """ggml of the library that this process has loaded."""
    return Attention()


@pytest.fixture(autouse=True)
def kernels_on() -> Iterator[None]:
    """Turn every kernel on again after the test."""
    yield
    native.load().lib.pyllama_set_cpu_changes(True)
