"""MTP heads over a part of the vocabulary: what files may say of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp.errors import ModelFileError
from pyllama_mtp.models.ggufinfo import validate_model_file

from ..processes import Cli
from ..trimmed import rewrite, tensors_of, write_trimmed

#: Tokens of a head, in an order of no kind; the vocabulary has 2,048.
IDS = np.array([5, 2047, 700, 0, 31], dtype=np.int64)
#: Ascending, two of them neighbours, as any real list has.
NEIGHBOURS = np.array([0, 5, 6, 31, 2047])
HEAD = "blk.4.nextn.shared_head_head.weight"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("which", ["tiny_dense", "moe_file"])
def test_a_trimmed_head(
    which: str, dtype: type[np.generic], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    whole: Path = request.getfixturevalue(which)
    info = validate_model_file(
        write_trimmed(whole, tmp_path / "m.gguf", IDS, IDS.astype(dtype)), require_mtp=True
    )
    head = info.trimmed_head
    assert head and head.name == HEAD and head.shape == (128, 5)
    assert info.mtp_complete


def test_a_whole_head_is_not_trimmed(tiny_dense: Path, tmp_path: Path) -> None:
    """A head over the whole vocabulary, the block's own or the model's, in any order of ids."""
    every = np.arange(2048)
    own = validate_model_file(write_trimmed(tiny_dense, tmp_path / "own.gguf", every, None))
    for info in (own, validate_model_file(tiny_dense)):
        assert info.trimmed_head is None
    back = every[::-1].astype(np.int64)
    validate_model_file(write_trimmed(tiny_dense, tmp_path / "back.gguf", back, back))


def changed(at: int, value: int) -> npt.NDArray[np.int64]:
    ids = IDS.copy()
    ids[at] = value
    return ids


#: Rows of the head, d2t, and the complaint about them.
MALFORMED: dict[str, tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.generic] | None, str]] = {
    "too few ids": (IDS, IDS[:4], f"d2t has 4 entries for the 5 rows of {HEAD}"),
    "too many ids": (IDS[:4], IDS, f"d2t has 5 entries for the 4 rows of {HEAD}"),
    "an id for every token": (IDS, np.arange(2048), "d2t has 2048 entries for the 5 rows"),
    "id out of range": (IDS, changed(2, 2048), "d2t: row 2 is token 2048, .* 0 to 2047"),
    "id beyond 32 bits": (IDS, changed(2, 2**32 + 7), "d2t: row 2 is token 4294967303"),
    "negative": (IDS, changed(4, -1), "d2t: row 4 is token -1"),
    "negative, 32 bits": (IDS, changed(4, -1).astype(np.int32), "d2t: row 4 is token -1"),
    "the same id twice": (IDS, changed(4, 5), "d2t: token 5 has 2 rows"),
    "floats": (IDS, IDS.astype(np.float32), "d2t has type F32; token ids are I32 or I64"),
    "16 bits": (IDS, IDS.astype(np.int16), "d2t has type I16"),
    "two dimensions": (IDS, IDS[:4].reshape(2, 2), r"d2t is \(2, 2\), expected one dimension"),
    "one row of ids": (IDS, IDS.reshape(5, 1), r"d2t is \(1, 5\), expected one dimension"),
    "no ids": (IDS, None, f"{HEAD} has 5 rows for a vocabulary of 2048 .* no tensor d2t"),
    "no head": (None, IDS, rf"there is a tensor d2t, .* no such head \({HEAD}\)"),
    "offsets": (
        NEIGHBOURS,
        NEIGHBOURS - np.arange(5),
        r"d2t: token 4 has 2 rows; it seems to hold offsets .*convert the model again",
    ),
}


@pytest.fixture(scope="module")
def malformed(tiny_dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("malformed")
    return {
        name: write_trimmed(tiny_dense, folder / f"{index}.gguf", rows, d2t)
        for index, (name, (rows, d2t, _)) in enumerate(MALFORMED.items())
    }


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_one_is_refused(malformed: dict[str, Path], name: str, mtp: bool) -> None:
    """Without MTP too: the library would look at the tensors all the same."""
    with pytest.raises(ModelFileError, match=MALFORMED[name][2]) as caught:
        validate_model_file(malformed[name], require_mtp=mtp)
    assert str(malformed[name]) in str(caught.value)
    assert ("offsets" in str(caught.value)) is (name == "offsets")


def test_rows_of_another_length(tiny_dense: Path, tmp_path: Path) -> None:
    """Rows as of a narrower model, and a stack of heads."""
    tensors = tensors_of(write_trimmed(tiny_dense, tmp_path / "t.gguf", IDS, IDS))
    for shape in ((5, 64), (5, 256), (5, 2, 128), (128,)):
        other = {**tensors, HEAD: (np.zeros(shape, np.float32), None)}
        path = rewrite(tiny_dense, tmp_path / "m.gguf", other)
        with pytest.raises(ModelFileError, match=rf"{HEAD} is \(.*\), expected \(128, 2048\)"):
            validate_model_file(path)


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect_shows_it(cli: Cli, tiny_dense: Path, tmp_path: Path) -> None:
    path = write_trimmed(tiny_dense, tmp_path / "m.gguf", IDS, IDS)
    assert "complete (1 block, trimmed to 5 of 2048 tokens)\n" in cli("inspect", path).out
    assert json.loads(cli("inspect", path, "--json").out)["mtp_trimmed_to"] == 5
    assert "complete (1 block)\n" in cli("inspect", tiny_dense).out
    assert json.loads(cli("inspect", tiny_dense, "--json").out)["mtp_trimmed_to"] is None


@pytest.mark.parametrize("name", ["too few ids", "the same id twice", "no head", "no ids"])
def test_inspect_shows_what_is_wrong(cli: Cli, malformed: dict[str, Path], name: str) -> None:
    out = cli("inspect", malformed[name]).out
    assert "MTP head        MALFORMED, " in out and "d2t" in out
    json.loads(cli("inspect", malformed[name], "--json").out)
