"""generate: what goes to stdout, what to stderr, and what Ctrl-C leaves."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyllama_mtp import Sampling, Settings
from pyllama_mtp.cli import progress
from pyllama_mtp.settings import MOST_TOKENS, RopeScaling

from ..processes import Cli


def options_of_the_generation(fake: ModuleType) -> tuple[Any, ...]:
    return next(entry for entry in fake.log if entry[0] == "generate")


def test_text_to_stdout_and_nothing_else(fake: ModuleType, cli: Cli) -> None:
    result = cli("generate", "--model", "m.gguf", "--max-tokens", "5", "hello")
    assert (result.code, result.out, result.err) == (0, "abcab\n", "")
    assert options_of_the_generation(fake)[1] == tuple(b"hello")
    assert fake.state["open_sessions"] == 0
    assert fake.log[-1] == ("model closed",)


def test_pieces_are_flushed_as_they_come(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watched(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Watched())
    cli("generate", "--model", "m.gguf", "--max-tokens", "3", "x")
    assert seen[:3] == ["a", "ab", "abc"]


def test_every_switch_arrives(fake: ModuleType, cli: Cli, tmp_path: Path) -> None:
    """Of each kind and each part of the declared options, of which the others are made alike."""
    fake.log.clear()
    grammar = tmp_path / "a.gbnf"
    grammar.write_text('root ::= "a"')
    result = cli(
        *("generate", "--model", "m.gguf", "--json", "--lib", "upstream", "--max-tokens", "4"),
        *("--draft-n-max", "2", "--p-min", "0.25", "--n-ctx", "1024", "--cache-type-k", "q8_0"),
        *("--rows", "all", "--sync", "full", "--draft-vocab", "500", "--no-draft-follow"),
        *("--yarn-orig-ctx", "512", "--temperature", "0.5", "--top-k", "7", "--seed", "3"),
        *("--logit-bias", "5=-2.5", "--logit-bias", "7=-inf", "--grammar", str(grammar)),
        *("--stop", "END", "--stop", "\n\n", "--ignore-eos", "--no-ngram", "--draft-sampling", "x"),
    )
    settings = Settings(
        **{"n_ctx": 1024, "cache_type_k": "q8_0", "prompt_rows": "all", "prompt_sync": "full"},
        **{"draft_n_max": 2, "p_min": 0.25, "draft_vocab": "500", "draft_follow": False},
        **{"ngram": False, "draft_sampling": True, "rope": RopeScaling(yarn_orig_ctx=512)},
    )
    assert json.loads(result.out)["settings"] == dataclasses.asdict(settings)
    _, _, max_tokens, ignore_eos, stop, sampling = options_of_the_generation(fake)
    assert (max_tokens, ignore_eos, stop) == (4, True, ("END", "\n\n"))
    biases = {5: -2.5, 7: -math.inf}
    wanted = Sampling(temperature=0.5, top_k=7, seed=3, logit_bias=biases, grammar='root ::= "a"')
    assert sampling == wanted and fake.log[0] == ("load", "upstream")


@pytest.mark.parametrize(
    ("option", "value", "kind", "source"),
    [
        ("-j", '{"type": "null"}', "json_schema", '{"type": "null"}'),
        ("--json-schema", "FILE", "json_schema", '{"type": "null"}'),
        ("--json-object", None, "json_schema", '{"type": "object"}'),
        ("--regex", "a+", "regex", "a+"),
        ("--lark", "FILE", "lark", 'start: "a"'),
    ],
)
def test_grammars(
    fake: ModuleType, cli: Cli, tmp_path: Path, option: str, value: str, kind: str, source: str
) -> None:
    file = tmp_path / "source"
    file.write_text(source)
    given = [str(file) if value == "FILE" else value] if value else []
    assert cli("generate", "-m", "m.gguf", option, *given, "-p", "x").code == 0
    grammar = options_of_the_generation(fake)[-1].grammar
    assert (grammar.kind, grammar.source) == (kind, source)


def test_grammars_that_are_refused(fake: ModuleType, cli: Cli) -> None:
    result = cli("generate", "-m", "m.gguf", "-j", '{"type": "nul"}', "x")
    assert result.code == 2 and "JSON schema cannot be used: Invalid type: nul" in result.err
    result = cli("generate", "-m", "m.gguf", "--regex", "a", "--json-object", "x")
    assert result.code == 2 and "one of --json-object, --regex" in result.err


def test_short_options(fake: ModuleType, cli: Cli) -> None:
    """llama.cpp's short options."""
    short = ("-m", "m.gguf", "-n", "3", "-c", "512", "-t", "1", "-ngl", "0", "--temp", "0.5")
    report = json.loads(cli("generate", "--json", *short, "--top-k", "9", "-p", "hello").out)
    assert (report["settings"]["n_ctx"], report["settings"]["n_threads"]) == (512, 1)
    _, _, max_tokens, _, _, sampling = options_of_the_generation(fake)
    assert (max_tokens, sampling.temperature, sampling.top_k) == (3, 0.5, 9)
    assert ("tokenize", "hello", True, False) in fake.log  # special tokens stay text
    assert cli("generate", "-p", "a", "b").code == 2


def test_the_demo_model_says_what_it_is_where_nobody_named_one(fake: ModuleType, cli: Cli) -> None:
    said = "this is the demo model: 3.9 million parameters that imitate Python code"
    assert said in cli("generate", "x").err and "-m FILE.gguf" in cli("generate", "x").err
    assert "demo" not in cli("generate", "-m", "m.gguf", "x").err


def test_the_context_has_room_for_prompt_and_answer(fake: ModuleType, cli: Cli) -> None:
    cases = ("300", 8192), ("99999", 100_004), (str(MOST_TOKENS), MOST_TOKENS)
    for max_tokens, expected in cases:
        fake.log.clear()
        fake.script[fake.state["generations"]] = lambda g: setattr(g, "finish_reason", "eos")
        cli("generate", "--model", "m.gguf", "--max-tokens", max_tokens, "hello")
        assert [entry[2] for entry in fake.log if entry[0] == "open"] == [expected]


def test_chat_goes_through_the_template(fake: ModuleType, cli: Cli) -> None:
    cli("generate", "--model", "m.gguf", "--chat", "--system", "Be kind.", "Why?")
    tokenized = [entry for entry in fake.log if entry[0] == "tokenize"]
    assert tokenized == [("tokenize", "<system>Be kind.<user>Why?<assistant>", False, True)]


def test_prompt_from_a_file_and_from_stdin(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("p.txt").write_text("from a file ä\n", encoding="utf-8")
    cli("generate", "--model", "m.gguf", "--prompt-file", "p.txt")
    assert options_of_the_generation(fake)[1] == tuple("from a file ä\n".encode())
    fake.log.clear()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    cli("generate", "--model", "m.gguf", "-")
    assert options_of_the_generation(fake)[1] == tuple(b"from stdin")


def test_json_is_one_object_instead_of_the_text(fake: ModuleType, cli: Cli) -> None:
    report = json.loads(cli("generate", "--model", "m.gguf", "-n", "4", "--json", "x").out)
    assert report["text"] == "abca" and report["tokens"] == [97, 98, 99, 97]
    assert report["finish_reason"] == "length" and report["model"] == "m.gguf"
    assert report["telemetry"]["n_generated"] == 4
    assert report["memory"]["weights"] == 1000
    assert report["variant"] == "patched"


def test_near_ties_are_watched_for_where_they_matter(
    fake: ModuleType, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for same, options in itertools.product((True, False), ((), ("--stats",))):
        monkeypatch.setattr(fake.Model, "same_bits", same)
        assert cli("generate", "--model", "m.gguf", *options, "x").code == 0
        assert fake.state["log_ties"] is (bool(options) and not same)


def test_log_pairs(fake: ModuleType, cli: Cli) -> None:
    cli("generate", "--model", "m.gguf", "--max-tokens", "3", "--log-pairs", "p.jsonl", "x")
    first, second = map(json.loads, Path("p.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["drafted_text"] == "ä" and first["accepted"] is True and first["position"] == 1
    assert second["drafted"] == 98 and second["actual"] == 99 and second["accepted"] is False


def test_imposed_acceptance_is_said_aloud(fake: ModuleType, cli: Cli) -> None:
    rates = ["--synthetic-acceptance", "0.8,0.7,0.6"]
    result = cli("generate", "--model", "m.gguf", *rates, "x")
    assert result.err.startswith("SYNTHETIC ACCEPTANCE 0.8, 0.7, 0.6: ")
    report = json.loads(cli("generate", "--model", "m.gguf", "--json", *rates, "x").out)
    assert report["synthetic_acceptance"] == [0.8, 0.7, 0.6]


@pytest.mark.parametrize("how", ["interrupt", "abort", "stop"])
def test_ctrl_c_keeps_the_text_and_the_figures(fake: ModuleType, cli: Cli, how: str) -> None:
    fake.script[0] = getattr(fake, how)
    result = cli("generate", "--model", "m.gguf", "--stats", "--log-pairs", "p.jsonl", "x")
    assert (result.code, result.out) == (130, "abc\n")
    assert "answer     3 tokens" in result.err and "Traceback" not in result.err
    assert len(Path("p.jsonl").read_text().splitlines()) == 2
    assert fake.state["open_sessions"] == 0 and fake.log[-1] == ("model closed",)


def test_a_failure_while_generating_keeps_the_text(fake: ModuleType, cli: Cli) -> None:
    fake.script[0] = fake.fail
    result = cli("generate", "--model", "m.gguf", "--log-pairs", "p.jsonl", "x")
    assert (result.code, result.out) == (2, "abc\n")
    assert result.err == "pyllama-mtp: error: llama_decode failed with -3\n"
    assert fake.state["open_sessions"] == 0


def test_a_long_prompt_has_a_bar_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.prompt() as tell:
        assert tell
        for done in (0, 100):
            tell(done, 100)
        assert not terminal.getvalue(), "a short one has none"
        for done in (0, 2048, 4096):
            tell(done, 4096)
    assert "reading the prompt" in terminal.getvalue() and "of 4096 tokens" in terminal.getvalue()
    monkeypatch.setattr(terminal, "isatty", lambda: False, raising=False)
    with progress.prompt() as tell:
        assert tell is None
