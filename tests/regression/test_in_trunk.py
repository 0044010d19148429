"""The MTP block in the trunk's context: its K and V are those of upstream's block in a context of
its own, and the trunk is as it is without.

Equal batches give equal graphs up to K and V, so these are compared bit by bit. Where graphs have
other sizes, rows are compared to a share of the largest entry; a row from a wrong hidden state is
off by about 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import ContextClosedError, FatalDecodeError
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.devicestates import DeviceStates, on_host
from pyllama_mtp.llama.drafts import compute_drafts

from ..marks import usual
from ..trimmed import write_untied
from .kvstate import CARRY_VERSION, KVState
from .support import EDGES, N_BATCH, made_up
from .twocontexts import (
    CACHES,
    TOLERANCE,
    TwoContexts,
    agree,
    beside,
    context,
    drafts_of,
    every,
    last,
    none,
    one_sequence,
    some,
    state,
    turns,
)

#: Sequences of one batch.
LENGTHS = (5, 19, 11)


def logits_of(found: Context, batch: Batch) -> list[bytes]:
    """Logits of the output rows of `batch`, the last one."""
    return [found.logits(int(row)).tobytes() for row in np.flatnonzero(batch.outputs)]


def assert_in_step(found: Context, wanted: TwoContexts, seq: int = 0) -> KVState:
    """Both parts of the caches of a sequence are those of two contexts, to the bit."""
    mine, trunk, block = state(found, seq), state(wanted.target, seq), state(wanted.block, seq)
    n = len(block.positions)
    assert mine.positions.tolist() == trunk.positions.tolist() == list(range(n)), "not in step"
    assert mine.tokens.tolist() == block.tokens.tolist()
    assert len(mine.k) == len(trunk.k) + 1 and len(block.k) == 1
    for what, own, whole in (("K", mine.k, block.k), ("V", mine.v, block.v)):
        assert len(np.unique(whole[0], axis=0)) == n, "the reference cannot tell positions apart"
        off = np.flatnonzero((own[-1] != whole[0]).any(axis=1))
        assert not len(off), f"{what} of the block differs at positions {off}"
    assert mine.k[:-1].tobytes() == trunk.k.tobytes() and mine.v[:-1].tobytes() == trunk.v.tobytes()
    assert mine.recurrent == trunk.recurrent and not len(trunk.carry)
    assert mine.carry.tobytes() == wanted.row(n - 1, seq).tobytes(), "the carry is another row"
    return mine


def assert_close(found: KVState, wanted: KVState, tolerance: float) -> None:
    """K and V of the block, position by position, and the carry."""
    assert found.positions.tolist() == wanted.positions.tolist()
    assert found.tokens.tolist() == wanted.tokens.tolist()
    rows = ((found.k[-1], wanted.k[-1]), (found.v[-1], wanted.v[-1]), (found.carry, wanted.carry))
    for what, (a, b) in zip(("K", "V", "carry"), rows, strict=True):
        off = np.abs(a - b).max(axis=-1) / np.abs(b).max()
        worst = int(np.argmax(off))
        assert np.max(off) < tolerance, f"{what} is off by {np.max(off):.4f}, at {worst}"


def assert_same(a: KVState, b: KVState) -> None:
    """K, V and the carry, to the bit."""
    for one, other in ((a.k, b.k), (a.v, b.v), (a.carry, b.carry)):
        assert one.tobytes() == other.tobytes()


# -- random walks ----------------------------------------------------------------------------------

#: Tokens of a prompt, drafts of a round, things that happen in a walk.
N, DEPTH, N_TURNS = 21, 3, 10
#: How many sequences, and whether they share a cache.
PLACES = ((1, False), (3, True), (3, False))
#: Tokens of a graph, threads, and how many tokens can be taken back. A block is a part of a graph.
SIZES = ((16, 1, DEPTH), (1, 1, 0), (48, 1, DEPTH), (7, 2, 0), (16, 2, DEPTH))


def together(model: Model, pasts: Sequence[int], n: int, first: int) -> Batch:
    """The next `n` tokens of each sequence, which take turns; some entries are outputs."""
    at, seqs = np.divmod(np.arange(n * len(pasts)), len(pasts))
    return Batch(made_up(model, len(at), first), at + np.array(pasts)[seqs], seqs, some(len(at)))


def walk(model: Model, seed: int, n_seqs: int = 1, n_rs_seq: int = 0, **options: object) -> None:
    """Caches and drafts, whatever happens to sequences, are those of two contexts, and logits are
    those of a context that knows nothing of MTP: after parts of prompts of any length, outputs or
    not, alone and together; after drafts of which some are taken back; in places used again. Chains
    are of all sequences at once, in any order."""
    choose, n_equal, n_chains = random.Random(seed), 0, 0
    plain = {name: value for name, value in options.items() if name != "hidden"}
    several = {"n_seq_max": n_seqs, "n_rs_seq": n_rs_seq}
    with (
        context(model, **several, **options) as found,
        TwoContexts(model, **several, **options) as wanted,
        context(model, with_mtp=False, **several, **plain) as without,
    ):
        for turn in range(N_TURNS):
            seq, kept = choose.randrange(n_seqs), None
            if found.past(seq) and (found.past(seq) > 90 or choose.random() < 0.15):
                assert all(one.remove(0, seq) for one in (found, wanted, without))
            past, n = found.past(seq), choose.choice((1, 2, *EDGES[1:5], DEPTH + 1, DEPTH + 1))
            if n_seqs > 1 and choose.random() < 0.3:
                pasts = [found.past(each) for each in range(n_seqs)]
                batch = together(model, pasts, choose.choice((1, 2, 5)), 50 * turn)
            elif n_rs_seq and past and n == DEPTH + 1:
                batch = one_sequence(made_up(model, n, 500 + 50 * turn), past, seq, every(n))
                kept = choose.randint(1, n)
            else:
                outputs = choose.choice((none, every, last, some))(n)
                batch = one_sequence(made_up(model, n, 50 * turn), past, seq, outputs)
            for one in (wanted, found, without):
                one.decode(batch) if isinstance(one, TwoContexts) else one.decode_batch(batch)
            logits = logits_of(found, batch)
            assert logits == logits_of(without, batch) == logits_of(wanted.target, batch)
            if kept:
                assert all(one.remove(past + kept, seq) for one in (found, wanted, without))
            if found.past(seq) and (n_seqs == 1 or options.get("unified")):
                there = [each for each in range(n_seqs) if found.past(each)]
                choose.shuffle(there)
                newest = made_up(model, len(there), 900 + turn)
                drafts = compute_drafts(found, newest, np.array(there, dtype=np.int32), 3)
                for i, each in enumerate(there):
                    steps = wanted.draft(int(newest[i]), 3, each)
                    n_equal, n_chains = n_equal + agree(drafts[:, i].tolist(), steps), n_chains + 1
            for each in range(n_seqs) if turn == N_TURNS - 1 else (seq,):
                if found.past(each):
                    assert_in_step(found, wanted, each)
    assert n_equal >= 0.8 * n_chains


@pytest.mark.parametrize("case", usual(*range(len(CACHES)), long=range(len(CACHES), 45)))
def test_whatever_happens_to_sequences(request: pytest.FixtureRequest, case: int) -> None:
    """Every type of cache with every model, with several sizes and places, in 45 cases."""
    turn, kind = divmod(case, len(CACHES))
    model = request.getfixturevalue(("demo", "moe", "qwen3next")[(turn + kind // 3) % 3])
    type_k, type_v, flash_attn = CACHES[kind]
    options = {"type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    n_seqs, unified = PLACES[(turn + kind) % 3]
    n_ubatch, n_threads, n_rs_seq = SIZES[case % 5]
    options |= {"n_ubatch": n_ubatch, "n_threads": n_threads, "unified": unified}
    options |= {"hidden": ("post-norm", "pre-norm")[case % 2]}
    walk(model, case, n_seqs, n_rs_seq, **options)


@pytest.mark.parametrize("unified", [True, False])
def test_sequences_in_one_batch(model: Model, unified: bool) -> None:
    """Of unequal lengths: graphs take equal parts, those of the block alone others. So each
    sequence is compared with itself alone, to rounding."""
    exact = {"type_k": "f32", "type_v": "f32"}
    several = {"n_seq_max": len(LENGTHS), "unified": unified}
    with context(model, **exact, **several) as found:
        for batch in turns(model, LENGTHS, N_BATCH):
            found.decode_batch(batch)
        states = [state(found, seq) for seq in range(len(LENGTHS))]
    for seq, n in enumerate(LENGTHS):
        batch = one_sequence(made_up(model, n, 100 * seq))
        with beside(model, [batch], **exact) as (alone, wanted):
            mine = assert_in_step(alone, wanted)
        assert_close(states[seq], mine, TOLERANCE["f32"])


# -- back and away ---------------------------------------------------------------------------------


def verified(model: Model, start: int, first: int, n: int = DEPTH + 1, seq: int = 0) -> Batch:
    """`n` tokens of the text that begins at `first`, all of them outputs."""
    return one_sequence(made_up(model, n, first), start, seq, every(n))


@pytest.mark.parametrize("back", [0, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_state_that_is_restored(model: Model, back: int, on_device: bool) -> None:
    """In a fresh context (on a device: in its own, after other things); also one that has gone
    back, whose newest row is among the snapshots."""
    options = {"n_rs_seq": DEPTH}
    with context(model, **options) as found, context(model, **options) as fresh:
        found.decode_batch(one_sequence(made_up(model, N)))
        found.decode_batch(verified(model, N, 300))
        assert found.remove(N + DEPTH + 1 - back)
        wanted, before = drafts_of(found, 7, 8), state(found)
        data = found.save_state(on_device=on_device)
        target = found if on_device else fresh
        for n in (3, 2):  # what was there does not matter
            target.clear()
            target.decode_batch(one_sequence(made_up(model, n, 700)))
        assert drafts_of(target, 7, 8) != wanted
        target.clear()
        target.load_state(data)
        assert drafts_of(target, 7, 8) == wanted
        assert_same(before, state(target))
        found.decode_batch(verified(model, found.past(), 800))
        if not on_device:
            fresh.decode_batch(verified(model, fresh.past(), 800))
            assert drafts_of(fresh, 9, 8) == drafts_of(found, 9, 8)
            assert state(fresh).carry.tobytes() == state(found).carry.tobytes()


def test_a_state_of_another_tap_is_refused(demo: Model) -> None:
    """Its carry, and K and V of the block, are of rows before the norm, not after it."""
    with context(demo, hidden="pre-norm") as before, context(demo) as after:
        before.decode_batch(one_sequence(made_up(demo, N)))
        data = before.save_state()
        with pytest.raises(FatalDecodeError, match="carry of the state is of kind 1"):
            after.load_state(data)


def test_the_blocks_input_does_not_change_within_a_text(demo: Model) -> None:
    """So a state's rows are of the kind that its label says."""
    with context(demo) as found:
        lib, choose = found.library.lib, found.library.lib.llama_mtp_set_block_input
        found.decode_batch(one_sequence(made_up(demo, N)))
        assert choose(found.handle, lib.LLAMA_HIDDEN_TAP_POST_NORM), "no change"
        assert not choose(found.handle, lib.LLAMA_HIDDEN_TAP_PRE_NORM)
        found.clear()
        assert choose(found.handle, lib.LLAMA_HIDDEN_TAP_PRE_NORM)
        assert not choose(found.handle, lib.LLAMA_HIDDEN_TAP_NONE)


def test_a_state_whose_carry_is_of_another_version_is_refused(demo: Model) -> None:
    with context(demo) as found:
        found.decode_batch(one_sequence(made_up(demo, N)))
        data = bytearray(found.save_state())
        at = data.index(CARRY_VERSION.to_bytes(4, "little"))
        data[at] += 1
        with pytest.raises(FatalDecodeError, match="no carry of an MTP block, or one of another"):
            found.load_state(bytes(data))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seq", [0, 1])
def test_checkpoints_of_the_recurrent_part(model: Model, on_device: bool, seq: int) -> None:
    """They hold the carry; K and V of the block are cut with the others."""
    with context(model, n_seq_max=2, unified=True, n_rs_seq=DEPTH) as found:
        found.decode_batch(one_sequence(made_up(model, 9, 50), seq=1 - seq))
        found.decode_batch(one_sequence(made_up(model, N), seq=seq))
        wanted, before = drafts_of(found, 7, 8, seq), state(found, seq)
        other = drafts_of(found, 7, 8, 1 - seq)
        data = found.save_state(recurrent_only=True, seq=seq, on_device=on_device)
        for start in (N, N + 20):
            found.decode_batch(one_sequence(made_up(model, 20, 400 + start), start, seq))
        assert drafts_of(found, 7, 8, seq) != wanted
        assert not found.remove(N, seq), "it is too far back for snapshots"
        found.load_state(data, recurrent_only=True, seq=seq)
        assert found.remove(N, seq)
        assert drafts_of(found, 7, 8, seq) == wanted and drafts_of(found, 7, 8, 1 - seq) == other
        after = state(found, seq)
        assert_same(before, after)
        assert before.recurrent == after.recurrent


@pytest.mark.parametrize("n_rs_seq", [0, DEPTH])
def test_states_kept_on_a_device(model: Model, n_rs_seq: int) -> None:
    """Are what was saved then, whatever was computed since; the oldest makes room for a third."""
    with context(model, n_seq_max=2, unified=True, n_rs_seq=n_rs_seq) as found:
        found.states = DeviceStates(found.handle, found.call, found.checkpoint_memory, 2)
        kept, wanted = [], []
        for i, n in enumerate((1, 2, N, 4, 1)):
            seq = i % 2
            found.decode_batch(one_sequence(made_up(model, n, 40 * i), found.past(seq), seq))
            kept.append(found.save_checkpoint(seq))
            wanted.append(bytes(found.save_state(recurrent_only=True, seq=seq)))
            assert [len(one) > 0 for one in kept] == [j < i - 1 for j in range(i + 1)]
        assert [bytes(on_host(one)) for one in kept] == wanted
        found.states.make_room()
        with_states = found.memory()["context"]
        found.states.close()
        assert with_states - found.memory()["context"] >= 2 * len(wanted[0]) - 1000
    with pytest.raises(ContextClosedError):
        found.states.fetch(0, len(wanted[0]))


# -- embeddings and head of its own ----------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def untied_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random tables, which are not the trunk's."""
    path: Path = tmp_path_factory.mktemp("untied") / "untied.gguf"
    return write_untied(path, request.param, "f16", "embed_tokens", "shared_head_head")


def test_a_block_with_tables_of_its_own(untied_file: Path) -> None:
    """K, V and drafts are made with them."""
    with Model(untied_file) as model:
        walk(model, 0, n_rs_seq=DEPTH)
