"""Bad input: exit code 2 and one message that says what was wrong; never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_mtp.errors import LibraryError

from ..processes import Cli

GENERATE = [
    (["--draft-n-max", "two", "x"], "draft_n_max is 'two', it must be a whole number"),
    (["--max-tokens", "0", "x"], "--max-tokens: 0 is not allowed; give 1 or more"),
    (
        ["--n-gpu-layers", "-2", "x"],
        "--n-gpu-layers: n_gpu_layers is -2, it must be -1 (all), 0 or above",
    ),
    (["--grammar", "nowhere.gbnf", "x"], "cannot read the grammar file nowhere.gbnf: No such"),
    (["--logit-bias", "7", "x"], "'7' is not ID=BIAS, as in 42=-2.5"),
    (["--cache-type-k", "f8", "x"], "-ctk/--cache-type-k: invalid choice"),
    (["--rows", "all", "x"], "unrecognized arguments: --rows"),
    (["--log-pairs", "p.jsonl", "--draft-n-max", "0", "x"], "--draft-n-max is 0"),
    (["--log-pairs", "no/such/folder/p.jsonl", "x"], "cannot create no/such/folder/p.jsonl"),
    (["--stop", "", "x"], "--stop with an empty text"),
    (["--system", "Be kind.", "x"], "--system needs --chat"),
    ([], "no prompt"),
    ([""], "the prompt is empty"),
    (["\udcff"], "the prompt is not UTF-8: byte 0xff at offset 0"),
    (["--prompt-file", "nowhere.txt"], "cannot read the prompt file nowhere.txt: No such file"),
    (
        ["--tempreature", "1", "x"],
        "unrecognized arguments: --tempreature",
    ),
]

MATRIX = [
    (["--synthetic-acceptance", "0.8;0.7"], "'0.8;0.7', it must be one or more rates from 0"),
    (["--depths", "0,-2"], "-2 is not allowed; give 0 or more"),
    (["--depths", ""], "has an empty item"),
    (["--synthetic-acceptance", "golden:x", "--depths", "2"], "do not increase, or golden:qwen3.5"),
    (["--axis", "synthetic-acceptance=golden:x"], "do not increase, or golden:qwen3.5"),
    (["--synthetic-acceptance", "0.8,0.7", "--depths", "0,3"], "depth 3 needs one for each draft"),
    (["--synthetic-acceptance", "0.8", "--depths", "0"], "needs a depth above 0"),
    (["--prompt-file", "nowhere.txt"], "cannot read the prompt file nowhere.txt"),
    (["--image", "nowhere.png"], "the image nowhere.png cannot be read: No such file"),
    (["--mmproj", "mm.gguf"], "--mmproj is the encoder of --image; give an image"),
    (["--image", "nowhere.png", "--mmproj", "none"], "--mmproj none leaves out"),
    (["--classes", "image"], "prompts of the class 'image' need an image"),
    (["--output", "."], "cannot write .: Is a directory"),
    (["--output", "no/such/folder/m.jsonl"], "cannot write no/such/folder/m.jsonl"),
    (["--rows", "first"], "--rows: prompt_rows is 'first', it must be one of last, all"),
    (
        ["--depths", "0", "--rows", "all,last"],
        "axes of drafting (prompt_rows) need a depth above 0",
    ),
    (["--variants", "patched:small_batch=off,patched"], "is the first of --variants"),
    (["--axis", "n_ctx=512"], "'n_ctx=512' is no NAME=VALUE,...; NAME: n_batch"),
    (["--axis", "p-min=0.1", "--axis", "p_min=0.2"], "--axis names one axis twice"),
    (["--axis", "p-min=0.1", "--depths", "0"], "axes of drafting (p_min) need a depth above 0"),
    (["--axis", "synthetic-acceptance=0.5", "--depths", "2"], "gives 1 rates, but depth 2 needs"),
    (["--budget", "soon"], "'soon' is no length of time"),
    (["--lib", "upstream", "--variants", "patched"], "give one of them"),
    (["--resume", "--no-output"], "leave --no-output out"),
    (["--peers", "ollama"], "'ollama' is not one of llama-server, llama-bench"),
    (["--peers", "llama-bench", "--temperature", "0.7"], "--peers measures at temperature 0"),
]


def refused(result: SimpleNamespace, message: str) -> None:
    assert result.code == 2
    assert result.err.startswith("pyllama-mtp: error: ")
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("arguments", "message"), GENERATE)
def test_generate(cli: Cli, arguments: list[str], message: str) -> None:
    refused(cli("generate", *arguments), message)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("arguments", "message"), MATRIX)
def test_matrix(cli: Cli, arguments: list[str], message: str) -> None:
    refused(cli("matrix", *arguments), message)
    assert not Path("matrix.jsonl").exists()


def test_what_was_meant_is_said(cli: Cli) -> None:
    for arguments, hint in (
        (
            ["generate", "--hf-repo", "a/b", "x"],
            "--hf-repo of llama.cpp is here --model: -m hf:OWNER/REPO",
        ),
        (["serve", "--spec-type=draft-mtp"], "--spec-type of llama.cpp is here --draft-n-max"),
        (["serve", "--prot", "1"], "see pyllama-mtp serve --help\ndid you mean --port?"),
        (["generate", "hi", "there"], 'needs quotes: pyllama-mtp generate "hi there"'),
        (["generate", "--stats", "a", "b", "c"], 'needs quotes: pyllama-mtp generate "a b c"'),
    ):
        refused(cli(*arguments), hint)


def test_no_hint_where_nothing_is_known(cli: Cli) -> None:
    for arguments in ("generate --nonsense x", "matrix --draft-max 2", "matrix x"):
        result = cli(*arguments.split())
        assert result.code == 2 and "of llama.cpp" not in result.err and "quotes" not in result.err


def test_no_such_command(cli: Cli) -> None:
    refused(cli("generat", "x"), "no command 'generat'; did you mean generate?")


def test_a_failure_leaves_no_empty_files(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: object) -> None:
        raise LibraryError("no native library; tried: here and there")

    monkeypatch.setattr("pyllama_mtp.llama.native.load", load)
    for command in (
        ["generate", "--log-pairs", "pairs.jsonl", "x"],
        ["matrix", "-m", "folder/m.gguf"],
    ):
        refused(cli(*command), "no native library; tried: here and there")
    assert [*Path.cwd().iterdir()] == [folder / "folder"]


def test_python_runs_out_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllama_mtp.cli.build_parser", lambda command: [0] * sys.maxsize)
    refused(cli("libdir"), "error: out of memory")
