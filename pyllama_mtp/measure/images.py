"""Prompts of a matrix that begin with an image: it is read once, and encoded anew for each sample,
as the first prompt with a picture has to."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as changed

from pyllama_mtp.errors import UsageError
from pyllama_mtp.images import ImageSource, Pixels, pixels_of
from pyllama_mtp.llama.vision import IMAGE_MARKER, ImagePrompt, Vision
from pyllama_mtp.measure.plan import ImageFile

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model


@dataclass(frozen=True)
class ImageText:
    """A prompt: the image, then `text`. It has `n_tokens`, those of the image among them."""

    text: str
    n_tokens: int

    def __len__(self) -> int:
        return self.n_tokens


@dataclass(frozen=True, eq=False)
class Picture:
    """An image to measure with.

    Attributes:
        pixels: [height, width, 3] uint8, RGB.
        file: what the records say of it; of the encoder nothing yet.
        mmproj: the file of the encoder; None: the one beside the model.
    """

    pixels: Pixels
    file: ImageFile
    mmproj: str | None = None

    @classmethod
    def read(cls, source: ImageSource, mmproj: Any = None) -> Picture:
        """Read an image. Raises UsageError: see :func:`.pixels_of`."""
        pixels = pixels_of(source)
        name = ""
        if isinstance(source, os.PathLike) or (
            isinstance(source, str) and not source.startswith("data:")
        ):
            name = Path(source).name
        height, width = pixels.shape[:2]
        file = ImageFile(name, hashlib.sha256(pixels.tobytes()).hexdigest(), width, height)
        return cls(pixels, file, None if mmproj is None else os.fspath(mmproj))

    def png(self) -> str:
        """The same pixels as a PNG file, in base64."""
        try:
            from PIL import Image
        except ImportError:
            raise UsageError(
                "other programs get the image as a file, which needs pillow: pip install "
                "'pyllama-mtp[images]'"
            ) from None
        out = io.BytesIO()
        Image.fromarray(self.pixels).save(out, "PNG")
        return base64.b64encode(out.getvalue()).decode()


class Imaging:
    """A picture and a model's encoder: makes prompts. A context manager, which closes the encoder.

    Attributes:
        file: describes the picture and the encoder.
        alone: a prompt without text.
        n_around: tokens that a prompt has beside its text.
        mmproj: the file of the encoder.
    """

    def __init__(self, model: Model, picture: Picture, n_threads: int | None = None) -> None:
        """Load the encoder, and encode the picture once, so that no sample is the first.

        Raises:
            UsageError: there is no encoder beside the model, or the picture cannot be encoded.
            ModelFileError, InsufficientMemoryError: see :class:`.Vision`.
        """
        self._pixels = picture.pixels
        self._vision = Vision(model, picture.mmproj, n_threads=n_threads)
        self.mmproj = self._vision.path
        try:
            self.alone = self._vision.prompt(IMAGE_MARKER, [self._pixels])
        except BaseException:
            self._vision.close()
            raise
        self.n_around = len(self.alone)
        encoder = hashlib.sha256(self.mmproj.read_bytes()).hexdigest()
        n_tokens = self.alone.images[0].image.n_tokens
        self.file = changed(
            picture.file, n_tokens=n_tokens, mmproj=self.mmproj.name, mmproj_sha256=encoder
        )

    def __enter__(self) -> Imaging:
        return self

    def __exit__(self, *raised: object) -> None:
        self._vision.close()

    def encode(self, prompt: ImageText) -> ImagePrompt:
        """The prompt with its picture encoded anew."""
        self._vision.forget()
        made = self._vision.prompt(IMAGE_MARKER + prompt.text, [self._pixels])
        if len(made) != len(prompt):
            raise UsageError(
                f"a prompt with an image has {len(made)} tokens, where {len(prompt)} were planned; "
                "give another text with --prompt-file"
            )
        return made
