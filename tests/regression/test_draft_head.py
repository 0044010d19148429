"""A draft head: an LM head over a part of the vocabulary. Drafts change, the text does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Generation, Model, Session
from pyllama_mtp.drafting.head import HeadRows, draft_head, set_draft_head
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.batch import Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.models.demo import demo_path

from ..marks import usual
from ..trimmed import head_rows, write_untied
from .draftheads import (
    NEWEST,
    N,
    Newest,
    assert_part,
    context,
    drafted,
    generated,
    logits_of,
    parts,
    set_head,
    tokens_of,
    unset_head,
)
from .support import greedy, made_up, settings
from .twocontexts import context as context_of
from .twocontexts import last, one_sequence

N_VOCAB = 2055

# -- logits and tokens -----------------------------------------------------------------------------

#: Shape, type of the matrices, and whether the MTP block has an LM head of its own.
FILES = [("tiny", "q4_0", False), ("tiny", "f16", True), ("tiny-moe", "q8_0", False)]
MORE_FILES = [
    ("tiny", "f16", False),
    ("tiny", "q8_0", False),
    ("tiny", "q8_0", True),
    ("tiny-moe", "f16", False),
    ("tiny-moe", "q8_0", True),
]


@pytest.fixture(scope="module", params=usual("demo", *FILES, long=[(one,) for one in MORE_FILES]))
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


def test_only_drafts_look_at_it(demo: Model) -> None:
    """Logits, K and V are the same with a head and without, with drafts in between."""
    outcomes = []
    for ids in (None, *parts(demo.n_vocab).values()):
        with context(demo) as draft:
            if ids is not None:
                set_head(draft, ids)
            drafted(draft, [7, 8, 9], False, 4)
            draft.decode_batch(one_sequence(made_up(demo, 9, 300), N))
            outcomes.append((draft.logits(8).tobytes(), bytes(draft.save_state())))
    assert all(outcome == outcomes[0] for outcome in outcomes)


# -- refusals --------------------------------------------------------------------------------------

#: Ids that do not fit the head of 2,048 rows.
WRONG_IDS = {
    "not ascending": [5, 9, 7],
    "descending": [9, 5, 3],
    "twice the same": [5, 7, 7],
    "negative": [-1, 5, 7],
    "one too large": [5, 7, 2048],
    "far too large": [5, 7, 2**31 - 1],
}


@pytest.fixture(params=[None, "37"], ids=["whole", "part"])
def unharmed(demo: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    """A context, with a head or without, that a refusal must not change."""
    with context(demo) as draft:
        if request.param:
            set_head(draft, parts(demo.n_vocab)[request.param])
        before, best, ids = logits_of(draft), tokens_of(draft, True), draft.draft_ids
        memory = draft.memory()
        yield draft
        assert draft.memory() == memory
        assert draft.draft_ids is ids
        assert logits_of(draft).tobytes() == before.tobytes()
        assert tokens_of(draft, True) == tokens_of(draft, False) == best


def assert_refused(draft: Context, rows: HeadRows, ids: Ints) -> None:
    with pytest.raises(
        UsageError, match=r"a draft head is not possible here: .*n_embd values for ascending tokens"
    ):
        set_draft_head(draft, rows, ids)


@pytest.mark.parametrize("wrong", WRONG_IDS.values(), ids=WRONG_IDS)
def test_ids_that_are_wrong(unharmed: Context, wrong: Sequence[int]) -> None:
    rows = head_rows(unharmed.model.info, np.array([5, 7, 9], dtype=np.int32))
    assert_refused(unharmed, rows, np.array(wrong, dtype=np.int32))


def test_a_size_that_does_not_fit(unharmed: Context) -> None:
    """Rows too few, too many, too short or too long; another number of ids."""
    ids = np.array([5, 7, 9], dtype=np.int32)
    rows = head_rows(unharmed.model.info, ids)
    for data in (rows.data[:2], np.tile(rows.data, (2, 1)), rows.data[:, :-2], rows.data[:0]):
        assert_refused(unharmed, HeadRows(rows.type, data, rows.name), ids)
    wide = np.concatenate([rows.data, rows.data], axis=1)
    assert_refused(unharmed, HeadRows(rows.type, wide, rows.name), ids)
    for other in (ids[:2], np.array([5, 7, 9, 11], dtype=np.int32)):
        assert_refused(unharmed, rows, other)


def test_a_head_of_no_rows(unharmed: Context) -> None:
    with pytest.raises(UsageError, match="a draft head of 0 rows"):
        set_head(unharmed, np.array([], dtype=np.int32))


@pytest.mark.parametrize("kind", [4, 10, 12, 0, 8, 9999, 2**31 - 1])
def test_a_type_that_is_wrong(unharmed: Context, kind: int) -> None:
    """A former type; blocks of 256, which 192 values do not fill; other sizes; no type at all."""
    ids = np.array([5, 7, 9], dtype=np.int32)
    rows = head_rows(unharmed.model.info, ids)
    assert_refused(unharmed, HeadRows(kind, rows.data, rows.name), ids)


def test_a_context_that_does_not_draft(model: Model) -> None:
    ids, tokens = parts(model.n_vocab)["37"], made_up(model, N)
    with context_of(model, with_mtp=False) as target:
        target.decode(tokens, 0, last(N))
        before = target.logits(N - 1).copy()
        assert_refused(target, head_rows(model.info, ids), ids)
        target.clear()
        target.decode(tokens, 0, last(N))
        assert target.logits(N - 1).tobytes() == before.tobytes()
        assert target.draft_ids is None


# -- generations -----------------------------------------------------------------------------------


def share(runs: Sequence[Generation]) -> float:
    """The share of all drafts that were accepted."""
    accepted = sum(sum(run.telemetry.accepted) for run in runs)
    return accepted / sum(sum(run.telemetry.drafted) for run in runs)


@pytest.mark.parametrize(
    ("depth", "options"),
    usual(
        (3, {"rollback": "replay"}),
        long=[
            *((depth, options) for depth in (1, 3) for options in ({}, {"p_min": 0.4})),
            (1, {"rollback": "replay"}),
        ],
    ),
    ids=str,
)
def test_the_text_is_the_same(
    demo: Model, prompts: list[list[int]], seen: list[int], depth: int, options: dict[str, object]
) -> None:
    """With fewer tokens to draft fewer drafts are accepted: what is outside cannot be proposed.
    Probabilities are taken among the logits of the part."""
    chosen, runs = prompts[::3], []
    for size in ("full", 1024, 300):
        seen.clear()
        runs.append(generated(demo, chosen, depth, draft_vocab=size, **options))
        assert len(runs[-1][0].telemetry.drafted) == depth
        head = draft_head(demo.info, size)
        assert head is None or len(head.ids) == size
        assert seen and (head is None or set(seen) <= set(head.ids.tolist()))
    assert [run.text for run in runs[0]] == [run.text for run in runs[1]]
    whole, *parts = ([run.tokens for run in found] for found in runs)
    assert all(part == whole for part in parts)
    if "p_min" not in options:
        assert share(runs[0]) > share(runs[1]) > share(runs[2]) > 0
        return
    for told in ([run.telemetry for run in found] for found in runs):
        n_drafted = sum(sum(one.drafted) for one in told)
        assert 0 < n_drafted < depth * sum(one.rounds for one in told), "no round stops early"


def test_sessions_side_by_side(demo: Model, prompts: list[list[int]]) -> None:
    """Each has the head that it was made with."""
    with (
        Session(demo, settings(3)) as whole,
        Session(demo, settings(3, draft_vocab=300, draft_follow=False)) as part,
        Session(demo, settings(3, draft_vocab=1024, draft_follow=False)) as more,
    ):
        accepted = []
        for session in (whole, part, more, part, whole):
            run = greedy(session, prompts[0], 24)
            accepted.append((sum(run.telemetry.accepted), run.telemetry.rounds, run.tokens))
    assert accepted[0] == accepted[4] and accepted[1] == accepted[3]
    assert len({tuple(tokens) for *_, tokens in accepted}) == 1
    assert accepted[1][0] < accepted[0][0]
