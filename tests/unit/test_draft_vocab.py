"""Draft vocabularies: rankings, what is chosen of them, their files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama_mtp.drafting import vocabulary
from pyllama_mtp.drafting.vocabulary import (
    DEFAULT_SIZE,
    best,
    choose,
    default_ranking,
    load,
    measure_ranking,
    save,
)
from pyllama_mtp.errors import DraftVocabError, ModelFileError, UsageError
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.models.tokenizer import Tokenizer, read_tokenizer
from pyllama_mtp.settings import DRAFT_VOCAB_LEAST

from ..trimmed import write_bare

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ROOT = Path(__file__).parents[2]


def tokenizer_of(**tokens: int) -> Tokenizer:
    """A tokenizer of these tokens and their types, without merges."""
    return Tokenizer([t.encode() for t in tokens], np.array([*tokens.values()], np.int32), [b"x y"])


@pytest.fixture(scope="module")
def models(demo_file: Path, moe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo model, a tiny one, and one whose token types are too many for the header reader."""
    large = tmp_path_factory.mktemp("large") / "large.gguf"
    return [demo_file, moe_file, write_synthetic(large, "tiny", "q8_0", n_vocab=5120)]


@pytest.fixture(scope="module")
def demo_tokenizer(demo_file: Path) -> Tokenizer:
    return read_tokenizer(demo_file)


# --- tokenizer ------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_one_in_the_file(models: list[Path]) -> None:
    """Compared with the gguf package's reader."""
    for path in models:
        found, fields = read_tokenizer(path), gguf.GGUFReader(path).fields
        for name in ("tokens", "merges"):
            texts = [text.decode() for text in getattr(found, name)]
            assert texts == fields[f"tokenizer.ggml.{name}"].contents()
        assert found.types.tolist() == fields["tokenizer.ggml.token_type"].contents()
        assert found.types.dtype == np.int32 and found.n_vocab == len(found.types)


def test_fingerprint_of_a_known_tokenizer() -> None:
    """Must stay the same over versions of this package: files carry it."""
    expected = "3:a6f61cc6bd2c5a1cde38a8459d402300943971c851f8025f57cf652d47889122"
    assert tokenizer_of(ab=1, c=1, d=3).fingerprint == expected


@pytest.mark.parametrize(
    ("tokens", "types", "merges", "message"),
    [
        ([], [1], ["a b"], "0 tokens, 1 token types and 1 merges"),
        (["a", "b"], [1, 1], [], "2 tokens, 2 token types and 0 merges.*use 'full'"),
        (["a", "b"], [1, 1, 1], ["a b"], "2 tokens, 3 token types"),
        (["a", "b", "c"], b"\1\1\1", ["a b"], "3 tokens, 0 token types"),
    ],
)
def test_tokenizers_of_no_use(
    tmp_path: Path, tokens: list[str], types: Any, merges: list[str], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        read_tokenizer(write_bare(tmp_path / "m.gguf", tokens, types, merges))
    assert caught.value.path == str(tmp_path / "m.gguf")


# --- rankings -------------------------------------------------------------------------------------


def test_the_order_of_every_kind_of_token() -> None:
    tokens = {
        "unreached": NORMAL,
        "[PAD]": UNUSED,
        "ab": NORMAL,
        "b": NORMAL,
        "<|im_end|>": CONTROL,
        "abc": NORMAL,
        "a": NORMAL,
        "<think>": USER_DEFINED,
        "ĠA": NORMAL,
        "Ġ": NORMAL,
        "other": NORMAL,
    }
    merges = [b"Gone Away", b"\xc4\xa0 A", b"ab c", b"a b", b"a bc", b"\xc4\xa0 A"]
    tokenizer = dataclasses.replace(tokenizer_of(**tokens), merges=merges)
    names = [*tokens]
    assert [names[token] for token in default_ranking(tokenizer)] == [
        *("<|im_end|>", "<think>"),
        *("b", "a", "Ġ"),
        *("ĠA", "abc", "ab"),
        *("unreached", "other"),
        "[PAD]",
    ]


def test_ranks_of_a_real_vocabulary(real_vocabulary: Path) -> None:
    """The words of this project's README are among the best, a word that is one token in every
    size; so are special tokens, and frequent words of other languages. Rare ones are not."""
    real = read_tokenizer(real_vocabulary)
    ranked = default_ranking(real)
    rank = {real.tokens[token].decode(): i for i, token in enumerate(ranked.tolist())}
    assert {*ranked[: len(real.special)].tolist()} == {*real.special.tolist()}
    words = re.findall(r"(?<= )[a-z]+", (ROOT / "README.md").read_text(encoding="utf-8"))
    known = [rank[f"Ġ{word}"] for word in words if f"Ġ{word}" in rank]
    shares = [sum(r < size for r in known) / len(known) for size in (2048, 8192, DEFAULT_SIZE)]
    assert shares == sorted(shares) and shares[0] > 0.4 and shares[2] > 0.9
    assert max(rank[word] for word in ("Ġthe", "self", "Ġreturn", "Ġund", "Ġque", "çļĦ")) < 16384
    assert min(rank[word] for word in ("Ġspeculative", "Ġtransformer")) > DEFAULT_SIZE


def test_a_measured_ranking() -> None:
    default = np.array([4, 2, 0, 1, 3], dtype=np.int32)
    pieces: list[Any] = [[0, 1, 1], [], np.array([3, 3, 3], np.int32), (0,)]
    ranking, n = measure_ranking(iter(pieces), default)
    assert (ranking.tolist(), ranking.dtype, n) == ([3, 0, 1, 4, 2], np.int32, 7)
    with pytest.raises(UsageError, match="the text is empty"):
        measure_ranking([[], []], default)


def test_special_tokens_are_in_every_part(demo_tokenizer: Tokenizer) -> None:
    """Special tokens do not occur in measured text, so every ranking must add them."""
    default, special = default_ranking(demo_tokenizer), demo_tokenizer.special.tolist()
    for ranking in (default, default[::-1], default[len(special) :]):
        others = [token for token in ranking.tolist() if token not in special]
        for size in (len(special), 300, demo_tokenizer.n_vocab):
            part = best(ranking, size, demo_tokenizer).tolist()
            assert part == [*special, *others][:size]


# --- choosing -------------------------------------------------------------------------------------


def test_a_number_takes_the_best_of_the_default_ranking(models: list[Path], tmp_path: Path) -> None:
    assert choose(tmp_path / "not even looked at", "full") is None
    for path in models:
        tokenizer = read_tokenizer(path)
        for size in (256, 257, 1000, 2047):
            for chosen in (choose(path, size), choose(path, str(size))):
                assert chosen is not None and chosen.dtype == np.int32
                assert chosen.tolist() == default_ranking(tokenizer)[:size].tolist()
    for size in (2048, "2048", 10**9, "9" * 18):
        assert choose(models[0], size) is None, "the whole vocabulary"


def test_more_special_tokens_than_the_least_size(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(600)]
    types = [NORMAL] * 100 + [CONTROL] * 400 + [NORMAL] * 100
    path = write_bare(tmp_path / "m.gguf", names, types, ["t 1"])
    with pytest.raises(UsageError, match=r"at least 400 are needed .special tokens: 400"):
        choose(path, 399)
    chosen = choose(path, 400)
    assert chosen is not None and chosen.tolist() == [*range(100, 500)]


def saved(folder: Path, tokenizer: Tokenizer, ids: Any, name: str = "ranking.json") -> Path:
    save(folder / name, np.asarray(ids, np.int32), tokenizer, "a test")
    return folder / name


def test_a_file_gives_its_best(
    tmp_path: Path, demo_file: Path, demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it holds, or as many as are usual; the special tokens too."""
    special = demo_tokenizer.special.tolist()
    for n in (251, 400):
        chosen = choose(demo_file, saved(tmp_path, demo_tokenizer, range(1000, 1000 + n)))
        assert chosen is not None and chosen.tolist() == [*special, *range(1000, 1000 + n)]
    others = [t for t in range(2047, -1, -1) if t not in special]
    path = saved(tmp_path, demo_tokenizer, others)
    assert choose(demo_file, path) is None, "the demo model has fewer tokens than are taken"
    monkeypatch.setattr(vocabulary, "DEFAULT_SIZE", 300)
    for spec in (path, str(path)):
        chosen = choose(demo_file, spec)
        assert chosen is not None
        assert chosen.tolist() == special + others[: 300 - len(special)]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        *(
            (size, UsageError, f"vocabulary of {size}: at least 256 are needed .*: 5.; give more")
            for size in (0, DRAFT_VOCAB_LEAST - 1, "-5", "255")
        ),
        *(
            (word, DraftVocabError, "give 'full', a number of tokens, or a file")
            for word in ("fulll", "32k", "1.5", "9" * 5000, "a\0b", "no/file")
        ),
        ([1, 2048], UsageError, "token 2048 is not in the vocabulary of 2048 tokens"),
        ([1, 2, 1], UsageError, "a token is given twice"),
        ("few", DraftVocabError, "has 255 tokens, at least 256 are needed"),
        ("other", DraftVocabError, r"made for the tokenizer '2048:.*this model has '2048"),
    ],
)
def test_what_cannot_be_chosen(
    tmp_path: Path,
    demo_file: Path,
    moe_file: Path,
    demo_tokenizer: Tokenizer,
    spec: Any,
    error: type[Exception],
    message: str,
) -> None:
    if spec == "few":
        spec = saved(tmp_path, demo_tokenizer, range(1000, 1250))
    elif spec == "other":
        spec = saved(tmp_path, read_tokenizer(moe_file), range(2048))
    with pytest.raises(error, match=message):
        choose(demo_file, spec)


# --- files ----------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Also from the longest file of an older version: counts of 63 bits, indented by another
    program."""
    n = 20_000
    tokenizer = Tokenizer([b"%d" % i for i in range(n)], np.ones(n, np.int32), [b"1 0"])
    ranking = default_ranking(tokenizer)
    save(tmp_path / "r", ranking, tokenizer, "größer\n")
    record = json.loads((tmp_path / "r").read_text())
    assert record == {
        "format": "pyllama-mtp draft vocabulary",
        "version": 1,
        "tokenizer": tokenizer.fingerprint,
        "source": "größer\n",
        "ids": ranking.tolist(),
    }
    older = {**record, "counts": [2**63 - 1] * n}
    for text in (json.dumps(record), json.dumps(older), json.dumps(older, indent=2)):
        (tmp_path / "r").write_text(text)
        back = load(tmp_path / "r", tokenizer)
        assert back.tolist() == ranking.tolist() and back.dtype == np.int32


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: b"\xff\xfe\x00", "make it anew"),
        (lambda r: b'{"a":' + b"[" * 100_000, "recursion"),
        (lambda r: {**r, "format": "another"}, r"'another' - at `\$.format`; make it anew"),
        (lambda r: {**r, "version": 2}, r"Invalid enum value 2 - at `\$.version`"),
        (lambda r: {**r, "tokenizer": "2048:00"}, "for the tokenizer '2048:00', this model has"),
        (lambda r: {**r, "tokenizer": "a" * 999}, "for the tokenizer .{80}, this model has"),
        (lambda r: {**r, "ids": []}, r"of length >= 1 - at `\$.ids`"),
        (lambda r: {**r, "ids": [7, 8, 2048]}, "an id appears twice or is not in 0 to 2047"),
        (lambda r: {**r, "ids": [7, 8, 7]}, "an id appears twice or is not in 0 to 2047"),
        (lambda r: {**r, "ids": [7, 8, -1]}, "Expected `int` >= 0"),
    ],
)
def test_damaged_files(
    tmp_path: Path, demo_tokenizer: Tokenizer, change: Change, message: str
) -> None:
    path = saved(tmp_path, demo_tokenizer, [7, 8, 9])
    changed = change(json.loads(path.read_bytes()))
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    with pytest.raises(DraftVocabError, match=message) as caught:
        load(path, demo_tokenizer)
    assert str(path) in str(caught.value) and caught.value.path == str(path)
    assert len(str(caught.value)) < 400


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(DraftVocabError, match="has more than 163840 bytes"):
        load(tmp_path / "huge", demo_tokenizer)
