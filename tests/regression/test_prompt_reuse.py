"""Going on from a processed prompt: from a checkpoint, without drafts for a while, from a file.

Text does not show a wrong draft cache, so besides the text the bytes of the draft cache and the
drafts are compared with those of a fresh session.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Generation, Model, RopeScaling, Session
from pyllama_mtp.errors import (
    InsufficientMemoryError,
    PromptFileError,
    UsageError,
)

from ..adapters import trunk, write_adapter
from ..marks import usual
from . import kvstate
from .kvstate import KVState
from .support import N_UBATCH, assert_same_tokens, cached, engine_of, scaled, settings
from .twocontexts import draft_state

N_TOKENS = 14
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32"}


def run(session: Session, prompt: Sequence[int], **options: object) -> Generation:
    return session.generate(
        prompt,
        max_tokens=N_TOKENS,
        ignore_eos=True,
        log_pairs=True,
        **options,  # type: ignore[arg-type]
    ).run()


def check_like_fresh(session: Session, prompt: Sequence[int], gap: float) -> Generation:
    """The generation gives the text, the drafts and the draft cache that a fresh session gives."""
    got = run(session, prompt)
    with Session(session.model, session.settings) as fresh:
        wanted = run(fresh, prompt)
        same = assert_same_tokens(session.model, prompt, got.tokens, wanted.tokens, gap)
        if same:
            assert got.telemetry.pairs == wanted.telemetry.pairs
            assert got.telemetry.accepted == wanted.telemetry.accepted
            ours, theirs = (cache(s) for s in (session, fresh))
            assert np.array_equal(ours.positions, theirs.positions)
            assert np.array_equal(ours.tokens, theirs.tokens)
            for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
                assert np.abs(a - b).max() < scaled(0.003) * np.abs(b).max()
    return got


def cache(session: Session) -> KVState:
    """The draft cache, without what is left over from drafting."""
    engine = engine_of(session)
    for context in engine.head.contexts:
        context.remove(engine.sequences[0].n_drafted_for)
    return draft_state(session)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "rollback"),
    usual(("kv", "snapshot"), ("full", "replay"), long=[("kv", "replay"), ("full", "snapshot")]),
)
@pytest.mark.parametrize("shared", usual(97, 79, 48, long=[96, 95, 80, 60, 49, 47]))
def test_the_closest_checkpoint_is_used(
    demo: Model, text: list[int], gap: float, shared: int, sync: str, rollback: str
) -> None:
    """A prompt that leaves an earlier one of 97 tokens after `shared`: cuts were 48, 80, 96, 97."""
    with Session(demo, settings(3, rollback=rollback, prompt_sync=sync, **EXACT)) as session:
        run(session, text[:97])
        assert engine_of(session).sequences[0].checkpoints.positions == [48, 80, 96, 97]
        prompt = [*text[:shared], *text[120:150]]
        got = check_like_fresh(session, prompt, gap)
        cuts = [cut for cut in (48, 80, 96, 97) if cut <= shared]
        assert got.telemetry.n_cached == max(cuts, default=0)


@pytest.mark.parametrize(
    ("parting", "n", "shared", "draft"),
    [(79, 113, 90, True), (79, 110, 110, False), (64, 66, 66, False)],
)
def test_what_is_of_a_text_that_is_gone_is_not_used(
    demo: Model, text: list[int], gap: float, parting: int, n: int, shared: int, draft: bool
) -> None:
    """The first prompt leaves a checkpoint at 80, and a draft cache of 110 positions. The second,
    of `n` tokens, parts from it, and the third, later, from the second. A checkpoint without a
    hidden row, at 64 where the draft cache ends, is no use."""
    with Session(demo, settings(3, prompt_sync="full", **EXACT)) as session:
        run(session, text[:97])
        assert len(cached(session)) == 110
        second = [*text[:parting], *text[120 : 120 + n - parting]]
        run(session, second, draft=draft)
        got = check_like_fresh(session, [*second[:shared], *text[200:230]], gap)
        assert got.telemetry.n_cached == 48


def test_no_checkpoints_when_none_are_wanted(demo: Model, text: list[int], gap: float) -> None:
    with Session(demo, settings(3, checkpoints=0)) as session:
        run(session, text[:97])
        got = check_like_fresh(session, [*text[:60], *text[120:130]], gap)
        assert got.telemetry.n_cached == 0


# -- without drafts for a while --------------------------------------------------------------------


def test_a_generation_that_does_not_draft(demo: Model, text: list[int], gap: float) -> None:
    """Later drafts are as ever, and nothing has to be processed again for them."""
    with Session(demo, settings(3, **EXACT)) as session:
        plain = run(session, text[:60], draft=False)
        assert plain.telemetry.drafted == [] and plain.telemetry.prompt_sync == ""
        held = list(cached(session))
        again = check_like_fresh(session, [*held, *text[70:80]], gap)
        assert again.telemetry.n_cached == len(held) and again.telemetry.drafted


def test_in_upstreams_way_what_is_not_drafted_for_costs_nothing(
    demo: Model, text: list[int], gap: float
) -> None:
    """Nothing is decoded on the draft context, the tap is off; later drafts are as ever."""
    with Session(demo, settings(3, prompt_sync="full", **EXACT)) as session:
        (context,) = engine_of(session).head.contexts
        decode, calls = context.decode_batch, []
        context.decode_batch = lambda b: (calls.append(b), decode(b))[1]  # type: ignore
        plain = run(session, text[:60], draft=False)
        assert not calls and engine_of(session).sequences[0].n_drafted_for == 0
        assert plain.telemetry.drafted == [] and plain.telemetry.time_s["prompt_sync"] == 0
        with pytest.raises(UsageError):
            engine_of(session).target.hidden_rows()
        # The draft cache has nothing of this text: it must be processed again, from the start.
        again = check_like_fresh(session, cached(session), gap)
        assert again.telemetry.n_cached == 0 and calls


def test_in_upstreams_way_drafting_goes_on_from_where_it_was_left(
    demo: Model, text: list[int], gap: float
) -> None:
    """Prompt with drafts, follow-up without, follow-up with: only the middle is processed again."""
    with Session(demo, settings(3, prompt_sync="full", **EXACT)) as session:
        run(session, text[:64])
        held = list(cached(session))
        run(session, [*held, *text[70:100]], draft=False)
        got = check_like_fresh(session, [*cached(session), *text[100:110]], gap)
        assert got.telemetry.n_cached == 64, "the last checkpoint that has its hidden row"


def test_a_copy_has_no_more_of_the_draft_cache_than_is_of_its_text(
    demo: Model, text: list[int]
) -> None:
    """What the text before has left there stays behind."""
    with Session(demo, settings(3, prompt_sync="full")) as session:
        run(session, text[:97])
        run(session, [*text[:79], *text[120:150]], draft=False)
        copy = session.copy()
    assert copy.draft and copy.draft_n_past == 79
    assert len(kvstate.parse(copy.draft, mrope=True).positions) == 79


# -- ahead of time, and in a file ------------------------------------------------------------------


#: The way, drafts before and after, and how many of 96 tokens are used, from a file and from the
#: other session; None: refused, as the MTP block's states are there in one of them only.
TAKEN = [
    *((sync, *depths, 96, 96) for sync in ("kv", "full") for depths in ((3, 3), (3, 1), (1, 5))),
    *(("kv", 0, 0, 96, 96), ("kv", 3, 0, None, 96), ("kv", 0, 3, None, None)),
    *(("full", 3, 0, 96, 96), ("full", 0, 3, 0, 0)),  # without a draft cache
]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("sync", "before", "after", "from_file", "from_session"), TAKEN)
def test_taken_from_a_file_or_another_session(
    demo: Model,
    text: list[int],
    gap: float,
    tmp_path: Path,
    sync: str,
    before: int,
    after: int,
    from_file: int | None,
    from_session: int | None,
    copied: bool,
) -> None:
    """Nothing is processed again, and drafts are right at once. The other session goes on."""
    with (
        Session(demo, settings(before, prompt_sync=sync, **EXACT)) as other,
        Session(demo, settings(after, prompt_sync=sync, **EXACT)) as session,
    ):
        other.process(text[:97])
        other.save(path := tmp_path / "prompt.bin")
        run(session, text[120:140])  # something else, to be forgotten
        wanted = from_session if copied else from_file
        with nullcontext() if wanted is not None else pytest.raises(PromptFileError, match="mtp"):
            assert (session.copy_from(other) if copied else session.restore(path)) == 96
        expected = run(other, text[:97])
        assert expected.telemetry.n_cached == 96
        if wanted is not None:
            got = check_like_fresh(session, text[:97], gap) if after else run(session, text[:97])
            assert got.telemetry.n_cached == wanted
            assert_same_tokens(demo, text[:97], got.tokens, expected.tokens, gap)


@pytest.mark.parametrize("sync", ["kv", "full"])
def test_what_was_processed_is_not_processed_again(
    demo: Model, text: list[int], gap: float, sync: str
) -> None:
    """Without a checkpoint at its end, too. The last token is left."""
    with Session(demo, settings(3, **EXACT, checkpoints=0, prompt_sync=sync)) as session:
        assert session.process(text[:1]).n_prompt == 0
        assert [session.process(text[:97]).n_cached for _ in range(2)] == [0, 96]
        assert session.process(text[:131]).n_cached == 96
        telemetry = session.process(text[:131])
        assert (telemetry.n_prompt, telemetry.n_cached) == (130, 130)
        assert check_like_fresh(session, text[:131], gap).telemetry.n_cached == 130


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_type_v": "q8_0"}, {"flash_attn": "off"}, {"prompt_sync": "full"}],
    ids=str,
)
def test_a_session_without_mtp_copies_from_one_with_it(
    demo: Model, text: list[int], options: dict[str, str]
) -> None:
    """All bytes of its states are those of a session that has processed the text itself."""
    with (
        Session(demo, settings(3, **options)) as other,
        Session(demo, settings(0, **options)) as fresh,
        Session(demo, settings(0, **options)) as session,
    ):
        other.process(text[:151])
        fresh.process(text[:151])
        assert session.copy_from(other) == 150
        wanted = engine_of(fresh).target.save_state()
        assert engine_of(session).target.save_state() == wanted
        other.reset()
        other.process(text[:2])  # one cell
        assert session.copy_from(other) == 1


def test_a_state_without_memory_leaves_both_sessions(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllama_mtp.llama.context.LARGE_STATE", 0)
    with Session(demo, settings(3)) as other, Session(demo, settings(3)) as session:
        for one in (other, session):
            one.process(text[:97])
        monkeypatch.setattr("pyllama_mtp.llama.context.available_memory", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match="no memory for a state of"):
            session.copy_from(other)
        assert cached(session) == cached(other) == text[:96]


def test_what_does_not_fit_is_refused(
    demo: Model, moe: Model, text: list[int], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", demo.info, trunk(demo.info))
    adapted = Model(demo.path, lora=adapter)
    path = tmp_path / "prompt.bin"
    with Session(demo, settings(3)) as session:
        with pytest.raises(UsageError, match="process one first"):
            session.save(path)
        session.process([*text[:160], *text[:160]])
        session.save(path)
        held, copy = list(cached(session)), session.copy()
    damaged = path.read_bytes()
    (tmp_path / "cut.bin").write_bytes(damaged[:-7])
    others: list[tuple[Model, dict[str, object], str, str]] = [
        (demo, {"cache_type_k": "q8_0"}, "prompt.bin", "cache_type_k"),
        (demo, {"hidden": "pre-norm"}, "prompt.bin", "hidden"),
        (demo, {"rope": RopeScaling(rope_freq_scale=0.5)}, "prompt.bin", "rope"),
        (adapted, {}, "prompt.bin", r"lora .* a\.gguf"),
        (moe, {}, "prompt.bin", "model"),
        (demo, {"n_ctx": 256}, "prompt.bin", "longer n_ctx"),
        (demo, {}, "cut.bin", "cut.bin"),
        (demo, {}, "missing.bin", "missing.bin"),
    ]
    for model, options, name, reason in others:
        with Session(model, settings(3, **options)) as session:
            run(session, text[:N_UBATCH])
            kept = list(cached(session))
            with pytest.raises((PromptFileError, UsageError), match=reason):
                session.restore(tmp_path / name)
            if name == path.name:
                with pytest.raises((PromptFileError, UsageError), match=f"^the other.*{reason}"):
                    session.copy_from(copy)
            held_now = cached(session)
            assert held_now == kept, "what is refused must leave the session as it was"
    adapted.close()
    with Session(demo, settings(3)) as session:
        session.restore(path)
        assert cached(session) == held
