"""The synth and inspect commands: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp import Model, Settings
from pyllama_mtp.errors import LibraryError
from pyllama_mtp.llama.native import Library
from pyllama_mtp.memory import resolve, simulate
from pyllama_mtp.models.demo import demo_path

from ..processes import Cli


def test_synth_then_inspect(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    cli("synth", "--shape", "tiny-moe", "--type", "Q4_0", "--set", "n_layer=8", path)
    out = cli("inspect", path, "--n-ctx", 512).out
    for text in ("qwen35moe", "8 (2 full attention, 6 recurrent)", "complete", "Q4_0", "synthetic"):
        assert text in out
    assert str(demo_path()) in cli("inspect").out


def test_inspect_says_what_a_step_reads_and_what_is_fast(
    cli: Cli, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of a step's bytes, and that MTP will hardly pay where most of them have no fast
    path."""
    for fast, sentence in (((8,), False), ((), True)):
        monkeypatch.setattr(Library, "few_columns", lambda self, number: number in fast)  # noqa: B023
        out = cli("inspect", tiny_dense).out
        line = next(line for line in out.splitlines() if line.startswith("  Q8_0 "))
        assert line.endswith("%   fast" if fast else "%   no fast path"), line
        assert ("MTP will hardly pay on this CPU" in out) is sentence
        found = json.loads(cli("inspect", tiny_dense, "--json").out)
        assert found["step_types"]["Q8_0"] > 0 and ("Q8_0" in found["slow_types"]) is not bool(fast)


def test_inspect_works_without_the_library(
    cli: Cli, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(library: object = None) -> None:
        raise LibraryError("none")

    monkeypatch.setattr("pyllama_mtp.llama.native.load", missing)
    out = cli("inspect", tiny_dense).out
    assert "%   unknown" in out and "  unknown: none" in out


def test_inspect_json(cli: Cli, tiny_dense: Path) -> None:
    found = json.loads(cli("inspect", tiny_dense, "--json", "--cache-type-k", "q8_0").out)
    assert (found["architecture"], found["mtp_complete"]) == ("qwen35", True)
    with_mtp, without = found["memory"]["mtp"], found["memory"]["no_mtp"]
    assert with_mtp["total"] > without["total"] > 0 and not found["memory"]["unknown"]
    settings = Settings(n_ctx=8192, draft_n_max=3, cache_type_k="q8_0")
    with Model(tiny_dense, no_alloc=True) as model:
        here, *_ = simulate(model, resolve(settings, model))
    host = with_mtp["devices"][here.name]
    assert {name: host[name] for name in here.parts} == here.parts


def test_list(cli: Cli) -> None:
    assert "qwen3.6-35b-a3b" in cli("synth", "--list").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("synth", "give the file to write"),
        ("synth --set n_layer x.gguf", "n_layer"),
        ("inspect absent.gguf", "no such model file"),
        ("inspect m.gguf --cache-type-v f8", "invalid choice: 'f8'"),
    ],
)
def test_errors_are_ours(cli: Cli, words: str, message: str) -> None:
    done = cli(*words.split())
    assert done.code == 2 and message in done.err
