"""Two workers on loopback that live for one module, and the names of their devices."""

from __future__ import annotations

import json
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
    """A value that JSON can hold, with these names in place of RPC0 and RPC1."""
    text = re.sub(r"RPC([01])\b", lambda found: names[int(found[1])], json.dumps(value))
    return json.loads(text)
