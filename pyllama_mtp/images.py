"""Images in a conversation, and their pixels: from files, bytes, data URLs, arrays, PIL images."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import UsageError

Pixels: TypeAlias = npt.NDArray[np.uint8]
#: A path, the bytes of a file, a data URL, [height, width, 3] uint8 RGB, or a PIL image.
ImageSource: TypeAlias = str | os.PathLike[str] | bytes | Pixels | Any

#: Stands for an image in a prompt's text.
IMAGE_MARKER = "<__media__>"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
#: Limits, so that a small file cannot take all memory: of a file, of an image, of one side of it.
MOST_BYTES, MOST_PIXELS, LONGEST_SIDE = 64 << 20, 1 << 26, 1 << 14
#: Encoders need something to look at, and their arithmetic is for sides of this ratio at most.
MOST_RATIO = 200
#: EXIF's number of the tag that tells how the camera was held.
_ORIENTATION = 0x112
_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)


def pixels_of(source: ImageSource) -> Pixels:
    """The pixels of an image: [height, width, 3] uint8, RGB.

    Transparency is dropped, rotation that a camera noted is carried out, and of several frames the
    first is taken.

    Raises:
        UsageError: no image of a known format, damaged, too large, or pillow is missing.
    """
    if isinstance(source, np.ndarray):
        return _checked(source)
    if isinstance(source, str) and re.match(r"\w{2,}:", source):
        return pixels_of_url(source)
    if isinstance(source, str | os.PathLike):
        return _decoded(_read(Path(source)), f"{os.fspath(source)}: ")
    if isinstance(source, bytes | bytearray | memoryview):
        return _decoded(bytes(source), "")
    if hasattr(source, "convert") and hasattr(source, "getexif"):
        return _decoded(source, "")
    raise UsageError(
        f"an image is a path, bytes, a data URL, an array (height, width, 3) of uint8 or a PIL "
        f"image, not {type(source).__name__}"
    )


def pixels_of_url(url: str) -> Pixels:
    """The pixels of a data URL, as :func:`pixels_of`; nothing is fetched and no file is read.
    Raises UsageError: also for any other URL."""
    start = _DATA_URL.match(url)
    if not start:
        raise UsageError(
            f"image URLs are not fetched ({url[:40]!r}); send the image itself, as "
            "data:image/png;base64,..."
        )
    if (len(url) - start.end()) * 3 // 4 > MOST_BYTES:
        raise UsageError(f"the image has more than {MOST_BYTES >> 20} MiB; send a smaller one")
    try:
        data = base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"the data URL of the image is not base64: {error}") from None
    return _decoded(data, "")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the image {path} cannot be read: {why}") from None


def _decoded(data: Any, name: str) -> Pixels:
    """The pixels of a file's bytes, or of a PIL image; `name`, with a colon, is for errors."""
    if isinstance(data, bytes) and len(data) > MOST_BYTES:
        raise UsageError(f"{name}the image has more than {MOST_BYTES >> 20} MiB; use a smaller one")
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError(
            "image files need pillow: pip install 'pyllama-mtp[images]', or give an array"
        ) from None
    try:
        return _checked(_rgb(data, name))
    except (UsageError, MemoryError):
        raise
    except Image.DecompressionBombError:
        why = _too_large()
    except UnidentifiedImageError:
        why = f"not an image of the formats {', '.join(FORMATS)}"
    except Exception as error:  # damaged files fail in many ways
        why = f"the image is damaged: {error}"
    raise UsageError(f"{name}{why}")


def _rgb(data: Any, name: str) -> npt.NDArray[Any]:
    """The pixels of a file's bytes, or of a PIL image."""
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(data), formats=FORMATS) if isinstance(data, bytes) else data
    width, height = image.size
    _check_size(width, height, name)
    if image.getexif().get(_ORIENTATION, 1) != 1:  # only then: it copies
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # of which PIL would cut off all above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB"))


def _too_large() -> str:
    return (
        f"an image may have {MOST_PIXELS / 1e6:.0f} million pixels, {LONGEST_SIDE} on a side; "
        "scale it down"
    )


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MOST_PIXELS or max(width, height) > LONGEST_SIDE:
        raise UsageError(f"{name}{width} x {height} pixels; {_too_large()}")
    if min(width, height) < 1 or max(width, height) > MOST_RATIO * min(width, height):
        raise UsageError(
            f"{name}{width} x {height} pixels; one side may be {MOST_RATIO} times the other at most"
        )


def _checked(pixels: npt.NDArray[Any]) -> Pixels:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise UsageError(
            f"an array of shape {pixels.shape} and type {pixels.dtype}; an image is (height, "
            "width, 3) of uint8"
        )
    _check_size(pixels.shape[1], pixels.shape[0], "")
    return np.ascontiguousarray(pixels)


# -- images in a conversation: parts of a message's content ----------------------------------------


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[Pixels]]:
    """Messages with markers in place of images, and the images.

    Parts of a content are ``{"type": "text", "text": ...}``, OpenAI's ``{"type": "image_url",
    "image_url": {"url": "data:image/..."}}``, or ``{"type": "image", "image": ...}`` with anything
    that :func:`.pixels_of` takes. Messages without images stay as they are.
    """
    images: list[Pixels] = []
    if not isinstance(messages, Sequence):
        return messages, images  # refused where messages are checked
    return [_without(message, images) for message in messages], images


def _without(message: Any, images: list[Pixels]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or all(_kind(part) == "text" for part in content):
        return message
    text = ""
    for part in content:
        match _kind(part):
            case "text":
                text += str(part.get("text", ""))
            case "image_url":
                images.append(pixels_of_url(url_of(part)))
                text += IMAGE_MARKER
            case "image":
                images.append(pixels_of(part.get("image")))
                text += IMAGE_MARKER
            case kind:
                raise UsageError(
                    f"content of type {kind!r} is not supported; use text, image_url or image"
                )
    return {**message, "content": text}


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def url_of(part: Mapping[str, Any]) -> str:
    """The URL of a part of the type image_url. Raises UsageError: there is none."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, Mapping) else found
    if not isinstance(url, str):
        raise UsageError("a part of the type image_url needs {'image_url': {'url': ...}}")
    return url
