"""--help names every option with its default, has examples, and loads nothing heavy."""

from __future__ import annotations

import re

import pytest

import pyllama_mtp
from pyllama_mtp.cli import COMMANDS, build_parser

from ..processes import Cli, RunPython

#: What makes --help quick: none of these is imported.
HEAVY = {"pyllama_mtp._native", "rich.progress", "rich.table"}
HELP = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from pyllama_mtp.cli import entry
sys.exit(entry())
"""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(run_python: RunPython, command: str | None) -> None:
    """It names every option, shows no Python syntax, and has examples in eighty columns."""
    done = run_python(HELP, *([command] if command else []), "--help", env={"COLUMNS": "80"})
    assert done.returncode == 0
    chosen = build_parser(command).chosen
    words = chosen._option_string_actions if chosen else COMMANDS
    assert not [word for word in words if not re.search(rf"(?<![\w-]){word}\b", done.stdout)]
    text = " ".join(done.stdout.split())
    assert not re.search(r"default: (\(|\[|None|True|False|\w+\()", text)
    if chosen:
        assert not HEAVY & set(done.stderr.split())
        assert f"examples:\n  pyllama-mtp {command}" in done.stdout
        assert not [line for line in done.stdout.splitlines() if len(line) > 80]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_explains_itself_with_its_default(command: str) -> None:
    parser = build_parser(command).chosen
    assert parser
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        text = parser._get_formatter()._expand_help(action)
        assert len(text) > 10, action.option_strings
        if action.nargs != 0 and action.default not in (None, [], (), {}):
            assert "default" in text, action.option_strings


def test_the_list_of_commands_is_the_same_beside_each_command() -> None:
    shown = {build_parser(command).format_help() for command in (None, *COMMANDS)}
    assert len(shown) == 1


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"pyllama-mtp {pyllama_mtp.__version__}\n")


def test_without_a_command_the_help_comes(cli: Cli) -> None:
    result = cli()
    assert result.code == 0 and "pyllama-mtp doctor" in result.out
