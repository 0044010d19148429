"""Marks of tests that share a rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(*values: Any, long: Iterable[Any] = ()) -> list[Any]:
    """What `parametrize` takes: these values, and `long` ones among the long tests. A tuple is a
    value for each of several names."""
    marked = ((v if isinstance(v, tuple) else (v,)) for v in long)
    return [*values, *(pytest.param(*value, marks=pytest.mark.long) for value in marked)]
