"""Which tokens the MTP head may draft: a part of the vocabulary, because its LM head is what costs.

A draft takes one pass through a single block and then one row product per token of the vocabulary,
248,320 of them in Qwen3.5. Text uses few of them often: with 32,768 rows most drafts are the same,
at an eighth of the cost. The model verifies over the whole vocabulary, so the text does not change;
a token outside the part is never drafted, which costs acceptance only.

The idea is FR-Spec's (frequency-ranked speculative sampling, arXiv:2502.14856). The part is the
best of a ranking: the default one, from the tokenizer alone, or one measured on the user's text.

Or the model file has a trimmed MTP head (:attr:`.GGUFInfo.trimmed_head`).
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import DraftVocabError, UsageError
from ..files import write_whole
from ..models.tokenizer import UNUSED, Ids, Tokenizer, byte_alphabet, read_tokenizer
from ..settings import DRAFT_VOCAB_LEAST

#: Tokens that can be drafted where the user gives no number. By the bytes that drafts and steps
#: read, no other size promises 3 % more speed, for any published shape in any type.
DEFAULT_SIZE = 32768
_MAX_BYTES_PER_TOKEN = 48  # an id and a count (of older versions), each on an indented line


def default_ranking(tokenizer: Tokenizer) -> Ids:
    """All ids, from the most to the least useful draft: [n_vocab] int32.

    First what a model must be able to draft whatever it writes: the special tokens, then the 256
    single bytes. The rest by the rank of the merge that makes the token, which stands in for its
    frequency: byte pair encoding learns its merges greedily, at each step the pair that is then the
    most frequent of the training text (Sennrich et al., arXiv:1508.07909), so that a token's count
    when it is made falls with its rank. Tokens that later merges use up rank higher than they
    should. Last come tokens that no merge makes, and then unused ones.
    """
    index = {text: token for token, text in enumerate(tokenizer.tokens)}
    made = np.array(
        [index.get(merge.replace(b" ", b"", 1), -1) for merge in tokenizer.merges], dtype=np.int64
    )
    ids, rank = np.unique(made, return_index=True)  # the first of several merges that make a token
    order = np.full(tokenizer.n_vocab, len(made), dtype=np.int64)
    order[ids[ids >= 0]] = rank[ids >= 0]
    single = (index.get(letter.encode()) for letter in byte_alphabet())
    order[[token for token in single if token is not None]] = -1
    order[tokenizer.types == UNUSED] = len(made) + 1
    order[tokenizer.special] = -2
    return np.argsort(order, kind="stable").astype(np.int32)


def measure_ranking(token_ids: Iterable[Sequence[int]], default: Ids) -> tuple[Ids, int]:
    """Rank by how often tokens occur; equal counts, zero included, in the order of `default`.

    Args:
        token_ids: token ids of the user's text in pieces of any length; none is kept.
        default: [n_vocab], :func:`default_ranking` of the same tokenizer.

    Returns:
        All ids, [n_vocab] int32, most frequent first; and the number of tokens in the text.

    Raises:
        UsageError: no ids at all.
    """
    counts = np.zeros(len(default), dtype=np.int64)
    for piece in token_ids:
        counts += np.bincount(np.asarray(piece, dtype=np.int64), minlength=len(default))
    if not counts.any():
        raise UsageError("there are no tokens to rank by: the text is empty")
    return default[np.argsort(-counts[default], kind="stable")], int(counts.sum())


def best(ranking: Ids, size: int, tokenizer: Tokenizer) -> Ids:
    """The `size` best tokens of a ranking, all special tokens among them, best first: int32.

    The special tokens go first: a text to measure on does not show them, and without the end of
    turn among its drafts every answer would end with a rejected one.
    """
    special = tokenizer.special
    return np.concatenate([special, ranking[~np.isin(ranking, special)]])[:size]


def _ranked(model_path: str | os.PathLike[str]) -> tuple[Ids, int]:
    """All tokens of a model file by the default ranking, [n_vocab] int32, and how many of them are
    special. Those of the last file are kept, because reading them takes 0.3 s and Python does not
    give all memory back. Raises ModelFileError: see :func:`.read_tokenizer`."""
    path, version = os.path.realpath(model_path), (0, 0)
    with suppress(OSError):  # the reader says why
        state = Path(path).stat()
        version = state.st_mtime_ns, state.st_size
    return _ranked_version(path, version)


@functools.lru_cache(maxsize=1)
def _ranked_version(path: str, _version: tuple[int, int]) -> tuple[Ids, int]:
    tokenizer = read_tokenizer(path)
    ids = default_ranking(tokenizer)  # the special tokens are the first
    ids.flags.writeable = False
    return ids, len(tokenizer.special)


def choose(
    model_path: str | os.PathLike[str], spec: str | int | os.PathLike[str] | Sequence[int]
) -> Ids | None:
    """The tokens that a user lets the head draft: [n] int32, unique, most useful first; None is the
    whole vocabulary.

    Args:
        model_path: the model file, for its tokenizer.
        spec: "full"; a number of tokens, the best of the default ranking; or a file with a ranking
            (``pyllama-mtp draft-vocab``), whose DEFAULT_SIZE best are taken, or all if it holds
            fewer. A file that is named "full" or like a number needs its folder: ./full. Or the
            tokens' ids, the most useful first.

    Raises:
        UsageError: a number too small to be of use, or an id that is not in the vocabulary, or
            given twice.
        DraftVocabError: a file that cannot be used; see :func:`load`.
        ModelFileError: the model's tokenizer cannot be read or is of no use here.
    """
    if spec == "full":
        return None
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return _listed(spec, len(_ranked(model_path)[0]))
    word = str(spec)
    number = re.fullmatch(r"-?\d{1,18}", word)
    if number:
        ids, n_special = _ranked(model_path)
        n_vocab, size = len(ids), int(word)
    else:
        tokenizer = read_tokenizer(model_path)
        ids = best(load(word, tokenizer), DEFAULT_SIZE, tokenizer)
        n_special, n_vocab, size = len(tokenizer.special), tokenizer.n_vocab, len(ids)
    least = max(DRAFT_VOCAB_LEAST, n_special)
    if size < least:
        need = f"at least {least} are needed (special tokens: {n_special})"
        if number:
            raise UsageError(f"a draft vocabulary of {spec}: {need}; give more, or 'full'")
        raise DraftVocabError(f"{word}: it has {size} tokens, {need}; make it anew", word)
    return ids[:size] if size < n_vocab else None


def _listed(ids: Sequence[int], n_vocab: int) -> Ids:
    wrong = next((token for token in ids if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise UsageError(f"draft_vocab: token {wrong} is not in the vocabulary of {n_vocab} tokens")
    if len({*ids}) < len(ids):
        raise UsageError("draft_vocab: a token is given twice")
    return np.array(ids, dtype=np.int32)


class _Record(Struct, kw_only=True):
    """A file's contents. Files of older versions also have `counts`, which nothing needs."""

    format: Literal["pyllama-mtp draft vocabulary"]
    version: Literal[1]
    tokenizer: str
    source: str = ""
    ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


def save(path: str | os.PathLike[str], ids: Ids, tokenizer: Tokenizer, source: str) -> None:
    """Write a ranking, the most useful token first, as JSON, or replace one: as a whole or not at
    all. `source`: what it was made from, in words.

    Raises:
        UsageError: `path` is no regular file, or its folder cannot be written.
        DiskFullError: no space, a quota or a size limit.
    """
    record = _Record(
        format="pyllama-mtp draft vocabulary",
        version=1,
        tokenizer=tokenizer.fingerprint,
        source=source,
        ids=ids.tolist(),
    )
    write_whole(path, msgspec.json.encode(record) + b"\n")


def load(path: str | os.PathLike[str], tokenizer: Tokenizer) -> Ids:
    """The ids of a ranking that was made for a tokenizer, most useful first: [n] int32, unique.
    Memory is bounded by the tokenizer's size.

    Raises:
        DraftVocabError: no such file, unreadable, too large, damaged, of an unknown version, or
            made for another tokenizer.
    """
    limit = (1 << 16) + _MAX_BYTES_PER_TOKEN * tokenizer.n_vocab
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for ever
            raise OSError("it is not a file")
        with Path(path).open("rb") as file:
            text = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        what = "'full', a number of tokens, or a file made with 'pyllama-mtp draft-vocab'"
        raise DraftVocabError(f"cannot read {path}: {reason}; give {what}", path) from error
    if len(text) > limit:
        raise DraftVocabError(f"{path} has more than {limit} bytes, which no ranking has", path)
    try:
        record = msgspec.json.decode(text, type=_Record)
        if record.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f"it was made for the tokenizer {record.tokenizer!r:.80}, this model has "
                f"{tokenizer.fingerprint!r}"
            )
        if max(record.ids) >= tokenizer.n_vocab or len({*record.ids}) < len(record.ids):
            raise ValueError(f"an id appears twice or is not in 0 to {tokenizer.n_vocab - 1}")
    except (RecursionError, ValueError) as error:
        raise DraftVocabError(f"{path}: {error}; make it anew", path) from None
    return np.array(record.ids, dtype=np.int32)
