"""Measure a finished file: losses, agreement of head and trunk, acceptance on held-out prompts.

Everything runs in float32 on the weights of the GGUF file. Acceptance is that of a driver which
drafts DEPTH tokens greedily each round. It is counted afterwards: the trunk's text is generated
first, greedily or by sampling; then the rounds are played over the text with the head's choices at
every position.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer

from . import corpus
from .chat import END_OF_TEXT, IM_END, IM_START
from .net import Model, rope_tables
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


@torch.no_grad()
def generate(
    model: Model, prompts: list[list[int]], ends: set[int], n_new: int, temperature: float
) -> list[list[int]]:
    """The trunk's continuation of each prompt, all at once; temperature 0 is greedy.

    No caches: every token recomputes the padded batch, which is exact and fast enough here.
    """
    generator = torch.Generator().manual_seed(1)
    texts = [list(prompt) for prompt in prompts]
    active = set(range(len(prompts)))
    while active:
        order = sorted(active)
        longest = max(len(texts[i]) for i in order)
        batch = torch.zeros(len(order), longest, dtype=torch.int64)
        for row, i in enumerate(order):
            batch[row, : len(texts[i])] = torch.tensor(texts[i])
        embedded = F.embedding(batch, model.embed)
        hidden = model.trunk(embedded, *rope_tables(model.c, longest))
        last = torch.tensor([len(texts[i]) - 1 for i in order])
        logits = model.logits(hidden[torch.arange(len(order)), last])
        if temperature > 0:
            weights = (logits / temperature).softmax(-1)
            picked = torch.multinomial(weights, 1, generator=generator)[:, 0]
        else:
            picked = logits.argmax(-1)
        for i, token in zip(order, picked.tolist(), strict=True):
            texts[i].append(token)
            if token in ends or len(texts[i]) - len(prompts[i]) >= n_new:
                active.discard(i)
    return texts


def rounds(
    start: int, text: list[int], drafts: list[list[int]]
) -> tuple[list[int], list[int], int]:
    """Play the draft rounds over `text`, whose position `start` holds the first generated token.

    In the round whose last emitted token is x_p, draft n is made at row p + n - 1, and is right if
    it equals x_{p + n}. Returns drafted and accepted per depth, and the number of rounds.
    """
    drafted, accepted, count, p = [0] * DEPTH, [0] * DEPTH, 0, start
    while p + 1 < len(text):
        count += 1
        right = 0
        still = True
        for n in range(1, DEPTH + 1):
            if p + n >= len(text):
                break
            drafted[n - 1] += 1
            still = still and drafts[n - 1][p + n - 1] == text[p + n]
            right += still
            accepted[n - 1] += still
        p += right + 1
    return drafted, accepted, count


@torch.no_grad()
def acceptance(
    model: Model,
    tokenizer: Tokenizer,
    records: list[dict[str, Any]],
    temperature: float,
    n_new: int,
) -> dict[str, Any]:
    """Acceptance per draft position and tokens per round, by class; and the texts."""
    ends = {tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)}
    prompts = [tokenizer.encode(prompt_text(r)).ids for r in records]
    texts = generate(model, prompts, ends, n_new, temperature)
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, DEPTH)))
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    samples = []
    for record, prompt, text in zip(records, prompts, texts, strict=True):
        _, states = model(torch.tensor([text]), steps=DEPTH)
        drafts = [model.logits(state).argmax(-1)[0].tolist() for state in states]
        drafted, accepted, n_rounds = rounds(len(prompt), text, drafts)
        totals[record["class"]] += np.array([drafted, accepted])
        counts[record["class"]] += (n_rounds, len(text) - len(prompt) - 1)
        shown = tokenizer.decode(text[len(prompt) :], skip_special_tokens=False)
        samples.append({"class": record["class"], "prompt": record["prompt"], "text": shown})
    result: dict[str, Any] = {"samples": samples, "classes": {}}
    for name in CLASSES:
        drafted, accepted = totals[name]
        n_rounds, tokens = counts[name]
        result["classes"][name] = {
            "drafted": drafted.astype(int).tolist(),
            "accepted": accepted.astype(int).tolist(),
            "rate": [round(float(x), 4) for x in accepted / np.maximum(drafted, 1)],
            "tokens_per_round": round(float(tokens / max(n_rounds, 1)), 3),
        }
    first = [result["classes"][name]["rate"][0] for name in CLASSES]
    result["mean_first"] = round(float(np.mean(first)), 4)
    return result


def evaluate(
    model: Model, tokenizer: Tokenizer, work: Path, prompts: Path, small: bool = False
) -> dict[str, Any]:
    """All figures of the model card; also written to work/evaluation.json."""
    torch.set_num_threads(2)
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
    result["greedy"] = acceptance(model, tokenizer, records, 0.0, n_new) | {"n_new": n_new}
    result["sampled"] = acceptance(model, tokenizer, records, 0.8, n_new) | {"n_new": n_new}
    (work / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    return result
