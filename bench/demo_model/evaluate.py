"""Measure a finished file on held-out text: losses, and agreement of head and trunk.

They are computed in float32 on the weights of the GGUF file.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor

from . import corpus
from .export import load
from .net import Model
from .tokenizer import encode, read

DEPTH = 3


class Rows:
    """Batches of token rows from one long stream, in a seeded order, epoch after epoch."""

    def __init__(self, stream: np.ndarray, row: int, seed: int) -> None:
        self.stream, self.row, self.seed = stream, row, seed
        self.n = (len(stream) - 1) // row

    def batch(self, index: int, size: int) -> Tensor:
        """Batch number `index`: int64, shape (size, row + 1), the last column only a target."""
        picks = []
        for i in range(index * size, (index + 1) * size):
            order = _order(self.seed, i // self.n, self.n)
            start = int(order[i % self.n]) * self.row
            picks.append(self.stream[start : start + self.row + 1])
        return torch.from_numpy(np.stack(picks).astype(np.int64))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n)


@torch.no_grad()
def on_text(model: Model, stream: np.ndarray, limit: int) -> dict[str, Any]:
    """Losses (nats per token) and agreement per draft step, teacher-forced over rows of `stream`.

    At most `limit` rows are drawn from all of it.
    """
    rows = Rows(stream, 256, 0)
    size = 16
    batches = max(1, min(limit, rows.n) // size)
    losses, tokens = np.zeros(1 + DEPTH), 0
    same, seen = np.zeros(DEPTH), np.zeros(DEPTH)
    for index in range(batches):
        batch = rows.batch(index, min(size, rows.n))
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden, states = model(inputs, steps=DEPTH)
        logits = [model.logits(found) for found in (hidden, *states)]
        for n, guess in enumerate(logits):
            flat = guess.flatten(0, 1), targets.flatten()
            losses[n] += float(F.cross_entropy(*flat, reduction="sum"))
        for n, guess in enumerate(logits[1:]):
            hits = (guess.argmax(-1) == logits[0].argmax(-1))[:, n:]
            same[n] += int(hits.sum())
            seen[n] += hits.numel()
        tokens += targets.numel()
    return {
        "tokens": tokens,
        "trunk_loss": round(losses[0] / tokens, 4),
        "head_loss": round(losses[1] / tokens, 4),
        "agreement": np.round(same / seen, 4).tolist(),
    }


def evaluate(gguf_file: Path, tokenizer: Tokenizer, work: Path) -> None:
    """Write figures of all held-out text and of each class to work/evaluation.json."""
    torch.set_num_threads(2)
    model, records = load(gguf_file), read(work / "heldout.jsonl")
    result = {"heldout": on_text(model, np.load(work / "heldout.npy"), 320)}
    for kind in corpus.CLASSES:
        stream = encode(tokenizer, [r for r in records if r["class"] == kind], 0)
        result[kind] = on_text(model, stream, 64)
    (work / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
