"""Log probabilities of chosen tokens and of the best ones, from a row of logits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batch import Floats


@dataclass(frozen=True)
class TopLogprobs:
    """Log probabilities at one position, before temperature and filters.

    Attributes:
        token, logprob: of the chosen token.
        top: (token, log probability) of the best tokens, the best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(logits: Floats, token: int, n: int) -> TopLogprobs:
    """Log probabilities of `token` and of the `n` best tokens.

    Args:
        logits: [n_vocab] float32.
    """
    largest = float(logits.max())
    norm = largest + float(np.log(np.exp(logits - largest, dtype=np.float64).sum()))
    n = min(n, len(logits))
    best = np.argpartition(logits, len(logits) - n)[len(logits) - n :] if n else np.empty(0, int)
    best = best[np.lexsort((best, -logits[best]))]
    top = [(int(i), float(logits[i]) - norm) for i in best]
    return TopLogprobs(token, float(logits[token]) - norm, top)
