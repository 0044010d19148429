"""``pyllama-mtp draft-vocab``: which tokens the MTP head drafts best, by the user's own text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.cli import loading, parsing
from pyllama_mtp.errors import NoMtpHeadError, UsageError
from pyllama_mtp.models.ggufinfo import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyllama_mtp import Model
    from pyllama_mtp.models.draftvocab import Counts, Ids, Ranking, Tokenizer

_SIZES = (8192, 16384, 32768, 65536)
_CHUNK = 1 << 16  # characters: what is tokenized at a time
_SHOWN = 12  # tokens

_EPILOG = """\
The head's LM head is what makes drafting expensive, so it computes a part of
the vocabulary only. The text does not change: the model verifies over all of
it. Coverage is the share of the text's tokens that can be drafted. Text like
what the model will write serves best: answers, code, your language.

examples:
  pyllama-mtp draft-vocab --model FILE
  pyllama-mtp draft-vocab --model FILE --text answers.txt
  pyllama-mtp draft-vocab --model FILE --text *.txt -o ranking.json
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``draft-vocab`` command."""
    parser = subparsers.add_parser(
        "draft-vocab",
        help="rank the tokens that the MTP head may draft, by your own text",
        description="Rank a model's vocabulary by how often its tokens occur in your text, and "
        "show how much of the text the best tokens cover, by this ranking and by the default one. "
        "Without a text, show the default ranking, which needs the model file only.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
    loading.add_model_option(parser)
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="TEXT.txt", help="UTF-8 text files to count in"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.json",
        help="write the ranking to this file; without it only the table is shown",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rank, show, write."""
    from pyllama_mtp.models import draftvocab

    _check(args)
    path = loading.model_path(args)
    info = read_gguf(path)
    if not info.supported:
        raise NoMtpHeadError(f"{path}: {info.why_no_mtp}; a draft vocabulary is for one", path)
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
    if not output.parent.is_dir():
        raise UsageError(f"folder {output.parent} does not exist; create it first")
    if output.exists() and not args.force:
        raise UsageError(f"{output} exists; choose another name or overwrite it with --force")
    if output.exists() and any(output.samefile(text) for text in args.text):
        raise UsageError(f"{output} is one of the texts; choose another name")


# -- text ------------------------------------------------------------------------------------------


def _tokens(path: str | Path, texts: Sequence[str]) -> Iterator[list[int]]:
    """The token ids of all texts, a chunk at a time."""
    from pyllama_mtp import Model

    with Model(path, n_gpu_layers=0, mtp=False) as model, _progress(texts) as advance:
        for text in texts:
            yield from _file_tokens(model, text, advance)


def _file_tokens(model: Model, path: str, advance: Callable[[int], object]) -> Iterator[list[int]]:
    """The token ids of one file."""
    for chunk in _chunks(path):
        yield model.tokenize(chunk, add_special=False)
        advance(len(chunk.encode()))


def _chunks(path: str) -> Iterator[str]:
    """A text file in pieces that end with a line, unless a line is longer than a piece.

    Raises:
        UsageError: it cannot be read or is not UTF-8.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            while chunk := file.read(_CHUNK):
                yield chunk + file.readline(_CHUNK)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason}; convert it first") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _progress(texts: Sequence[str]) -> Iterator[Callable[[int], object]]:
    """A bar over the bytes of all texts that vanishes at the end; only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        total = sum(Path(text).stat().st_size for text in texts if Path(text).is_file())
        task = bar.add_task("tokenizing", total=total)
        yield lambda n: bar.advance(task, n)


# -- tables ----------------------------------------------------------------------------------------


def _sizes(n_vocab: int) -> tuple[int, ...]:
    """The sizes to show: the usual ones, or parts of a vocabulary that is smaller than they are."""
    usual = tuple(size for size in _SIZES if size < n_vocab)
    return usual or tuple(n_vocab // part for part in (8, 4, 2))


def _show_coverage(tokenizer: Tokenizer, default: Ids, ranking: Ranking) -> None:
    """Share of the text's tokens that the best of either ranking cover."""
    import numpy as np

    counts: Counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    counts[ranking.ids] = ranking.counts
    print(f"{counts.sum()} tokens in the text, {np.count_nonzero(counts)} different ones")
    print(f"{'draft vocabulary':>16}{'default ranking':>18}{'by this text':>15}")
    for size in _sizes(tokenizer.n_vocab):
        covered = [_covered(counts, ids, size, tokenizer) for ids in (default, ranking.ids)]
        print(f"{size:16}{covered[0]:17.2%} {covered[1]:14.2%}")
    print("The last column is for the text that it was made from; expect less for other text.")


def _covered(counts: Counts, ranking: Ids, size: int, tokenizer: Tokenizer) -> float:
    from pyllama_mtp.models.draftvocab import best

    return float(counts[best(ranking, size, tokenizer)].sum() / counts.sum())


def _show_default(tokenizer: Tokenizer, default: Ids) -> None:
    """Sizes, and the tokens at the start and around each size."""
    n_special = len(tokenizer.special)
    print(f"{tokenizer.n_vocab} tokens, {n_special} of them special; the default ranking:")
    rows: list[tuple[str, Any]] = [("special", default[:n_special])]
    rows.append(("first words", default[n_special + 256 :]))
    rows += [(f"from {size}", default[size:]) for size in _sizes(tokenizer.n_vocab)]
    for label, ids in rows:
        shown = "  ".join(_text(tokenizer.tokens[token]) for token in ids[:_SHOWN])
        print(f"{label:>12}  {shown}")


def _text(token: bytes) -> str:
    """A token as it reads, quoted; its bytes are in the file as letters of the byte alphabet."""
    from pyllama_mtp.models.vocab import byte_alphabet

    letters = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    text = token.decode(errors="replace")
    if all(letter in letters for letter in text):
        text = bytes(letters[letter] for letter in text).decode(errors="replace")
    return repr(text)
