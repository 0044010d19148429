"""Pixels of images: what is read, and what is refused before it takes memory."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.images import FORMATS, MOST_BYTES, Pixels, pixels_of, pixels_of_url

from ..processes import RunPython

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def pixels() -> Pixels:
    across = np.tile(np.linspace(0, 255, 40, dtype=np.uint8), (30, 1))
    down = np.tile(np.arange(0, 240, 8, dtype=np.uint8)[:, None], (1, 40))
    return np.dstack([across, np.full_like(across, 80), down])


def encoded(pixels: Pixels, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_way_in(kind: str, pixels: Pixels, tmp_path: Path) -> None:
    data = encoded(pixels, kind)
    found = pixels_of(data)
    assert found.shape == pixels.shape and found.dtype == np.uint8
    assert np.abs(found.astype(int) - pixels).mean() < 12, "lossy at most"
    path = tmp_path / "picture"
    path.write_bytes(data)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    for source in (path, str(path), url, Image.open(path), found):
        assert np.array_equal(pixels_of(source), found)


def test_the_first_frame_and_no_transparency(pixels: Pixels) -> None:
    out = io.BytesIO()
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert pixels_of(out.getvalue()).mean() < 128
    clear = np.dstack([pixels, np.zeros(pixels.shape[:2], np.uint8)])
    assert np.array_equal(pixels_of(encoded(clear, "PNG")), pixels)


def test_16_bits(pixels: Pixels) -> None:
    """Gray of 16 bits keeps its upper 8."""
    gray = pixels[..., 0]
    out = io.BytesIO()
    Image.fromarray(gray.astype(np.uint16) * 256 + 7).save(out, "PNG")
    assert np.array_equal(pixels_of(out.getvalue()), np.dstack([gray] * 3))


def test_pil_images_are_as_files(pixels: Pixels) -> None:
    """A PIL image is rotated as its file, and a damaged one is refused as its file."""
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x112] = 6  # rotated by 90 degrees
    Image.fromarray(pixels).save(out, "JPEG", exif=exif)
    data = out.getvalue()
    found = pixels_of(Image.open(io.BytesIO(data)))
    assert found.shape == (40, 30, 3) and np.array_equal(found, pixels_of(data))
    with pytest.raises(UsageError, match="damaged"):
        pixels_of(Image.open(io.BytesIO(data[:-20])))
    with pytest.raises(UsageError, match="cannot be read"):
        pixels_of("a\0b")


@pytest.mark.long
def test_threads_keep_no_images(run_python: RunPython) -> None:
    """A server has many threads, and any of them may read a large image."""
    done = run_python("""
import io, threading
import numpy as np
from PIL import Image
from pyllama_mtp.images import pixels_of
from pyllama_mtp.serve.reading import free_at_once
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
free_at_once()
out = io.BytesIO()
Image.new("1", (8000, 8000)).save(out, "PNG")
data, end, before = out.getvalue(), threading.Event(), resident()
def work(done):
    pixels_of(data)
    done.set()
    end.wait()
threads = []
for _ in range(4):
    done = threading.Event()
    threads.append(threading.Thread(target=work, args=(done,)))
    threads[-1].start()
    done.wait()
print((resident() - before) // 8000**2)
end.set()
""")
    assert done.returncode == 0 and int(done.stdout) < 4, (done.stdout, done.stderr)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checked

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_refusals(pixels: Pixels, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not an image")
    jpeg = encoded(np.tile(pixels, (9, 9, 1)), "JPEG")
    cases = [
        (bomb(50_000, 50_000), "scale it down"),
        (bomb(9_000, 9_000), "scale it down"),
        (bomb(16_000, 20), "times the other"),
        (jpeg[: len(jpeg) // 2], "damaged"),
        (text, "not an image of the formats"),
        (tmp_path / "none.png", "cannot be read"),
        (b"", "not an image of the formats"),
        (bytes(MOST_BYTES + 1), "MiB"),
        ("https://example.com/cat.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("data:image/png;base64,%%%", "not base64"),
        (pixels.astype(np.float32), "uint8"),
        (pixels[..., 0], "uint8"),
        (7, "not int"),
    ]
    for source, reason in cases:
        with pytest.raises(UsageError, match=reason):
            pixels_of(source)
    with pytest.raises(UsageError, match="not fetched"):
        pixels_of_url(str(text))  # a server's clients read no files
