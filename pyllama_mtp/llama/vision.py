"""Image encoders: the mmproj file of a model, and prompts with images.

A prompt with images is a list of entries, one for each position of the cache: token ids, and for
each row of an image's embeddings one negative number, which is made of the image's pixels and the
encoder's settings. So two prompts begin alike exactly if their entries do.

With M-RoPE an image of w x h tokens takes max(w, h) positions: its rows have the positions
(t, y, x), and the text goes on after the largest. So a position is not the number of entries before
it; :func:`position` tells.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import file_name, utf8, whole
from ..errors import InsufficientMemoryError, LibraryError, ModelFileError, UsageError
from ..images import IMAGE_MARKER as IMAGE_MARKER
from ..images import ImageSource, Pixels, pixels_of
from ..models.mmproj import PROJECTOR, find_mmproj, read_mmproj
from ..settings import MOST_THREADS, available_threads
from . import native, trial
from .batch import Floats, Ints
from .model import Model
from .native import Exclusive, Owned

LIBRARY = f"libpyllama-vision{native.SUFFIX}"
#: Bytes of encoded images that are kept for prompts to come.
KEPT_BYTES = 256 << 20
#: Pixels of all images of a prompt, of which copies are in memory at once.
MOST_PIXELS = 1 << 27


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image as the model takes it.

    Attributes:
        entry: stands for each row in a prompt; negative.
        rows: [n, n_embd] float32 embeddings.
        positions: [n, 4] int32: (t, y, x, 0) from 0, of models with M-RoPE; else [n, 1].
        n_positions: that the image takes of the text's.
    """

    entry: int
    rows: Floats
    positions: Ints
    n_positions: int

    @property
    def n_tokens(self) -> int:
        """Entries of the cache that it takes."""
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image whose first row is entry `start` of a prompt; `end` is one past its last."""

    start: int
    image: EncodedImage

    @property
    def end(self) -> int:
        """One past its last entry."""
        return self.start + self.image.n_tokens


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images.

    Attributes:
        entries: token ids, and negative numbers for rows of images.
        images: in their order.
        encode_s: seconds spent on images that were not known before.
    """

    entries: list[int]
    images: tuple[PlacedImage, ...] = ()
    encode_s: float = 0.0

    def __len__(self) -> int:
        return len(self.entries)


def position(entry: int, images: Iterable[PlacedImage]) -> int:
    """The position of an entry that is not within an image, or of the first of one."""
    spare = (i.image.n_tokens - i.image.n_positions for i in images if i.end <= entry)
    return entry - sum(spare)


def text_tokens(entries: Sequence[int]) -> list[int]:
    """The token ids among a prompt's entries."""
    return [entry for entry in entries if entry >= 0]


class Vision(Owned):
    """The image encoder of a model, from its mmproj file. A context manager.

    Attributes:
        path: of the mmproj file.
        model: whose prompts have the images.
    """

    def __init__(
        self,
        model: Model,
        mmproj: str | os.PathLike[str] | None = None,
        *,
        n_threads: int | None = None,
    ) -> None:
        """Load the encoder.

        Args:
            mmproj: its file; default: the one beside the model, see :func:`.mmproj.find_mmproj`.
            n_threads: default: one for each CPU core that is available.

        Raises:
            ModelFileError: no such file, damaged, not an image encoder, an encoder of audio only,
                of another model, or of a kind that is not supported. A file that cannot be checked
                in depth is loaded in a child process first; see :mod:`.trial`.
            InsufficientMemoryError: it does not fit into memory.
            UsageError: a bad argument, or no file beside the model.
        """
        self._handle: Any = None
        if mmproj is None and (mmproj := find_mmproj(model.path)) is None:
            raise UsageError(
                f"{Path(model.path).parent} has no mmproj*.gguf for this model; give the file of "
                "its image encoder (mmproj=, --mmproj)"
            )
        self.model, self.path = model, Path(file_name("mmproj", mmproj, "an mmproj .gguf file"))
        most = MOST_THREADS, f"from 1 to {MOST_THREADS}"
        self._n_threads = whole("n_threads", n_threads or available_threads(), 1, *most)
        tower = read_mmproj(self.path)
        self._kind = tower if isinstance(tower, str) else PROJECTOR
        if isinstance(tower, str):
            trial.try_encoder(model.info, self.path)
        elif tower.n_embd != model.n_embd_inp:
            raise self._refusal(
                f"it is for models of width {tower.n_embd}, and the model's is {model.n_embd_inp}"
            )
        library = model._library
        self._ffi, self._lib, self._api = library.ffi, library.lib, _api(library)
        self._alone = Exclusive("an image encoder")
        self._lock = threading.Lock()
        self._known: OrderedDict[int, EncodedImage] = OrderedDict()
        self._message = self._ffi.new("char[1024]")
        self._weights = model.weights.hold()
        try:
            self._load()
        except BaseException:
            if self._handle:
                self.close()
            else:
                self._weights.release()
            raise
        identity = f"{self.path.stat().st_size} [-1, -1] {self.model.n_embd_inp}".encode()
        self._identity = identity + _head(self.path)
        model.contexts.add(self)

    def _refusal(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is no image encoder for this model: {why}", self.path)

    def _load(self) -> None:
        info, message = self._ffi.new("struct pyllama_vision_info *"), self._message
        native.take_recent_errors()
        path = os.fsencode(self.path)
        of_the_file = -1, -1  # least and most tokens of an image
        arguments = self.model.handle, self.model.on_gpu, self._n_threads, *of_the_file, info
        self._handle = self._api.init(path, *arguments, message, len(message)) or None
        native.raise_pending()
        if self._handle is None:
            reason = native.reason(message)
            if native.short_of_memory(reason):
                raise InsufficientMemoryError(f"no memory for {self.path}: {reason}")
            raise self._refusal(reason)
        self._mrope = bool(info.mrope)
        if info.non_causal:
            raise self._refusal(
                f"images of its kind, {self._kind}, need attention in both directions, which is "
                "not supported"
            )

    def close(self) -> None:
        """Free the encoder. May be called again."""
        with self._lock:  # another thread may be encoding
            handle, self._handle = self._handle, None
            if handle:
                self._api.free(handle)
                self._weights.release()

    def disown(self) -> None:
        """In a forked child: forget the encoder."""
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def prompt(
        self,
        text: str,
        images: Sequence[ImageSource],
        *,
        add_special: bool = True,
        check_length: Callable[[int], object] | None = None,
        read: Callable[[Any], Pixels] = pixels_of,
    ) -> ImagePrompt:
        """A prompt of text in which :data:`IMAGE_MARKER` stands for each of `images`.

        Images are encoded, unless they are known. May be called from several threads.

        Args:
            add_special: put the vocabulary's first token before the text, if it has one.
            check_length: called with the number of tokens before images are encoded, and raises
                if there are too many.
            read: gives the pixels of an image; default: :func:`.pixels_of`.

        Raises:
            UsageError: not as many markers as images, or an image that cannot be used, or too many
                pixels.
            InsufficientMemoryError: no memory to encode an image.
        """
        if isinstance(images, str | bytes | os.PathLike | np.ndarray) or not isinstance(
            images, Sequence
        ):
            raise UsageError(f"images is {type(images).__name__}; give a list of images")
        if not isinstance(text, str):
            raise UsageError("images go with text, in which a marker stands for each of them")
        data = utf8("the text", text)
        if text.count(IMAGE_MARKER) != len(images):
            raise UsageError(
                f"the text has {text.count(IMAGE_MARKER)} markers {IMAGE_MARKER} for "
                f"{len(images)} images; put one where each image belongs"
            )
        with self._lock:  # also around reading: so few pixels are in memory at once
            if not self._handle:
                raise UsageError("the image encoder is closed")
            return self._prompt(data, _read(images, read), add_special, check_length)

    def _prompt(
        self,
        text: bytes,
        images: list[Pixels],
        add_special: bool,
        check_length: Callable[[int], object] | None,
    ) -> ImagePrompt:
        chunks = self._tokenize(text, images, add_special)
        entries, placed, left, encode_s = list[int](), list[PlacedImage](), iter(images), 0.0
        try:
            parts = [self._api.chunk(chunks, i) for i in range(self._api.n_chunks(chunks))]
            if check_length:
                check_length(sum(chunk.n_tokens for chunk in parts))
            for i, chunk in enumerate(parts):
                if not chunk.is_image:
                    if chunk.n_tokens:
                        entries += self._ffi.unpack(chunk.token, chunk.n_tokens)
                    continue
                began = time.perf_counter()
                entry = self._entry(next(left))
                image = self._known.get(entry)
                if image is None:
                    image = self._encode(chunks, i, chunk, entry)
                    encode_s += time.perf_counter() - began
                self._keep(image)
                placed.append(PlacedImage(len(entries), image))
                entries += [entry] * image.n_tokens
        finally:
            self._api.free_chunks(chunks)
        if len(placed) != len(images) or not entries or entries[-1] < 0:
            raise UsageError(
                f"an encoder of the kind {self._kind} cuts the image into several parts, which is "
                "not supported; where it does so for large images only, scale it down"
            )
        return ImagePrompt(entries, tuple(placed), encode_s)

    def forget(self) -> None:
        """Drop the encoded images that are kept: the next prompt has them encoded anew."""
        with self._lock:
            self._known.clear()

    def _entry(self, pixels: Pixels) -> int:
        digest = hashlib.sha256(self._identity)
        digest.update(repr(pixels.shape).encode())
        digest.update(pixels.tobytes())
        return -1 - int.from_bytes(digest.digest()[:15], "big")

    def _keep(self, image: EncodedImage) -> None:
        self._known[image.entry] = image
        self._known.move_to_end(image.entry)
        n_bytes = sum(known.rows.nbytes for known in self._known.values())
        while n_bytes > KEPT_BYTES:
            n_bytes -= self._known.popitem(last=False)[1].rows.nbytes

    def _tokenize(self, text: bytes, images: list[Pixels], add_special: bool) -> Any:
        view = self._ffi.from_buffer
        rows = [view("uint8_t[]", image) for image in images]
        rgb = self._ffi.new("uint8_t *[]", rows or 1)
        width = self._ffi.new("uint32_t[]", [image.shape[1] for image in images] or 1)
        height = self._ffi.new("uint32_t[]", [image.shape[0] for image in images] or 1)
        native.take_recent_errors()
        message = self._message
        given = text, len(text), add_special, rgb, width, height, len(images)
        chunks = self._api.tokenize(self._handle, *given, message, len(message))
        if not chunks:
            raise self._failure("the prompt cannot be prepared")
        return chunks

    def _encode(self, chunks: Any, i: int, chunk: Any, entry: int) -> EncodedImage:
        view, message = self._ffi.from_buffer, self._message
        rows = np.empty((chunk.n_tokens, self.model.n_embd_inp), dtype=np.float32)
        positions = np.empty((chunk.n_tokens, 4), dtype=np.int32)
        native.take_recent_errors()
        found = view("int32_t[]", positions), message, len(message)
        if self._api.positions(chunks, i, *found) != 0:
            raise self._failure("the image has no positions")
        target = view("float[]", rows), rows.size, message, len(message)
        if self._api.encode(self._handle, chunks, i, self._n_threads, *target) != 0:
            raise self._failure("the image cannot be encoded")
        if not np.isfinite(rows).all():
            raise self._refusal("a damaged encoder: it gives numbers that are not finite")
        if not self._mrope:
            positions = positions[:, :1].copy()
        return EncodedImage(entry, rows, positions, chunk.n_pos)

    def _failure(self, what: str) -> Exception:
        """The exception for what has just failed."""
        native.raise_pending()
        reason = native.reason(self._message)
        if native.short_of_memory(reason):
            return InsufficientMemoryError(f"{what}, for lack of memory: {reason}")
        return UsageError(f"{what}: {reason}")


def _read(images: Sequence[ImageSource], read: Callable[[Any], Pixels]) -> list[Pixels]:
    """The pixels of a prompt's images. Raises UsageError: too many together."""
    found = list[Pixels]()
    for image in images:
        found.append(read(image))
        if sum(pixels.size for pixels in found) > 3 * MOST_PIXELS:
            raise UsageError(
                f"the images of a prompt may have {MOST_PIXELS / 1e6:.0f} million pixels together; "
                "scale them down"
            )
    return found


def _api(library: native.Library) -> Any:
    """The functions of libpyllama-vision. Raises LibraryError: it is not there, or damaged."""
    for folder in (library.folder, library.folder.parent):
        path = folder / LIBRARY
        if path.is_file():
            try:
                function = ctypes.CDLL(str(path)).pyllama_vision
            except (OSError, AttributeError) as error:
                raise LibraryError(f"{path} cannot be loaded: {error}") from None
            function.restype = ctypes.c_void_p
            api = library.ffi.cast("struct pyllama_vision_api *", function())
            api.set_log(library.lib.pyllama_on_log)
            return api
    raise LibraryError(f"no {LIBRARY} in {library.folder}; build the package again for images")


def _head(path: Path) -> bytes:
    """A file's metadata, or a part of it: tells encoders apart."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(1 << 20)).digest()


def with_images(
    vision: Vision | None, text: Any, images: Sequence[ImageSource], **options: Any
) -> ImagePrompt:
    """A prompt of :meth:`Vision.prompt`, with its options. Raises UsageError: see there; or there
    is no encoder."""
    if vision is None:
        raise UsageError("images need an encoder; give the session Vision(model, mmproj)")
    return vision.prompt(text, images, **options)
