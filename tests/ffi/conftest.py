"""ggml called directly, with every kernel of ours on before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyllama_mtp.llama import native

from .attentioncalls import Attention
from .products import Products


class Calls(Attention, Products):
    """All that is called directly."""


@pytest.fixture(scope="session")
def ggml() -> Calls:
    """ggml of the library that this process has loaded."""
    return Calls()


@pytest.fixture(autouse=True)
def kernels_on() -> Iterator[None]:
    """Turn every kernel on again after the test."""
    yield
    library = native.load()
    for switch in (
        library.set_small_batch,
        library.set_large_batch,
        library.set_few_rows_attention,
        library.set_direct_states,
    ):
        switch(True)
