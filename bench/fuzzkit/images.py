"""Damaged and hostile images."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np

from fuzzkit.edits import Edit, apply_bytes
from fuzzkit.otherfiles import byte_edit

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "YCbCr")
SIDES = (1, 2, 3, 31, 64, 199, 400)
PICTURE = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)


def edits(seed: int) -> list[Edit]:
    """The edits of a case: the picture, then changes of its bytes, and checksums made right."""
    rng = random.Random(seed)
    size = [rng.choice(SIDES), rng.choice(SIDES)]
    drawn: Edit = {"op": "draw", "format": rng.choice(FORMATS), "mode": rng.choice(MODES)}
    changes = [byte_edit(rng, 200) for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 20)))]
    return [{**drawn, "size": size}, *changes, *[{"op": "sums"}] * rng.randrange(2)]


def apply_image(edits: list[Edit]) -> bytes:
    """The bytes of an image with edits."""
    data = apply_bytes(_drawn(edits[0]), edits[1:])
    return _with_sums(data) if edits[-1]["op"] == "sums" else data


def _drawn(edit: Edit) -> bytes:
    from PIL import Image

    width, height = edit["size"]
    values = np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8)
    picture: Any = Image.fromarray(values)
    if edit["mode"] == "I;16":
        picture = Image.fromarray(values[..., 0].astype(np.uint16) * 256)
    elif edit["mode"] in ("LA",):
        picture = picture.convert("L").convert("LA")
    else:
        picture = picture.convert(edit["mode"])
    out = io.BytesIO()
    try:
        picture.save(out, edit["format"])
    except (OSError, ValueError):  # a mode that the format has not
        out = io.BytesIO()
        picture.convert("RGB").save(out, edit["format"])
    return out.getvalue()


def _with_sums(data: bytes) -> bytes:
    """A PNG whose chunks have the right checksums, so that its decoder goes on; others as is."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        (n,) = struct.unpack_from(">I", out, at)
        if at + 12 + n > len(out):
            break
        struct.pack_into(">I", out, at + 8 + n, zlib.crc32(out[at + 4 : at + 8 + n]))
        at += 12 + n
    return bytes(out)
