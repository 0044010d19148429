"""Files of processed prompts: round trip, identity, damage of every kind, writing that fails."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import promptfile
from pyllama_mtp.errors import (
    DiskFullError,
    InsufficientMemoryError,
    PromptFileError,
    UsageError,
)
from pyllama_mtp.models.ggufheader import ArraySummary, TensorEntry
from pyllama_mtp.models.ggufinfo import GGUFInfo, read_gguf
from pyllama_mtp.models.synth import write_synthetic
from pyllama_mtp.promptfile import ProcessedPrompt, fingerprint, read, write

IDENTITY: dict[str, str | int] = {"model": "ab12", "cache_type_k": "q8_0", "n_rs_seq": 3}
PROMPT = ProcessedPrompt(
    tokens=[5, 0, 2**31 - 1, -1],
    target=b"target state",
    draft=b"draft",
    draft_n_past=4,
    carry=np.array([1.5, -0.0, np.inf], dtype=np.float32),
    identity=IDENTITY,
)
HEADER_AT = 20


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "prompt.bin"
    write(path, dataclasses.replace(PROMPT, **changes))
    return path


def assert_same(a: ProcessedPrompt, b: ProcessedPrompt) -> None:
    for field in ("tokens", "target", "draft", "draft_n_past", "identity"):
        assert getattr(a, field) == getattr(b, field), field
    assert (a.carry is None) == (b.carry is None)
    if a.carry is not None and b.carry is not None:
        assert (a.carry.dtype, a.carry.tobytes()) == (b.carry.dtype, b.carry.tobytes())


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
    ],
)
def test_what_is_read_is_what_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    prompt = dataclasses.replace(PROMPT, **changes)
    write(tmp_path / "p", prompt)
    back = read(tmp_path / "p", prompt.identity)
    assert_same(back, prompt)
    assert all(type(token) is int for token in back.tokens)


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    data = saved(tmp_path).read_bytes()
    magic, version, length, crc = struct.unpack_from("<8sIII", data)
    assert (magic, version) == (b"PYMTP-PP", 1)
    text = data[20 : 20 + length]
    assert crc == zlib.crc32(data[:16] + text)
    parts = {
        "tokens": struct.pack("<4i", *PROMPT.tokens),
        "target": b"target state",
        "draft": b"draft",
        "carry": struct.pack("<3f", 1.5, -0.0, np.inf),
    }
    table = [[name, len(part), zlib.crc32(part)] for name, part in parts.items()]
    assert json.loads(text) == {"identity": IDENTITY, "draft_n_past": 4, "sections": table}
    assert data[20 + length :] == b"".join(parts.values())


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


def test_a_change_of_any_byte_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = path.read_bytes()
    for position in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= flip
            path.write_bytes(changed)
            refused(path)


def test_random_mutations_are_refused(tmp_path: Path) -> None:
    """Stretches overwritten, cut out, doubled or put in, exchanged."""
    path, rng = saved(tmp_path), random.Random(0)
    data = path.read_bytes()
    for _ in range(1000):
        a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        noise = rng.randbytes(rng.randrange(1, 9))
        changed = rng.choice(
            (
                data[:a] + noise + data[a + len(noise) :],
                data[:a] + data[b:],
                data[:b] + data[a:],
                data[:a] + noise + data[a:],
                data[b:] + data[a:b] + data[:a],
            )
        )
        path.write_bytes(changed)
        if changed == data:
            assert_same(read(path, IDENTITY), PROMPT)
        else:
            refused(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"GGUF" + bytes(100), "not a processed prompt: it starts with b'GGUF"),
        (b"PYMTP-PP" + struct.pack("<III", 7, 2, 0) + b"{}", "version 7 is not known; known: 1"),
        (b"PYMTP-PP" + struct.pack("<III", 1, 2**32 - 1, 0), "a header of 4294967295 bytes"),
    ],
)
def test_what_is_no_prompt_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "p"
    path.write_bytes(data)
    refused(path, message)


def with_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write the file again with another header, its checksum right."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[HEADER_AT : HEADER_AT + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    start = struct.pack("<8sII", b"PYMTP-PP", 1, len(text))
    crc = struct.pack("<I", zlib.crc32(start + text))
    path.write_bytes(start + crc + text + data[HEADER_AT + length :])


def section(index: int, *row: Any) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        rows = header["sections"]
        return {**header, "sections": [*rows[:index], list(row), *rows[index + 1 :]]}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: b"\xff\xfe", "not JSON"),
        (lambda h: b"[" * 60_000, "not JSON"),
        (lambda h: b"9" * 60_000, "not JSON|lacks a key"),
        (lambda h: [h], "lacks a key or has another"),
        (lambda h: {"identity": {}, "draft_n_past": 4}, "lacks a key or has another"),
        (lambda h: {**h, "more": 1}, "lacks a key or has another"),
        (lambda h: {**h, "identity": ["a"]}, "the identity is not"),
        (lambda h: {**h, "identity": {"a": 1.5}}, "the identity is not"),
        (lambda h: {**h, "identity": {"a": True}}, "the identity is not"),
        (lambda h: {**h, "identity": {"a": 2**63}}, "the identity is not"),
        (lambda h: {**h, "draft_n_past": 5}, "draft_n_past is 5, at most 4"),
        (lambda h: {**h, "draft_n_past": -1}, "draft_n_past is -1"),
        (lambda h: {**h, "draft_n_past": "4"}, "draft_n_past is '4'"),
        (lambda h: {**h, "draft_n_past": None}, "draft_n_past is None"),
        (lambda h: {**h, "sections": {}}, "no list of sections"),
        (lambda h: {**h, "sections": h["sections"] * 2}, "no list of sections"),
        (lambda h: {**h, "sections": []}, "possible are"),
        (lambda h: {**h, "sections": h["sections"][1:]}, "possible are"),
        (lambda h: {**h, "sections": h["sections"][::-1]}, "possible are"),
        (lambda h: {**h, "sections": h["sections"][:3] + h["sections"][2:3]}, "possible are"),
        (section(2, "other", 5, 0), "possible are"),
        (section(2, "draft", 5), "a row of the section table"),
        (section(2, 7, 5, 0), "a row of the section table"),
        (section(2, "draft", -5, 0), "a row of the section table"),
        (section(2, "draft", 5.0, 0), "a row of the section table"),
        (section(2, "draft", True, 0), "a row of the section table"),
        (section(2, "draft", 5, None), "a row of the section table"),
        (section(0, "tokens", 15, 0), "15 bytes, not 4 each"),
        (section(3, "carry", 11, 0), "11 bytes, not 4 each"),
        (section(1, "target", 2**62, 0), "bytes, its header says 46116860184273"),
        (section(1, "target", 2**63, 0), "a row of the section table"),
        (section(1, "target", 10**4000, 0), "a row of the section table"),
        (section(1, "target", 11, 0), "its header says"),
        (section(1, "target", 12, 0), "the checksum of section target"),
        (section(3, "carry", 12, 2**62), "the checksum of section carry"),
        (lambda h: {**h, "sections": h["sections"][:2]}, "at most 0 is possible"),
    ],
)
def test_header_that_makes_no_sense(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """The checksum is right, so a faulty writer or a forger must have made these."""
    path = saved(tmp_path)
    with_header(path, lambda h: h)
    assert_same(read(path, IDENTITY), PROMPT)
    with_header(path, change)
    refused(path, message)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such file")
    refused(tmp_path, "is not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is not a file")
    file = saved(tmp_path)
    refused(file / "below", "cannot read .*Not a directory")


def test_states_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, target=bytes(1_000_000))
    monkeypatch.setattr(promptfile, "available_memory", lambda: 999_999)
    with pytest.raises(InsufficientMemoryError, match=r"holds 1.0 MB of states"):
        read(path, IDENTITY)


# --- writing that fails ---------------------------------------------------------------------------


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """The file size limit strikes; the file that was there stays, and nothing else."""
    path = saved(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DiskFullError, match=r"cannot write .*prompt.bin \(1.0 MB\): File too"):
            saved(tmp_path, target=bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(read(path, IDENTITY), PROMPT)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(5, "Input/output error"), UsageError, "cannot write .*prompt.bin: Input/output"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_failure_before_the_last_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: type[BaseException],
    message: str | None,
) -> None:
    path = saved(tmp_path)
    seen: list[list[str]] = []

    def fail(fd: int) -> None:
        seen.append(sorted(p.name for p in tmp_path.iterdir()))
        raise error

    monkeypatch.setattr(promptfile.os, "fsync", fail)
    with pytest.raises(expected, match=message):
        saved(tmp_path, target=b"other")
    assert len(seen[0]) == 2, "written beside the file, brought to the disk before the renaming"
    assert_same(read(path, IDENTITY), PROMPT)
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    file = saved(tmp_path)
    with pytest.raises(UsageError, match="is no regular file"):
        write(tmp_path, PROMPT)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file"):
        write(tmp_path / "pipe", PROMPT)
    with pytest.raises(UsageError, match=r"cannot write .*absent/p: No such file"):
        write(tmp_path / "absent" / "p", PROMPT)
    with pytest.raises(UsageError, match=r"cannot write .*below: Not a directory"):
        write(file / "below", PROMPT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "prompt.bin"]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    write(link, dataclasses.replace(PROMPT, target=b"new"))
    assert link.is_symlink()
    assert read(path, IDENTITY).target == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [2**31, 1, 2, 3]}, "token ids must be"),
        ({"tokens": [1.5, 1, 2, 3]}, "token ids must be"),
        ({"tokens": [[1], 1, 2, 3]}, "token ids must be"),
        ({"draft_n_past": 5}, "draft_n_past is 5 with 4 tokens and a draft state"),
        ({"draft_n_past": -1}, "draft_n_past is -1"),
        ({"draft": None}, "draft_n_past is 4 with 4 tokens and no draft state"),
        ({"carry": np.zeros((1, 3), np.float32)}, r"a carry of shape \(1, 3\)"),
        ({"identity": {"p_min": 0.5}}, "text or whole numbers"),
        ({"identity": {"mtp": True}}, "text or whole numbers"),
        ({"identity": {1: 1}}, "text or whole numbers"),
        ({"identity": {"n": 2**63}}, "text or whole numbers"),
        ({"identity": {"model": "x" * 65_536}}, "the identity is too long"),
    ],
)
def test_values_that_the_format_cannot_hold(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        saved(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


# --- fingerprint ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("tiny") / "m.gguf", "tiny", "q8_0")


@pytest.fixture(scope="module")
def tiny(tiny_file: Path) -> GGUFInfo:
    return read_gguf(tiny_file)


def test_fingerprint_of_a_known_model(tiny: GGUFInfo) -> None:
    """Must stay the same over versions of Python and of this package: files carry it."""
    metadata = {
        "general.architecture": "qwen35",
        "a": ArraySummary(8, 2048, None),
        "b": (1, 2.5, True),
        "c": 1e-6,
    }
    tensors = (TensorEntry("output.weight", (64, 2), "Q8_0", 96, 136),)
    info = dataclasses.replace(
        tiny, architecture="qwen35", size=1234, metadata=metadata, tensors=tensors
    )
    assert fingerprint(info) == "9c5c324e3f57b3f7b70a150a083fc2907373ca7f0768778201f2dfa5b3bd5866"


def test_fingerprint_survives_a_move(tiny: GGUFInfo, tiny_file: Path, tmp_path: Path) -> None:
    moved = tmp_path / "other name.gguf"
    moved.write_bytes(tiny_file.read_bytes())
    assert fingerprint(read_gguf(moved)) == fingerprint(tiny)
    shuffled = dataclasses.replace(tiny, metadata=dict(reversed(tiny.metadata.items())))
    assert fingerprint(shuffled) == fingerprint(tiny), "the order of metadata means nothing"


def test_fingerprint_tells_models_apart(tiny: GGUFInfo) -> None:
    first, *rest = tiny.tensors
    summary = tiny.metadata["tokenizer.ggml.tokens"]
    assert isinstance(summary, ArraySummary)
    others = [
        {"architecture": "other"},
        {"size": tiny.size + 1},
        {"metadata": {**tiny.metadata, "general.name": "other"}},
        {"metadata": {**tiny.metadata, "extra": 1}},
        {"metadata": {**tiny.metadata, "extra": True}},
        {"metadata": {**tiny.metadata, "extra": 1.0}},
        {
            "metadata": {
                **tiny.metadata,
                "tokenizer.ggml.tokens": dataclasses.replace(summary, length=summary.length + 1),
            }
        },
        *(
            {"tensors": (dataclasses.replace(first, **change), *rest)}
            for change in (
                {"name": "other"},
                {"type": "F16"},
                {"shape": first.shape[::-1]},
                {"offset": first.offset + 32},
            )
        ),
        {"tensors": (*rest, first)},
    ]
    prints = {fingerprint(dataclasses.replace(tiny, **change)) for change in others}
    assert len(prints | {fingerprint(tiny)}) == len(others) + 1
