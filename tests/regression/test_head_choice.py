"""The draft head that "auto" chooses, and chooses again: drafts change, the text does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.drafting import headrows

from .support import draft_ids, engine_of, greedy, settings, written

#: Bytes of a plain step, and of the MTP block, beside which all rows of the demo model pay, or 256.
FREE, DEAR = (1 << 40, 1 << 30), (1 << 20, 1 << 10)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a vocabulary of 2,048 tokens."""
    monkeypatch.setattr(headrows, "DEFAULT_SIZE", 300)
    monkeypatch.setattr(headrows, "SIZES", (256, 512, 1024))
    monkeypatch.setattr(headrows, "PRIOR_SIZE", 256)


@pytest.fixture
def model(demo_file: Path, small: None) -> Model:
    """The demo model, by itself: its draft head is kept with it."""
    with Model(demo_file) as found:
        yield found


def n_rows(session: Session) -> int:
    ids = draft_ids(session)
    return session.model.n_vocab if ids is None else len(ids)


@pytest.mark.parametrize(("read", "rows"), [(FREE, 2048), (DEAR, 256)], ids=["free", "dear"])
@pytest.mark.parametrize("kind", ["file", "q4_0"])
def test_it_is_the_best_and_the_text_is_the_same(
    model: Model,
    demo_prompts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    read: tuple[int, int],
    rows: int,
    kind: str,
) -> None:
    prompt = model.tokenize(demo_prompts[0], parse_special=True)
    monkeypatch.setattr(headrows, "read_bytes", lambda info: read)
    plain = written(model, prompt, 32, 0).tokens
    with Session(model, settings(3, draft_head_type=kind)) as session:
        assert n_rows(session) == rows
        chosen = engine_of(session).head.heads
        assert chosen and chosen.chosen and chosen.chosen.n_rows == rows
        assert len(chosen.table()) == 4
        run = greedy(session, prompt, 32)
        assert run.tokens == plain and sum(run.telemetry.accepted) > 0


@pytest.mark.parametrize(("better", "rows"), [(1.0, 256), (10.0, 512)])
def test_the_usual_one_unless_another_is_clearly_better(
    model: Model, monkeypatch: pytest.MonkeyPatch, better: float, rows: int
) -> None:
    """Costs are guesses."""
    monkeypatch.setattr(headrows, "DEFAULT_SIZE", 512)
    monkeypatch.setattr(headrows, "BETTER", better)
    monkeypatch.setattr(headrows, "read_bytes", lambda info: DEAR)
    with Session(model, settings(3)) as session:
        assert n_rows(session) == rows


def test_it_is_chosen_again_when_the_text_needs_it(
    model: Model, demo_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prior, that nothing is outside, is wrong for this text. Prompts may change the head."""
    monkeypatch.setattr(headrows, "PRIOR_OUTSIDE", 0.0)
    monkeypatch.setattr(headrows, "PRIOR_WEIGHT", 1)
    monkeypatch.setattr(headrows, "ENOUGH", 40)
    prompts = [model.tokenize(text, parse_special=True) for text in demo_prompts[:4]]
    monkeypatch.setattr(headrows, "read_bytes", lambda info: (160 << 20, 4 << 20))
    with Session(model, settings(0)) as session:
        plain = [greedy(session, prompt, 48).tokens for prompt in prompts]
    found, rows = [], []
    with Session(model, settings(3, draft_follow=False)) as session:
        for prompt in prompts:
            rows.append(n_rows(session))
            found.append(greedy(session, prompt, 48).tokens)
        rows.append(n_rows(session))
    assert found == plain
    assert rows[:2] == [256, 256] and rows[-1] > 256


OTHERWISE = {
    "a size": {"draft_vocab": 512},
    "the whole": {"draft_vocab": "full"},
    "drawn drafts": {"draft_sampling": True},
    "imposed acceptance": {"synthetic_acceptance": (0.5, 0.5)},
}


@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_where_there_is_no_choice(model: Model, options: dict[str, object]) -> None:
    with Session(model, settings(2, **options)) as session:
        chosen = engine_of(session).head.heads
        assert chosen and chosen.chosen is None and chosen.table() == []


def test_small_vocabularies(demo: Model) -> None:
    """Up to 65,536 tokens, drafts come from the whole vocabulary."""
    with Session(demo, Settings(n_ctx=64, draft_n_max=1)) as session:
        assert n_rows(session) == demo.n_vocab and not engine_of(session).head.heads.table()  # type: ignore[union-attr]
