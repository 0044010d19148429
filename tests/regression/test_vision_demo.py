"""The bundled demo that sees: what it says of freshly drawn pictures is right, and drafts are
accepted after an image as after text. Its files and card: models/test_demo_reference.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo_model.pictures import CELL, draw_up, paint
from image_acceptance import measure
from PIL import Image

from ..processes import Program


@pytest.mark.parametrize("cell", [CELL, 3 * CELL + 5])
def test_it_says_what_a_picture_shows(cell: int) -> None:
    """Also of pictures that have to be scaled."""
    image, text = measure(10, cell=cell)
    assert image.right >= 8 and text.right >= 8
    assert image.accepted[0] > 0.8 * image.drafted[0] and image.tokens > 2 * image.rounds


@pytest.mark.long
def test_drafts_are_accepted_after_an_image_as_after_text() -> None:
    image, text = measure(200)
    rates = [np.array(count.accepted) / count.drafted for count in (image, text)]
    assert np.abs(rates[0] - rates[1]).max() < 0.03
    assert image.right >= 180 and text.right >= 180


def test_generate_takes_it_for_an_image(in_process: Program, tmp_path: Path) -> None:
    """Without -m."""
    rng, right = np.random.default_rng(7), 0
    for i in range(3):
        picture = draw_up(rng)
        path = tmp_path / f"{i}.png"
        Image.fromarray(paint([picture], rng)[0]).save(path)
        asked = ("--image", str(path), "--chat", "What does the picture show?")
        out = in_process("generate", "--threads", "1", *asked).stdout.decode().strip()
        right += out == f"The picture shows {picture.caption}."
    assert right >= 2
