"""Train trunk and head together; the head is distilled from the trunk at every position.

Loss = cross-entropy of the trunk + 0.5 KL(trunk || head) + 0.25 KL(trunk || head's second step).
The trunk's distribution is detached in the KL terms: they teach the head, and make the hidden rows
that it reads more useful to it, but they do not flatten the distribution.
Matrices are updated by Muon, everything else by AdamW; learning rates fall linearly to zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .net import Config, Model

HEAD_WEIGHT, SECOND_WEIGHT = 0.5, 0.25


@dataclass
class Plan:
    """How long and how to train: for so many `steps`, or if these are 0, `minutes` by the clock."""

    minutes: float = 60.0
    steps: int = 0
    seed: int = 1
    tokens_per_step: int = 4096
    row: int = 256
    long_row: int = 1024  # rows of the last part, so that longer contexts work too
    long_from: float = 0.85  # fraction of the run at which that part starts
    lr_matrix: float = 6e-3
    lr_other: float = 3e-3
    warmup: float = 0.02
    hold: float = 0.25  # fraction of the run before the linear decay starts
    checkpoint_minutes: float = 3.0
    threads: int = 2
    compile: bool = False


class Rows:
    """Batches of token rows from one long stream, in a seeded order, epoch after epoch."""

    def __init__(self, stream: np.ndarray, row: int, seed: int) -> None:
        self.stream, self.row, self.seed = stream, row, seed
        self.n = (len(stream) - 1) // row

    def batch(self, index: int, size: int) -> Tensor:
        """Batch number `index`: int64, shape (size, row + 1), the last column only a target."""
        picks = []
        for i in range(index * size, (index + 1) * size):
            order = self._order(i // self.n)
            start = int(order[i % self.n]) * self.row
            picks.append(self.stream[start : start + self.row + 1])
        return torch.from_numpy(np.stack(picks).astype(np.int64))

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.n)
        return self._shuffled


def optimizers(model: Model, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks and head, AdamW for embedding, norms and small ones."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        large = parameter.ndim == 2 and min(parameter.shape) >= 32 and name != "embed"
        (matrices if large else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=plan.lr_matrix, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=plan.lr_other, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [muon, adam]


def rate(progress: float, plan: Plan) -> float:
    """Factor on the learning rates at `progress` in [0, 1]."""
    if progress < plan.warmup:
        return max(progress, 1e-4) / plan.warmup
    return min(1.0, max(0.0, (1 - progress) / (1 - plan.hold)))


def all_logits(forward: torch.nn.Module, model: Model, tokens: Tensor) -> list[Tensor]:
    """Logits of the trunk and of draft steps 1 and 2, computed in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, states = forward(tokens)
        return [model.logits(rows) for rows in (hidden, *states)]


def losses(logits: list[Tensor], targets: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Total loss and figures of one batch; targets (batch, tokens) are the next tokens."""
    trunk, head, second = (x.flatten(0, 1) for x in logits)
    ce = F.cross_entropy(trunk, targets.flatten())
    teacher = trunk.detach().softmax(-1)
    entropy = torch.special.entr(teacher).sum(-1).mean()
    kl1 = F.cross_entropy(head, teacher) - entropy
    kl2 = F.cross_entropy(second, teacher) - entropy
    total = ce + HEAD_WEIGHT * kl1 + SECOND_WEIGHT * kl2
    return total, {"trunk": ce.item(), "kl": kl1.item(), "kl2": kl2.item()}


@torch.no_grad()
def quick_eval(model: Model, heldout: np.ndarray, rows: int = 24) -> dict[str, float]:
    """Losses and agreement of both draft steps on a few held-out rows."""
    batch = Rows(heldout, 256, 0).batch(0, rows)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    trunk, head, second = all_logits(model, model, tokens)
    best = trunk.argmax(-1)
    return {
        "heldout_trunk": float(F.cross_entropy(trunk.flatten(0, 1), targets.flatten())),
        "heldout_head": float(F.cross_entropy(head.flatten(0, 1), targets.flatten())),
        "agree": float((head.argmax(-1) == best).float().mean()),
        "agree2": float((second.argmax(-1) == best)[:, 1:].float().mean()),
    }


def step(
    optimizers: list[torch.optim.Optimizer], parameters: Iterable[Tensor], factor: float
) -> None:
    """A step by the gradients there are, which are zero afterwards; `factor`: of usual rates."""
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Run:
    """A training run, which goes on from `work/checkpoint.pt` if there is one."""

    def __init__(self, work: Path, config: Config, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        torch.manual_seed(plan.seed)
        self.work, self.plan = work, plan
        self.model = Model(config)
        self.optimizers = optimizers(self.model, plan)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.long_steps = 0
        self.file = work / "checkpoint.pt"
        if self.file.exists():
            self._load()

    def _load(self) -> None:
        saved = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]
        self.long_steps = saved["long_steps"]

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is complete."""
        partial = self.file.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "config": asdict(self.model.c),
                "plan": asdict(self.plan),
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "long_steps": self.long_steps,
            },
            partial,
        )
        partial.replace(self.file)

    def progress(self) -> float:
        """Done part of the run, in [0, 1]."""
        if self.plan.steps:
            return self.step / self.plan.steps
        return self.seconds / 60 / self.plan.minutes

    def one_step(self, forward: torch.nn.Module, batch: Tensor) -> dict[str, float]:
        """One optimizer step on a batch (rows, tokens + 1)."""
        factor = rate(self.progress(), self.plan)
        logits = all_logits(forward, self.model, batch[:, :-1])
        total, figures = losses(logits, batch[:, 1:])
        total.backward()
        step(self.optimizers, self.model.parameters(), factor)
        self.step += 1
        self.tokens += batch.shape[0] * (batch.shape[1] - 1)
        return figures

    def loop(self, train: np.ndarray, heldout: np.ndarray) -> None:
        """Train to the end of the plan; logs to work/log.jsonl, checkpoints as it goes."""
        plan = self.plan
        forward = torch.compile(self.model) if plan.compile else self.model
        short = Rows(train, plan.row, plan.seed)
        long = Rows(train, plan.long_row, plan.seed + 1)
        mark = saved = time.monotonic()
        while self.progress() < 1:
            if self.progress() < plan.long_from:
                batch = short.batch(self.step - self.long_steps, plan.tokens_per_step // plan.row)
                figures = self.one_step(forward, batch)
            else:
                size = plan.tokens_per_step // plan.long_row
                figures = self.one_step(self.model, long.batch(self.long_steps, size))
                self.long_steps += 1
            now = time.monotonic()
            self.seconds, mark = self.seconds + now - mark, now
            if self.step % 20 == 0:
                self._log(figures)
            if now - saved > 60 * plan.checkpoint_minutes:
                self._log(quick_eval(self.model, heldout))
                self.save()
                saved = time.monotonic()
        self._log(quick_eval(self.model, heldout))
        self.save()

    def _log(self, figures: dict[str, float]) -> None:
        record = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        record |= {key: round(value, 4) for key, value in figures.items()}
        with (self.work / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
