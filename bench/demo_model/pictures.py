"""Pictures of a few coloured shapes on a grid, and what is said about them.

A picture is drawn from a seed alone. The model is shown it in two ways: as an image, and in text,
as a Python dictionary. The caption that it learns to give is the same after both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from .chat import IM_END, IM_START

COLOURS = {"red": (214, 48, 44), "green": (44, 160, 70), "blue": (48, 84, 210),
           "yellow": (240, 200, 40)}  # fmt: skip
SHAPES = ("square", "circle", "triangle")
NUMBERS = ("one", "two", "three", "four")
GRID = 3  # cells of a side
CELL = 32  # pixels of a cell's side: one token of the image encoder
MOST_SHAPES, MOST_KINDS = 6, 3

Kind = tuple[str, str]  # colour and shape
KINDS: list[Kind] = [(colour, shape) for colour in COLOURS for shape in SHAPES]

QUESTIONS = (
    "What does the picture show?",
    "What is in the picture?",
    "What do you see?",
    "Describe the picture.",
    "What does the image show?",
    "What is in the image?",
    "Describe the image.",
    "What is this?",
)
ANSWER = "The picture shows"


@dataclass(frozen=True)
class Picture:
    """What is in each of the GRID * GRID cells, row by row: colour and shape, or None."""

    cells: tuple[Kind | None, ...]

    @property
    def counts(self) -> dict[Kind, int]:
        """How many there are of each kind that is there, in the order of KINDS."""
        found = Counter(self.cells)
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @property
    def caption(self) -> str:
        """For example "three red squares and one blue circle"."""
        said = [
            f"{NUMBERS[n - 1]} {colour} {shape}{'s' * (n > 1)}"
            for (colour, shape), n in self.counts.items()
        ]
        return " and ".join(part for part in (", ".join(said[:-1]), said[-1]) if part)

    @property
    def described(self) -> str:
        """The same as Python would print it: "{'red square': 3, 'blue circle': 1}"."""
        return str({" ".join(kind): n for kind, n in self.counts.items()})


def draw_up(rng: np.random.Generator) -> Picture:
    """A picture of one to MOST_KINDS kinds of shapes, at most MOST_SHAPES shapes."""
    while True:
        n_kinds = int(rng.integers(1, MOST_KINDS + 1))
        counts = rng.integers(1, len(NUMBERS) + 1, n_kinds)
        if counts.sum() <= MOST_SHAPES:
            break
    chosen = rng.choice(len(KINDS), n_kinds, replace=False)
    shown = [KINDS[k] for k, n in zip(chosen, counts, strict=True) for _ in range(n)]
    cells: list[Kind | None] = [None] * GRID**2
    for cell, kind in zip(rng.permutation(GRID**2), shown, strict=False):
        cells[cell] = kind
    return Picture(tuple(cells))


def paint(pictures: list[Picture], rng: np.random.Generator, cell: int = CELL) -> np.ndarray:
    """Pixels (n, GRID * cell, GRID * cell, 3) uint8. Place, size and colours vary a little."""
    n, cells = len(pictures), GRID**2
    ground = rng.uniform(225, 255, (n, 1, 1, 1, 1)) + np.zeros((n, cells, cell, cell, 3))
    flat = [kind for picture in pictures for kind in picture.cells]
    seen = np.array([kind is not None for kind in flat])
    colours = np.array([COLOURS[kind[0]] if kind else (0, 0, 0) for kind in flat], float)
    colours = np.clip(colours + rng.normal(0, 8, colours.shape), 0, 255)
    shape = np.array([SHAPES.index(kind[1]) if kind else 0 for kind in flat])
    radius = cell * rng.uniform(0.27, 0.4, len(flat))
    centre = cell * (0.5 + rng.uniform(-0.08, 0.08, (len(flat), 2)))
    pixel = np.arange(cell) + 0.5
    y = (pixel[None, :, None] - centre[:, 0, None, None]) / radius[:, None, None]
    x = (pixel[None, None, :] - centre[:, 1, None, None]) / radius[:, None, None]
    outside = np.stack(
        [
            np.maximum(abs(x), abs(y)) - 0.9,
            np.hypot(x, y) - 1,
            np.maximum(y - 0.8, 0.89 * abs(x) - 0.45 * y - 0.45),
        ]
    )[shape, np.arange(len(flat))]  # distance from the outline, in radii; below 0 within
    cover = np.clip(0.5 - outside * radius[:, None, None], 0, 1) * seen[:, None, None]
    cover = cover.reshape(n, cells, cell, cell, 1)
    painted = ground * (1 - cover) + colours.reshape(n, cells, 1, 1, 3) * cover
    grid = painted.reshape(n, GRID, GRID, cell, cell, 3).transpose(0, 1, 3, 2, 4, 5)
    return np.rint(grid).astype(np.uint8).reshape(n, GRID * cell, GRID * cell, 3)


def prompt(question: str, shown: str, image_first: bool = True) -> str:
    """The question in the chat frame, beside what is `shown`: a marker, or text."""
    content = f"{shown}{question}" if image_first else f"{question}{shown}"
    return f"{IM_START}user\n{content}{IM_END}\n{IM_START}assistant\n"
