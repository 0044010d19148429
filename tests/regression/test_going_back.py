"""When the recurrent states of several sequences can go back, and what they then are.

Snapshots lie beside the state of their sequence. A graph of several sequences brings their states
together; a state that it moves leaves its snapshots behind, and llama.cpp would go back to what
lies there instead. The driver asks only for what is there; see Context.rewind().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model
from pyllama_mtp.errors import FatalDecodeError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.prefixcache import go_back

from .support import N_CTX, c_call, decode, made_up, plain_context
from .twocontexts import trunk

SNAPSHOTS, N_SEQS = 3, 3
STARTS = (9, 14, 20)


def some(context: Context, lengths: dict[int, int]) -> Batch:
    """The next `lengths[seq]` tokens of sequences, in that order; every row is an output."""
    tokens, positions, seqs = [], [], []
    for seq, n in lengths.items():
        start = context.past(seq)
        tokens.append(text(context.model, seq)[start : start + n])
        positions.append(np.arange(start, start + n))
        seqs.append(np.full(n, seq))
    ones = np.ones(sum(lengths.values()), dtype=np.int8)
    return Batch(np.concatenate(tokens), np.concatenate(positions), np.concatenate(seqs), ones)


def text(model: Model, seq: int) -> npt.NDArray[np.int32]:
    return made_up(model, 64, 100 * seq)


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    """Three sequences of different lengths."""
    several = {"n_ctx": 3 * N_CTX, "n_seq_max": N_SEQS, "unified": True}
    with trunk(model, n_rs_seq=SNAPSHOTS, **several) as made:
        for seq, n in enumerate(STARTS):
            made.decode_batch(some(made, {seq: n}))
        yield made


def right(model: Model, seq: int, n: int) -> npt.NDArray[np.float32]:
    """Logits after the first `n` tokens of a sequence alone, the last of them by itself."""
    with plain_context(model) as alone:
        decode(alone, text(model, seq)[: n - 1])
        return decode(alone, text(model, seq)[n - 1 : n], n - 1)


def off(context: Context, seq: int) -> float:
    """How far the logits of the next token are from the right ones, as a share of their range."""
    context.decode_batch(some(context, {seq: 1}))
    wanted = right(context.model, seq, context.past(seq))
    return float(np.abs(context.logits(0) - wanted).max() / np.ptp(wanted))


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 0)])
def test_each_goes_back_as_far_as_it_likes(context: Context, order: Sequence[int]) -> None:
    """Equally many rows of each in one graph, in any order, one of them left out."""
    context.decode_batch(some(context, dict.fromkeys(order, 4)))
    for seq in range(N_SEQS):
        assert context.rewind(seq) == (SNAPSHOTS if seq in order else 0)
    for back, seq in enumerate(order, start=1):
        past = context.past(seq)
        assert not context.remove(past - SNAPSHOTS - 1, seq)
        assert context.remove(past - back, seq) and context.past(seq) == past - back
        assert context.rewind(seq) == 0 and not context.remove(past - back - 1, seq)
    for seq in range(N_SEQS):
        assert off(context, seq) < 0.01


def test_not_after_a_decode_that_was_interrupted(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.decode_batch(some(context, {0: 4, 1: 4}))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(native, "raise_pending", interrupt)
        context.decode_batch(some(context, {2: 1}))
    assert [context.rewind(seq) for seq in range(N_SEQS)] == [0, 0, 0]


RAGGED = {1: 2, 0: 4, 2: 4}
#: Tokens of each sequence, decode by decode, and how far each can then go back.
DECODES: dict[str, tuple[list[dict[int, int]], list[int]]] = {
    "as many as there are rows": ([{0: 2, 2: 2}], [1, 0, 1]),
    "single rows": ([{0: 2, 2: 2}, {0: 1, 2: 1}], [0, 0, 0]),
    "after another decode": ([{0: 4, 1: 4}, {2: 1}], [0, 0, 0]),
    "more than can be taken back": ([{0: SNAPSHOTS + 2}], [0, 0, 0]),
    "ragged": ([RAGGED], [0, 0, 0]),
    "more than a graph": ([{0: 6, 1: 6, 2: 6}], [0, 0, 0]),
}


@pytest.mark.parametrize(("decodes", "rewinds"), DECODES.values(), ids=DECODES)
def test_no_further_than_there_are_states(
    context: Context, decodes: list[dict[int, int]], rewinds: list[int]
) -> None:
    for lengths in decodes:
        context.decode_batch(some(context, lengths))
    assert [context.rewind(seq) for seq in range(N_SEQS)] == rewinds
    for seq, n in enumerate(rewinds):
        assert not context.remove(context.past(seq) - n - 1, seq)
    assert all(off(context, seq) < 0.01 for seq in range(N_SEQS))


def native_remove(context: Context, seq: int, start: int) -> bool:
    """What ``llama_memory_seq_rm()`` says, which the context would not ask."""
    return bool(context.library.lib.llama_memory_seq_rm(context._memory, seq, start, -1))


def test_llama_cpp_refuses_a_state_that_was_moved(context: Context) -> None:
    """The first graph has sequence 1, the second one brings 0 and 2 together and puts the last
    state of 1 elsewhere, without the ones before."""
    context.decode_batch(some(context, RAGGED))
    past = context.past(1)
    assert not native_remove(context, 1, past - 1)
    assert off(context, 1) < 0.01


def test_llama_cpp_refuses_what_the_last_decode_did_not_keep(context: Context) -> None:
    """One row leaves one state, and so do more than can be taken back; older ones are of other
    tokens. A rollback leaves the states before it behind."""

    def refused(*back: int) -> bool:
        return not any(native_remove(context, 0, context.past(0) - n) for n in back)

    context.decode_batch(some(context, {0: 4}))
    context.decode_batch(some(context, {0: 1}))
    assert refused(1, 2, 3)
    context.decode_batch(some(context, {0: SNAPSHOTS + 2}))
    assert refused(1, 2, 3)
    context.decode_batch(some(context, {0: 3}))
    assert refused(3)
    past = context.past(0)
    assert native_remove(context, 0, past - 1)
    assert not native_remove(context, 0, past - 2)


def test_the_size_of_a_state_settles_nothing(context: Context) -> None:
    """What is pending can still be taken back; the size is that of the state that is saved."""
    context.decode_batch(some(context, {0: 4, 1: 4}))

    def sizes() -> list[int]:
        each = [c_call(context, "llama_state_seq_get_size", seq) for seq in range(N_SEQS)]
        return [*each, c_call(context, "llama_state_get_size")]

    before = sizes()
    assert native_remove(context, 0, context.past(0) - 2)
    assert sizes()[1:3] == before[1:3]
    context.save_state(seq=1)
    assert sizes()[1:3] == before[1:3]
    if context.model.is_recurrent:
        assert not native_remove(context, 1, context.past(1) - 2)
    assert all(off(context, seq) < 0.01 for seq in range(N_SEQS))


def test_llama_cpp_refuses_to_go_back_in_a_state_that_was_restored(context: Context) -> None:
    context.decode_batch(some(context, {0: 4}))
    context.load_state(bytes(context.save_state()))
    assert not native_remove(context, 0, context.past(0) - 1)


def test_by_a_checkpoint_of_its_own(context: Context) -> None:
    """Any number of rows, one sequence after the other."""
    states = [context.save_state(True, seq, on_device=True) for seq in range(N_SEQS)]
    context.decode_batch(some(context, RAGGED))
    for seq, n_keep in ((0, 2), (1, 1), (2, 4)):
        go_back(context, states[seq], STARTS[seq], seq)
        context.decode_batch(some(context, {seq: n_keep}))
        assert context.past(seq) == STARTS[seq] + n_keep
    assert all(off(context, seq) < 0.01 for seq in range(N_SEQS))


def test_a_state_that_stays_on_its_device(context: Context) -> None:
    """Going back to it is going back to the state on the host, of each sequence by itself."""
    model = context.model
    if not model.is_recurrent:
        pytest.skip("no recurrent state")
    for seq in range(N_SEQS):
        outdated = context.save_state(True, seq, on_device=True)
        state, copy = context.save_state(True, seq, on_device=True), context.save_state(True, seq)
        assert 10 * len(state) < len(copy)
        context.decode_batch(some(context, {seq: 4}))
        go_back(context, state, STARTS[seq], seq)
        context.decode_batch(some(context, {seq: 1}))
        wanted = right(model, seq, STARTS[seq] + 1)
        np.testing.assert_allclose(context.logits(0), wanted, atol=0.05)
        with pytest.raises(FatalDecodeError, match="cannot be restored"):
            context.load_state(outdated, True, seq)
