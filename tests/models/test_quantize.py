"""Quantizing by the library: the same mixtures, whole files or none, and no process that ends."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pyllama_mtp.errors import PyllamaMtpError, UsageError
from pyllama_mtp.models import quantize
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file
from pyllama_mtp.models.quantize import FILE_TYPES, choose_types, quantize_model
from pyllama_mtp.models.synth import write_synthetic

from ..marks import usual

#: Rows with room for blocks of 256.
WIDE = {"n_embd": 256, "n_ff": 512, "n_ff_exp": 256}


def wide(shape: str) -> dict[str, int]:
    return {name: n for name, n in WIDE.items() if (name == "n_ff_exp") <= (shape == "tiny-moe")}


@pytest.fixture(scope="module", params=usual("tiny", long=["tiny-moe"]))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def f16(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("f16") / "m.gguf"
    return write_synthetic(path, shape, "f16", head_noise=0.05, **wide(shape))


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in read_gguf(path).tensors}


@pytest.mark.parametrize(
    ("file_type", "head_type"),
    usual(
        ("q4_k_m", None),
        long=[("q5_0", "bf16"), ("q3_k_m", "q6_k"), ("iq4_xs", "q8_0"), ("q4_0", None)],
    ),
)
def test_synth_writes_what_quantizing_gives(
    shape: str, f16: Path, file_type: str, head_type: str | None, tmp_path: Path
) -> None:
    """The same types; and the same bytes, but for types that are drawn as they are stored."""
    made = quantize_model(f16, tmp_path / "q.gguf", file_type, head_type=head_type)
    drawn = write_synthetic(
        tmp_path / "s.gguf", shape, file_type, head_noise=0.05, head_type=head_type, **wide(shape)
    )
    validate_model_file(made)
    assert types_of(made) == types_of(drawn)
    assert len(set(types_of(made).values())) > 2
    data = {tensor.name: tensor for tensor in gguf.GGUFReader(drawn).tensors}
    compared = 0
    for tensor in gguf.GGUFReader(made).tensors:
        if tensor.tensor_type.name not in ("Q8_0", "Q4_0", "IQ4_NL"):
            assert np.array_equal(tensor.data, data[tensor.name].data), tensor.name
            compared += tensor.tensor_type.name not in ("F32", "F16")
    assert compared
    for path in (made, drawn):
        field = gguf.GGUFReader(path).get_field("general.file_type")
        assert field and field.contents() == FILE_TYPES[file_type]


def test_f32_keeps_every_value(demo_file: Path, tmp_path: Path) -> None:
    """Comparisons with other implementations rest on it."""
    before = gguf.GGUFReader(demo_file)
    after = gguf.GGUFReader(quantize_model(demo_file, tmp_path / "f32.gguf", "f32"))
    wide = {tensor.name: tensor for tensor in after.tensors}
    assert wide.keys() == {tensor.name for tensor in before.tensors}
    assert {tensor.tensor_type.name for tensor in after.tensors} == {"F32"}
    for tensor in before.tensors:
        assert np.array_equal(tensor.data.astype(np.float32), wide[tensor.name].data), tensor.name
    for key in before.fields.keys() - {"GGUF.kv_count", "general.file_type"}:
        assert after.fields[key].contents() == before.fields[key].contents(), key


def test_a_head_type_is_for_the_head_only(f16: Path, tmp_path: Path) -> None:
    info = read_gguf(f16)
    plain, own = (choose_types(info, "q4_k_m", kind) for kind in (None, "bf16"))
    prefix = f"blk.{info.n_layer}."
    changed = {name for name in plain if plain[name] != own[name]}
    matrices = {t.name for t in info.tensors if t.name.startswith(prefix) and t.type == "F16"}
    assert changed == matrices and {own[name] for name in changed} == {"BF16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_type": "q4_k"}, "unknown type 'q4_k'; allowed: .*q4_k_m"),
        ({"head_type": "q4_k_m"}, "unknown head type 'q4_k_m'; allowed: .*q4_k,"),
        ({"file_type": "f16", "head_type": "q8_0"}, "goes with a quantized type"),
        ({"file_type": "iq2_xs"}, "importance matrix"),
        ({"head_type": "iq1_s"}, "head in iq1_s needs an importance matrix"),
        ({"target": "m.gguf", "force": True}, "is the file that is read"),
        ({"source": "q8_0.gguf"}, r"quantized already \(Q8_0\).*--requantize"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    arguments: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_synthetic("m.gguf", "tiny", "f16")
    write_synthetic("q8_0.gguf", "tiny", "q8_0")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    call = {"source": "m.gguf", "target": "q.gguf", "file_type": "q4_k_m", **arguments}
    with pytest.raises(UsageError, match=message):
        quantize_model(**call)  # type: ignore[arg-type]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_quantized_twice_if_that_is_wanted(tiny_dense: Path, tmp_path: Path) -> None:
    path = quantize_model(tiny_dense, tmp_path / "q.gguf", "q4_0", requantize=True)
    assert "Q4_0" in types_of(path).values()


def test_interruption_ends_the_library(
    f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that quantizes is ended, also in the middle of a tensor."""
    went_on, types = tmp_path / "went-on", choose_types(read_gguf(f16), "q4_0", None)
    says = "print('DEBUG\\t[ 1/ 9] blk.0.ffn_up.weight - [ 1], type = f16,', flush=True)"
    goes_on = f"import time; time.sleep(60); open({str(went_on)!r}, 'w')"
    monkeypatch.setattr(quantize, "choose_types", lambda *arguments: types)
    monkeypatch.setattr(quantize.child, "_CHILD", f"{says}; {goes_on}")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(f16, tmp_path / "q.gguf", "q4_0", progress=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("child", ["import os; os.abort()", "1 / 0"])
def test_a_library_that_ends_its_process(
    f16: Path, child: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize.child, "_CHILD", child)
    with pytest.raises(PyllamaMtpError, match="the process that quantizes ended"):
        quantize_model(f16, tmp_path / "q.gguf", "q4_0")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """The library looks at what it reads, and says so."""
    path = write_synthetic(tmp_path / "m.gguf", "tiny", "f16")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight")
    tensor.data[:] = np.inf
    del reader
    with pytest.raises(UsageError, match=r"cannot be quantized: .*invalid data"):
        quantize_model(path, tmp_path / "q.gguf", "q4_0")
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]
