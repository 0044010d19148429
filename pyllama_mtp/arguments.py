"""Checks of arguments. A UsageError names the argument, its value, and the values allowed.

Numbers of numpy become Python's. A bool is no number.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, SupportsIndex, TypeVar

from .errors import UsageError, refusal

T = TypeVar("T")

MOST_TOKENS = 2**31 - 1


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise unless `ok`."""
    if not ok:
        raise refusal(name, value, allowed)


def instance(name: str, value: object, kind: type[T], allowed: str) -> T:
    """`value`, which must be of this kind."""
    if not isinstance(value, kind):
        raise refusal(name, value, allowed)
    return value


def flag(name: str, value: object) -> bool:
    """True or False."""
    require(_is_bool(value), name, value, "True or False")
    return bool(value)


def as_index(value: object) -> int | None:
    """A whole number as Python's; None: `value` is none."""
    if type(value) is int:  # nearly all are, and prompts are long
        return value
    if _is_bool(value) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None


def whole(name: str, value: object, least: int, most: float, allowed: str) -> int:
    """A whole number from `least` to `most`."""
    found = as_index(value)
    if found is None:
        raise refusal(name, value, f"a whole number, {allowed}")
    require(least <= found <= most, name, value, allowed)
    return found


def as_float(value: object) -> float | None:
    """A number as Python's float, NaN beyond the range; None: `value` is none."""
    if _is_bool(value) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.nan


def number(name: str, value: object, usable: Callable[[float], bool], allowed: str) -> float:
    """A number that is `usable`."""
    found = as_float(value)
    if found is None:
        raise refusal(name, value, f"a number, {allowed}")
    require(usable(found), name, value, allowed)
    return found


def listed(value: object) -> list[Any] | None:
    """The elements of a sequence or an array; None: `value` is none, or is text or bytes."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        return None
    if not (isinstance(value, Sized) and hasattr(value, "__getitem__")):
        return None
    tolist = getattr(value, "tolist", None)  # an array's elements as Python's
    found = tolist() if tolist else list(value)  # type: ignore[call-overload]
    return found if isinstance(found, list) else None  # an array of no dimension


def numbers_of(name: str, value: object, allowed: str) -> tuple[float, ...]:
    """The numbers of a sequence or an array."""
    given = listed(value)
    found = [as_float(one) for one in given or ()]
    if given is None or None in found:
        raise refusal(name, value, allowed)
    return tuple(one for one in found if one is not None)


def token_ids(name: str, value: object, instead: str = "") -> list[int]:
    """The token ids of a sequence or an array; not checked against a vocabulary.

    Args:
        instead: other types that are allowed, for the message.
    """
    found = listed(value)
    if found is None:
        raise refusal(name, value, f"{instead}a sequence of token ids (whole numbers)")
    ids = []
    for i, one in enumerate(found):
        token = as_index(one)
        if token is None:
            raise refusal(f"{name}[{i}]", one, "a token id: a whole number")
        ids.append(token)
    return ids


def stop_strings(stop: str | Iterable[str] | None, name: str = "stop") -> list[str]:
    """Strings, none of them empty: one, several, or none."""
    allowed = "text or several texts, none of them empty"
    if stop is None:
        return []
    if isinstance(stop, bytes | bytearray | Mapping) or not isinstance(stop, Iterable):
        raise refusal(name, stop, allowed)
    found = [stop] if isinstance(stop, str) else list(stop)
    require(all(isinstance(one, str) and one for one in found), name, found, allowed)
    return found


def file_name(name: str, value: object, kind: str = "a file") -> str:
    """The name of a file."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or not found:
        raise refusal(name, value, f"the name of {kind}: text or a path")
    return found


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """What a misspelled word may have meant; None: nothing is so much `alike`, of 1."""
    if len(word) > 100:  # a client may send millions of letters, and each is looked at
        return None
    return next(iter(difflib.get_close_matches(word, known, 1, alike)), None)


def utf8(name: str, text: str) -> bytes:
    """The bytes of a text. Raises UsageError: a lone surrogate, which stands for half a letter, or
    for a byte that was not UTF-8; the message says where."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        char, before = text[error.start], text[max(0, error.start - 20) : error.start]
        raise UsageError(
            f"{name} is not valid Unicode: {char!r} after {before!r} is half a letter (a lone "
            "surrogate), or a byte that is not UTF-8; leave it out, or decode the text as it was "
            "written"
        ) from None


def _is_bool(value: object) -> bool:
    kind = type(value)  # numpy's is not imported for it: the command line answers before it is
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


# -- fields that are options -----------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """The values that a field takes.

    Attributes:
        check: (name, value) -> the value to keep; raises UsageError.
        read: reads a value, of `several` one item, from the command line's text; raises ValueError.
        choices: all values, of words.
        several: the value has items, which the command line separates by commas.
        on_off: the values are True and False.
    """

    check: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    several: bool = False
    on_off: bool = False

    def or_this(self, one: Any) -> Kind:
        """The same values, and this one."""

        def check(name: str, value: Any) -> Any:
            same = value is one or (isinstance(value, str) and value == one)
            return one if same else self.check(name, value)

        return replace(self, check=check)


def wholes(least: int, most: float, allowed: str) -> Kind:
    """Whole numbers from `least` to `most`."""
    return Kind(lambda name, value: whole(name, value, least, most, allowed), int)


def numbers(usable: Callable[[float], bool], allowed: str) -> Kind:
    """Numbers that are `usable`."""
    return Kind(lambda name, value: number(name, value, usable, allowed), float)


def between(least: float, most: float, allowed: str) -> Kind:
    """Numbers from `least` to `most`, both of them finite."""
    return numbers(lambda value: least <= value <= most, allowed)


def words(*choices: str) -> Kind:
    """One of these words."""

    def check(name: str, value: Any) -> Any:
        ok = isinstance(value, str) and value in choices
        require(ok, name, value, "one of " + ", ".join(choices))
        return value

    return Kind(check, choices=choices)


FLAG = Kind(flag, on_off=True)


def option(default: Any, kind: Kind, usage: str = "", *, part: str = "") -> Any:
    """A field of a dataclass, checked by :func:`keep_checked`, with its command-line option.

    Its description is in the class's docstring, under ``Attributes``; see :func:`described`.

    Args:
        usage: the option's names, if not the field's, and a word for its value: "-t --threads N".
        part: the group of options; "": no option.
    """
    return field(default=default, metadata={"kind": kind, "usage": usage.split(), "part": part})


@functools.cache
def described(kind: type) -> dict[str, str]:
    """What the docstring of a class says under ``Attributes``, by name.

    The first sentence of a field is the help of its command-line option.
    """
    attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {names: " ".join(text.split()) for names, text in entries}
    return {name: text for names, text in texts.items() for name in names.split(", ")}


def keep_checked(of: Any) -> None:
    """Check every field of a new object, and keep the checked values. Raises UsageError."""
    for one in fields(of):
        kept = one.metadata["kind"].check(one.name, getattr(of, one.name))
        object.__setattr__(of, one.name, kept)  # it may be frozen
