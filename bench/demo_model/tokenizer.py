"""The demo model's byte-level BPE tokenizer, with the pre-tokenizer that llama.cpp calls qwen35."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .chat import END_OF_TEXT, END_THINK, IM_END, IM_START, THINK

SPECIAL = (END_OF_TEXT, IM_START, IM_END)
ADDED = (THINK, END_THINK)
#: Around an image's rows, in Qwen's vocabulary; the demo that sees has them after all others.
VISION = ("<|vision_start|>", "<|vision_end|>")

# The regular expression of Qwen3.5's tokenizer.json as llama.cpp writes it
# (LLAMA_VOCAB_PRE_TYPE_QWEN35 in src/llama-vocab.cpp): one digit at a time, letters with marks.
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read(path: Path) -> list[dict[str, str]]:
    """The records of a JSON-lines file."""
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def train(records: list[dict[str, str]], n_vocab: int) -> Tokenizer:
    """A byte-level BPE of `n_vocab` entries; ids 0..4 are the special and added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[*SPECIAL, *ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    kept = re.compile("|".join(map(re.escape, (*SPECIAL, *ADDED))))
    texts = (kept.sub("\n", record["text"]) for record in records)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, records: list[dict[str, str]], seed: int) -> np.ndarray:
    """All documents in a seeded order, each followed by <|endoftext|>: uint16, shape (n,)."""
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([records[i]["text"] for i in order])
    return np.concatenate([np.array([*one.ids, end], dtype=np.uint16) for one in encodings])


def prepare(work: Path, n_vocab: int, seed: int) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Train the tokenizer on the training part and encode both parts; kept in `work`."""
    file = work / "tokenizer.json"
    arrays = work / "train.npy", work / "heldout.npy"
    if not (file.exists() and all(a.exists() for a in arrays)):
        records = read(work / "train.jsonl")
        tokenizer = train(records, n_vocab)
        np.save(arrays[0], encode(tokenizer, records, seed))
        np.save(arrays[1], encode(tokenizer, read(work / "heldout.jsonl"), seed))
        tokenizer.save(str(file))
    return Tokenizer.from_file(str(file)), np.load(arrays[0]), np.load(arrays[1])
