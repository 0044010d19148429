"""What verified tokens do to delta nets is taken in by the next pass, as far as they stay: logits
and states are, bit for bit, those of steps.

The reference decodes the tokens that stay, one by one, in a context that can never go back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import cffi
import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.memory import state_bytes

from .support import N_CTX, made_up
from .twocontexts import ROUNDING, every, trunk

SNAPSHOTS, N_SEQS = 3, 3
LLAMA_BATCH = """
struct llama_batch { int32_t n_tokens; int32_t * token; float * embd; int32_t * pos;
                     int32_t * n_seq_id; int32_t ** seq_id; int8_t * logits; };
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(void * ctx, struct llama_batch batch);
float * llama_get_logits_ith(void * ctx, int32_t i);
"""


@pytest.fixture(autouse=True)
def same_bits(model: Model) -> None:
    if not model.same_bits:
        pytest.skip("bits depend on the number of rows here")


def step(context: Context, tokens: npt.NDArray[np.int32], seq: int = 0) -> list[bytes]:
    """The logits after each of `tokens`, in one batch."""
    start, n = context.past(seq), len(tokens)
    batch = Batch(tokens, np.arange(start, start + n), np.full(n, seq), every(n))
    context.decode_batch(batch)
    return [context.logits(row).tobytes() for row in range(n)]


def state(context: Context, seq: int = 0) -> bytes:
    return bytes(context.save_state(recurrent_only=True, seq=seq))


@pytest.fixture
def steps(model: Model) -> Iterator[Context]:
    with trunk(model, n_seq_max=N_SEQS, n_ctx=N_SEQS * N_CTX, unified=True) as context:
        yield context


@pytest.fixture
def rounds(model: Model) -> Iterator[Context]:
    several = {"n_seq_max": N_SEQS, "n_ctx": N_SEQS * N_CTX, "unified": True}
    with trunk(model, n_rs_seq=SNAPSHOTS, **several) as context:
        yield context


@pytest.mark.parametrize("seed", range(4))
def test_random_lengths_and_rollbacks(steps: Context, rounds: Context, seed: int) -> None:
    """Short batches, of which some tokens are taken back, and long ones, of three sequences in
    turn, of which one begins as a copy of another. States are saved, read by the context that
    cannot go back, and gone on from."""
    choose = random.Random(seed)
    texts = [made_up(steps.model, 400, 100 * seq) for seq in range(N_SEQS)]
    for turn in range(24):
        seq = choose.randrange(N_SEQS)
        past = rounds.past(seq)
        n = choose.choice((1, 2, 3, 4, 4, 4, 6, 13))
        got = step(rounds, texts[seq][past : past + n], seq)
        back = choose.randint(0, min(rounds.rewind(seq), n - 1))
        if back:
            assert rounds.remove(past + n - back, seq)
        expected = [
            step(steps, texts[seq][i : i + 1], seq)[0] for i in range(past, past + n - back)
        ]
        if n <= SNAPSHOTS + 1:
            assert got[: n - back] == expected, (turn, n, back)
        how, other = choose.randrange(5), (seq + 1) % N_SEQS
        if how == 0 and n <= SNAPSHOTS + 1:
            assert state(rounds, seq) == state(steps, seq)
        if how == 1 or n > SNAPSHOTS + 1:  # whose kernels are others
            saved = rounds.save_state(seq=seq)
            steps.load_state(saved, seq=seq)
            rounds.load_state(saved, seq=seq)
        elif not rounds.past(other):
            texts[other] = texts[seq]
            rounds.copy(seq, other)
            steps.load_state(steps.save_state(seq=seq), seq=other)


@pytest.mark.parametrize("n_rs_seq", [1, 2, 6])
def test_convolutions_of_random_lengths(steps: Context, n_rs_seq: int) -> None:
    """A context keeps the inputs of its convolutions in a ring, which comes round every 3 +
    n_rs_seq of them, and goes back in it; a saved state has the last three of them."""
    choose = random.Random(n_rs_seq)
    tokens, model = made_up(steps.model, 200), steps.model
    with trunk(model, n_rs_seq=n_rs_seq) as rounds:
        past = 0
        while past < 100:
            n = choose.randint(1, n_rs_seq + 1)
            got = step(rounds, tokens[past : past + n])
            back = choose.randint(0, min(rounds.rewind(), n - 1))
            assert not back or rounds.remove(past + n - back)
            expected = [step(steps, tokens[i : i + 1])[0] for i in range(past, past + n - back)]
            assert got[: n - back] == expected, (past, n, back)
            past += n - back
            how = choose.randrange(6)
            if how == 0:
                assert state(rounds) == state(steps)
            elif how == 1:
                rounds.load_state(rounds.save_state(on_device=choose.random() < 0.5))


def test_a_new_sequence_has_nothing_pending(steps: Context, rounds: Context) -> None:
    """Its cell was another sequence's, which was removed; a pass of the others went over it."""
    texts = [made_up(steps.model, 40, 100 * seq) for seq in range(N_SEQS)]
    for seq in range(N_SEQS):
        step(rounds, texts[seq][:4], seq)
    assert rounds.remove(0, 1)
    pair = np.concatenate([texts[0][4:8], texts[2][4:8]])
    positions, seqs = np.tile(np.arange(4, 8), 2), np.repeat([0, 2], 4)
    rounds.decode_batch(Batch(pair, positions, seqs, every(8)))
    expected = [step(steps, texts[1][i : i + 1], 1)[0] for i in range(4)]
    off = [
        np.abs(np.frombuffer(a, np.float32) - np.frombuffer(b, np.float32)).max()
        for a, b in zip(step(rounds, texts[1][:4], 1), expected, strict=True)
    ]
    assert max(off) < ROUNDING * np.ptp(np.frombuffer(expected[0], np.float32))


def test_a_new_sequence_in_a_cell_that_the_same_batch_empties(rounds: Context) -> None:
    """Sequences 0 and 1 share a token, and so a cell from then on; sequence 2 gets the other one,
    without what its convolutions have had."""
    texts = [made_up(rounds.model, 9, 100 * seq) for seq in range(N_SEQS)]
    with trunk(rounds.model) as alone:
        expected = np.frombuffer(step(alone, texts[2][:1])[0], np.float32)
    for seq in (1, 0):  # the last one's cell is emptied, and searched first
        step(rounds, texts[seq][:8], seq)
    ffi = cffi.FFI()
    ffi.cdef(LLAMA_BATCH)
    maps = Path("/proc/self/maps").read_text()
    llama = ffi.dlopen(re.findall(r"/\S*libllama\S*", maps)[0])
    batch = llama.llama_batch_init(2, 0, 2)
    for i, seqs in enumerate([(0, 1), (2,)]):
        batch.token[i], batch.pos[i] = texts[2 * i][8 * (1 - i)], 8 * (1 - i)
        batch.n_seq_id[i], batch.logits[i] = len(seqs), 1
        batch.seq_id[i][0 : len(seqs)] = seqs
    batch.n_tokens = 2
    handle = ffi.cast("void *", int(rounds.library.ffi.cast("uintptr_t", rounds.handle)))
    assert llama.llama_decode(handle, batch) == 0
    row = ffi.buffer(llama.llama_get_logits_ith(handle, 1), expected.nbytes)
    assert np.abs(np.frombuffer(row, np.float32) - expected).max() < ROUNDING * np.ptp(expected)
    llama.llama_batch_free(batch)


def test_each_sequence_of_a_batch_keeps_its_own_number(model: Model) -> None:
    """As near to steps as other cells of a unified cache let it be."""
    several = {"n_seq_max": N_SEQS, "n_ctx": N_SEQS * N_CTX, "unified": True}
    texts = [made_up(model, 60, 100 * seq) for seq in range(N_SEQS)]
    with trunk(model, **several) as steps, trunk(model, n_rs_seq=SNAPSHOTS, **several) as rounds:
        for kept in ((4, 1, 2), (1, 3, 4), (2, 2, 1), (3, 4, 4)):
            starts = [rounds.past(seq) for seq in range(N_SEQS)]
            tokens = np.concatenate([texts[seq][at : at + 4] for seq, at in enumerate(starts)])
            positions = np.concatenate([np.arange(at, at + 4) for at in starts])
            seqs = np.repeat(np.arange(N_SEQS), 4)
            rounds.decode_batch(Batch(tokens, positions, seqs, every(12)))
            got = [rounds.logits(row).copy() for row in range(12)]
            for seq, (at, n) in enumerate(zip(starts, kept, strict=True)):
                for i in range(n):
                    (one,) = step(steps, texts[seq][at + i : at + i + 1], seq)
                    expected = np.frombuffer(one, dtype=np.float32)
                    off = np.abs(got[4 * seq + i] - expected).max()
                    assert off < ROUNDING * np.ptp(expected)
                assert n == 4 or rounds.remove(at + n, seq)


def test_room_for_going_back_costs_tokens_not_states(model: Model) -> None:
    n_bytes = []
    for n in (0, 1, 4):
        with trunk(model, n_rs_seq=n) as context:
            n_bytes.append(context.memory()["context"])
    none, one, four = n_bytes
    assert 0 < four - one < 3 * (one - none) and four - one < state_bytes(model.info)
