"""A head in a file of its own drafts as it does inside the model's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.memory import resolve, simulate
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.models.surgery import drop_head, extract_head, graft_head

from ..marks import usual

PROMPTS = ("def add(a, b):\n    return", "class Node:\n    def __init__(self,", "import os\n\n")


class Files:
    """A model in every form that a head may have, the head of one type."""

    def __init__(self, whole: Path, folder: Path, kind: str | None) -> None:
        self.whole = whole
        self.head = extract_head(whole, folder / "mtp-trunk.gguf", kind)
        self.trunk = drop_head(whole, folder / "trunk.gguf")
        self.grafted = graft_head(self.trunk, self.head, folder / "grafted.gguf")


@pytest.fixture(scope="module", params=[None, "q4_0"], ids=["as it is", "q4_0"])
def files(
    demo_file: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Files:
    return Files(demo_file, tmp_path_factory.mktemp("heads"), request.param)


def drafted(path: Path, head: Path | str | None, **options: Any) -> list[tuple[Any, ...]]:
    """For each prompt: the tokens, and the drafts made and accepted."""
    found: list[tuple[Any, ...]] = []
    settings = Settings(**{"n_ctx": 256, "n_threads": 1, "draft_n_max": 3, **options})
    with Model(path, head=head) as model, Session(model, settings) as session:
        for prompt in PROMPTS:
            answer = session.generate(prompt, max_tokens=48, log_pairs=True, ignore_eos=True).run()
            t = answer.telemetry
            found.append((answer.tokens, t.drafted, t.accepted, t.pairs))
    return found


@pytest.mark.parametrize(
    "options",
    usual(
        {},
        long=[
            {"draft_vocab": 700},
            {"prompt_sync": "full"},
            {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            {"draft_head_type": "q4_0", "draft_vocab": "full"},
        ],
    ),
    ids=str,
)
def test_the_same_drafts(files: Files, options: dict[str, Any]) -> None:
    inside = drafted(files.grafted, NO_HEAD, **options)
    assert drafted(files.trunk, None, **options) == inside
    assert drafted(files.whole, files.head, **options) == inside
    if files.head.stat().st_size > 1e6:  # as it is
        assert drafted(files.whole, None, **options) == inside


def test_its_own_lm_head_is_what_drafts_come_from(demo_file: Path, tmp_path: Path) -> None:
    """A draft is made of it: with an LM head of nothing but zeros every token is as likely."""
    head = extract_head(demo_file, tmp_path / "h.gguf", "q8_0")
    (tensor,) = (t for t in read_gguf(head).tensors if t.name == "token_embd.weight")
    data = bytearray(head.read_bytes())
    data[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    head.write_bytes(data)
    for vocab in ("auto", 700):
        found = drafted(demo_file, head, draft_vocab=vocab)
        assert {pair.drafted for _, _, _, pairs in found for pair in pairs} == {0}


def test_memory_counts_it(files: Files) -> None:
    settings = Settings(n_ctx=256, n_threads=1, draft_n_max=3)

    def parts(path: Path, head: Path | str | None) -> dict[str, int]:
        with Model(path, head=head, no_alloc=True) as model:
            return simulate(model, resolve(settings, model))[0].parts

    assert parts(files.trunk, files.head) == parts(files.grafted, NO_HEAD)
