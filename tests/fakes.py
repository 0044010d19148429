"""Stand-ins for objects of the package, which cannot drift from what they stand for."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters, without a method's own."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def like(kind: type, **members: Any) -> Any:
    """An object with these members of `kind`, each of which `kind`, or a base of its, has. A
    function has the parameters of the method that it stands for."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("pyllama_mtp")]
    source = "".join(map(inspect.getsource, bases))
    annotated = {name for base in bases for name in inspect.get_annotations(base)}
    for name, value in members.items():
        real = inspect.getattr_static(kind, name, None)
        known = real is not None or name in annotated or f"self.{name}" in source
        assert known, f"{kind.__name__} has no {name}"
        if inspect.isfunction(real):
            assert parameters(value) == parameters(real), f"{kind.__name__}.{name} has changed"
    return SimpleNamespace(**members)


def same_methods(fake: type, real: type) -> None:
    """Every public method of `fake` is one of `real`, with the same parameters."""
    for name, method in vars(fake).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert parameters(method) == parameters(getattr(real, name)), f"{name} has changed"
