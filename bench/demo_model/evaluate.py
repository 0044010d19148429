"""Measure a finished file: losses, agreement of head and trunk, acceptance on held-out prompts.

Losses and agreement are computed in float32 on the weights of the GGUF file. Acceptance is that of
the package, which drafts DEPTH tokens greedily each round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer

from pyllama_mtp import Model as PackageModel
from pyllama_mtp import Sampling, Session, Settings

from . import corpus
from .chat import IM_END, IM_START
from .export import load
from .net import Model
from .tokenizer import encode, read
from .train import Rows

DEPTH = 3
CLASSES = ("factual", "thinking", "code", "instruction")


def prompt_text(record: dict[str, Any]) -> str:
    """What the model is given: the user turn in the chat frame, or the bare text."""
    if not record["chat"]:
        return record["prompt"]
    return f"{IM_START}user\n{record['prompt']}{IM_END}\n{IM_START}assistant\n"


@torch.no_grad()
def on_text(model: Model, stream: np.ndarray, limit: int) -> dict[str, Any]:
    """Losses (nats per token) and agreement per draft step, teacher-forced over rows of `stream`.

    At most `limit` rows are drawn from all of it.
    """
    rows = Rows(stream, 256, 0)
    size = 16
    batches = max(1, min(limit, rows.n) // size)
    trunk = head = tokens = 0.0
    same = np.zeros(DEPTH)
    seen = np.zeros(DEPTH)
    for index in range(batches):
        batch = rows.batch(index, min(size, rows.n))
        inputs, targets = batch[:, :-1], batch[:, 1:]
        hidden, states = model(inputs, steps=DEPTH)
        logits = model.logits(hidden)
        best = logits.argmax(-1)
        trunk += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        for n, state in enumerate(states):
            guess = model.logits(state)
            if n == 0:
                flat = guess.flatten(0, 1)
                head += float(F.cross_entropy(flat, targets.flatten(), reduction="sum"))
            hits = (guess.argmax(-1) == best)[:, n:]
            same[n] += int(hits.sum())
            seen[n] += hits.numel()
        tokens += targets.numel()
    return {
        "tokens": int(tokens),
        "trunk_loss": round(trunk / tokens, 4),
        "head_loss": round(head / tokens, 4),
        "agreement": [round(float(x), 4) for x in same / seen],
    }


def acceptance(
    gguf_file: Path, records: list[dict[str, Any]], temperature: float, n_new: int
) -> dict[str, Any]:
    """Acceptance per draft position and tokens per round, by class; and the texts."""
    settings = Settings(n_ctx=1024, n_threads=1, draft_n_max=DEPTH, ngram=False, draft_vocab="full")
    sampling = Sampling(temperature=temperature, seed=1)
    drafted, accepted = ({name: np.zeros(DEPTH, int) for name in CLASSES} for _ in range(2))
    counts, samples = {name: np.zeros(2, int) for name in CLASSES}, []
    with PackageModel(gguf_file) as model, Session(model, settings) as session:
        for record in records:
            kind, prompt = record["class"], prompt_text(record)
            answer = session.generate(prompt, max_tokens=n_new, sampling=sampling).run()
            told = answer.telemetry
            for totals, numbers in ((drafted, told.drafted), (accepted, told.accepted)):
                totals[kind][: len(numbers)] += numbers
            counts[kind] += (told.rounds, told.n_generated - 1)
            text = model.detokenize(answer.tokens, special=True)
            samples.append({"class": kind, "prompt": record["prompt"], "text": text})
    result: dict[str, Any] = {"samples": samples, "classes": {}, "n_new": n_new}
    for name in CLASSES:
        n_rounds, tokens = counts[name]
        result["classes"][name] = {
            "drafted": drafted[name].tolist(),
            "accepted": accepted[name].tolist(),
            "rate": np.round(accepted[name] / np.maximum(drafted[name], 1), 4).tolist(),
            "tokens_per_round": round(float(tokens / max(n_rounds, 1)), 3),
        }
    first = [result["classes"][name]["rate"][0] for name in CLASSES]
    result["mean_first"] = round(float(np.mean(first)), 4)
    return result


def evaluate(
    gguf_file: Path, tokenizer: Tokenizer, work: Path, prompts: Path, small: bool = False
) -> dict[str, Any]:
    """All figures of the model card; also written to work/evaluation.json."""
    torch.set_num_threads(2)
    model = load(gguf_file)
    heldout = read(work / "heldout.jsonl")
    limit, class_limit = (16, 16) if small else (320, 64)  # rows, drawn from all the text
    result: dict[str, Any] = {
        "heldout": on_text(model, np.load(work / "heldout.npy"), limit),
        "by_class": {},
    }
    for kind in corpus.CLASSES:
        chosen = [r for r in heldout if r["class"] == kind]
        stream = encode(tokenizer, chosen, 0)
        result["by_class"][kind] = on_text(model, stream, class_limit)
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    n_new = 16 if small else 64
    result["greedy"] = acceptance(gguf_file, records, 0.0, n_new)
    result["sampled"] = acceptance(gguf_file, records, 0.8, n_new)
    (work / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
