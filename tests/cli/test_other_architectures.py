"""The commands on models whose MTP head drafts in upstream's way: one block for all drafts, and
several that draft a token each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..architectures import write_model
from ..marks import usual
from ..processes import Program

pytestmark = pytest.mark.usefixtures("at_once")
BLOCKS = {"glm4moe": 1, "step35": 2}
SMALL = ("-p", "32", "-n", "12", "--repeat", "1", "--threads", "1", "--format", "markdown")
FEWER = b"step35.gguf has 2 MTP blocks, each of which drafts one token: at most 2 a round"


@pytest.fixture(scope="module", params=usual("step35", long=["glm4moe"]))
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_model(
        request.param, folder / f"{request.param}.gguf", BLOCKS[request.param], noise=0.05
    )


def test_matrix(other: Path, in_process: Program) -> None:
    """A depth that the model cannot draft at is not measured."""
    given = ("-m", str(other), "--depths", "0,2,4", "--no-output", *SMALL)
    done = in_process("matrix", *given, "--draft-vocab", "512,full")
    several = BLOCKS[other.stem] > 1
    assert done.stdout.count(b"| MTP 2 |") == 2
    assert done.stdout.count(b"| MTP 4 |") == (0 if several else 2)
    assert (FEWER + b": deeper is not measured\n" in done.stderr) == several


@pytest.mark.long
def test_tune(other: Path, in_process: Program) -> None:
    """It measures at the most drafts that the model can make in a round."""
    several = BLOCKS[other.stem] > 1
    done = in_process(
        *("tune", "-m", str(other), "--limit", "3", "--prompt-size", "40", "--threads", "1"),
        *("--repeat", "2", "--n-ctx", "256", "--json"),
    )
    assert len(json.loads(done.stdout)["draft"]) == 1 + (2 if several else 3)
    assert (FEWER in done.stderr) == several


def test_options_that_do_not_apply(other: Path, in_process: Program) -> None:
    given = ("-m", str(other), "--depths", "0,2", "--no-output", *SMALL, "--sync", "kv,full")
    done = in_process("matrix", *given, code=2)
    said = f"is not there for models of architecture '{other.stem}'; use another model"
    assert said in done.stderr.decode()
