"""A damaged or foreign file gives a typed error that says what is wrong, and costs no memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufheader import read_header


def text(s: str) -> bytes:
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32) + data


ARCH = entry("general.architecture", 8, text("llama"))


def holding(*tensors: bytes) -> bytes:
    """A file of these tensors, with 64 bytes of data."""
    return gguf([ARCH], [*tensors], bytes(64))


def beginning(*entries: bytes) -> bytes:
    """A file whose metadata begin with these entries."""
    return gguf([*entries], [], bytes(64))


def array(key: str, kind: int, length: int) -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, length))


HUGE = (1 << 62) + 1
CASES = {
    "empty": (b"", "is empty"),
    "not a GGUF": (b"PK\x03\x04 a zip file", r"not a GGUF.*PK"),
    "GGUF 1": (gguf([], [], version=1), "version 1"),
    "big-endian": (gguf([], [], version=3 << 24), "big-endian"),
    "huge tensor count": (gguf([ARCH], [], n_tensors=HUGE), "tensor count is"),
    "tensors that are not there": (gguf([ARCH], [], n_tensors=1000), "tensor count is 1000"),
    "huge metadata count": (gguf([ARCH], [], n_entries=HUGE), "metadata count is"),
    "huge string": (beginning(struct.pack("<Q", HUGE)), "truncated"),
    "huge string array": (beginning(array("tokens", 8, HUGE)), "length of 'tokens'"),
    "array of arrays": (beginning(array("a", 9, 1)), "type 9"),
    "unknown value type": (beginning(entry("a", 77, bytes(8))), "unknown type 77"),
    "key twice": (gguf([ARCH, ARCH], []), "appears twice"),
    "bad UTF-8": (beginning(struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "alignment 24": (beginning(entry("general.alignment", 4, b"\x18\0\0\0")), "power of 2"),
    "unknown tensor type": (holding(tensor("t", (32,), 99)), "unknown type 99"),
    "removed tensor type": (holding(tensor("t", (32,), 4)), "unknown type 4;"),
    "rows not of whole blocks": (holding(tensor("t", (33,), 8)), "multiples of"),
    "five dimensions": (holding(tensor("t", (1,) * 5, 0)), "5 dimensions"),
    "no elements": (holding(tensor("t", (0, 4), 0)), "impossible shape"),
    "overflowing shape": (holding(tensor("t", (1 << 40, 1 << 40), 0)), "impossible shape"),
    "long tensor name": (holding(tensor("x" * 64, (1,), 0)), "longer than 63"),
    "tensor twice": (holding(*(tensor("t", (8,), 0, at) for at in (0, 32))), "appears twice"),
    "overlapping tensors": (holding(*(tensor(n, (8,), 0) for n in "ab")), "expected 32"),
    "tensor data cut": (gguf([ARCH], [tensor("t", (8, 4), 0)], bytes(100)), "28 bytes of tensor"),
}


#: A sparse file of 8 GB has room for any count; the limits refuse it all the same.
SPARSE = {
    "metadata count": (gguf([], [], n_entries=100_000), "metadata count is 100000, more than"),
    "tensor count": (gguf([], [], n_tensors=1 << 20), "tensor count is 1048576, more than"),
    "long string": (gguf([struct.pack("<Q", 1 << 32)], []), "no real header is that long"),
    "many strings": (gguf([array("tokens", 8, 1 << 25)], []), "is 33554432, more than"),
}


@pytest.mark.parametrize("case", [*CASES, *SPARSE])
def test_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = {**CASES, **SPARSE}[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    if case in SPARSE:
        os.truncate(path, 8 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    assert peak < 4 << 20


def test_values_of_every_type(tmp_path: Path) -> None:
    scalars = {0: ("B", 200), 1: ("b", -5), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 1 << 31)} | {
        **{5: ("i", -7), 6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -1)},
        12: ("d", 0.1),
    }
    entries = [entry(f"k{t}", t, struct.pack("<" + c, v)) for t, (c, v) in scalars.items()]
    entries.append(entry("array", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)))
    path = tmp_path / "values.gguf"
    path.write_bytes(gguf(entries, []))
    metadata = read_header(path).metadata
    assert {k: metadata[f"k{k}"] for k in scalars} == {k: v for k, (_, v) in scalars.items()}
    assert metadata["array"] == (1, -2, 3)
