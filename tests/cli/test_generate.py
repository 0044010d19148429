"""generate: what goes to stdout, what to stderr, and what Ctrl-C leaves."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import ChatOptions, Model, Sampling, Session, Settings
from pyllama_mtp.cli import progress
from pyllama_mtp.errors import FatalDecodeError
from pyllama_mtp.llama.context import Context
from pyllama_mtp.settings import MOST_TOKENS, RopeScaling

from ..processes import Cli
from .conftest import Watched

MODEL = ("generate", "-m", "folder/m.gguf", "-t", "1")


def asked(watched: Watched) -> tuple[list[int], dict[str, Any]]:
    """The prompt of the first generation since the last call, and its options."""
    prompt, options = watched.of("generate")[0]
    watched.log.clear()
    return list(prompt), options


def test_text_to_stdout_and_nothing_else(watched: Watched, cli: Cli, demo: Model) -> None:
    result = cli(*MODEL, "-n", "5", "hello")
    with Session(demo, Settings(n_threads=1)) as session:
        text = session.generate("hello", max_tokens=5).run().text
    assert (result.code, result.out, result.err) == (0, f"{text}\n", "")
    assert asked(watched)[0] == demo.tokenize("hello")
    assert watched.n_open == 0


def test_pieces_are_flushed_as_they_come(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Pieces(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Pieces())
    cli(*MODEL, "-n", "12", "def add(a, b):\n")
    assert len(seen) > 4 and all(b.startswith(a) for a, b in itertools.pairwise(seen))


def test_every_switch_arrives(watched: Watched, cli: Cli, tmp_path: Path) -> None:
    """Of each kind and each part of the declared options, of which the others are made alike."""
    grammar = tmp_path / "a.gbnf"
    grammar.write_text('root ::= "a"')
    result = cli(
        *(*MODEL, "--json", "--lib", "patched", "--max-tokens", "4"),
        *("--draft-n-max", "2", "--p-min", "0.25", "--n-ctx", "1024", "--cache-type-k", "q8_0"),
        *("--draft-vocab", "500", "--no-draft-follow"),
        *("--yarn-orig-ctx", "512", "--temperature", "0.5", "--top-k", "7", "--seed", "3"),
        *("--logit-bias", "5=-2.5", "--logit-bias", "7=-inf", "--grammar", str(grammar)),
        *("--stop", "END", "--stop", "\n\n", "--ignore-eos", "--no-ngram", "--draft-sampling", "x"),
    )
    settings = Settings(
        **{"n_ctx": 1024, "cache_type_k": "q8_0"},
        **{"draft_n_max": 2, "p_min": 0.25, "draft_vocab": "500", "draft_follow": False},
        **{"ngram": False, "draft_sampling": True, "rope": RopeScaling(yarn_orig_ctx=512)},
        n_threads=1,
    )
    assert json.loads(result.out)["settings"] == dataclasses.asdict(settings)
    _, options = asked(watched)
    assert (options["max_tokens"], options["ignore_eos"]) == (4, True)
    assert options["stop"] == ("END", "\n\n")
    biases = {5: -2.5, 7: -math.inf}
    wanted = Sampling(temperature=0.5, top_k=7, seed=3, logit_bias=biases, grammar='root ::= "a"')
    assert options["sampling"] == wanted


@pytest.mark.parametrize(
    ("option", "value", "kind", "source"),
    [
        ("--json-schema", "FILE", "json_schema", '{"type": "null"}'),
        ("--json-object", None, "json_schema", '{"type": "object"}'),
        ("--regex", "a+", "regex", "a+"),
        ("--lark", "FILE", "lark", 'start: "a"'),
    ],
)
def test_grammars(
    watched: Watched, cli: Cli, tmp_path: Path, option: str, value: str, kind: str, source: str
) -> None:
    file = tmp_path / "source"
    file.write_text(source)
    given = [str(file) if value == "FILE" else value] if value else []
    assert cli(*MODEL, option, *given, "-n", "4", "-p", "x").code == 0
    grammar = asked(watched)[1]["sampling"].grammar
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.usefixtures("nothing_loads")
def test_grammars_that_are_refused(cli: Cli) -> None:
    result = cli(*MODEL, "-j", '{"type": "nul"}', "x")
    assert result.code == 2 and "JSON schema cannot be used: Invalid type: nul" in result.err
    result = cli(*MODEL, "--regex", "a", "--json-object", "x")
    assert result.code == 2 and "one of --json-object, --regex" in result.err


def test_short_options(watched: Watched, cli: Cli, demo: Model) -> None:
    """llama.cpp's short options; special tokens in a prompt stay text."""
    short = ("-n", "3", "-c", "512", "-ngl", "0", "--temp", "0.5", "--top-k", "9")
    report = json.loads(cli(*MODEL, "--json", *short, "-p", "hi<|im_end|>").out)
    assert (report["settings"]["n_ctx"], report["settings"]["n_threads"]) == (512, 1)
    prompt, options = asked(watched)
    assert (options["max_tokens"], options["sampling"].temperature) == (3, 0.5)
    assert options["sampling"].top_k == 9
    assert prompt == demo.tokenize("hi<|im_end|>", parse_special=False)
    assert cli("generate", "-p", "a", "b").code == 2


@pytest.mark.parametrize("depth", ["2", "auto"])
def test_the_speed_up_is_measured_from_32_tokens_on(cli: Cli, folder: Path, depth: str) -> None:
    usual = *MODEL, "--stats", "--ignore-eos", "--draft-n-max", depth
    said = cli(*usual, "-n", "40", "x").err
    found = re.search(r"speed-up   (?:not known \(|the answer came .*, )([\d.]+) to ([\d.]+)", said)
    assert found and float(found[1]) <= float(found[2])
    assert "speed-up" not in cli(*usual, "-n", "31", "x").err
    assert "speed-up" not in cli(*usual[:-1], "0", "-n", "40", "x").err


def test_the_context_has_room_for_prompt_and_answer(
    watched: Watched, cli: Cli, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []

    def open_session(model: Model, settings: Settings, room: int) -> None:
        rooms.append(room)
        raise FatalDecodeError("no session", -3)

    monkeypatch.setattr("pyllama_mtp.session.Session", open_session)
    for max_tokens in ("300", str(MOST_TOKENS), "-1"):
        assert cli(*MODEL, "-n", max_tokens, "hello").code == 2
    assert rooms == [300 + len(demo.tokenize("hello")), MOST_TOKENS, 0]


def test_why_the_answer_ended(cli: Cli, folder: Path) -> None:
    """The README's question: the demo model's answer is short, and --stats says why."""
    asked = "generate", "--chat", "--stats", "What does str.split() do?"
    assert "end        the model ended its text" in cli(*asked).err
    assert "end        as many tokens as asked for" in cli(*asked, "-n", "5").err
    assert "end        a stop string came" in cli(*asked, "--stop", "e").err


def test_chat_goes_through_the_template(watched: Watched, cli: Cli, demo: Model) -> None:
    cli(*MODEL, "-n", "1", "--chat", "--system", "Be kind.", "Why?")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    assert asked(watched)[0] == ChatOptions().prompt(demo, messages)


def test_prompt_from_a_file_and_from_stdin(
    watched: Watched, cli: Cli, demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("p.txt").write_text("from a file ä\n", encoding="utf-8")
    cli(*MODEL, "-n", "1", "--prompt-file", "p.txt")
    assert asked(watched)[0] == demo.tokenize("from a file ä\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    cli(*MODEL, "-n", "1", "-")
    assert asked(watched)[0] == demo.tokenize("from stdin")


def test_json_is_one_object_instead_of_the_text(watched: Watched, cli: Cli, demo: Model) -> None:
    result = cli(*MODEL, "-n", "4", "--ignore-eos", "--json", "x")
    report = json.loads(result.out)
    assert report["text"] == demo.detokenize(report["tokens"]) and len(report["tokens"]) == 4
    assert report["finish_reason"] == "length" and report["model"] == "m.gguf"
    assert report["telemetry"]["n_generated"] == 4
    assert report["memory"]["weights"] > 0
    assert report["variant"] == "patched"


def test_near_ties_are_watched_for_where_they_matter(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for same, options in itertools.product((True, False), ((), ("--stats",))):
        monkeypatch.setattr(Model, "same_bits", same)
        assert cli(*MODEL, "-n", "1", *options, "x").code == 0
        assert asked(watched)[1]["log_ties"] is (bool(options) and not same)


def test_log_pairs(watched: Watched, cli: Cli) -> None:
    drafts = ("-n", "150", "--ignore-eos", "--draft-n-max", "2", "--log-pairs", "p.jsonl")
    assert cli(*MODEL, *drafts, "def add(a, b):\n").code == 0
    pairs = [json.loads(line) for line in Path("p.jsonl").read_text("utf-8").splitlines()]
    assert {pair["accepted"] for pair in pairs} == {True, False}
    assert all(pair["accepted"] == (pair["drafted"] == pair["actual"]) for pair in pairs)
    assert {pair["position"] for pair in pairs} == {1, 2} and "drafted_text" in pairs[0]


def test_a_failure_while_generating_keeps_the_text(
    watched: Watched, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C does, too: see test_real_commands.py."""
    decode, calls = Context.decode_batch, itertools.count()

    def fail(self: Context, *given: Any, **options: Any) -> Any:
        if next(calls) == 8:
            raise FatalDecodeError("llama_decode failed with -3", -3)
        return decode(self, *given, **options)

    monkeypatch.setattr(Context, "decode_batch", fail)
    result = cli(*MODEL, "--draft-n-max", "0", "--ignore-eos", "def add(a, b):\n")
    assert result.code == 2 and len(result.out) > 4 and result.out.endswith("\n")
    assert result.err == "pyllama-mtp: error: llama_decode failed with -3\n"
    assert watched.n_open == 0


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
