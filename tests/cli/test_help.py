"""--help names every option with its default, has examples, and loads nothing heavy."""

from __future__ import annotations

import re

import pytest

import pyllama_mtp
from pyllama_mtp.cli import COMMANDS, build_parser, main

from ..processes import Cli, RunPython

#: What makes --help quick: none of these is imported.
HEAVY = {"pyllama_mtp._native", "rich.progress", "rich.table"}
HELP = """
import sys
from pyllama_mtp.cli import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
print(*sys.modules)
"""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str | None
) -> None:
    """It names every option, shows no Python syntax, and has examples in eighty columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*([command] if command else []), "--help"])
    out = capsys.readouterr().out
    chosen = build_parser(command).chosen
    words = chosen._option_string_actions if chosen else COMMANDS
    assert not [word for word in words if not re.search(rf"(?<![\w-]){word}\b", out)]
    text = " ".join(out.split())
    assert not re.search(r"default: (\(|\[|None|True|False|\w+\()", text)
    if chosen:
        assert f"examples:\n  pyllama-mtp {command}" in out
        assert not [line for line in out.splitlines() if len(line) > 80]


def test_help_loads_nothing_heavy(run_python: RunPython) -> None:
    done = run_python(HELP, *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.splitlines()[-1].split())


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
