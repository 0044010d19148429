"""Two workers on loopback that live for one module, and the names of their devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model

from ..workers import worker


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[str, str]]:
    """The addresses of two workers."""
    with worker() as first, worker() as second:
        yield first, second


@pytest.fixture(scope="module")
def names(demo_file: Path, two_workers: tuple[str, str]) -> list[str]:
    """Names of the two workers' devices; ggml numbers devices through a whole process."""
    with Model(demo_file, rpc_servers=two_workers) as model:
        return [model._library.device_name(device) for device in model.devices]


def named(value: Any, names: list[str]) -> Any:
    """The value with these names in place of RPC0 and RPC1."""
    if isinstance(value, str):
        return re.sub(r"RPC([01])\b", lambda found: names[int(found[1])], value)
    if isinstance(value, dict):
        return {key: named(one, names) for key, one in value.items()}
    return (
        type(value)(named(one, names) for one in value)
        if isinstance(value, list | tuple)
        else value
    )
