"""MTP heads in files of their own: found, joined to their model, refused; taken out and put in."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp.errors import (
    HeadMismatchError,
    ModelFileError,
    NoMtpHeadError,
    PyllamaMtpError,
    UsageError,
)
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.sidecar import NO_HEAD, find_head, is_head
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head
from pyllama_mtp.models.synth import write_synthetic

from ..processes import Program
from ..trimmed import write_trimmed
from .test_parts import write_parts


def tensors(info: GGUFInfo) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Type, shape and digest of the bytes of every tensor."""
    found = {}
    for t in info.tensors:
        with Path(t.file).open("rb") as file:
            file.seek(t.offset)
            found[t.name] = (t.type, t.shape, hashlib.sha256(file.read(t.nbytes)).hexdigest())
    return found


@pytest.fixture(params=["demo_file", "tiny_dense", "moe_file"])
def whole(request: pytest.FixtureRequest) -> Path:
    """Models with one matrix for embedding and LM head, and with two; dense and of experts."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def pair(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The model without its head, and the head."""
    trunk = drop_head(whole, tmp_path / "m.gguf")
    return trunk, extract_head(whole, tmp_path / "h.gguf")


def test_taken_apart_and_put_together_it_is_the_model(
    whole: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    trunk, head = pair
    info = read_gguf(trunk)
    assert not info.has_mtp and "qwen35" in info.architecture
    assert f"{info.architecture}.nextn_predict_layers" not in info.metadata
    assert is_head(read_gguf(head))
    source = read_gguf(whole)
    joined = validate_model_file(trunk, head=head)
    assert tensors(joined) == tensors(source)
    assert joined.head == str(head) and {name for name, _ in joined.head_tensors} == {
        t.name for t in source.tensors if t.name.startswith(f"blk.{source.n_layer}.")
    }
    back = read_gguf(graft_head(trunk, head, tmp_path / "back.gguf"))
    assert tensors(back) == tensors(source)
    assert back.metadata == source.metadata == joined.metadata


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "bf16"])
def test_a_head_of_another_type_brings_its_own_embedding_and_lm_head(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    head = extract_head(whole, tmp_path / "h.gguf", kind)
    trunk = drop_head(whole, tmp_path / "m.gguf")
    info, source = validate_model_file(trunk, head=head), read_gguf(whole)
    if kind.upper() in source.tensor_types:
        assert tensors(info) == tensors(source)
        return
    nextn = f"blk.{info.n_layer}.nextn."
    found = tensors(info)
    for name in ("embed_tokens", "shared_head_head", "eh_proj"):
        assert found[f"{nextn}{name}.weight"][0] == kind.upper()
    assert found[f"{nextn}hnorm.weight"] == tensors(source)[f"{nextn}hnorm.weight"]
    assert f"{nextn}shared_head_norm.weight" in found
    grafted = read_gguf(graft_head(trunk, head, tmp_path / "back.gguf"))
    assert tensors(grafted) == found
    again = extract_head(grafted.path, tmp_path / "again.gguf")
    assert tensors(read_gguf(again)) == tensors(read_gguf(head))


def test_a_head_in_the_model_is_replaced(whole: Path, tmp_path: Path) -> None:
    head = extract_head(whole, tmp_path / "h.gguf", "q5_0")
    info = validate_model_file(whole, head=head)
    gone = [name for name, there in info.head_tensors if there is None]
    assert gone == [t.name for t in read_gguf(whole).tensors if f"blk.{info.n_layer}." in t.name]
    trunk = drop_head(whole, tmp_path / "m.gguf")
    assert tensors(info) == tensors(read_gguf(trunk, head))
    graft = graft_head(whole, head, tmp_path / "g.gguf")
    assert tensors(read_gguf(graft)) == tensors(info)


def test_a_trimmed_head(tiny_dense: Path, tmp_path: Path) -> None:
    """Inside a file, in a file as FastMTP's are published, and from one to the other."""
    ids = np.array([5, 2047, 700, 0, 31])
    inside = write_trimmed(tiny_dense, tmp_path / "in.gguf", ids, ids)
    beside = write_trimmed(tiny_dense, tmp_path / "out.gguf", ids, ids, sidecar=True)
    trunk = drop_head(inside, tmp_path / "m.gguf")
    assert "d2t" not in tensors(read_gguf(trunk))
    for head in (beside, extract_head(inside, tmp_path / "h.gguf")):
        info = validate_model_file(trunk, head=head)
        rows = info.trimmed_head
        assert rows and rows.shape[1] == 5
        assert tensors(info) == tensors(read_gguf(inside))


def test_parts(demo_file: Path, tmp_path: Path) -> None:
    """A split model: the head from it, and one beside it."""
    head = extract_head(demo_file, tmp_path / "mtp-m.gguf")
    first, *_ = write_parts(drop_head(demo_file, tmp_path / "w.gguf"), tmp_path, 40)
    info = validate_model_file(first)
    assert info.head == str(head) and tensors(info) == tensors(read_gguf(demo_file))
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = write_parts(demo_file, folder, 40)
    assert tensors(read_gguf(extract_head(parts[0], folder / "h.gguf"))) == tensors(
        read_gguf(head, NO_HEAD)
    )
    back = read_gguf(graft_head(first, head, tmp_path / "back.gguf"))
    assert tensors(back) == tensors(info) and "split.count" not in back.metadata


@pytest.mark.parametrize(
    ("model", "heads", "found"),
    [
        ("Qwen3.8-27B-UD-Q4_K_XL", ["mtp-Qwen3.8-27B-Q4_0"], 0),
        ("Qwen3.8-27B-Q8_0", ["mtp-Qwen3.8-27B-Q4_0", "mtp-Qwen3.8-27B-Q8_0"], 1),
        ("Qwen3.8-27B-Q4_K_M-00001-of-00003", ["MTP/mtp-Qwen3.8-27B-BF16"], 0),
        ("qwen3.6-27b-nvfp4-q4_k_m-mtp", ["mtp-Qwen3.6-27B-NVFP4"], 0),
        ("NAME", ["mtp-NAME"], 0),
        ("Qwen3.8-27B-Q4_0", ["mtp-Qwen3.8-2B-Q4_0", "mtp-Qwen3.8-9B", "Qwen3.8-27B-Q8_0"], None),
        ("Qwen3.8-270B-Q4_0", ["mtp-Qwen3.8-27B-Q4_0", "mtp-.gguf", "mmproj-F16"], None),
    ],
)
def test_the_names_that_publishers_give(
    model: str, heads: list[str], found: int | None, tmp_path: Path
) -> None:
    (tmp_path / "MTP").mkdir()
    for name in (model, *heads):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    wanted = None if found is None else tmp_path / f"{heads[found]}.gguf"
    assert find_head(tmp_path / f"{model}.gguf") == wanted


def test_one_that_lies_beside_the_model_is_taken(pair: tuple[Path, Path], tmp_path: Path) -> None:
    trunk, head = pair
    with pytest.raises(NoMtpHeadError, match=r"no MTP head.*\(head\)"):
        validate_model_file(trunk)
    beside = head.rename(tmp_path / "mtp-m-Q4_0.gguf")
    assert validate_model_file(trunk).head == str(beside)
    assert validate_model_file(trunk, require_mtp=False).head == ""
    with pytest.raises(NoMtpHeadError):
        validate_model_file(trunk, head=NO_HEAD)
    with pytest.raises(ModelFileError, match="MTP head alone; give the file of the model"):
        validate_model_file(beside)


def _other(folder: Path, **changes: Any) -> Path:
    source = write_synthetic(folder / "other.gguf", changes.pop("shape", "tiny"), "q8_0", **changes)
    return extract_head(source, folder / "h.gguf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: _other(folder, n_embd=256), "n_embd is 256 and the model has 128"),
        (lambda folder: _other(folder, n_layer=8), "n_layer is 8 and the model has 4"),
        (lambda folder: _other(folder, n_vocab=4096), "n_vocab is 4096 and the model has 2048"),
        (lambda folder: _other(folder, n_ff=512), "n_ff is 512"),
        (lambda folder: _other(folder, shape="tiny-moe"), "architecture is 'qwen35moe'"),
        (lambda folder: drop_head(folder / "whole.gguf", folder / "h.gguf"), "has no MTP head"),
    ],
    ids=["width", "layers", "vocabulary", "ffn", "architecture", "none"],
)
def test_a_head_that_does_not_fit(
    make: Callable[[Path], Path], message: str, tiny_dense: Path, tmp_path: Path
) -> None:
    whole = Path(shutil.copy(tiny_dense, tmp_path / "whole.gguf"))
    trunk = drop_head(whole, tmp_path / "m.gguf")
    head = make(tmp_path)
    for use in (
        lambda: validate_model_file(trunk, head=head),
        lambda: graft_head(trunk, head, tmp_path / "out.gguf"),
    ):
        with pytest.raises(HeadMismatchError, match=message):
            use()
    assert not (tmp_path / "out.gguf").exists()
    head.rename(tmp_path / "mtp-m.gguf")
    with pytest.raises(HeadMismatchError, match=r"mtp-m\.gguf"):
        validate_model_file(trunk)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("output_norm.weight", 3.0, "its final norm (output_norm) is another model's"),
        ("output_norm.weight", 1.01, None),
        ("tokens", None, "its vocabulary has other tokens"),
    ],
)
def test_the_head_of_another_model_of_this_shape(
    name: str,
    change: float | None,
    message: str | None,
    tiny_dense: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Known by the norm that it has of its model, or by its vocabulary; a fine-tune's is used."""
    trunk = drop_head(tiny_dense, tmp_path / "m.gguf")
    head = extract_head(tiny_dense, tmp_path / "h.gguf")
    data = bytearray(head.read_bytes())
    if change is None:
        at = data.index(b"<|im_end|>")
        data[at + 2 : at + 4] = b"MI"
    else:
        (tensor,) = (t for t in read_gguf(head).tensors if t.name == name)
        values = np.frombuffer(data, "<f4", tensor.nbytes // 4, tensor.offset)
        changed = (values * np.float32(change)).tobytes()
        data[tensor.offset : tensor.offset + tensor.nbytes] = changed
    head.write_bytes(data)
    if message is None:
        validate_model_file(trunk, head=head)
        assert "was made of another version" in caplog.text
        return
    with pytest.raises(HeadMismatchError) as caught:
        validate_model_file(trunk, head=head)
    assert message in str(caught.value) and str(head) in str(caught.value)


def test_what_is_refused(demo_file: Path, tmp_path: Path) -> None:
    trunk = drop_head(demo_file, tmp_path / "m.gguf")
    out = tmp_path / "out.gguf"
    cases: list[tuple[type[PyllamaMtpError], str, Callable[[], object]]] = [
        (NoMtpHeadError, "no MTP head", lambda: extract_head(trunk, out)),
        (NoMtpHeadError, "no MTP head to be left out", lambda: drop_head(trunk, out)),
        (UsageError, "unknown type 'q9'", lambda: extract_head(demo_file, out, "q9")),
        (UsageError, "importance matrix", lambda: extract_head(demo_file, out, "iq2_xxs")),
        (UsageError, "is read", lambda: graft_head(trunk, demo_file, trunk, force=True)),
        (ModelFileError, "no such", lambda: graft_head(trunk, tmp_path / "x.gguf", out)),
    ]
    for kind, message, act in cases:
        with pytest.raises(kind, match=message):
            act()
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf"}


def test_the_command(in_process: Program, demo_file: Path) -> None:
    made = in_process("head", "extract", demo_file, "-o", "mtp-t.gguf", "--type", "q4_0")
    assert made.stdout.startswith(b"mtp-t.gguf: 17 tensors (Q4_0 0.5 MB")
    in_process("head", "drop", demo_file, "-o", "t-F16.gguf")
    in_process("head", "graft", "t-F16.gguf", "mtp-t.gguf", "-o", "g.gguf")
    said = in_process("inspect", "t-F16.gguf").stdout
    assert b"complete (1 block), in mtp-t.gguf" in said and b"NOT" not in said
    assert b"MTP head alone" in in_process("inspect", "mtp-t.gguf").stdout
    options = ("generate", "--max-tokens", 8, "--threads", 1, "x = ")
    beside = in_process(*options, "-m", "t-F16.gguf")
    assert beside.stderr == b"pyllama-mtp: the MTP head is in mtp-t.gguf\n"
    given = in_process(*options, "-m", "t-F16.gguf", "-md", "mtp-t.gguf")  # llama.cpp's name
    assert (given.stdout, given.stderr) == (beside.stdout, b"")
    assert in_process(*options, "-m", "g.gguf").stdout == beside.stdout
    bad = in_process(*options, "-m", "t-F16.gguf", "--head", "t-F16.gguf", code=2)
    assert b"t-F16.gguf has no MTP head" in bad.stderr
