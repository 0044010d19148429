"""A draft head whose rows are replaced where they are, and a draft vocabulary that follows the
text: more drafts are accepted, and the text stays what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import BatchSession, Model
from pyllama_mtp.drafting.head import (
    HeadRows,
    draft_head,
    replace_draft_rows,
    set_draft_head,
    use_trimmed_head,
)
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama.batch import Ints
from pyllama_mtp.llama.context import Context

from ..trimmed import head_rows, write_trimmed
from ..workers import worker
from .draftheads import (
    NEWEST,
    Newest,
    assert_part,
    context,
    drafted,
    logits_of,
    set_head,
    tokens_of,
)
from .support import draft_ids, scaled, settings

IDS = np.arange(0, 700, 7, dtype=np.int32)
#: Rows 0 and 99 among them; ids above and below those beside them.
SLOTS = np.array([0, 99, 40, 41, 7], dtype=np.int32)
NEW = np.array([1500, 3, 2047, 1, 601], dtype=np.int32)


def after(ids: Ints = IDS) -> Ints:
    """The tokens by row, when they are replaced."""
    found = ids.copy()
    found[SLOTS] = NEW
    return found


def replace(draft: Context, slots: Ints = SLOTS, new: Ints = NEW, kind: str = "file") -> None:
    replace_draft_rows(draft, slots, new, head_rows(draft.model.info, new, kind))


def chains(draft: Context) -> list[list[int]]:
    """Three drafts each, after several tokens."""
    return [drafted(draft, [token], False, 3)[:, 0].tolist() for token in range(100, 220, 10)]


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", NEWEST.values(), ids=NEWEST)
def test_logits_and_tokens_are_those_of_the_new_rows(demo: Model, newest: Newest) -> None:
    """Rows are used in place, in any order of tokens, by a graph that was built before."""
    with context(demo) as whole, context(demo) as draft:
        wanted = logits_of(whole, newest)
        new = np.setdiff1d(wanted.argmax(axis=1), IDS).astype(np.int32)  # the best of all
        slots = np.arange(len(new), dtype=np.int32)[::-1] * 2
        set_head(draft, IDS)
        before = {drawn: tokens_of(draft, drawn, newest) for drawn in (False, True)}
        memory = draft.memory()
        replace(draft, slots, new)
        ids = IDS.copy()
        ids[slots] = new
        assert draft.draft_ids is not None and draft.draft_ids.tolist() == ids.tolist()
        assert_part(logits_of(draft, newest), wanted, ids)
        best = ids[wanted[:, ids].argmax(axis=1)].tolist()
        assert tokens_of(draft, False, newest) == tokens_of(draft, True, newest) == best
        assert {*best} & {*new.tolist()}
        replace(draft, slots, IDS[slots])  # and back
        assert tokens_of(draft, True, newest) == before[True] == before[False]
        assert draft.memory() == memory


def test_the_smallest_of_equal_rows(demo: Model) -> None:
    """The smallest id wins wherever its row lies, drawn or picked."""
    with context(demo) as draft:
        set_head(draft, IDS)
        best = int(logits_of(draft, NEWEST["one"])[0].argmax())
        twin = head_rows(demo.info, IDS[[best, best]])
        for slots, ids in ([1, 98], [900, 3]), ([1, 98], [3, 900]), ([50, 51], [1001, 1000]):
            set_head(draft, IDS)
            replace_draft_rows(draft, np.array(slots), np.array(ids), twin)
            first = min(*ids, int(IDS[best]))
            for drawn in (False, True):
                assert tokens_of(draft, drawn, NEWEST["one"]) == [first]


def test_rows_of_another_type(demo: Model) -> None:
    """They are of the type that the head has."""
    with context(demo) as fresh, context(demo) as draft:
        set_draft_head(draft, head_rows(demo.info, IDS, "q4_0"), IDS)
        replace(draft, kind="q4_0")
        order = np.argsort(after())
        set_draft_head(fresh, head_rows(demo.info, after()[order], "q4_0"), after()[order])
        np.testing.assert_allclose(
            logits_of(draft)[:, order], logits_of(fresh), rtol=0, atol=scaled(1e-5)
        )
        with pytest.raises(UsageError, match=r"no row is replaced: .* rows of its type"):
            replace(draft)


def test_on_a_device(model: Model) -> None:
    """In the memory of a worker. There a chain of a model whose LM head is not its embeddings takes
    those from rows beside the head's."""
    with context(model) as here:
        new = np.unique([drafts[:2] for drafts in chains(here)]).astype(np.int32)
        before = np.setdiff1d(IDS, new)
        slots = np.arange(len(new), dtype=np.int32) * 3
        ids = before.copy()
        ids[slots] = new
        set_head(here, np.sort(ids))
        wanted, drafted = logits_of(here), chains(here)
    assert {token for drafts in drafted for token in drafts[:2]} & {*new.tolist()}
    with (
        worker() as address,
        Model(model.path, rpc_servers=address) as remote,
        context(remote) as there,
    ):
        set_head(there, before)
        assert chains(there) != drafted
        replace(there, slots, new)
        assert chains(there) == drafted
        order = np.argsort(ids)
        np.testing.assert_allclose(logits_of(there)[:, order], wanted, rtol=0, atol=scaled(1e-4))


# -- refusals --------------------------------------------------------------------------------------

#: Slots, tokens and data of two rows that do not go together with a head of 100 rows.
WRONG: dict[str, dict[str, Any]] = {
    "a slot below 0": {"slots": [-1, 3]},
    "a slot too large": {"slots": [3, 100]},
    "a slot twice": {"slots": [3, 3]},
    "more slots": {"slots": [3, 4, 5]},
    "a token below 0": {"ids": [5, -1]},
    "a token too large": {"ids": [5, 2048]},
    "a token twice": {"ids": [5, 5]},
    "a token that has a row elsewhere": {"ids": [5, int(IDS[0])]},
    "fewer rows": {"data": lambda rows: rows[:-1]},
    "short rows": {"data": lambda rows: rows[:, :-2]},
    "more rows": {"data": lambda rows: np.tile(rows, (2, 1))},
}


def test_rows_that_do_not_fit_change_nothing(demo: Model) -> None:
    rows = head_rows(demo.info, np.array([5, 9], dtype=np.int32))
    with context(demo) as draft:
        set_head(draft, IDS)
        before = logits_of(draft)
        for name, wrong in WRONG.items():
            data = wrong["data"](rows.data) if "data" in wrong else rows.data
            slots, ids = np.array(wrong.get("slots", [3, 4])), np.array(wrong.get("ids", [5, 9]))
            with pytest.raises(UsageError, match=r"no row is replaced: |3 slots for 2 tokens"):
                replace_draft_rows(draft, slots, ids, HeadRows(rows.type, data))
            assert draft.draft_ids is not None and draft.draft_ids.tolist() == IDS.tolist(), name
        assert logits_of(draft).tobytes() == before.tobytes()


def test_a_head_that_was_not_set(demo: Model, demo_file: Path, tmp_path: Path) -> None:
    """The trimmed head of a file belongs to the model: its rows cannot be replaced either."""
    file = write_trimmed(demo_file, tmp_path / "trimmed.gguf", IDS, IDS)
    with Model(file) as model, context(demo) as whole, context(model) as trimmed:
        use_trimmed_head(trimmed)
        for draft in (whole, trimmed):
            before = logits_of(draft)
            with pytest.raises(UsageError, match="no row is replaced"):
                replace(draft)
            assert logits_of(draft).tobytes() == before.tobytes()
        assert draft_head(model.info, "auto") is None


# -- generations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_sequences", "options"), [(1, {}), (1, {"draft_head_type": "q8_0", "p_min": 0.3}), (3, {})]
)
def test_more_drafts_are_accepted_and_the_text_stays(
    demo: Model, prompts: list[list[int]], n_sequences: int, options: dict[str, object]
) -> None:
    """256 rows of 2,048, which follow the texts of all sequences: counted, not timed."""
    texts, rates = [], []
    for follow in (False, True):
        chosen = settings(3, draft_vocab=256, draft_follow=follow, **options)
        with BatchSession(demo, chosen, n_sequences) as session:
            batch = session.generate(prompts[:6], max_tokens=48).run()
            ids, head = draft_ids(session), draft_head(demo.info, 256)
            missing = np.setdiff1d(np.arange(2048), ids)[100:104].tolist()
            session.generate([missing * 3], max_tokens=1).run()
            assert np.isin(missing, draft_ids(session)).all() == follow
        assert head and len(np.unique(ids)) == 256
        assert np.array_equal(np.sort(ids), head.ids) != follow
        texts.append([result.tokens for result in batch.results])
        rates.append(batch.telemetry.mean_accepted_length)
        each, total = [one.telemetry.draft_vocab for one in batch.results], batch.telemetry
        for name in ("tokens", "outside", "replaced"):
            assert total.draft_vocab[name] == sum(one[name] for one in each)
        assert all(one["replaced"] > 0 for one in each) == follow
    assert texts[0] == texts[1] and rates[1] > 2 * rates[0]
    assert [one["tokens"] for one in each] == [len(tokens) - 1 for tokens in texts[1]]
    assert 0 < total.draft_vocab["outside"] < 0.3 * total.draft_vocab["tokens"]
