"""The plan of :func:`pyllama_mtp.bench.matrix`, whose arguments take one value or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pyllama_mtp.arguments import as_index, listed, whole
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.classprompts import check_class
from pyllama_mtp.measure.plan import AXES, SWITCHES, Plan
from pyllama_mtp.settings import MOST_TOKENS, Sampling, Settings

#: Arguments of the function by their names in the command or in `Settings`.
_CALLED = {
    "prompt_sizes": "sizes",
    "draft_n_max": "depths",
    "budget": "budget_s",
    "rows": "prompt_rows",
    "sync": "prompt_sync",
}


def make_plan(
    sizes: Any, depths: Any, max_tokens: Any, repeat: Any, classes: Any, axes: Mapping[str, Any]
) -> Plan:
    """The plan of these arguments. Raises UsageError for an unknown name or a value out of range,
    naming the argument."""
    for name in axes:
        if name not in AXES:
            raise UsageError(_unknown(name))
    varied = {name: axis_values(name, given) for name, given in axes.items()}
    kinds = _several("classes", classes, "('text', 'code')")
    for kind in kinds:
        check_class(kind)
    return Plan(
        tuple(_whole("sizes", size) for size in _several("sizes", sizes, "(512, 2048)")),
        tuple(map(_depth, _several("depths", depths, "(0, 3, 'auto')"))),
        _whole("max_tokens", max_tokens),
        _whole("repeat", repeat),
        varied,
        kinds,
    )


def axis_values(name: str, given: Any) -> tuple[Any, ...]:
    """The values of an axis, given as a sequence or as one value. Raises UsageError for a value
    that the axis does not take."""
    if name == "synthetic_acceptance":
        several = any(rates is None or listed(rates) for rates in listed(given) or ())
        values = tuple(given) if several else (given,)
    elif isinstance(given, bool | float):
        values = (given,)
    else:
        values = _several(name, given, f"({getattr(Settings, name, 2)!r},)")
    if name == "n_sequences":
        from pyllama_mtp.session import MOST_SEQUENCES

        return tuple(whole(name, n, 1, MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}") for n in values)
    checked = []
    for value in values:
        if name in SWITCHES and not isinstance(value, str | int):
            raise UsageError(f"{name} has {value!r}, which is not a word")
        field_of_settings: dict[str, Any] = {name: value}
        checked.append(getattr(Settings(**field_of_settings), name))  # raises UsageError
    return tuple(map(str, checked)) if name in SWITCHES else tuple(checked)


def _unknown(name: str) -> str:
    """The message for an unknown argument: the axes, and where the name may belong."""
    hint = (
        "fields of Settings go into settings=, those of Sampling into sampling=; prompt_sizes is "
        "called sizes"
    )
    if name in _CALLED:
        hint = f"{name} is called {_CALLED[name]} here"
    for kind in (Settings, Sampling):
        if name not in _CALLED and name in {item.name for item in fields(kind)} - {*AXES}:
            where = kind.__name__.lower()
            hint = f"a field of {kind.__name__} goes into {where}={kind.__name__}({name}=...)"
    return f"matrix() has no argument {name!r}; the axes are {', '.join(AXES)}; {hint}"


def _several(name: str, given: Any, example: str) -> tuple[Any, ...]:
    """The values of a sequence; a word or a number is the only value."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(given)
    if isinstance(given, str) or as_index(given) is not None:
        return (given,)
    raise UsageError(f"{name} is {given!r}; it must be a sequence, such as {example}")


def _whole(name: str, value: Any) -> int:
    return whole(name, value, 1, MOST_TOKENS, "1 or more")


def _depth(value: Any) -> int | str:
    if isinstance(value, str) and value == "auto":
        return value
    several = "0 or more, or 'auto'; several are given as (0, 3, 'auto')"
    return whole("depths", value, 0, MOST_TOKENS, several)
