"""The head's cache holds, at every position, what position-by-position evaluation puts there.

Emitted text is the target's own choice whatever the drafts are, so no comparison of texts finds an
empty or a shifted cache. These tests read the K and V rows themselves, after what sessions do; what
single decodes do is in test_in_trunk.py.

The reference pairs token x_p with the trunk's h_{p-1} (zeros at p = 0) one position at a time,
without the driver. On an AVX-512 machine it agrees to the bit for batches up to 48; with
flash attention and 64 tokens or more another kernel runs, and rows differ by 0.0003 of the largest
entry. The tolerance is ten times that. A row from a wrong hidden state is off by about 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyllama_mtp import Model, Session

from ..marks import usual
from .kvstate import KVState
from .support import EDGES, cached, engine_of, made_up, settings
from .twocontexts import TOLERANCE, TwoContexts, draft_state, none, one_sequence, state

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32"}
SYNCS = pytest.mark.parametrize("sync", ["kv", "full"])


def position_by_position(
    model: Model, tokens: Sequence[int], cache: str, flash_attn: str = "auto"
) -> KVState:
    """The draft cache after `tokens`, by the contract and nothing else."""
    one = {"n_batch": 1, "n_ubatch": 1, "n_outputs_max": 1, "flash_attn": flash_attn}
    with TwoContexts(model, type_k=cache, type_v=cache, **one) as wanted:
        for position, token in enumerate(tokens):
            wanted.decode(
                one_sequence(np.array([token], dtype=np.int32), position, outputs=none(1))
            )
        return state(wanted.block)


def assert_equal(found: KVState, wanted: KVState, tolerance: float) -> None:
    """`found` has every position of `wanted`, once, with the same token, K and V."""
    n = len(wanted.positions)
    inside = found.positions < n  # anything above is left over from drafting
    assert np.array_equal(found.positions[inside], np.arange(n)), "positions are missing"
    assert np.array_equal(found.tokens[inside], wanted.tokens)
    for what, a, b in (("K", found.k, wanted.k), ("V", found.v, wanted.v)):
        off = np.abs(a[:, inside] - b).max(axis=(0, 2)) / np.abs(b).max()
        worst = int(off.argmax())
        assert off[worst] < tolerance, f"{what} at position {worst} is off by {off[worst]:.4f}"


def check(session: Session, cache: str = "f32") -> None:
    """The head's cache is in step with the target's, at every position."""
    engine = engine_of(session)
    cached, found = engine.sequences[0].tokens, draft_state(session)
    if engine.head.contexts:
        assert engine.sequences[0].n_drafted_for == len(cached) > 0
    else:
        assert len(found.positions) == len(cached) > 0, "drafts are left over"
    wanted = position_by_position(session.model, cached, cache, session.settings.flash_attn)
    assert_equal(found, wanted, TOLERANCE[cache])


#: Lengths of prompts, type of the cache, other settings. Without flash attention V is transposed.
PROMPTS: list[tuple[int, str, dict[str, object]]] = [
    *((n, "f32", {"prompt_sync": sync}) for n in EDGES for sync in ("kv", "full")),
    (97, "f32", {"n_batch": 512, "n_ubatch": 512}),
    (50, "f32", {"prompt_rows": "all"}),
    (49, "f16", {}),
    (49, "q8_0", {}),
    (49, "f32", {"flash_attn": "off"}),
]
CASES = [("demo", *case) for case in PROMPTS]
CASES += [(name, 49, "f32", {}) for name in ("moe", "qwen3next")]


@pytest.mark.parametrize(("name", "n", "cache", "options"), CASES, ids=str)
def test_after_a_prompt(
    request: pytest.FixtureRequest, name: str, n: int, cache: str, options: dict[str, object]
) -> None:
    model: Model = request.getfixturevalue(name)
    prompt = made_up(model, n).tolist()
    chosen = settings(3, cache_type_k=cache, cache_type_v=cache, **options)
    with Session(model, chosen) as session:
        session.generate(prompt, max_tokens=1).run()
        assert cached(session) == prompt
        check(session, cache)


@pytest.mark.parametrize("sync", usual("kv", long=["full"]))
@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("depth", usual(1, 6, long=[3]))
def test_after_generation(
    demo: Model, text: list[int], depth: int, rollback: str, sync: str
) -> None:
    """Accepted positions come from the trunk's hidden states, not the head's own."""
    chosen = settings(depth, rollback=rollback, prompt_sync=sync, **EXACT)
    with Session(demo, chosen) as session:
        run = session.generate(text[:33], max_tokens=24, ignore_eos=True).run()
        assert sum(run.telemetry.accepted) > 0
        assert len(cached(session)) == 33 + 24 - 1
        check(session)


@SYNCS
@pytest.mark.parametrize("cut", [1, 2])
def test_after_going_back_within_the_snapshots(
    demo: Model, text: list[int], cut: int, sync: str
) -> None:
    """In upstream's way the trunk goes back one position further than the draft cache.

    The last pass of the generation is a full one: all of its drafts are accepted, by decree.
    """
    decreed = {"checkpoints": 0, "synthetic_acceptance": (1.0, 1.0, 1.0)}
    chosen = settings(3, rollback="snapshot", prompt_sync=sync, **EXACT, **decreed)
    with Session(demo, chosen) as session:
        session.generate(text[:33], max_tokens=9, ignore_eos=True).run()
        n = len(cached(session))
        prompt = [*cached(session)[: n - cut], *text[70:80]]
        run = session.generate(prompt, max_tokens=5, ignore_eos=True).run()
        back = cut + (sync == "full")
        assert run.telemetry.n_cached == n - back, "the snapshots were not used"
        check(session)
