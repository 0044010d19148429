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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .evaluate import Rows, on_text
from .net import Model

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


def optimizers(model: Model, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks and head, AdamW for embedding, norms and small ones."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        large = parameter.ndim == 2 and min(parameter.shape) >= 32 and "embed" not in name
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


def all_logits(model: Model, tokens: Tensor) -> list[Tensor]:
    """Logits of the trunk and of draft steps 1 and 2, computed in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, states = model(tokens)
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
    figures = {"trunk": ce, "kl": kl1, "kl2": kl2}
    return total, {name: round(value.item(), 4) for name, value in figures.items()}


class Run:
    """A training run, which goes on from the checkpoint in `file` if there is one.

    Attributes:
        step, tokens, seconds, long_steps: done so far; seconds by `clock`.
    """

    clock = staticmethod(time.monotonic)

    def __init__(
        self, file: Path, model: Model, plan: Plan, stream: np.ndarray, heldout: np.ndarray
    ) -> None:
        torch.set_num_threads(plan.threads)
        self.file, self.model, self.plan, self.heldout = file, model, plan, heldout
        self.short = Rows(stream, plan.row, plan.seed)
        self.long = Rows(stream, plan.long_row, plan.seed + 1)
        self.optimizers = optimizers(model, plan)
        self.step, self.tokens, self.seconds, self.long_steps = 0, 0, 0.0, 0

    def load(self) -> bool:
        """Whether there is a checkpoint, from which the run then goes on."""
        if not self.file.exists():
            return False
        saved = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.tokens, self.seconds = saved["step"], saved["tokens"], saved["seconds"]
        self.long_steps = saved["long_steps"]
        return True

    def save(self, **more: Any) -> None:
        """Write the checkpoint; the old one stays until the new one is complete."""
        saved = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "plan": asdict(self.plan),
            **{name: getattr(self, name) for name in ("step", "tokens", "seconds", "long_steps")},
        }
        partial = self.file.with_suffix(".part")
        torch.save(saved | more, partial)
        partial.replace(self.file)

    def progress(self) -> float:
        """Done part of the run, in [0, 1]."""
        if self.plan.steps:
            return self.step / self.plan.steps
        return self.seconds / 60 / self.plan.minutes

    def one_step(self) -> dict[str, float]:
        """One optimizer step on the next rows; returns its figures."""
        rows, index = self.short, self.step - self.long_steps
        if self.progress() >= self.plan.long_from:
            rows, index = self.long, self.long_steps
            self.long_steps += 1
        batch = rows.batch(index, self.plan.tokens_per_step // rows.row)
        total, figures = losses(all_logits(self.model, batch[:, :-1]), batch[:, 1:])
        total.backward()
        self.tokens += batch.shape[0] * (batch.shape[1] - 1)
        self.update(self.model.parameters())
        return figures

    def update(self, parameters: Iterable[Tensor]) -> None:
        """A step by the gradients there are, which are zero afterwards."""
        factor = rate(self.progress(), self.plan)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def checked(self) -> dict[str, Any]:
        """Figures on held-out text."""
        return on_text(self.model, self.heldout, 32)

    def loop(self) -> None:
        """Train to the end of the plan; logs beside the checkpoint, which is written as it goes."""
        mark = saved = self.clock()
        while self.progress() < 1:
            figures = self.one_step()
            now = self.clock()
            self.seconds, mark = self.seconds + now - mark, now
            if self.step % 20 == 0:
                self._log(figures)
            if now - saved > 60 * self.plan.checkpoint_minutes:
                self._log(self.checked())
                self.save()
                saved = now
        self._log(self.checked())
        self.save()

    def _log(self, figures: dict[str, Any]) -> None:
        record = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        record |= figures
        with self.file.with_suffix(".jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
