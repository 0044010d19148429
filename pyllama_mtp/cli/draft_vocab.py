"""Rank a model's vocabulary by how often its tokens occur in your text, and show
how much of the text the best tokens cover, by this ranking and by the default
one. Without a text, show the default ranking, which needs the model file only.

The LM head makes drafting expensive, so drafts come from a part of the
vocabulary. The answers do not change: the model verifies over all of it.
Coverage is the share of the text's tokens that can be drafted. The best texts
are like what the model will write: answers, code, your language.

examples:
  pyllama-mtp draft-vocab --model FILE
  pyllama-mtp draft-vocab --model FILE --text answers.txt
  pyllama-mtp draft-vocab --model FILE --text *.txt -o ranking.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import options, parsing, progress
from pyllama_mtp.errors import NoMtpHeadError, UsageError
from pyllama_mtp.files import check_target
from pyllama_mtp.models.ggufinfo import read_gguf

if TYPE_CHECKING:
    from pyllama_mtp.models.draftvocab import Counts, Ids, Ranking, Tokenizer

_SIZES = (8192, 16384, 32768, 65536)
_CHUNK = 1 << 16  # characters that are tokenized at a time
_SHOWN = 12  # tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="TEXT.txt", help="UTF-8 text files to count in"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.json",
        help="write the ranking to this file (default: only show the table)",
    )
    parsing.add_force_option(parser)


def run(args: argparse.Namespace) -> int:
    """Rank, show, write."""
    from pyllama_mtp.models import draftvocab

    _check(args)
    path = options.model_path(args)
    info = read_gguf(path)
    if not info.supported:
        raise NoMtpHeadError(f"{path}: {info.why_no_mtp}; only a head has a draft vocabulary", path)
    tokenizer = draftvocab.read_tokenizer(path)
    default = draftvocab.default_ranking(tokenizer)
    if not args.text:
        _show_default(tokenizer, default)
        return 0
    ranking = draftvocab.measure_ranking(_tokens(path, args.text), default)
    _show_coverage(tokenizer, default, ranking)
    if args.output is not None:
        source = f"{ranking.counts.sum()} tokens of {len(args.text)} text files"
        draftvocab.save(args.output, ranking, tokenizer, source)
        print(f"{args.output}: {len(ranking.ids)} tokens, best first")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse at once what would fail after the work."""
    missing = [text for text in args.text if not Path(text).exists()]
    if missing:
        raise UsageError(f"no such text file: {missing[0]}")
    if args.output is None:
        return
    output = Path(args.output)
    if not args.text:
        raise UsageError("--output needs --text: the default ranking needs no file")
    check_target(output, args.force)
    if output.exists() and any(output.samefile(text) for text in args.text):
        raise UsageError(f"{output} is one of the texts; choose another name")


# -- text ------------------------------------------------------------------------------------------


def _tokens(path: str | Path, texts: Sequence[str]) -> Iterator[list[int]]:
    """The token ids of all texts, a chunk at a time."""
    from pyllama_mtp import Model

    total = sum(Path(text).stat().st_size for text in texts if Path(text).is_file())
    bar = progress.file("tokenizing", transient=True, disable=not sys.stderr.isatty())
    with Model(path, n_gpu_layers=0, mtp=False) as model, bar as tell:
        done = 0
        for text in texts:
            for chunk in _chunks(text):
                yield model.tokenize(chunk, add_special=False)
                done += len(chunk.encode())
                tell(done, total)


def _chunks(path: str) -> Iterator[str]:
    """A text file in pieces that end with a line, unless a line is longer than a piece. Raises
    UsageError: the file cannot be read or is not UTF-8."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            while chunk := file.read(_CHUNK):
                yield chunk + file.readline(_CHUNK)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}; convert it first") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


# -- tables ----------------------------------------------------------------------------------------


def _sizes(n_vocab: int) -> tuple[int, ...]:
    """The sizes to show: the usual ones, or shares of a smaller vocabulary."""
    usual = tuple(size for size in _SIZES if size < n_vocab)
    return usual or tuple(n_vocab // part for part in (8, 4, 2))


def _show_coverage(tokenizer: Tokenizer, default: Ids, ranking: Ranking) -> None:
    """Print the share of the text's tokens that the best of either ranking cover."""
    import numpy as np

    from pyllama_mtp.models.draftvocab import best

    counts: Counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    counts[ranking.ids] = ranking.counts
    print(f"{counts.sum()} tokens in the text, {np.count_nonzero(counts)} different ones")
    print(f"{'draft vocabulary':>16}{'default ranking':>18}{'by this text':>15}")
    for size in _sizes(tokenizer.n_vocab):
        kept = (counts[best(ids, size, tokenizer)].sum() for ids in (default, ranking.ids))
        usual, own = (n / counts.sum() for n in kept)
        print(f"{size:16}{usual:17.2%} {own:14.2%}")
    print("The last column is for the text of the ranking itself; expect less for other text.")


def _show_default(tokenizer: Tokenizer, default: Ids) -> None:
    """Print the tokens at the start of the default ranking, and from each size on."""
    n_special = len(tokenizer.special)
    print(f"{tokenizer.n_vocab} tokens, {n_special} of them special; the default ranking:")
    rows: list[tuple[str, Any]] = [("special", default[:n_special])]
    rows.append(("first words", default[n_special + 256 :]))
    rows += [(f"from {size}", default[size:]) for size in _sizes(tokenizer.n_vocab)]
    for label, ids in rows:
        shown = "  ".join(_text(tokenizer.tokens[token]) for token in ids[:_SHOWN])
        print(f"{label:>12}  {shown}")


def _text(token: bytes) -> str:
    """A token as text, quoted. The file may have its bytes as letters of the byte alphabet."""
    from pyllama_mtp.models.draftvocab import byte_alphabet

    letters = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    text = token.decode(errors="replace")
    if all(letter in letters for letter in text):
        text = bytes(letters[letter] for letter in text).decode(errors="replace")
    return repr(text)
