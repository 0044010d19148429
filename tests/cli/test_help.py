"""--help names every option with its default, has examples, and loads nothing heavy."""

from __future__ import annotations

import re

import pytest

import pyllama_mtp
from pyllama_mtp import settings
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


#: Options that only measure, and answer worse.
RESEARCH = {"--rows", "--sync", "--hidden", "--synthetic-acceptance"}


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str | None
) -> None:
    """It names every option, shows no Python syntax, and has examples in eighty columns; where
    there are many, --help names about fifteen, and --help-all every one."""
    monkeypatch.setenv("COLUMNS", "80")
    chosen = build_parser(command).chosen
    usual = chosen.usual if chosen else ()
    for flag in ("--help", *(["--help-all"] if usual else [])):
        with pytest.raises(SystemExit, match="0"):
            main([*([command] if command else []), flag])
        out = capsys.readouterr().out
        actions = chosen._actions if chosen else []
        for action in actions:
            shown = not usual or flag == "--help-all" or action.dest in usual
            for word in action.option_strings:
                assert bool(re.search(rf"^ .*(?<![\w-]){word}\b", out, re.M)) >= shown, word
        if not chosen:
            assert not [word for word in COMMANDS if not re.search(rf"(?<![\w-]){word}\b", out)]
        text = " ".join(out.split())
        assert not re.search(r"default: (\(|\[|None|True|False|\w+\()", text)
        assert not set(vars(settings)) & set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", text))
        if chosen:
            assert f"examples:\n  pyllama-mtp {command}" in out
            assert not [line for line in out.splitlines() if len(line) > 80]
        if usual and flag == "--help":
            assert out.splitlines()[0].startswith(f"usage: pyllama-mtp {command} [options]")
            assert len(re.findall(r"^  -", out, re.M)) <= 24 and len(out.splitlines()) <= 105
    if chosen:
        known, dests = set(chosen._option_string_actions), {action.dest for action in actions}
        assert bool(RESEARCH & known) is (command in ("matrix", "accept", "tune"))
        assert set(usual) <= dests


def test_short_names_of_llama_cpp(cli: Cli) -> None:
    chosen = build_parser("serve").chosen
    assert chosen
    words = "-np 2 -fa on -b 64 -ub 32 -ctk q8_0 -ctv q8_0 -a tiny --parallel 3 --ctx-size 512"
    args = chosen.parse_args(words.split())
    assert (args.n_sequences, args.flash_attn, args.n_batch, args.n_ubatch) == (3, "on", 64, 32)
    assert (args.cache_type_k, args.cache_type_v, args.name) == ("q8_0", "q8_0", "tiny")
    assert args.n_ctx == 512


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


def test_public_names_are_all_that_a_shell_completes() -> None:
    assert {name for name in dir(pyllama_mtp) if name != "__version__"} == {
        *pyllama_mtp.__all__,
        "bench",
    }


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"pyllama-mtp {pyllama_mtp.__version__}\n")


def test_without_a_command_the_help_comes(cli: Cli) -> None:
    result = cli()
    assert result.code == 0 and "pyllama-mtp doctor" in result.out
