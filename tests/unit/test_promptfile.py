"""Files of processed prompts: round trip, identity, damage of every kind, a full disk."""

from __future__ import annotations

import dataclasses
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import promptfile
from pyllama_mtp.checkpoints import Checkpoint
from pyllama_mtp.errors import InsufficientMemoryError, PromptFileError, UsageError
from pyllama_mtp.llama.batch import KeptRow
from pyllama_mtp.models.ggufheader import ArraySummary, TensorEntry
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.promptfile import (
    ProcessedPrompt,
    SavedImage,
    fingerprint,
    read,
    weights_sample,
    write,
)

IDENTITY: dict[str, str | int] = {"model": "ab12", "cache_type_k": "q8_0", "n_rs_seq": 3}
PROMPT = ProcessedPrompt(
    tokens=[5, 0, 2**31 - 1, -1],
    target=b"target state",
    draft=b"draft",
    draft_n_past=4,
    carry=np.array([1.5, -0.0, np.inf], dtype=np.float32),
    identity=IDENTITY,
)
HEADER = "prompt-1.json"
IMAGES = (SavedImage(1, "ab12", 3, 2, 1), SavedImage(5, "0", 1, 1, 0))
#: Rows of an image stand as its entry among the tokens.
SEEN = [7, *[-1 - 0xAB12] * 3, 8, -1, 9]
ROWS = (
    KeptRow(5, np.array([5, 2], np.int32), np.array([2.5, 1.0], np.float32)),
    KeptRow(values=np.arange(7, dtype=np.float32)),
    KeptRow(3),
)
CHECKPOINTS = (
    Checkpoint(1, b"one", np.array([[1.5, 2.0, 0.5]], np.float32)),
    *(Checkpoint(2 + i, bytes(5 + i), None, row) for i, row in enumerate(ROWS)),
)


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "prompt.bin"
    write(path, dataclasses.replace(PROMPT, **changes))
    return path


def bits(array: Any) -> object:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def described(checkpoint: Checkpoint) -> list[object]:
    row = checkpoint.row
    kept = row and [row.best, bits(row.ids), bits(row.values)]
    return [checkpoint.n_past, bytes(checkpoint.state), bits(checkpoint.carry), kept]


def assert_same(a: ProcessedPrompt, b: ProcessedPrompt) -> None:
    for field in ("tokens", "target", "draft", "draft_n_past", "identity", "images", "n_bytes"):
        assert getattr(a, field) == getattr(b, field), field
    assert bits(a.carry) == bits(b.carry)
    assert [*map(described, a.checkpoints)] == [*map(described, b.checkpoints)]


# --- round trip -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft": None, "draft_n_past": 0, "carry": None},
        {"draft": None, "draft_n_past": 0},
        {"carry": None, "draft_n_past": 2},
        {"draft": b"", "target": b"", "tokens": [], "draft_n_past": 0},
        {"identity": {}},
        {"identity": {"größe": "größer", "least": -(2**63)}},
        {"target": bytes(range(256)) * 4096},
        {"tokens": SEEN, "images": IMAGES},
        {"checkpoints": CHECKPOINTS},
    ],
)
def test_what_is_read_is_what_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    prompt = dataclasses.replace(PROMPT, **changes)
    write(tmp_path / "p", prompt)
    back = read(tmp_path / "p", prompt.identity)
    assert_same(back, prompt)
    assert all(type(token) is int for token in back.tokens)


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(saved(tmp_path)) as archive:
        assert all(one.compress_type == zipfile.ZIP_STORED for one in archive.infolist())
        found = {name: archive.read(name) for name in archive.namelist()}
    parts = {
        "tokens": struct.pack("<4i", *PROMPT.tokens),
        "target": b"target state",
        "draft": b"draft",
        "carry": struct.pack("<3f", 1.5, -0.0, np.inf),
    }
    header = json.loads(found.pop(HEADER))
    assert header == {"identity": IDENTITY, "draft_n_past": 4, "sections": list(parts)}
    assert found == parts and list(found) == list(parts)


def test_a_file_is_found_by_its_tokens_and_the_places_of_checkpoints(tmp_path: Path) -> None:
    bare = read(saved(tmp_path, checkpoints=CHECKPOINTS), IDENTITY, states=False)
    assert (bare.tokens, bare.n_bytes) == (PROMPT.tokens, 0)
    places = [(one.n_past, one.row is not None) for one in bare.checkpoints]
    assert places == [(1, False), (2, True), (3, True), (4, True)]


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({**IDENTITY, "cache_type_k": "f16"}, "made with cache_type_k q8_0, this session uses f16"),
        ({**IDENTITY, "n_rs_seq": 0}, "made with n_rs_seq 3, this session uses 0$"),
        ({**IDENTITY, "tap": "pre"}, "made with tap unknown, this session uses pre"),
        ({"model": "ab12", "n_rs_seq": 3}, "cache_type_k q8_0, this session uses unknown"),
        ({**IDENTITY, "model": "x", "n_rs_seq": 1}, "model ab12.*uses x; .*n_rs_seq 3.*uses 1"),
    ],
)
def test_another_identity_is_refused_by_name(
    tmp_path: Path, session: dict[str, str | int], message: str
) -> None:
    path = saved(tmp_path)
    with pytest.raises(PromptFileError, match=message) as caught:
        read(path, session)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.path == str(path)


# --- damage ---------------------------------------------------------------------------------------


def refused(path: Path, match: str = ".") -> None:
    with pytest.raises(PromptFileError, match=match) as caught:
        read(path, IDENTITY)
    assert str(path) in str(caught.value)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        refused(path, "not a processed prompt|damaged")


def outcome(path: Path) -> bool:
    """Whether a file that was changed is refused; what is read of another is what was written."""
    try:
        found = read(path, IDENTITY)
    except PromptFileError as error:
        assert str(path) in str(error)
        return True
    assert_same(found, PROMPT)
    return False


def test_a_change_of_any_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """A bit of each. Harmless: what an archive has beside its members, such as their times and
    attributes."""
    path = saved(tmp_path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        places = [data.index(archive.read(name)) for name in archive.namelist()]
        sizes = [one.file_size for one in archive.infolist()]
    inside = {at + i for at, size in zip(places, sizes, strict=True) for i in range(size)}
    refusals = set()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        if outcome(path):
            refusals.add(position)
    assert inside <= refusals and len(refusals) > 2 / 3 * len(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"GGUF" + bytes(100), "not a processed prompt: it starts with b'GGUF"),
        (b"PK\3\4" + bytes(100), "damaged: File is not a zip file; process the prompt again"),
    ],
)
def test_what_is_no_prompt_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "p"
    path.write_bytes(data)
    refused(path, message)


def forge(path: Path, change: Callable[[dict[str, bytes]], Any], **how: Any) -> None:
    """Write the file again with other members, their checksums right."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def header(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    """Another header; a field of None is left out."""

    def change(members: dict[str, bytes]) -> None:
        fields = {**json.loads(members[HEADER]), **changes}
        members[HEADER] = json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()

    return change


def member(name: str, data: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda members: members.update({name: data})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (member(HEADER, b"\xff\xfe"), "damaged: Expecting value"),
        (member(HEADER, b"[" * 60_000), "damaged: .*recursion"),
        (member(HEADER, b" " * 65_537), "its header has more than 65536 bytes"),
        (lambda members: members.pop(HEADER), "not a processed prompt, or of another version: no"),
        (header(sections=...), "missing required field `sections`"),
        (header(more=1), "unknown field `more`"),
        (header(identity={"a": 1.5}), r"Expected `int \| str`, got `float` - at `\$.identity"),
        (header(draft_n_past=5), "draft_n_past is 5, at most 4"),
        (header(draft_n_past=-1), r"Expected `int` >= 0 - at `\$.draft_n_past`"),
        (header(sections=[]), r"its header says \[\]"),
        (header(sections=["tokens", "target", "draft", "other"]), "its header says"),
        (lambda members: members.pop("draft"), "its header says"),
        (lambda members: members.pop("tokens"), "its header says"),
        (member("other", b""), "its header says"),
        (member("tokens", bytes(15)), "15 bytes, not 4 each"),
        (
            lambda m: (m.pop("draft"), header(sections=["tokens", "target", "carry"])(m)),
            "at most 0 is possible",
        ),
        (
            lambda m: (m.pop("tokens"), header(sections=["target", "draft", "carry"])(m)),
            "its header says",
        ),
    ],
)
def test_contents_that_make_no_sense(
    tmp_path: Path, change: Callable[[dict[str, bytes]], Any], message: str
) -> None:
    """The checksums are right, so a faulty writer or a forger must have made these."""
    path = saved(tmp_path)
    forge(path, lambda members: None)
    assert_same(read(path, IDENTITY), PROMPT)
    forge(path, change)
    refused(path, message)


IMPOSSIBLE: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("images", 0): [
        *({"start": -1}, {"start": 5}, {"n_tokens": 5}, {"n_tokens": 0}, {"n_positions": 4}),
        *({"n_positions": 0}, {"last": 2}, {"digest": "-1"}, {"digest": "f" * 31}, {"x": 0}),
        {"start": 1 << 40},
    ],
    ("checkpoints", 1): [{"n_past": 3}, {"n_past": 5}, {"n_state": 4}, {"n_ids": -1}, {"x": 0}],
}


@pytest.mark.parametrize(("name", "i"), IMPOSSIBLE)
def test_what_cannot_be_there(tmp_path: Path, name: str, i: int) -> None:
    """An image or a checkpoint of a file is said to be another."""
    for changes in IMPOSSIBLE[name, i]:
        path = saved(tmp_path, tokens=SEEN, images=IMAGES, checkpoints=CHECKPOINTS)
        read(path, IDENTITY)

        def change(members: dict[str, bytes], changes: dict[str, Any] = changes) -> None:
            fields = json.loads(members[HEADER])
            fields[name][i] |= changes
            members[HEADER] = json.dumps(fields).encode()

        forge(path, change)
        refused(path, "damaged")


def test_what_is_compressed_is_refused_before_it_is_taken_apart(tmp_path: Path) -> None:
    """A file could otherwise be a thousand times as large in memory."""
    path = saved(tmp_path)
    forge(path, member("target", bytes(10_000_000)), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 20_000
    refused(path, "is not stored as it is")


@pytest.mark.parametrize("size", [2**31, 2**32 - 2])
def test_a_size_beyond_the_file_is_refused(tmp_path: Path, size: int) -> None:
    path = saved(tmp_path, target=bytes(13))
    data, old = path.read_bytes(), struct.pack("<II", 13, 13)
    path.write_bytes(data.replace(old, struct.pack("<II", size, size)))
    assert data.count(old) == 2, "target's, in front of it and in the directory"
    refused(path, "target is not stored as it is")


def test_states_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, target=bytes(1_000_000))
    monkeypatch.setattr(promptfile, "available_memory", lambda: 999_999)
    with pytest.raises(InsufficientMemoryError, match=r"holds 1.0 MB of states"):
        read(path, IDENTITY)


# --- writing ---------------------------------------------------------------------------


def test_an_identity_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        saved(tmp_path, identity={"model": "x" * 65_536})
    assert not list(tmp_path.iterdir())


# --- fingerprint ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(demo_file: Path) -> GGUFInfo:
    return read_gguf(demo_file)


def test_fingerprint_of_a_known_model(model: GGUFInfo) -> None:
    """Must stay the same over versions of Python and of this package: files carry it."""
    metadata = {
        "general.architecture": "qwen35",
        "a": ArraySummary(8, 2048, None),
        "b": (1, 2.5, True),
        "c": 1e-6,
    }
    tensors = (TensorEntry("output.weight", (64, 2), "Q8_0", 96, 136),)
    info = dataclasses.replace(
        model, architecture="qwen35", size=1234, metadata=metadata, tensors=tensors
    )
    assert fingerprint(info) == "9c5c324e3f57b3f7b70a150a083fc2907373ca7f0768778201f2dfa5b3bd5866"


def test_weights_tell_fine_tunes_apart(model: GGUFInfo, demo_file: Path, tmp_path: Path) -> None:
    """A file with the same metadata, and one byte of a tensor changed."""
    tuned = tmp_path / "tuned.gguf"
    data = bytearray(demo_file.read_bytes())
    tensor = model.tensors[len(model.tensors) // 2]
    data[tensor.offset + tensor.nbytes // 2] ^= 1
    tuned.write_bytes(data)
    other = read_gguf(tuned)
    assert fingerprint(other) == fingerprint(model)
    assert weights_sample(other) != weights_sample(model) == weights_sample(read_gguf(demo_file))
