"""What passes between host and device: counted in a process of its own, by functions that come
before ggml's (traffic.c)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_mtp.models.synth import write_synthetic

from ..preloaded import compile_library, run_preloaded

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """traffic.c, compiled."""
    return compile_library(HERE / "traffic.c", tmp_path_factory.mktemp("traffic"))


def run(library: Path, script: str, *arguments: object) -> str:
    """What a script beside this file prints."""
    done = run_preloaded(library, HERE / script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Settings, and what drafting and verifying then take: graphs, uploads, downloads, waits, and
#: graphs on the CPU.
ROUNDS: list[tuple[dict[str, object], tuple[int, ...], tuple[int, ...]]] = [
    ({}, (0, 0, 0, 0, 0), (2, 2, 1, 1, 0)),
    ({"n_sequences": 4}, (0, 0, 0, 0, 0), (2, 2, 1, 1, 0)),
    ({"p_min": 0.01}, (1, 1, 2, 1, 0), (1, 1, 1, 2, 1)),
    ({"draft_n_max": 0}, (0, 0, 0, 0, 0), (1, 1, 1, 2, 1)),
]


def test_a_round(library: Path, tmp_path: Path) -> None:
    """Two graphs, none of which leaves the device, an upload for each, one download and one wait.
    With p_min drafts come to the host first. A pass over tokens that the host knows looks up their
    embeddings on the CPU, and waits before it copies them."""
    # CUDA leaves convolutions to the CPU where 128 does not divide the channels: the demo model's.
    model = write_synthetic(tmp_path / "tiny.gguf", "tiny", "f16", head_noise=0.05)
    usual = {"draft_n_max": 3, "ngram": False, "draft_vocab": 300, "draft_follow": False}
    chosen = json.dumps([{**usual, **options} for options, *_ in ROUNDS])
    lines = run(library, "count.py", model, chosen).splitlines()
    for (options, draft, verify), line in zip(ROUNDS, lines, strict=True):
        found = json.loads(line)
        rounds = {phase: tuple(counts.values()) for phase, counts in found["round"].items()}
        nothing = dict.fromkeys(("accept", "roll_back"), (0,) * 5)
        assert rounds == {"draft": draft, "verify": verify, **nothing}, options
        assert found["prompt"]["graphs"] == 4, "one for each batch"
        assert found["prompt"]["downloads"] <= 1, "what the last one chose"


def test_a_device_that_fails(library: Path, demo_file: Path) -> None:
    """The failure is an error, freeing what is left ends no process, and the CPU goes on."""
    assert run(library, "fail.py", demo_file).splitlines() == ["FatalDecodeError", "3"]
