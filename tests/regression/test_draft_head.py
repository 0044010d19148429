"""A draft head: an LM head over a part of the vocabulary. Drafts change, the text does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import HeadRows, draft_head, set_draft_head
from pyllama_mtp.drafting.vocabulary import choose
from pyllama_mtp.errors import UsageError
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.synth import write_synthetic

from ..trimmed import head_rows, write_untied
from .draftheads import (
    NEWEST,
    Newest,
    assert_part,
    context,
    logits_of,
    parts,
    set_head,
    tokens_of,
    unset_head,
)
from .twocontexts import context as context_of

N_VOCAB = 2055

# -- logits and tokens -----------------------------------------------------------------------------

#: Shape, type of the matrices, and whether the MTP block has an LM head of its own.
FILES = [("tiny", "q4_0", False), ("tiny", "f16", True), ("tiny-moe", "q8_0", False)]


@pytest.fixture(scope="module", params=["demo", *FILES])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model files whose embeddings are their LM head ("tiny", the demo model's) and that have one
    ("tiny-moe")."""
    if request.param == "demo":
        return demo_path()
    shape, kind, own = request.param
    target: Path = tmp_path_factory.mktemp("head") / "model.gguf"
    write_untied(target, shape, kind, *["shared_head_head"] * own, n_vocab=N_VOCAB)
    names = [tensor.name for tensor in GGUFReader(target).tensors]
    assert any("shared_head_head" in name for name in names) is own
    assert ("output.weight" in names) is (shape == "tiny-moe")
    return target


@pytest.fixture(scope="module")
def loaded(file: Path) -> Iterator[Model]:
    with Model(file) as found:
        yield found


@pytest.mark.parametrize("newest", NEWEST.values(), ids=NEWEST)
def test_logits_are_columns_of_the_whole_heads(loaded: Model, newest: Newest) -> None:
    """A draft is named by its id in the whole vocabulary."""
    with context(loaded) as whole, context(loaded) as draft:
        wanted = logits_of(whole, newest)
        for ids in parts(loaded.n_vocab).values():
            set_head(draft, ids)
            found = logits_of(draft, newest)
            assert_part(found, wanted, ids)
            best = ids[found.argmax(axis=1)].tolist()
            assert tokens_of(draft, False, newest) == tokens_of(draft, True, newest) == best


def test_nothing_is_read_after_the_call(demo: Model) -> None:
    """Rows and ids are copied."""
    ids = parts(demo.n_vocab)["37"]
    rows = head_rows(demo.info, ids)
    with context(demo) as draft:
        set_draft_head(draft, rows, ids)
        wanted, best = logits_of(draft), tokens_of(draft, True)
        rows.data[:] = 0
        ids[:] = 0
        assert logits_of(draft).tobytes() == wanted.tobytes()
        assert tokens_of(draft, True) == tokens_of(draft, False) == best


# -- which head is in use --------------------------------------------------------------------------


def test_one_head_after_another(model: Model) -> None:
    """Of equal sizes too, with batches of one shape: the graph would be used again if nobody
    looked. The one before is freed. At last the block's own."""
    sevens = [np.arange(first, model.n_vocab - 7, 7, dtype=np.int32) for first in (0, 3)]
    heads = [*sevens, parts(model.n_vocab)["37"], sevens[0], sevens[1], sevens[0]]
    with context(model) as whole, context(model) as draft:
        wanted = logits_of(whole)
        nothing = draft.memory()["context"]
        for drawn in (False, True):
            for ids in heads:
                set_head(draft, ids)
                best = ids[wanted[:, ids].argmax(axis=1)].tolist()
                assert tokens_of(draft, drawn) == best
                assert_part(logits_of(draft), wanted, ids)
        size = draft.memory()["context"] - nothing
        assert size == pytest.approx(head_rows(model.info, heads[-1]).data.nbytes, rel=0.05)
        unset_head(draft)
        assert logits_of(draft).tobytes() == wanted.tobytes()
        assert draft.memory()["context"] == nothing


# -- refusals --------------------------------------------------------------------------------------

#: What changes of a head of three rows, of ids 5, 7 and 9; 192 values do not fill blocks of 256.
WRONG: dict[str, dict[str, Any]] = {
    "not ascending": {"ids": [5, 9, 7]},
    "twice the same": {"ids": [5, 7, 7]},
    "negative": {"ids": [-1, 5, 7]},
    "too large": {"ids": [5, 7, 2048]},
    "far too large": {"ids": [5, 7, 2**31 - 1]},
    "fewer ids": {"ids": [5, 7]},
    "more ids": {"ids": [5, 7, 9, 11]},
    "no ids": {"ids": []},
    "fewer rows": {"data": lambda rows: rows[:2]},
    "no rows": {"data": lambda rows: rows[:0]},
    "more rows": {"data": lambda rows: np.tile(rows, (2, 1))},
    "short rows": {"data": lambda rows: rows[:, :-2]},
    "long rows": {"data": lambda rows: np.tile(rows, (1, 2))},
    **{f"type {kind}": {"type": kind} for kind in (4, 10, 12, 0, 8, 9999, 2**31 - 1)},
}


@pytest.mark.parametrize("part", [None, "37"])
def test_heads_that_do_not_fit_change_nothing(demo: Model, part: str | None) -> None:
    rows = head_rows(demo.info, np.array([5, 7, 9], dtype=np.int32))
    refused = pytest.raises(
        UsageError, match=r"a draft head (of 0 rows|.*n_embd values for ascending tokens)"
    )
    with context(demo) as draft, context_of(demo, with_mtp=False) as target:
        with refused:
            set_draft_head(target, rows, np.array([5, 7, 9]))
        assert target.draft_ids is None
        if part:
            set_head(draft, parts(demo.n_vocab)[part])
        before, best, ids = logits_of(draft), tokens_of(draft, True), draft.draft_ids
        memory = draft.memory()
        for name, wrong in WRONG.items():
            data = wrong["data"](rows.data) if "data" in wrong else rows.data
            with refused:
                found = HeadRows(wrong.get("type", rows.type), data)
                set_draft_head(draft, found, np.array(wrong.get("ids", [5, 7, 9])))
            assert draft.draft_ids is ids and draft.memory() == memory, name
        assert logits_of(draft).tobytes() == before.tobytes()
        assert tokens_of(draft, True) == tokens_of(draft, False) == best


def test_the_usual_size(demo: Model, tmp_path: Path) -> None:
    """A part of a vocabulary of more than 65,536 tokens, most useful first; else the whole."""
    info = read_gguf(write_synthetic(tmp_path / "m.gguf", "tiny", "q8_0", n_vocab=65_537))
    head, ranked = draft_head(info, "auto"), choose(info.path, 32768)
    assert head and ranked is not None and head.ranked is not None
    assert head.ids.tolist() == sorted(ranked) and head.ranked.tolist() == ranked.tolist()
    assert draft_head(demo.info, "auto") is None


# -- generations -----------------------------------------------------------------------------------
