"""``draft-vocab``: the file it writes, what it refuses; with the demo model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pyllama_mtp import Model
from pyllama_mtp.cli import modelfiles
from pyllama_mtp.drafting.vocabulary import default_ranking, load
from pyllama_mtp.models.tokenizer import read_tokenizer

from ..processes import Cli

TEXT = (
    "def total(values):\n    return sum(values)\n\n\n"
    "The total of an empty list is 0. Größe, naïve, 日本語.\r\nNo end of line"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 20, encoding="utf-8", newline="")
    return path


def expected_counts(model: Model, *texts: str) -> Counter[int]:
    return Counter(t for text in texts for t in model.tokenize(text, add_special=False))


def test_the_ranking_is_by_the_counts_of_the_text(
    cli: Cli, demo: Model, demo_file: Path, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("values values values")
    output = tmp_path / "ranking.json"
    output.write_text("old")
    result = cli("draft-vocab", "--text", str(text), str(other), "-o", str(output), "--force")
    assert result.code == 0, result.err
    assert f"{output}: 2048 tokens, best first" in result.out
    tokenizer = read_tokenizer(demo_file)
    counts = expected_counts(demo, TEXT * 20, other.read_text())
    default = default_ranking(tokenizer).tolist()
    wanted = sorted(default, key=lambda token: -counts[token])
    assert load(output, tokenizer).tolist() == wanted != default
    source = json.loads(output.read_text())["source"]
    assert source == f"{counts.total()} tokens of 2 text files"


@pytest.mark.parametrize("chunk", [1, 7, 64, 100_000])
def test_pieces_of_a_text_end_with_a_line(
    text: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(modelfiles, "_CHUNK", chunk)
    pieces = [*modelfiles._chunks(str(text))]
    assert "".join(pieces) == TEXT * 20
    assert max(map(len, pieces)) <= 2 * chunk, "bounded, also where a line is long"
    if chunk == 64:
        assert all(piece.endswith("\n") for piece in pieces[:-1]) and len(pieces) > 10


def test_bad_input_is_refused_before_the_work(
    cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelfiles, "_tokens", None)
    existing = tmp_path / "existing.json"
    existing.write_text("kept")
    cases = {
        ("-o", "new.json"): "the following arguments are required: --text",
        ("--text", str(text)): "the following arguments are required: -o/--output",
        ("--text", str(tmp_path / "absent"), "-o", "new.json"): "no such text file",
        ("--text", str(text), "-o", str(existing)): "exists; choose another name or overwrite it",
        ("--text", str(text), "-o", str(tmp_path / "no" / "r.json")): "does not exist; create it",
        ("--text", str(text), "-o", str(text), "--force"): "is the file that is read",
        ("--text", str(text), "-o", "new.json", "--model", str(text)): "not a GGUF",
        ("--text",): "expected at least one argument",
    }
    for words, message in cases.items():
        result = cli("draft-vocab", *words)
        assert (result.code, result.out) == (2, ""), words
        assert message in result.err and "Traceback" not in result.err
    assert existing.read_text() == "kept" and text.read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["existing.json", "text.txt"]


def test_texts_that_cannot_be_counted(cli: Cli, tmp_path: Path) -> None:
    binary, empty, output = (tmp_path / name for name in ("binary", "empty", "r.json"))
    binary.write_bytes(b"text\xff\xfe")
    empty.write_bytes(b"")
    cases = {binary: "is not UTF-8 text", empty: "the text is empty", tmp_path: "Is a directory"}
    for path, message in cases.items():
        result = cli("draft-vocab", "--text", str(path), "-o", str(output))
        assert result.code == 2 and message in result.err
        assert not output.exists()
