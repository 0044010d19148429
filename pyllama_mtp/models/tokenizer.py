"""The tokenizer of a model file: texts, types and merges of its tokens."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .ggufheader import TOKENS, parse_file

#: Token types as upstream's include/llama.h counts them.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_TYPES, _MERGES = "tokenizer.ggml.token_type", "tokenizer.ggml.merges"

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


def read_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a model file; takes 0.3 s for 248,320 tokens.

    Raises:
        ModelFileError: as :func:`pyllama_mtp.models.ggufheader.read_header`; also no tokens, no
            merges, or not one type for each token.
    """
    parser, _ = parse_file(path, TOKENS, _MERGES)
    # Numbers of 32 bits after types and length; llama.cpp does not look either.
    raw = parser.raw(_TYPES)[16:]
    types = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<i4").astype(np.int32)
    tokenizer = Tokenizer(parser.strings[TOKENS], types, parser.strings[_MERGES])
    if not tokenizer.tokens or not tokenizer.merges or len(tokenizer.types) != tokenizer.n_vocab:
        raise parser.fail(
            f"{tokenizer.n_vocab} tokens, {len(tokenizer.types)} token types and "
            f"{len(tokenizer.merges)} merges: a draft vocabulary cannot be chosen from that; "
            "use 'full'"
        )
    return tokenizer
