"""The tokenizer of a model file: texts, types and merges of its tokens."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .ggufheader import STRING, ArraySummary, Parser, Value, parse_file

#: Token types as upstream's include/llama.h counts them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """What a ranking needs of a byte-level BPE tokenizer.

    Attributes:
        tokens: [n_vocab] texts as in the file, that is in the byte alphabet of GPT-2, by id.
        types: [n_vocab] int32, llama.cpp's token types.
        merges: "left right", in the order in which they were learned.
    """

    tokens: list[bytes]
    types: npt.NDArray[np.int32]
    merges: list[bytes]

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        """Number of tokens and SHA-256 of them, "2048:ab12...": models that share it share ids."""
        lengths = np.array([len(text) for text in self.tokens], dtype="<u4")
        digest = hashlib.sha256(lengths.tobytes() + b"".join(self.tokens)).hexdigest()
        return f"{self.n_vocab}:{digest}"

    @property
    def special(self) -> Ids:
        """Control and user-defined tokens by id: end of turn, thinking, tool calls and the like."""
        return np.flatnonzero(np.isin(self.types, (CONTROL, USER_DEFINED))).astype(np.int32)


def byte_alphabet() -> list[str]:
    """The printable stand-in for each byte 0..255 in byte-level BPE (GPT-2's bytes_to_unicode)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [""] * 256
    for byte in plain:
        letters[byte] = chr(byte)
    for offset, byte in enumerate(b for b in range(256) if not letters[b]):
        letters[byte] = chr(256 + offset)
    return letters


class _TokenizerParser(Parser):
    """Keeps the arrays that a header reader only walks over."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file, path)
        self.texts: dict[str, list[bytes]] = {_TOKENS: [], _MERGES: []}
        self.types: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def string_array(self, key: str, n: int) -> ArraySummary:
        if key not in self.texts:
            return super().string_array(key, n)
        self.texts[key] = self.strings(key, n, keep=True)
        return ArraySummary(STRING, n)

    def value(self, key: str, kind: int) -> Value:
        start = self.pos
        value = super().value(key, kind)
        if key == _TYPES:
            # Numbers of 32 bits after element type and length; llama.cpp does not look either.
            raw = self.buffer[start + 12 : self.pos]
            self.types = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<i4").astype(np.int32)
        return value


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a model file; takes 0.3 s for 248,320 tokens.

    Raises:
        ModelFileError: as :func:`pyllama_mtp.models.ggufheader.read_header`; also no tokens, no
            merges, or not one type for each token.
    """
    parser, _ = parse_file(path, _TokenizerParser)
    tokenizer = Tokenizer(parser.texts[_TOKENS], parser.types, parser.texts[_MERGES])
    if not tokenizer.tokens or not tokenizer.merges or len(tokenizer.types) != tokenizer.n_vocab:
        raise parser.fail(
            f"{tokenizer.n_vocab} tokens, {len(tokenizer.types)} token types and "
            f"{len(tokenizer.merges)} merges: a draft vocabulary cannot be chosen from that; "
            "use 'full'"
        )
    return tokenizer
