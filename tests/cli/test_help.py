"""--help is enough to use a command: every option, its default, examples; and it comes at once."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import pyllama_mtp
from pyllama_mtp.cli import COMMANDS, build_parser


def options_of(command: str) -> argparse.ArgumentParser:
    for action in build_parser(command)._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[command]
    raise AssertionError


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_names_every_option(
    program: Callable[..., subprocess.CompletedProcess[bytes]], command: str | None
) -> None:
    done = program(*([command] if command else []), "--help")
    assert done.returncode == 0 and not done.stderr
    text = done.stdout.decode()
    words = COMMANDS if command is None else options_of(command)._option_string_actions
    assert not [word for word in words if not re.search(rf"(?<![\w-]){word}\b", text)]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_default_is_shown_as_python(
    program: Callable[..., subprocess.CompletedProcess[bytes]], command: str
) -> None:
    text = " ".join(program(command, "--help").stdout.decode().split())
    assert not re.search(r"default: (\(|\[|None|True|False|\w+\()", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_fits_eighty_columns(
    program: Callable[..., subprocess.CompletedProcess[bytes]], command: str
) -> None:
    text = program(command, "--help").stdout.decode()
    assert "examples:\n  pyllama-mtp " + command in text
    assert not [line for line in text.splitlines() if len(line) > 80]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_explains_itself_with_its_default(command: str) -> None:
    parser = options_of(command)
    for action in parser._actions:
        if not action.option_strings or action.dest == "help":
            continue
        text = parser._get_formatter()._expand_help(action)
        assert len(text) > 10, action.option_strings
        takes_a_value = action.nargs != 0
        if takes_a_value and action.default not in (None, [], (), {}):
            assert "default" in text, action.option_strings


def test_the_list_of_commands_says_what_each_command_says() -> None:
    for command, summary in COMMANDS.items():
        for action in build_parser(command)._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help for choice in action._choices_actions}
                assert helps[command] == summary


def test_version(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"pyllama-mtp {pyllama_mtp.__version__}\n")


def test_without_a_command_the_help_comes(cli: Callable[..., SimpleNamespace]) -> None:
    result = cli()
    assert result.code == 0 and "pyllama-mtp doctor" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command: str, tmp_path: Path) -> None:
    """That is what makes it quick."""
    code = (
        "import sys\nfrom pyllama_mtp.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    heavy = {"pyllama_mtp._native", "rich.progress", "rich.table"}
    assert not heavy & set(done.stderr.split())
