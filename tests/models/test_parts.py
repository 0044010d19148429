"""Models split into several files load as one; parts that do not fit together are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import read_gguf, validate_model_file

from ..trimmed import head_rows, rewrite, tensors_of


def write_parts(source: Path, folder: Path, most: int) -> list[Path]:
    """Split a model into files of `most` tensors each, by the gguf package."""
    rewrite(source, folder / "m.gguf", tensors_of(source), split_max_tensors=most)
    return sorted(folder.glob("m-*.gguf"))


@pytest.fixture(scope="module")
def parts(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_parts(demo_file, tmp_path_factory.mktemp("parts"), 40)


def test_a_split_model_is_the_model(parts: list[Path], demo_file: Path) -> None:
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    info, whole = validate_model_file(parts[0]), read_gguf(demo_file)
    assert [(t.name, t.shape, t.type) for t in info.tensors] == [
        (t.name, t.shape, t.type) for t in whole.tensors
    ]
    assert {t.file for t in info.tensors} == {str(part) for part in parts}
    assert info.size == sum(part.stat().st_size for part in parts)

    def text(path: Path) -> list[int]:
        settings = Settings(n_ctx=128, n_threads=1, draft_n_max=2)
        with Model(path) as model, Session(model, settings) as session:
            return session.generate("def f(x):", max_tokens=8).run().tokens

    assert text(parts[0]) == text(demo_file)


def test_rows_of_the_head_are_read_where_it_is(moe_file: Path, tmp_path: Path) -> None:
    parts, ids = write_parts(moe_file, tmp_path, 30), np.arange(0, 2048, 7, dtype=np.int32)
    split, whole = head_rows(parts[0], ids), head_rows(moe_file, ids)
    (place,) = {t.file for t in read_gguf(parts[0]).tensors if t.name == "output.weight"}
    assert place == str(parts[-1])
    assert np.array_equal(split.data, whole.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].unlink(), "part 2 of 3 is missing"),
        (lambda parts: shutil.copy(parts[2], parts[1]), "not part 2"),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-9]), "truncated: 9 bytes"),
        (lambda parts: parts[2].write_bytes(b"GGUF"), "truncated: version"),
    ],
    ids=["missing", "another", "truncated", "empty"],
)
def test_parts_that_do_not_fit(
    change: Callable[[list[Path]], object], message: str, parts: list[Path], tmp_path: Path
) -> None:
    mine = [Path(shutil.copy(part, tmp_path)) for part in parts]
    change(mine)
    with pytest.raises(ModelFileError, match=message):
        Model(mine[0])


def test_only_the_first_part_is_taken(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"give the first, m-00001-of-00003\.gguf"):
        read_gguf(parts[1])
    other = shutil.copy(parts[0], tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"must be named NAME-00001-of-00003\.gguf"):
        read_gguf(other)


def test_a_number_of_another_type_is_refused(parts: list[Path], tmp_path: Path) -> None:
    """The loader ends the process on it: it asks for a number of 16 bits."""
    mine = [Path(shutil.copy(part, tmp_path)) for part in parts]
    data = mine[1].read_bytes()
    at = data.index(b"split.no") + len(b"split.no")
    assert data[at : at + 4] == b"\x02\0\0\0"  # 16 bits, unsigned
    mine[1].write_bytes(data[:at] + b"\x03" + data[at + 1 :])
    with pytest.raises(ModelFileError, match="not part 2"):
        validate_model_file(mine[0])
