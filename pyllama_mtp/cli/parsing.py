"""How the commands' parsers show help and read values."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import JsonLines


def add_force_option(parser: argparse.ArgumentParser) -> None:
    """Add --force, for commands that write a file."""
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def add_format_option(parser: argparse._ActionsContainer, *more: str) -> None:
    """Add --format, for commands that print tables. `more`: formats that this one has as well."""
    choices = ("table", "markdown", "json", *more)
    parser.add_argument("--format", default="table", choices=choices, help="how to print results")


def add_lib_option(parser: argparse._ActionsContainer) -> None:
    """Add --lib: the native library."""
    parser.add_argument(
        "--lib",
        metavar="upstream|patched|DIR",
        help="native library: llama.cpp as it is, with our patches, or a folder that holds one "
        "(default: PYLLAMA_MTP_LIB from the environment, else patched)",
    )


def new_file(name: str | None) -> AbstractContextManager[JsonLines | None]:
    """A new file of JSON lines for an option, if the option was given. Raises UsageError."""
    return nullcontext() if name is None else JsonLines(name)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to every option that has one, and keeps the line breaks of the epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a description, which is one line; keep an epilog as it is."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """All names, and the value once: "-c, --n-ctx TOKENS"."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        empty = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        if empty or action.nargs == 0 or action.default in ([], (), {}) or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


def _at_least(least: float, read: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """An argparse type: a number of at least `least`, not infinite."""

    def parse(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not allowed; give {least:g} or more")
        return value

    return parse


def whole(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""
    return _at_least(least, int, "a whole number")


def real(least: float) -> Callable[[str], float]:
    """An argparse type: a number of at least `least`, not infinite."""
    return _at_least(least, float, "a number")


def tokens(text: str, least: int = 1) -> int:
    """An argparse type: a number of tokens, "2048" or "2k"."""
    thousands = text[:-1] if text[-1:] in ("k", "K") else ""
    return 1024 * whole(1)(thousands) if thousands.isdigit() else whole(least)(text)


def add_whole(
    parser: argparse._ActionsContainer,
    *names: str,
    help: str,
    default: int | None = None,
    least: int = 1,
    metavar: str = "N",
) -> None:
    """Add an option that takes a whole number of at least `least`."""
    parser.add_argument(*names, type=whole(least), default=default, metavar=metavar, help=help)


def whole_or_auto(least: int) -> Callable[[str], int | str]:
    """An argparse type: a whole number of at least `least`, or the word auto."""
    number = whole(least)

    def parse(text: str) -> int | str:
        return text if text == "auto" else number(text)

    return parse


def comma_list(item: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: items separated by commas."""

    def parse(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(
                f"{text!r} has an empty item; separate items with single commas, as in 1,2,3"
            )
        return tuple(item(part) for part in parts)

    return parse


def pair(
    first: Callable[[str], Any], mark: str, second: Callable[[str], Any], form: str
) -> Callable[[str], tuple[Any, Any]]:
    """An argparse type: two values with a mark between them; `form` describes them in the error."""

    def parse(text: str) -> tuple[Any, Any]:
        left, _, right = text.rpartition(mark)
        try:
            if left and right:
                return first(left), second(right)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {form}")

    return parse


bias = pair(int, "=", float, "ID=BIAS, as in 42=-2.5")
scaled = pair(str, ":", float, "FILE:SCALE, as in a.gguf:0.5")


def told(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type: what `read` makes of a text; its UsageError is the option's message."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is not a JSON object, as {{"name": 1}}""")
    return found


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """An argparse type: one of these words, for an item of a list: `choices` cannot check it."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


@told
def axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """An argparse type: "NAME=VALUE,...", the values of an axis by its name."""
    from pyllama_mtp.measure.plan import AXES, axis_value
    from pyllama_mtp.measure.request import axis_values

    name, equals, words = text.partition("=")
    name = name.replace("-", "_")
    if not equals or name not in AXES:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE,...; NAME: {', '.join(AXES)}")
    if name == "n_context":
        raise argparse.ArgumentTypeError(f"{text!r}: lengths of the context are given by --at")
    return name, axis_values(name, tuple(axis_value(name, word) for word in words.split(",")))
