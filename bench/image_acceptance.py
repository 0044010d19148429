#!/usr/bin/env python3
"""Accepted drafts after an image beside those after text, on the demo that sees.

    python bench/image_acceptance.py

Freshly drawn pictures are shown, and the same pictures are described in text; asked the same, the
model gives the same captions. Counted are answers that are right as a whole, and accepted drafts by
position in the round. Greedy; no n-gram drafts; seeds of the pictures are not those of training.
"""

from __future__ import annotations

import argparse

import numpy as np
from demo_model import pictures

from pyllama_mtp import Model, Session, Settings, Vision
from pyllama_mtp.llama.vision import IMAGE_MARKER
from pyllama_mtp.models.demo import vision_demo_path

SEED = 1000
DEPTH = 3


class Count:
    """Answers of one kind of prompt; drafts by position."""

    def __init__(self) -> None:
        self.n = self.right = self.tokens = self.rounds = 0
        self.drafted, self.accepted = np.zeros((2, DEPTH), int)

    def add(self, session: Session, prompt: str, images: list[np.ndarray], caption: str) -> None:
        """Ask for one picture's caption."""
        answer = session.generate(prompt, images=images, max_tokens=64).run()
        told = answer.telemetry
        self.n += 1
        self.right += answer.text == f"{pictures.ANSWER} {caption}."
        self.tokens, self.rounds = self.tokens + told.n_generated, self.rounds + told.rounds
        self.drafted[: len(told.drafted)] += told.drafted
        self.accepted[: len(told.accepted)] += told.accepted

    def __str__(self) -> str:
        rates = " / ".join(f"{rate:.3f}" for rate in self.accepted / self.drafted)
        return (
            f"{self.right} of {self.n} right; accepted at position 1 / 2 / 3: {rates} "
            f"({self.accepted} of {self.drafted}); {self.tokens / self.rounds:.2f} tokens a round"
        )


def measure(n: int, cell: int = pictures.CELL) -> list[Count]:
    """Answers about `n` pictures after images and after text."""
    rng = np.random.default_rng(SEED)
    settings = Settings(n_ctx=512, n_threads=1, draft_n_max=DEPTH, ngram=False)
    counts = [Count(), Count()]
    with (
        Model(vision_demo_path()) as model,
        Vision(model, n_threads=1) as vision,
        Session(model, settings, vision=vision) as session,
    ):
        for i in range(n):
            picture = pictures.draw_up(rng)
            (pixels,) = pictures.paint([picture], rng, cell)
            question = pictures.QUESTIONS[i % len(pictures.QUESTIONS)]
            shown = (([pixels], IMAGE_MARKER), ([], f"{picture.described}\n"))
            for count, (images, text) in zip(counts, shown, strict=True):
                count.add(session, pictures.prompt(question, text), images, picture.caption)
    return counts


def main() -> int:
    """Measure and print; 1 if a rate differs by more than 0.03."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=300, help="pictures")
    args = parser.parse_args()
    counts = measure(args.n)
    for name, count in zip(("after an image", "after text"), counts, strict=True):
        print(f"{name}: {count}")
    image, text = (count.accepted / count.drafted for count in counts)
    difference = np.abs(image - text).max()
    print(f"largest difference of a rate: {difference:.3f}")
    return int(difference > 0.03)


if __name__ == "__main__":
    raise SystemExit(main())
