"""A processed prompt in a file: tokens, states of the caches, identity of model and settings.

The file is a zip archive of members that are stored, not compressed; numbers are little-endian:

    prompt-1.json  {"identity": {name: text or whole number}, "draft_n_past": whole number,
                   "sections": names of the other members}; see ProcessedPrompt. 1 is the version.
                   With images also "images": what SavedImage says of each.
    tokens         token ids, i32; -1 for rows of images
    target         state of the target cache, as llama.cpp gave it
    draft          of a draft context (upstream's way), likewise; may be absent
    carry          its hidden state of the last position, f32; may be absent

Every member has a CRC-32, against truncated copies and bad disks: it misses no burst of up to 32
bits, and one in 4 billion of other damages. It does not stop a forger: the states go to native
code, so read only files of people you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from .errors import InsufficientMemoryError, PromptFileError, UsageError
from .files import replacing
from .machine import available_memory
from .models.ggufheader import ArraySummary, Value
from .models.modelinfo import GGUFInfo

if TYPE_CHECKING:
    from .engine import Engine
    from .llama.vision import PlacedImage
    from .sequence import Sequence as Text

HEADER = "prompt-1.json"
MAX_HEADER = 1 << 16
#: Bytes read at a time: a section is in memory once.
_CHUNK = 1 << 20
#: Exceptions of zipfile about a damaged archive.
_DAMAGED = (zipfile.BadZipFile, RuntimeError, ValueError, OverflowError, EOFError, struct.error)

Floats = npt.NDArray[np.float32]
Identity = Mapping[str, str | int]
_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class SavedImage(Struct, forbid_unknown_fields=True, frozen=True):
    """An image of a processed prompt; see :class:`.PlacedImage`.

    Attributes:
        start: its first row among the tokens; `n_tokens` rows, `n_positions` positions.
        digest: which image it is: -1 - entry in hexadecimal digits.
        last: its largest position in the cache, from the position of its first row.
    """

    start: _Count
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{1,30}$")]
    n_tokens: _Count
    n_positions: _Count
    last: _Count

    @property
    def entry(self) -> int:
        """Stands for each of its rows in a prompt."""
        return -1 - int(self.digest, 16)


class _Header(Struct, forbid_unknown_fields=True):
    identity: dict[str, str | _Int64]
    draft_n_past: Annotated[int, Meta(ge=0)]
    sections: list[Literal["tokens", "target", "draft", "carry"]]
    images: tuple[SavedImage, ...] = ()


@dataclass(frozen=True, eq=False)
class ProcessedPrompt:
    """The state of a session after a prompt.

    Attributes:
        tokens: ids of the prompt, position 0 first, and entries of images; the caller checks ids
            against its vocabulary.
        target: state of the target cache, which holds exactly `tokens`.
        draft: state of the draft cache; None without MTP.
        draft_n_past: positions of the draft cache in step with the target; 0 without one.
        carry: [n_embd] float32, hidden state of position draft_n_past - 1; None when not known.
        identity: values, by name, that must be equal for the states to fit: the model's
            fingerprint, the upstream commit, cache types. Text or whole numbers of 64 bits.
        images: among the tokens.
    """

    tokens: list[int]
    target: bytes | bytearray
    draft: bytes | bytearray | None
    draft_n_past: int
    carry: Floats | None
    identity: dict[str, str | int]
    images: tuple[SavedImage, ...] = ()


def fingerprint(info: GGUFInfo) -> str:
    """A model's identity as 64 hex digits: SHA-256 of its metadata, tensor table and file size.

    The table has every tensor's name, type, shape and place. The weights are left out, because
    reading them takes as long as loading the model, and so are elements of metadata arrays that the
    header reader does not keep (vocabulary and merges). So the fingerprint differs between models,
    quantizations and conversions, and survives moving or renaming the file. Two fine-tunes of one
    model with the same metadata, name included, have the same fingerprint: the state of one gives
    wrong text with the other.
    """
    described = {
        "architecture": info.architecture,
        "size": info.size,
        "metadata": {key: _plain(value) for key, value in info.metadata.items()},
        "tensors": [[t.name, t.type, t.shape, t.offset] for t in info.tensors],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _plain(value: Value) -> Any:
    if isinstance(value, ArraySummary):
        return {"type": value.type, "length": value.length, "distinct": value.n_distinct}
    return value


# --- writing ------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], prompt: ProcessedPrompt) -> None:
    """Write a file, or replace one: as a whole or not at all; see :func:`.files.replacing`.

    Raises:
        UsageError: an identity that is too long; `path` is no regular file, or its folder cannot
            be written.
        DiskFullError: no space, a quota or a size limit.
    """
    members = _members(prompt)
    shown = f"{os.fspath(path)} ({sum(map(len, members.values())) / 1e6:.1f} MB)"
    with replacing(path, shown) as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def _members(prompt: ProcessedPrompt) -> dict[str, bytes | bytearray]:
    """The archive's members, by name, in file order."""
    tokens = np.array([max(token, -1) for token in prompt.tokens], dtype="<i4")
    sections: dict[str, bytes | bytearray] = {"tokens": tokens.tobytes(), "target": prompt.target}
    if prompt.draft is not None:
        sections["draft"] = prompt.draft
    if prompt.carry is not None:
        sections["carry"] = prompt.carry.astype("<f4").tobytes()
    given: dict[str, Any] = {"identity": prompt.identity, "draft_n_past": prompt.draft_n_past}
    given |= {"sections": [*sections]}
    if prompt.images:
        given["images"] = msgspec.to_builtins(prompt.images)
    text = json.dumps(given).encode()
    if len(text) > MAX_HEADER:
        raise UsageError(f"the identity, or the list of images, has {len(text)} bytes: too long")
    return {HEADER: text, **sections}


# --- reading ------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], identity: Identity) -> ProcessedPrompt:
    """Read and check a file that was made with `identity`.

    Args:
        identity: of this session. A name that only one side has is a difference too.

    Raises:
        PromptFileError: no such file, unreadable, damaged, of an unknown version, or of another
            identity; the message gives both values.
        InsufficientMemoryError: the states do not fit into memory.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for ever
            raise PromptFileError(f"{path} is not a file", path)
        with Path(path).open("rb") as file:
            return _read(file, path, identity)
    except FileNotFoundError:
        raise PromptFileError(f"no such file: {path}", path) from None
    except OSError as error:
        raise PromptFileError(f"cannot read {path}: {error.strerror or error}", path) from error
    except _DAMAGED as error:
        what = str(error) or "it ends too early"
        raise PromptFileError(
            f"{path}: damaged: {what}; process the prompt again and save it anew", path
        ) from error


def _read(file: BinaryIO, path: str | os.PathLike[str], identity: Identity) -> ProcessedPrompt:
    """The contents. Damage raises one of _DAMAGED."""
    start = file.read(4)
    if start != b"PK\3\4":
        what = "the file is empty" if not start else f"it starts with {start!r}"
        raise PromptFileError(f"{path}: not a processed prompt: {what}", path)
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        size = os.fstat(file.fileno()).st_size
        for name, member in members.items():  # before anything takes memory
            if not member.file_size == member.compress_size < size:
                raise ValueError(f"{name} is not stored as it is")
        if HEADER not in members:
            raise PromptFileError(
                f"{path}: not a processed prompt, or of another version: no {HEADER} in it", path
            )
        if members[HEADER].file_size > MAX_HEADER:
            raise ValueError(f"its header has more than {MAX_HEADER} bytes")
        header = msgspec.convert(json.loads(archive.read(members.pop(HEADER))), _Header)
        _compare(path, header.identity, identity)
        sizes = {name: member.file_size for name, member in members.items()}
        _check_sections(header, sizes)
        _check_images(header.images, sizes["tokens"] // 4)
        if (total := sum(sizes.values())) > available_memory():
            raise InsufficientMemoryError(
                f"{path} holds {total / 1e6:.1f} MB of states, "
                f"{available_memory() / 1e6:.1f} MB of memory are available"
            )
        try:
            found = {name: _load(archive, member) for name, member in members.items()}
        except MemoryError:
            raise InsufficientMemoryError(
                f"{path}: no memory for {total / 1e6:.1f} MB of states"
            ) from None
    carry = found.get("carry")
    tokens = np.frombuffer(found["tokens"], dtype="<i4").tolist()
    for image in header.images:
        tokens[image.start : image.start + image.n_tokens] = [image.entry] * image.n_tokens
    return ProcessedPrompt(
        tokens=tokens,
        target=found["target"],
        draft=found.get("draft"),
        draft_n_past=header.draft_n_past,
        carry=None if carry is None else np.frombuffer(carry, "<f4").astype(np.float32),
        identity=header.identity,
        images=header.images,
    )


def _check_images(images: Sequence[SavedImage], n_tokens: int) -> None:
    """Refuse images that are not one after the other within the tokens, or of impossible sizes."""
    free = 0
    for image in images:
        if not (
            free <= image.start < image.start + image.n_tokens <= n_tokens
            and image.last < image.n_positions <= image.n_tokens
        ):
            raise ValueError(f"an image at {image.start} cannot be there")
        free = image.start + image.n_tokens


def _check_sections(header: _Header, sizes: Mapping[str, int]) -> None:
    """Refuse members that differ from the header's list, or have an impossible size."""
    if [*sizes] != header.sections or not {"tokens", "target"} <= {*sizes}:
        raise ValueError(f"it has {[*sizes]}, its header says {header.sections}")
    for name in ("tokens", "carry"):
        if sizes.get(name, 0) % 4:
            raise ValueError(f"section {name} has {sizes[name]} bytes, not 4 each")
    most = sizes["tokens"] // 4 if "draft" in sizes else 0
    if header.draft_n_past > most:
        raise ValueError(f"draft_n_past is {header.draft_n_past}, at most {most} is possible")


def _load(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    """A member's data; zipfile checks its CRC at the end."""
    data = bytearray(member.file_size)
    with archive.open(member) as file, memoryview(data) as view:
        for at in range(0, len(data), _CHUNK):
            view[at : at + _CHUNK] = file.read(_CHUNK)
    return data


def _compare(path: str | os.PathLike[str], made_with: Identity, wanted: Identity) -> None:
    """Raises PromptFileError when the two identities differ, with every difference."""
    differences = [
        f"made with {name} {made_with.get(name, 'unknown')}, this session uses "
        f"{wanted.get(name, 'unknown')}"
        for name in sorted({*made_with, *wanted})
        if made_with.get(name) != wanted.get(name)
    ]
    if differences:
        raise PromptFileError(f"{path}: {'; '.join(differences)}", path)


# --- of a sequence -------------------------------------------------------------------------------


def identity_of(engine: Engine) -> dict[str, str | int]:
    """The identity of a file that fits `engine`; see :class:`.ProcessedPrompt`."""
    settings, head = engine.settings, "apart or none"
    if 0 < engine.head.n_blocks < (engine.model.info.most_drafts or 1):
        head = f"apart, {engine.head.n_blocks} of its blocks"  # no more drafts were wanted
    # A name that only one side has is a difference: these two are left out where they are empty.
    further = {"lora": engine.model.adapters.names, "rope": json.dumps(settings.rope.given)}
    return {
        **{name: text for name, text in further.items() if text not in ("", "{}")},
        "model": fingerprint(engine.model.info),
        "llama.cpp": str(engine.target.library.stamp.get("upstream_commit", "")),
        "cache_type_k": settings.cache_type_k,
        "cache_type_v": settings.cache_type_v,
        "flash_attn": settings.flash_attn,
        "hidden": settings.hidden,
        "mtp": "with the model" if engine.target.options.with_mtp else head,
    }


def save(engine: Engine, sequence: Text, path: str | os.PathLike[str]) -> None:
    """Write the processed text of a sequence.

    Raises:
        UsageError: nothing is processed, or a computation was interrupted.
        ContextClosedError: the context is closed.
        PyllamaMtpError: the file cannot be written; see :func:`write`.
    """
    if engine.target.handle and not (engine.intact and sequence.tokens):
        raise UsageError("there is no processed prompt to save; process one first")
    draft = engine.head.save(sequence)
    target = engine.target.save_state(seq=sequence.id)
    images = tuple(map(_saved, sequence.images))
    found = ProcessedPrompt(list(sequence.tokens), target, *draft, identity_of(engine), images)
    write(path, found)


def _saved(placed: PlacedImage) -> SavedImage:
    image = placed.image
    sizes = image.n_tokens, image.n_positions, int(image.positions[:, 0].max())
    return SavedImage(placed.start, f"{-1 - image.entry:x}", *sizes)


def _placed(saved: SavedImage) -> PlacedImage:
    """A restored image. It has no embeddings: they are in the caches."""
    from .llama.vision import EncodedImage, PlacedImage

    rows = np.zeros((saved.n_tokens, 0), np.float32)
    positions = np.full((saved.n_tokens, 1), saved.last, np.int32)
    image = EncodedImage(saved.entry, rows, positions, saved.n_positions)
    return PlacedImage(saved.start, image)


def restore(engine: Engine, sequence: Text, path: str | os.PathLike[str]) -> int:
    """Put saved text into a sequence, instead of its present text: the number of tokens.

    Raises:
        PromptFileError: damaged, or made with another model, library or settings.
        UsageError: longer than the context.
    """
    found = read(path, identity_of(engine))
    images = [*map(_placed, found.images)]
    entries = {image.entry for image in found.images}
    engine.model.check_tokens([token for token in found.tokens if token not in entries])
    if len(found.tokens) > engine.n_ctx:
        raise UsageError(
            f"{os.fspath(path)} holds {len(found.tokens)} tokens and the context "
            f"{engine.n_ctx}; use a longer n_ctx"
        )
    engine.begin()
    engine.release(sequence)
    try:
        engine.target.load_state(found.target, seq=sequence.id)
        sequence.tokens, sequence.images = list(found.tokens), images
        for image in found.images:
            first = sequence.position(image.start)
            end = first + image.n_positions
            engine.target.note_image(first + image.last, end, sequence.id)
        if engine.target.past(sequence.id) != sequence.position(len(found.tokens)):
            raise PromptFileError(f"{os.fspath(path)}: its state does not match its tokens", path)
        if found.draft is not None:
            engine.head.load(sequence, found.draft, found.draft_n_past, found.carry)
    except BaseException:
        engine.reset()
        raise
    sequence.used = time.monotonic()
    return len(found.tokens)
