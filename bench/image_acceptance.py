#!/usr/bin/env python3
"""Accepted drafts after an image beside those after text, on the demo that sees.

    python bench/image_acceptance.py

Freshly drawn pictures are shown, and the same pictures are described in text; asked the same, the
model gives the same captions. Counted are answers that are right as a whole, and accepted drafts by
position in the round. Greedy; no n-gram drafts; seeds of the pictures are not those of training.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from demo_model import pictures

from pyllama_mtp import Model, Session, Settings, Vision
from pyllama_mtp.llama.vision import IMAGE_MARKER
from pyllama_mtp.models.demo import vision_demo_path

SEED = 1000
DEPTH = 3


@dataclass
class Count:
    """Answers of one kind of prompt."""

    n: int = 0
    right: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, session: Session, prompt: str, images: list[np.ndarray], caption: str) -> None:
        """Ask for one picture's caption."""
        answer = session.generate(prompt, images=images, max_tokens=64).run()
        told = answer.telemetry
        self.n += 1
        self.right += answer.text == f"{pictures.ANSWER} {caption}."
        self.tokens, self.rounds = self.tokens + told.n_generated, self.rounds + told.rounds
        for name in ("drafted", "accepted"):
            pairs = zip_longest(getattr(self, name), getattr(told, name), fillvalue=0)
            setattr(self, name, [a + b for a, b in pairs])

    @property
    def rates(self) -> str:
        """Of acceptance, by position."""
        return " / ".join(f"{a / d:.3f}" for a, d in zip(self.accepted, self.drafted, strict=True))

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.n} right; accepted at position 1 / 2 / 3: {self.rates} "
            f"({self.accepted} of {self.drafted}); {self.tokens / self.rounds:.2f} tokens a round"
        )


def measure(n: int, depth: int = DEPTH, seed: int = SEED, cell: int = pictures.CELL) -> list[Count]:
    """Answers about `n` pictures after images and after text."""
    rng = np.random.default_rng(seed)
    settings = Settings(n_ctx=512, n_threads=1, draft_n_max=depth, ngram=False)
    counts = [Count(), Count()]
    with ExitStack() as stack:
        model = stack.enter_context(Model(vision_demo_path()))
        vision = stack.enter_context(Vision(model, n_threads=1))
        session = stack.enter_context(Session(model, settings, vision=vision))
        for i in range(n):
            picture = pictures.draw_up(rng)
            (pixels,) = pictures.paint([picture], rng, cell)
            question = pictures.QUESTIONS[i % len(pictures.QUESTIONS)]
            for count, images, shown in zip(
                counts, ([pixels], []), (IMAGE_MARKER, f"{picture.described}\n"), strict=True
            ):
                prompt = pictures.prompt(question, shown)
                count.add(session, prompt, images, picture.caption)
    return counts


def main() -> int:
    """Measure and print; 1 if a rate differs by more than 0.03."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=300, help="pictures")
    parser.add_argument("--cell", type=int, default=pictures.CELL, help="pixels of a cell's side")
    args = parser.parse_args()
    counts = measure(args.n, cell=args.cell)
    for name, count in zip(("after an image", "after text"), counts, strict=True):
        print(f"{name}: {count}")
    rates = [np.array(count.accepted) / count.drafted for count in counts]
    difference = np.abs(rates[0] - rates[1]).max()
    print(f"largest difference of a rate: {difference:.3f}")
    return int(difference > 0.03)


if __name__ == "__main__":
    raise SystemExit(main())
