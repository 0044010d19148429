"""A processed prompt in a file: tokens, states of the caches, identity of model and settings.

The file is a zip archive of members that are stored, not compressed; numbers are little-endian:

    prompt-1.json  {"identity": {name: text or whole number}, "draft_n_past": whole number,
                   "sections": names of the other members}; see ProcessedPrompt. 1 is the version.
                   With images also "images": what SavedImage says of each.
    tokens         token ids, i32; -1 for rows of images
    target         state of the target cache, as llama.cpp gave it
    draft          of a draft context (upstream's way), likewise; may be absent
    carry          its hidden state of the last position, f32; may be absent
    checkpoint-N   a checkpoint after the first N tokens; those of SavedCheckpoint in the header,
                   under "checkpoints"; may be absent

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
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from .checkpoints import Checkpoint
from .errors import InsufficientMemoryError, ModelFileError, PromptFileError, UsageError
from .files import replacing
from .llama.batch import KeptRow, State
from .llama.devicestates import on_host
from .llama.vision import EncodedImage, PlacedImage
from .machine import available_memory
from .models.ggufheader import ArraySummary, Value
from .models.modelinfo import GGUFInfo

if TYPE_CHECKING:
    from .llama.model import Model

HEADER = "prompt-1.json"
MAX_HEADER = 1 << 16
#: Bytes read at a time: a section is in memory once.
_CHUNK = 1 << 20
#: Bytes of each tensor that tell models apart.
SAMPLE = 64
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

    @classmethod
    def of(cls, placed: PlacedImage) -> SavedImage:
        """An image as it is saved."""
        image = placed.image
        last = int(image.positions[:, 0].max())
        return cls(placed.start, f"{-1 - image.entry:x}", image.n_tokens, image.n_positions, last)

    def placed(self) -> PlacedImage:
        """The restored image. It has no embeddings: they are in the caches."""
        rows = np.zeros((self.n_tokens, 0), np.float32)
        positions = np.full((self.n_tokens, 1), self.last, np.int32)
        return PlacedImage(self.start, EncodedImage(self.entry, rows, positions, self.n_positions))

    @property
    def end(self) -> int:
        """One past its last row."""
        return self.start + self.n_tokens

    @property
    def entry(self) -> int:
        """Stands for each of its rows in a prompt."""
        return -1 - int(self.digest, 16)


class SavedCheckpoint(Struct, forbid_unknown_fields=True, frozen=True):
    """A checkpoint of a processed prompt, and the lengths of its member's parts.

    Attributes:
        n_past: tokens before it.
        n_state: bytes of the state.
        n_carry, n_ids, n_values: then elements of `carry`, of `ids` and `values` of its row, 4
            bytes each.
        best: of the row.
        has_row: there is a row.
    """

    n_past: _Count
    n_state: _Count
    n_carry: _Count = 0
    n_ids: _Count = 0
    n_values: _Count = 0
    best: _Count | None = None
    has_row: bool = False

    @property
    def name(self) -> str:
        """Of the member."""
        return f"checkpoint-{self.n_past}"

    @property
    def size(self) -> int:
        """Of the member, in bytes."""
        return self.n_state + 4 * (self.n_carry + self.n_ids + self.n_values)


class _Header(Struct, forbid_unknown_fields=True, omit_defaults=True):
    identity: dict[str, str | _Int64]
    draft_n_past: Annotated[int, Meta(ge=0)]
    sections: list[str]
    images: tuple[SavedImage, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()


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
        checkpoints: along the tokens.
    """

    tokens: list[int]
    target: State
    draft: State | None
    draft_n_past: int
    carry: Floats | None
    identity: dict[str, str | int]
    images: tuple[SavedImage, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of its states."""
        parts = self.target, self.draft or b""
        return sum(map(len, parts)) + sum(one.n_bytes for one in self.checkpoints)

    def without_states(self) -> ProcessedPrompt:
        """The same, to be found by."""
        bare = tuple(
            Checkpoint(one.n_past, b"", row=one.row and KeptRow()) for one in self.checkpoints
        )
        return replace(self, target=b"", draft=None, draft_n_past=0, carry=None, checkpoints=bare)

    def check_tokens(self, model: Model) -> None:
        """Raise UsageError: tokens that the model's vocabulary does not have."""
        entries = {image.entry for image in self.images}
        model.check_tokens([token for token in self.tokens if token not in entries])
        for row in (one.row for one in self.checkpoints if one.row):
            best = [] if row.best is None else [row.best]
            model.check_tokens(best + ([] if row.ids is None else row.ids.tolist()))
            if row.ids is None and row.values is not None and row.best is None:
                model.check_tokens([len(row.values) - 1])


def fingerprint(info: GGUFInfo) -> str:
    """A model's identity as 64 hex digits: SHA-256 of its metadata, tensor table and file size.

    The table has every tensor's name, type, shape and place. The weights are left out, because
    reading them takes as long as loading the model (see :func:`weights_sample`), and so are
    elements of metadata arrays that the header reader does not keep (vocabulary and merges). So the
    fingerprint differs between models, quantizations and conversions, and survives moving or
    renaming the file.
    """
    described = {
        "architecture": info.architecture,
        "size": info.size,
        "metadata": {key: _plain(value) for key, value in info.metadata.items()},
        "tensors": [[t.name, t.type, t.shape, t.offset] for t in info.tensors],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def weights_sample(info: GGUFInfo) -> str:
    """32 hex digits of bytes from the middle of every tensor: they tell fine-tunes apart whose
    metadata are the same. "": the file cannot be read any more."""
    digest = hashlib.sha256()
    try:
        for tensor in info.tensors:
            middle = tensor.nbytes // 2
            digest.update(tensor.read((middle, min(SAMPLE, tensor.nbytes - middle))))
    except ModelFileError:
        return ""
    return digest.hexdigest()[:32]


def _plain(value: Value) -> Any:
    if isinstance(value, ArraySummary):
        return {"type": value.type, "length": value.length, "distinct": value.n_distinct}
    return value


# --- writing ------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], prompt: ProcessedPrompt) -> None:
    """Write a file, or replace one: as a whole or not at all; see :func:`.files.replacing`. Only
    its owner can read it, at any time: it holds a conversation.

    Raises:
        UsageError: an identity that is too long; `path` is no regular file, or its folder cannot
            be written.
        DiskFullError: no space, a quota or a size limit.
    """
    members = _members(prompt)
    shown = f"{os.fspath(path)} ({sum(map(len, members.values())) / 1e6:.1f} MB)"
    with replacing(path, shown, 0o600) as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)


def about(path: Path) -> os.stat_result | None:
    """Of a file that begins like one of :func:`write`; None for anything else, links too."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(file)
        begin = os.read(file, 30 + len(HEADER)) if stat.S_ISREG(state.st_mode) else b""
    finally:
        os.close(file)
    return state if begin.startswith(b"PK") and begin[30:] == HEADER.encode() else None


def _members(prompt: ProcessedPrompt) -> dict[str, State]:
    """The archive's members, by name, in file order."""
    tokens = np.array([max(token, -1) for token in prompt.tokens], dtype="<i4")
    sections: dict[str, State] = {"tokens": tokens.tobytes(), "target": prompt.target}
    if prompt.draft is not None:
        sections["draft"] = prompt.draft
    if prompt.carry is not None:
        sections["carry"] = prompt.carry.astype("<f4").tobytes()
    described = [*map(_described, prompt.checkpoints)]
    for saved, one in zip(described, prompt.checkpoints, strict=True):
        row = one.row or KeptRow()
        rest = [array.tobytes() for array in (one.carry, row.ids, row.values) if array is not None]
        sections[saved.name] = b"".join([on_host(one.state), *rest])
    about = prompt.identity, prompt.draft_n_past, [*sections], prompt.images, tuple(described)
    text = json.dumps(msgspec.to_builtins(_Header(*about))).encode()
    if len(text) > MAX_HEADER:
        raise UsageError(f"the identity, or the list of images, has {len(text)} bytes: too long")
    return {HEADER: text, **sections}


def _described(one: Checkpoint) -> SavedCheckpoint:
    row = one.row or KeptRow()
    n = [0 if part is None else part.size for part in (one.carry, row.ids, row.values)]
    has_row = one.row is not None
    return SavedCheckpoint(one.n_past, len(one.state), n[0], n[1], n[2], row.best, has_row)


def _checkpoint(saved: SavedCheckpoint, data: bytearray) -> Checkpoint:
    """A checkpoint of its member; without data one that only says where it is."""
    at, parts = saved.n_state, list[Any]()
    for n, kind in ((saved.n_carry, "<f4"), (saved.n_ids, "<i4"), (saved.n_values, "<f4")):
        n = n if data else 0
        parts.append(np.frombuffer(data, kind, n, at).copy() if n else None)
        at += 4 * n
    del data[saved.n_state :]
    carry, ids, values = parts
    row = KeptRow(saved.best, ids, values) if saved.has_row else None
    return Checkpoint(saved.n_past, data, carry if carry is None else carry[None, :], row)


# --- reading ------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], identity: Identity, states: bool = True) -> ProcessedPrompt:
    """Read and check a file that was made with `identity`.

    Args:
        identity: of this session. A name that only one side has is a difference too.
        states: False: the header and the tokens are read, and :meth:`.without_states` is given.

    Raises:
        PromptFileError: no such file, unreadable, damaged, of an unknown version, or of another
            identity; the message gives both values.
        InsufficientMemoryError: the states do not fit into memory.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would wait for ever
            raise PromptFileError(f"{path} is not a file", path)
        with Path(path).open("rb") as file:
            return _read(file, path, identity, states)
    except FileNotFoundError:
        raise PromptFileError(f"no such file: {path}", path) from None
    except OSError as error:
        raise PromptFileError(f"cannot read {path}: {error.strerror or error}", path) from error
    except _DAMAGED as error:
        what = str(error) or "it ends too early"
        raise PromptFileError(
            f"{path}: damaged: {what}; process the prompt again and save it anew", path
        ) from error


def _read(
    file: BinaryIO, path: str | os.PathLike[str], identity: Identity, states: bool
) -> ProcessedPrompt:
    """The contents. Damage raises one of _DAMAGED."""
    start = file.read(4)
    if start != b"PK\3\4":
        what = "the file is empty" if not start else f"it starts with {start!r}"
        raise PromptFileError(f"{path}: not a processed prompt: {what}", path)
    with zipfile.ZipFile(file) as archive:
        members = _listed(archive, os.fstat(file.fileno()).st_size)
        if HEADER not in members:
            raise PromptFileError(
                f"{path}: not a processed prompt, or of another version: no {HEADER} in it", path
            )
        if members[HEADER].file_size > MAX_HEADER:
            raise ValueError(f"its header has more than {MAX_HEADER} bytes")
        header = msgspec.convert(json.loads(archive.read(members.pop(HEADER))), _Header)
        compare(path, header.identity, identity)
        _check_sections(header, {name: member.file_size for name, member in members.items()})
        if not states:
            members = {"tokens": members["tokens"]}
        total = sum(member.file_size for member in members.values())
        if total > (free := available_memory()):
            raise InsufficientMemoryError(
                f"{path} holds {total / 1e6:.1f} MB of states, {free / 1e6:.1f} MB of memory are "
                "available"
            )
        try:
            found = {name: _load(archive, member) for name, member in members.items()}
        except MemoryError:
            raise InsufficientMemoryError(
                f"{path}: no memory for {total / 1e6:.1f} MB of states"
            ) from None
    tokens = np.frombuffer(found["tokens"], dtype="<i4").tolist()
    for image in header.images:
        tokens[image.start : image.start + image.n_tokens] = [image.entry] * image.n_tokens
    return ProcessedPrompt(
        tokens=tokens,
        target=found.get("target", b""),
        draft=found.get("draft"),
        draft_n_past=header.draft_n_past if states else 0,
        carry=np.frombuffer(found["carry"], "<f4").copy() if "carry" in found else None,
        identity=header.identity,
        images=header.images,
        checkpoints=tuple(
            _checkpoint(one, found.get(one.name, bytearray())) for one in header.checkpoints
        ),
    )


def _listed(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive of so many bytes, by name, before anything takes memory."""
    members = {member.filename: member for member in archive.infolist()}
    for name, member in members.items():
        stored = member.compress_type == zipfile.ZIP_STORED
        if not (stored and member.file_size == member.compress_size < size):
            raise ValueError(f"{name} is not stored as it is")
    return members


def _check_sections(header: _Header, sizes: Mapping[str, int]) -> None:
    """Refuse members that differ from the header's list, or have an impossible size; images that
    are not one after the other within the tokens, or have one."""
    checkpoints = {one.name: one for one in header.checkpoints}
    known = {"tokens", "target", "draft", "carry", *checkpoints}
    needed = {"tokens", "target", *checkpoints}
    if [*sizes] != header.sections or not needed <= {*sizes} <= known:
        raise ValueError(f"it has {[*sizes]}, its header says {header.sections}")
    n_tokens, free, before = sizes["tokens"] // 4, 0, 0
    for image in header.images:
        within = free <= image.start < image.end <= n_tokens
        if not (within and image.last < image.n_positions <= image.n_tokens):
            raise ValueError(f"an image at {image.start} cannot be there")
        free = image.end
    for name, one in checkpoints.items():
        if one.size != sizes[name] or not before < one.n_past <= n_tokens:
            raise ValueError(f"{name} has {sizes[name]} bytes, and cannot be there")
        before = one.n_past
    for name in ("tokens", "carry"):
        if sizes.get(name, 0) % 4:
            raise ValueError(f"section {name} has {sizes[name]} bytes, not 4 each")
    most = n_tokens if "draft" in sizes else 0
    if header.draft_n_past > most:
        raise ValueError(f"draft_n_past is {header.draft_n_past}, at most {most} is possible")


def _load(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    """A member's data; zipfile checks its CRC at the end."""
    data = bytearray(member.file_size)
    with archive.open(member) as file, memoryview(data) as view:
        for at in range(0, len(data), _CHUNK):
            view[at : at + _CHUNK] = file.read(_CHUNK)
    return data


def compare(path: str | os.PathLike[str], made_with: Identity, wanted: Identity) -> None:
    """Raises PromptFileError when the two identities differ, with every difference."""
    differences = [
        f"made with {name} {made_with.get(name, 'unknown')}, this session uses "
        f"{wanted.get(name, 'unknown')}"
        for name in sorted({*made_with, *wanted})
        if made_with.get(name) != wanted.get(name)
    ]
    if differences:
        raise PromptFileError(f"{path}: {'; '.join(differences)}", path)
