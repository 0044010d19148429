"""llama.cpp against an independent PyTorch implementation of the demo model, in F32.

The reference (``tests/data/demo_reference.npz``) was computed with transformers' Qwen3.5 classes
for the trunk and a head written out in plain PyTorch; what each array holds is said in
``bench/demo_model/reference.py``. It is read here without PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.quantize import quantize_model

TOLERANCE = 1e-3  # largest absolute difference of a logit
REFERENCE = Path(__file__).parents[1] / "data" / "demo_reference.npz"
ONE = np.ones(1, dtype=np.int8)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("f32") / "demo-f32.gguf"
    with Model(quantize_model(demo_path(), path, "f32")) as model:
        yield model


def options(**changes: Any) -> ContextOptions:
    common: dict[str, Any] = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_threads": 1}
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    return ContextOptions(**{**common, **exact, **changes})


@pytest.fixture(scope="module")
def trunk(model: Model, reference: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sequence: all logits [T, n_vocab] and all tapped rows [T, n_embd], in one batch."""
    found = []
    for tokens in reference["tokens"]:
        with Context(model, options(tap="all", n_outputs_max=256)) as target:
            target.decode(tokens, 0, np.ones(len(tokens), dtype=np.int8))
            logits = np.stack([target.logits(row) for row in range(len(tokens))])
            found.append((logits, target.hidden_rows().copy()))
    return found


def worst(found: list[np.ndarray], expected: np.ndarray) -> float:
    return float(np.abs(np.stack(found) - expected).max())


def test_trunk_logits_and_hidden_rows(
    trunk: list[tuple[np.ndarray, np.ndarray]], reference: dict[str, Any]
) -> None:
    rows = reference["positions"]
    assert worst([logits[rows] for logits, _ in trunk], reference["trunk_logits"]) < TOLERANCE
    assert worst([hidden[rows] for _, hidden in trunk], reference["hidden"]) < TOLERANCE


def test_head_logits_of_the_first_and_second_draft_step(
    model: Model, trunk: list[tuple[np.ndarray, np.ndarray]], reference: dict[str, Any]
) -> None:
    """Position p: first fed with the head's own state of p-1 (a second draft step), then, the
    position removed again, with the trunk's row h_{p-1} (a first draft step)."""
    first, second, states = [], [], []
    zero = np.zeros((1, model.n_embd), dtype=np.float32)
    for tokens, (_, hidden) in zip(reference["tokens"], trunk, strict=True):
        firsts, seconds, own = [], [], [zero]
        with Context(model, options(mtp_head=True, tap="outputs")) as draft:
            for p in range(len(tokens)):
                draft.decode(tokens[p : p + 1], p, ONE, own[-1])
                seconds.append(draft.logits(0).copy())
                assert draft.remove(p)
                draft.decode(tokens[p : p + 1], p, ONE, hidden[p - 1 : p] if p else zero)
                firsts.append(draft.logits(0).copy())
                own.append(draft.hidden_rows().copy())
        rows = reference["positions"]
        first.append(np.stack(firsts)[rows])
        second.append(np.stack(seconds)[rows])
        states.append(np.concatenate(own[1:])[rows])
    assert worst(first, reference["head_logits"]) < TOLERANCE
    assert worst(second, reference["second_logits"]) < TOLERANCE
    assert worst(states, reference["head_hidden"]) < TOLERANCE
