"""The fake driver takes what the real one takes."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from pyllama_mtp import Generation, Model, Session
from pyllama_mtp.llama import native

from ..fakes import parameters


@pytest.mark.parametrize("real", [Generation, Model, Session, native.Library, native.Device])
def test_methods_and_their_parameters(fake_driver: ModuleType, real: type) -> None:
    fake = getattr(fake_driver, real.__name__)
    for name, method in vars(fake).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert {*parameters(method)} <= {*parameters(getattr(real, name))}, name
