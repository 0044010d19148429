"""Hidden states of a text as a numpy array, and what they cost beside all logits.

    python -m pyllama_mtp.examples.hidden_states [--model FILE] [--file FILE] [--repeat 5]

A hidden state is what the model knows after a token: for probes, classifiers or retrieval. The last
one has seen the whole text. Decoding with every row as an output gives the same rows, but also runs
the LM head for each of them and copies the logits of the whole vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.models.demo import demo_path

TEXTS = ("def add(a, b):", "def subtract(a, b):", "import os")

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--file", default=textwrap.__file__, help="a text, for the times")
parser.add_argument("--tokens", type=int, default=512, help="so many of them")
parser.add_argument("--repeat", type=int, default=5)
args = parser.parse_args()


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine of the angle between two states."""
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


with Model(args.model) as model, Session(model, Settings(n_ctx=4096, draft_n_max=0)) as session:
    first, *others = (session.hidden_states(text, rows="last")[0] for text in TEXTS)
    for text, state in zip(TEXTS[1:], others, strict=True):
        print(f"{TEXTS[0]!r} and {text!r}: cosine {likeness(first, state):.2f}")

    tokens = model.tokenize(Path(args.file).read_text(encoding="utf-8"))[: args.tokens]
    before = session.hidden_states(tokens, point="pre-norm")
    after = session.hidden_states(tokens)
    print(f"{len(tokens)} tokens: {before.shape} {before.dtype} before and after the final norm")
    print(f"mean norm {np.linalg.norm(before, axis=1).mean():.1f} before it,", end=" ")
    print(f"{np.linalg.norm(after, axis=1).mean():.1f} after it")

    with Session(model, Settings(n_ctx=4096, draft_n_max=0, prompt_rows="all")) as outputs:
        pairs = []
        for _ in range(args.repeat + 1):  # the first round warms up
            outputs.reset()
            pairs.append(
                (
                    seconds(lambda: session.hidden_states(tokens)),
                    seconds(lambda: outputs.process(tokens)),
                )
            )
    rows, logits = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    print(f"hidden states {1e3 * rows:.1f} ms, all rows as outputs {1e3 * logits:.1f} ms:", end=" ")
    print(f"{logits / rows:.2f} times")
