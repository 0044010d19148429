"""Bad input: exit code 2 and one message that says what was wrong; never a traceback."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pyllama_mtp.errors import InsufficientMemoryError

from ..processes import Cli

GENERATE = [
    (["--draft-n-max", "-1", "x"], "--draft-n-max: draft_n_max is -1, it must be a draft depth"),
    (["--draft-n-max", "two", "x"], "draft_n_max is 'two', it must be a whole number"),
    (["--max-tokens", "0", "x"], "--max-tokens: 0 is not allowed; give 1 or more"),
    (["--n-ctx", "-5", "x"], "--n-ctx: n_ctx is -5, it must be 0 (as much"),
    (["--n-batch", "0", "x"], "--n-batch: n_batch is 0, it must be from 1"),
    (["--n-ubatch", "0", "x"], "--n-ubatch: n_ubatch is 0, it must be from 1"),
    (["--threads", "0", "x"], "--threads: n_threads is 0, it must be from 1"),
    (["--n-gpu-layers", "-2", "x"], "--n-gpu-layers: -2 is not allowed"),
    (["--temperature", "nan", "x"], "--temperature: temperature is nan, it must be 0 (greedy) or"),
    (["--top-k", "-1", "x"], "--top-k: top_k is -1, it must be 0 (off) or above"),
    (["--top-p", "1.1", "x"], "--top-p: top_p is 1.1, it must be above 0, at most 1"),
    (["--min-p", "2", "x"], "--min-p: min_p is 2.0, it must be from 0 to 1"),
    (["--repeat-penalty", "0", "x"], "repeat_penalty is 0.0"),
    (["--repeat-last-n", "-1", "x"], "--repeat-last-n: repeat_last_n is -1, it must be from 0"),
    (["--seed", "-1", "x"], "--seed: seed is -1, it must be from 0 to"),
    (["--grammar", "nowhere.gbnf", "x"], "cannot read the grammar file nowhere.gbnf: No such"),
    (["--logit-bias", "7", "x"], "'7' is not ID=BIAS, as in 42=-2.5"),
    (["--logit-bias", "7=nan", "x"], "logit_bias is {7: nan}"),
    (["--p-min", "1.5", "x"], "--p-min: p_min is 1.5, it must be a probability from 0 to 1"),
    (["--cache-type-k", "q3", "x"], "--cache-type-k: invalid choice: 'q3'"),
    (["--cache-type-v", "q4_0", "--flash-attn", "off", "x"], "needs flash attention"),
    (["--flash-attn", "maybe", "x"], "--flash-attn: invalid choice"),
    (["--rows", "first", "x"], "--rows: invalid choice"),
    (["--rows", "last,all", "x"], "--rows: invalid choice"),
    (["--sync", "half", "x"], "--sync: invalid choice"),
    (["--hidden", "norm", "x"], "--hidden: invalid choice"),
    (["--checkpoints", "-1", "x"], "--checkpoints: checkpoints is -1, it must be from 0 (none)"),
    (["--prompt-rows", "all", "x"], "unrecognized arguments: --prompt-rows"),
    (["--rollback", "never", "x"], "--rollback: invalid choice"),
    (["--synthetic-acceptance", "0.8,1.7,0.6", "x"], "(0.8, 1.7, 0.6), it must be one or more"),
    (["--synthetic-acceptance", "0.8;0.7", "x"], "'0.8;0.7', it must be one or more rates from 0"),
    (["--synthetic-acceptance", "0.8,,0.7", "x"], "is '0.8,,0.7', it must be one or more"),
    (["--synthetic-acceptance", "", "x"], "is '', it must be one or more rates"),
    (["--synthetic-acceptance", "0.6,0.7,0.8", "x"], "do not increase"),
    (
        ["--synthetic-acceptance", "0.8,0.7", "--draft-n-max", "3", "x"],
        "one rate for each of the 3 draft positions",
    ),
    (["--synthetic-acceptance", "0.8", "--draft-n-max", "0", "x"], "--draft-n-max is 0"),
    (["--log-pairs", "p.jsonl", "--draft-n-max", "0", "x"], "--draft-n-max is 0"),
    (["--log-pairs", "no/such/folder/p.jsonl", "x"], "cannot create no/such/folder/p.jsonl"),
    (["--log-pairs", ".", "x"], "cannot create ."),
    (["--stop", "", "x"], "--stop with an empty text"),
    (["--system", "Be kind.", "x"], "--system needs --chat"),
    ([], "no prompt"),
    ([""], "the prompt is empty"),
    (["  \n"], "the prompt is empty"),
    (["\udcff"], "the prompt is not UTF-8: byte 0xff at offset 0"),
    (["--prompt-file", "nowhere.txt"], "cannot read the prompt file nowhere.txt: No such file"),
    (["--prompt-file", "."], "cannot read the prompt file .: Is a directory"),
    (["--prompt-file", "a.txt", "x"], "not allowed with argument"),
    (["--no-such-option", "x"], "unrecognized arguments: --no-such-option"),
]

MATRIX = [
    (["--depths", "0,-2"], "-2 is not allowed; give 0 or more"),
    (["--depths", "0,x"], "'x' is not a whole number"),
    (["--depths", ""], "has an empty item"),
    (["--depths", "2,2"], "depths 2, 2 name one value twice"),
    (["--depths", "0,99"], "draft_n_max is 99"),
    (["--prompt-sizes", "0"], "0 is not allowed; give 1 or more"),
    (["--prompt-sizes", "512,,1024"], "has an empty item"),
    (["--prompt-sizes", "1x"], "'1x' is not a whole number"),
    (["--max-tokens", "0"], "--max-tokens: 0 is not allowed"),
    (["--repeat", "0"], "--repeat: 0 is not allowed"),
    (["--synthetic-acceptance", "0.8,0.7", "--depths", "0,3"], "depth 3 needs one for each draft"),
    (["--synthetic-acceptance", "0.8", "--depths", "0"], "needs a depth above 0"),
    (["--synthetic-acceptance", "2"], "(2.0,), it must be one or more rates"),
    (["--prompt-file", "nowhere.txt"], "cannot read the prompt file nowhere.txt"),
    (["--output", "."], "cannot write .: Is a directory"),
    (["--output", "no/such/folder/m.jsonl"], "cannot write no/such/folder/m.jsonl"),
    (["--output", "a.jsonl", "--no-output"], "not allowed with argument"),
    (["--format", "html"], "--format: invalid choice: 'html'"),
    (["512"], "unrecognized arguments: 512"),
    (["--rows", "first"], "--rows: prompt_rows is 'first', it must be one of last, all"),
    (["--sync", "kv,half"], "--sync: prompt_sync is 'half', it must be one of auto, kv, full"),
    (["--sync", "kv,kv"], "prompt_sync kv, kv name one value twice"),
    (["--sync", ""], "has an empty item"),
    (["--hidden", "pre"], "--hidden: hidden is 'pre', it must be one of post-norm, pre-norm"),
    (["--checkpoints", "31"], "checkpoints is 31"),
    (
        ["--depths", "0", "--rows", "all,last"],
        "--rows, --sync, --hidden and --draft-vocab need a depth above 0",
    ),
    (["--variants", "patched:small_batch=off,patched"], "is the first of --variants"),
    (["--variants", "patched,patched:fast=on"], "'fast=on' is nothing that a process can be given"),
    (["--prompt-step", "64", "--axis", "n-sequences=2"], "several sequences have no steps"),
    (["--axis", "n_ctx=512"], "'n_ctx=512' is no NAME=VALUE,...; NAME: prompt_rows"),
    (["--axis", "ngram=maybe"], "'maybe' is no value of the axis ngram"),
    (["--axis", "cache-type-k=q9"], "cache_type_k is 'q9'"),
    (["--axis", "n-sequences=300"], "n_sequences is 300, it must be 1 to 256"),
    (["--axis", "p-min=0.1", "--axis", "p_min=0.2"], "--axis names one axis twice"),
    (["--axis", "p-min=0.1", "--depths", "0"], "as axes of drafting (p_min) do"),
    (["--axis", "synthetic-acceptance=0.5", "--depths", "2"], "gives 1 rates, but depth 2 needs"),
    (["--axis", "n-sequences=2", "--peers", "llama-bench"], "are measured with one sequence"),
    (["--classes", "poems"], "unknown class of prompts 'poems'; known are text, source"),
    (["--classes", "code", "--prompt-file", "p.txt"], "leave --classes out"),
    (["--budget", "soon"], "'soon' is no length of time"),
    (["--lib", "upstream", "--variants", "patched"], "give one of them"),
    (["--resume", "--no-output"], "leave --no-output out"),
    (["--peers", "ollama"], "'ollama' is not one of llama-server, llama-bench"),
    (["--peers", "llama-bench", "--temperature", "0.7"], "--peers measures at temperature 0"),
    (["--peers", "llama-bench", "--peer-dir", "nowhere"], "--peer-dir nowhere: there is no such"),
]


def refused(result: SimpleNamespace, message: str) -> None:
    assert result.code == 2
    assert result.err.startswith("pyllama-mtp: error: ")
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(("arguments", "message"), GENERATE)
def test_generate(fake: ModuleType, cli: Cli, arguments: list[str], message: str) -> None:
    refused(cli("generate", *arguments), message)
    assert not fake.log, "nothing may be loaded before the options are checked"


@pytest.mark.parametrize(("arguments", "message"), MATRIX)
def test_matrix(fake: ModuleType, cli: Cli, arguments: list[str], message: str) -> None:
    Path("p.txt").write_text("text")
    refused(cli("matrix", *arguments), message)
    assert not fake.log, "nothing may be loaded before the options are checked"
    assert not Path("matrix.jsonl").exists()


@pytest.mark.parametrize("command", ["generate", "matrix"])
@pytest.mark.parametrize(
    ("data", "message"),
    [(b"abc \xe9t\xe9", "is not UTF-8: byte 0xe9 at offset 4"), (b"", "is empty")],
)
def test_prompt_files(fake: ModuleType, cli: Cli, command: str, data: bytes, message: str) -> None:
    Path("p.txt").write_bytes(data)
    refused(cli(command, "--prompt-file", "p.txt"), f"the prompt file p.txt {message}")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "--ctx-size", "4096", "x"], "--ctx-size of llama.cpp is here --n-ctx"),
        (["generate", "--predict=9", "x"], "--predict of llama.cpp is here --max-tokens"),
        (["generate", "-ctk", "q8_0", "x"], "-ctk of llama.cpp is here --cache-type-k"),
        (["matrix", "--gpu-layers", "0"], "--gpu-layers of llama.cpp is here --n-gpu-layers"),
        (["serve", "--draft-max", "3"], "--draft-max of llama.cpp is here --draft-n-max"),
        (["serve", "-np", "3"], "-np of llama.cpp is here --n-sequences"),
        (["generate", "hi", "there"], 'needs quotes: pyllama-mtp generate "hi there"'),
        (["generate", "--stats", "a", "b", "c"], 'needs quotes: pyllama-mtp generate "a b c"'),
    ],
)
def test_what_was_meant_is_said(cli: Cli, arguments: list[str], hint: str) -> None:
    result = cli(*arguments)
    refused(result, hint.split(" of llama")[0])
    assert hint in result.err


def test_no_hint_where_nothing_is_known(cli: Cli) -> None:
    for arguments in (
        ["generate", "--nonsense", "x"],
        ["matrix", "--draft-max", "2"],
        ["matrix", "x"],
    ):
        result = cli(*arguments)
        assert result.code == 2 and "of llama.cpp" not in result.err and "quotes" not in result.err


def test_no_such_command(cli: Cli) -> None:
    refused(cli("generat", "x"), "invalid choice: 'generat'")


def test_a_model_without_an_mtp_head_names_the_way_out(fake: ModuleType, cli: Cli) -> None:
    fake.state["has_mtp"] = False
    depth = ("--draft-n-max", "2")
    refused(cli("generate", "--model", "m.gguf", *depth, "x"), "give --draft-n-max 0")
    refused(cli("matrix", "--model", "m.gguf", "--depths", "0,2"), "give --depths 0")
    assert cli("generate", "--model", "m.gguf", "--draft-n-max", "0", "x").code == 0
    result = cli("generate", "--model", "m.gguf", "x")
    assert result.code == 0 and "has no MTP head; drafts come from the text" in result.err
    result = cli("generate", "--model", "m.gguf", "--no-ngram", "x")
    assert result.code == 0 and "has no MTP head; nothing is drafted" in result.err
    fake.state["partial"] = True
    refused(cli("generate", "--model", "m.gguf", "x"), "give --draft-n-max 0")


def test_a_library_that_cannot_be_loaded(fake: ModuleType, cli: Cli) -> None:
    fake.native.library = None
    for command in (["generate", "x"], ["matrix"]):
        refused(cli(*command), "no native library; tried: here and there")


def test_a_switch_that_the_library_lacks(fake: ModuleType, cli: Cli) -> None:
    fake.state["has_tap"] = False
    message = "prompt_sync 'kv' is not in upstream's library"
    refused(cli("generate", "--model", "m.gguf", "--sync", "kv", "x"), message)
    refused(cli("matrix", "--model", "m.gguf", "--sync", "full,kv"), f"sync kv: {message}")
    assert not [entry for entry in fake.log if entry[0] == "generate"]
    assert not Path("matrix.jsonl").exists()


def test_a_context_larger_than_memory(fake: ModuleType, cli: Cli) -> None:
    fake.refuse_session[(1 << 20, "auto")] = InsufficientMemoryError(
        "needs 99 GiB, 1 GiB available"
    )
    result = cli("generate", "--model", "m.gguf", "--n-ctx", str(1 << 20), "x")
    refused(result, "needs 99 GiB")


def test_log_pairs_never_overwrites(fake: ModuleType, cli: Cli) -> None:
    Path("old.jsonl").write_text("precious")
    refused(cli("generate", "--log-pairs", "old.jsonl", "x"), "File exists")
    assert Path("old.jsonl").read_text() == "precious"


def test_a_failure_leaves_no_empty_files(fake: ModuleType, cli: Cli) -> None:
    fake.native.library = None
    cli("generate", "--log-pairs", "pairs.jsonl", "x")
    cli("matrix")
    assert not list(Path.cwd().iterdir())
