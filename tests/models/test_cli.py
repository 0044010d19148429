"""The synth and inspect commands: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp import Model, Settings
from pyllama_mtp.cli import build_parser
from pyllama_mtp.errors import LibraryError, PyllamaMtpError, UsageError
from pyllama_mtp.llama.native import Library
from pyllama_mtp.sizing import simulate


def call(*words: str) -> int:
    args = build_parser(words[0]).parse_args(words)
    code: int = args.run(args)
    return code


def test_synth_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "m.gguf")
    assert call("synth", "--shape", "tiny-moe", "--type", "Q4_0", "--set", "n_layer=8", path) == 0
    assert call("inspect", path, "--n-ctx", "512") == 0
    out = capsys.readouterr().out
    for text in ("qwen35moe", "8 (2 full attention, 6 recurrent)", "complete", "Q4_0", "synthetic"):
        assert text in out


def test_inspect_says_what_a_step_reads_and_what_is_fast(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares of a step's bytes, and that MTP will hardly pay where most of them have no fast
    path."""
    for fast, sentence in (((8,), False), ((), True)):
        monkeypatch.setattr(Library, "few_columns", lambda self, number: number in fast)  # noqa: B023
        assert call("inspect", str(tiny_dense)) == 0
        out = capsys.readouterr().out
        line = next(line for line in out.splitlines() if line.startswith("  Q8_0 "))
        assert line.endswith("%   fast" if fast else "%   no fast path"), line
        assert ("MTP will hardly pay on this CPU" in out) is sentence
        assert call("inspect", str(tiny_dense), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step_types"]["Q8_0"] > 0 and ("Q8_0" in found["slow_types"]) is not bool(fast)


def test_inspect_works_without_the_library(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(library: object = None) -> None:
        raise LibraryError("none")

    monkeypatch.setattr("pyllama_mtp.llama.native.load", missing)
    assert call("inspect", str(tiny_dense)) == 0
    out = capsys.readouterr().out
    assert "%   unknown" in out and "  unknown: none" in out


def test_inspect_json(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", str(tiny_dense), "--json", "--cache-type-k", "q8_0") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["mtp_complete"]) == ("qwen35", True)
    with_mtp, without = found["memory"]["mtp"], found["memory"]["no_mtp"]
    assert with_mtp["total"] > without["total"] > 0 and not found["memory"]["unknown"]
    settings = Settings(n_ctx=8192, draft_n_max=3, cache_type_k="q8_0")
    with Model(tiny_dense, no_alloc=True) as model:
        here, *_ = simulate(model, settings, 1, 8192)
    host = with_mtp["devices"][here.name]
    assert {name: host[name] for name in here.parts} == here.parts


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("synth", "--list") == 0
    assert "qwen3.6-35b-a3b" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [("synth",), ("synth", "--set", "n_layer", "x.gguf"), ("inspect", "absent.gguf")],
)
def test_errors_are_ours(words: tuple[str, ...]) -> None:
    with pytest.raises(PyllamaMtpError):
        call(*words)


def test_bad_cache_type(tiny_dense: Path) -> None:
    with pytest.raises(UsageError, match="invalid choice: 'f8'"):
        call("inspect", str(tiny_dense), "--cache-type-v", "f8")
