"""Images in a conversation: parts of a message's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError
from ..imagefile import Pixels, pixels_of, pixels_of_url
from ..llama.vision import IMAGE_MARKER


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[Pixels]]:
    """Messages with markers in place of images, and the images.

    Parts of a content are ``{"type": "text", "text": ...}``, OpenAI's ``{"type": "image_url",
    "image_url": {"url": "data:image/..."}}``, or ``{"type": "image", "image": ...}`` with anything
    that :func:`.pixels_of` takes. Messages without images stay as they are.

    Raises:
        UsageError: a part of another type, or an image that cannot be used.
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
