"""Hidden rows that a draft context reads in a tap are those that an array would bring it.

Compared by the bytes of the draft cache and by logits, without a tolerance: only the way of the
rows differs. Contents of the cache themselves are checked in test_draft_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model, Session, native
from pyllama_mtp.batch import Batch
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.errors import ContextClosedError, DecodeError, UsageError
from pyllama_mtp.hidden import CARRY_SLOT, Hidden, HostRows, Ints, Tap, TapRows

from .support import EDGES, N_CTX, long_text, settings
from .support import made_up as text

RunPython = Callable[..., "CompletedProcess[str]"]
#: Tokens of the target, more than a short batch has.
N = 69
N_BATCH, N_UBATCH = 96, 32
Int8s = npt.NDArray[np.int8]
ONE = np.ones(1, dtype=np.int8)


def none(n: int) -> Int8s:
    return np.zeros(n, dtype=np.int8)


def context(model: Model, target: Context | None = None, **options: object) -> Context:
    chosen = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1}
    chosen |= {"need_embd_pre_norm": True, "n_outputs_max": 3, **options}
    return Context(model, ContextOptions(**chosen), target)  # type: ignore[arg-type]


@pytest.fixture
def target(model: Model) -> Iterator[Context]:
    """A target that has decoded the first N tokens."""
    with context(model) as found:
        found.decode(text(model, N), 0, none(N))
        yield found


@pytest.fixture
def draft(model: Model, target: Context) -> Iterator[Context]:
    with context(model, target, mtp_head=True) as found:
        yield found


def tap_of(context: Context) -> Tap:
    assert context.tap
    return context.tap


def shifted(rows: Hidden, carry: Hidden) -> Hidden:
    """Row i of the result pairs with token i: the carry, then all rows but the last."""
    return rows.part(0, len(rows) - 1).after(carry)


def on_host(rows: Hidden) -> HostRows:
    return HostRows(rows.to_host().copy())


def state(draft: Context, seq: int = 0) -> bytes:
    """The cache of one sequence, as Context.save_state() gives it for sequence 0."""
    ffi, lib = draft.library.ffi, draft.library.lib
    data = bytearray(lib.llama_state_seq_get_size_ext(draft.handle, seq, 0))
    target, message = ffi.from_buffer("uint8_t[]", data), ffi.new("char[256]")
    n = lib.pyllama_state_seq_get(draft.handle, target, len(data), seq, 0, message, len(message))
    assert n == len(data)
    return bytes(data)


def synced(draft: Context, tokens: Ints, hidden: Hidden, start: int = 0) -> bytes:
    """The draft cache after these tokens, in an empty cache unless start > 0."""
    if start == 0:
        draft.clear()
    draft.decode(tokens, start, none(len(tokens)), hidden)
    return state(draft)


# -- equal to arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", EDGES)
def test_a_prompt_in_batches_with_a_carry(model: Model, n: int) -> None:
    """Position 0 pairs with zeros; the last row of a batch, kept, with the first token of the
    next one. The draft context takes the same batches, so only the way of the rows differs."""
    tokens = text(model, n)
    with (
        context(model) as target,
        context(model, target, mtp_head=True) as device,
        context(model, target, mtp_head=True) as host,
    ):
        carry: Hidden = tap_of(target).zero()
        carry_data = np.zeros((1, model.n_embd), dtype=np.float32)
        for start in range(0, n, N_BATCH):
            part = tokens[start : start + N_BATCH]
            target.decode(part, start, none(len(part)))
            rows, data = target.hidden(), target.hidden_rows().copy()
            assert rows.to_host().tobytes() == data.tobytes()
            device.decode(part, start, none(len(part)), shifted(rows, carry))
            host.decode(part, start, none(len(part)), np.concatenate([carry_data, data[:-1]]))
            carry, carry_data = rows.part(len(part) - 1, len(part)).keep(CARRY_SLOT), data[-1:]
        assert state(device) == state(host)
        assert device.hidden_bytes_sent == 0 and host.hidden_bytes_sent == 4 * n * model.n_embd


def test_each_token_gets_its_row(model: Model, target: Context, draft: Context) -> None:
    """Rows in any order, more than once, across graphs: the order of the indices is what counts."""
    tokens, rows = text(model, N), tap_of(target).rows(N)
    order = np.random.default_rng(1).integers(0, N, N)
    found = synced(draft, tokens, TapRows(rows.tap, rows.index[order]))
    data = target.hidden_rows()
    assert found == synced(draft, tokens, HostRows(data[order]))
    assert found != synced(draft, tokens, rows)


@pytest.mark.parametrize("full_block", [False, True])
def test_logits(model: Model, target: Context, full_block: bool) -> None:
    """A batch with outputs on top of a sync without."""
    some, found = np.array([0, 1, 0, 1, 1], dtype=np.int8), []
    tokens, more = text(model, N), text(model, 5, N)
    with context(model, target, mtp_head=True, full_block=full_block) as draft:
        rows = tap_of(target).rows(N)
        for hidden in (rows, on_host(rows)):
            synced(draft, tokens, hidden)
            draft.decode(more, N, some, hidden.part(3, 8))
            found.append([draft.logits(i).tobytes() for i in (1, 3, 4)] + [state(draft)])
    assert found[0] == found[1]


def test_a_chain_of_drafts_on_its_own_tap(model: Model, target: Context, draft: Context) -> None:
    """A draft context reads the row that it has written itself, one token at a time."""
    rows, found = tap_of(target).rows(N), []
    for device in (True, False):
        synced(draft, text(model, N), shifted(rows, tap_of(target).zero()))
        row, token, chain = rows.part(N - 1, N), 7, b""
        for position in range(N, N + 5):
            hidden = row if device else on_host(row)
            draft.decode(np.array([token], dtype=np.int32), position, ONE, hidden)
            token, row = draft.argmax(0), tap_of(draft).rows(1)
            chain += draft.logits(0).tobytes()
        found.append(chain)
    assert found[0] == found[1]


def test_several_sequences_with_slots_of_their_own(model: Model) -> None:
    """Interleaved, of unequal lengths, in two batches; the first row of each sequence in a batch is
    the zero row, then its kept one."""
    lengths, cut = (5, 19, 11), 14
    several = {"n_seq_max": 3}
    turns = [(p, s) for p in range(max(lengths)) for s in range(3) if p < lengths[s]]
    positions, seqs = (np.array(column, dtype=np.int32) for column in zip(*turns, strict=True))
    tokens = text(model, len(turns))
    with (
        context(model, **several) as target,
        context(model, target, mtp_head=True, **several) as device,
        context(model, target, mtp_head=True, **several) as host,
    ):
        tap = tap_of(target)
        carry = [tap.zero()] * 3
        carry_data = [np.zeros(model.n_embd, dtype=np.float32)] * 3
        for part in (slice(0, cut), slice(cut, None)):
            batch = tokens[part], positions[part], seqs[part], none(len(tokens[part]))
            target.decode_batch(Batch(*batch))
            rows, data = tap.rows(len(batch[0])), target.hidden_rows().copy()
            index, paired = [], []
            for i, seq in enumerate(seqs[part]):
                index.append(int(carry[seq].index[0]))
                paired.append(carry_data[seq])
                carry[seq], carry_data[seq] = rows.part(i, i + 1), data[i]
            device.decode_batch(Batch(*batch, TapRows(tap, np.array(index, dtype=np.int32))))
            host.decode_batch(Batch(*batch, HostRows(np.stack(paired))))
            for seq in range(3):  # slots in another order than sequences
                if carry[seq].index[0] in rows.index:
                    carry[seq] = carry[seq].keep(4 - 2 * seq)
        for seq in range(3):
            assert state(device, seq) == state(host, seq), f"sequence {seq}"
        assert len({state(device, seq) for seq in range(3)}) == 3


def test_arrays_and_taps_in_turn(model: Model, target: Context, draft: Context) -> None:
    """Batches of one shape, whose graph would be used again if nobody looked where rows are."""
    tokens, rows = text(model, N_UBATCH), tap_of(target).rows(N_UBATCH)
    with context(model) as other:
        other.decode(text(model, N, 100), 0, none(N))
        others = tap_of(other).rows(N_UBATCH)
        assert np.array_equal(others.index, rows.index), "or the indices would tell them apart"
        a, b = synced(draft, tokens, rows), synced(draft, tokens, others)
        assert a != b
        for hidden, wanted in ((on_host(others), b), (rows, a), (on_host(rows), a), (others, b)):
            assert synced(draft, tokens, hidden) == wanted


@dataclass
class Outcome:
    """Of a generation: text, (position, drafted, actual) of every draft, accepted ones, cache."""

    text: str
    pairs: list[tuple[int, int, int]]
    accepted: list[int]
    cache: bytes


def drafts(model: Model, tokens: list[int], **options: object) -> list[Outcome]:
    """Generations after several prompts, the second of which goes on from the first."""
    found = []
    with Session(model, settings(3, **options)) as session:
        for n in (33, 49, 20):
            run = session.generate(tokens[:n], max_tokens=16, ignore_eos=True, log_pairs=True)
            run.run()
            assert run.telemetry.pairs and session._engine.drafter
            pairs = [(p.position, p.drafted, p.actual) for p in run.telemetry.pairs]
            draft = session._engine.drafter.context
            assert (draft.hidden_bytes_sent > 0) is (options.get("handoff") == "host")
            cache = draft.save_state()
            found.append(Outcome(run.text, pairs, run.telemetry.accepted, cache))
    return found


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_generations(demo: Model, demo_prompts: list[str], rollback: str) -> None:
    tokens = long_text(demo, demo_prompts)
    device = drafts(demo, tokens, rollback=rollback, handoff="device")
    host = drafts(demo, tokens, rollback=rollback, handoff="host")
    assert device == host
    assert sum(sum(run.accepted) for run in device) > 0
    assert any(drafted != actual for run in device for _, drafted, actual in run.pairs)


def test_rows_before_the_norm_give_other_drafts(demo: Model, demo_prompts: list[str]) -> None:
    """They run; the head was not trained on them."""
    tokens = long_text(demo, demo_prompts)
    before = drafts(demo, tokens, hidden="pre-norm")
    assert before == drafts(demo, tokens, hidden="pre-norm", handoff="host")
    after = drafts(demo, tokens)
    assert [run.pairs for run in before] != [run.pairs for run in after]
    for a, b in zip(before, after, strict=True):
        assert a.cache != b.cache


# -- kept rows -------------------------------------------------------------------------------------


def test_a_kept_row_stays_and_the_others_do_not(model: Model, target: Context) -> None:
    tap = tap_of(target)
    rows = tap.rows(N)
    before = rows.to_host()
    kept = {slot: rows.part(row, row + 1).keep(slot) for slot, row in ((0, N - 1), (32, 3))}
    for slot, row in ((0, N - 1), (32, 3)):
        assert tap.read(int(kept[slot].index[0])).tobytes() == before[row].tobytes()
    again = kept[0].keep(0)  # onto itself
    assert np.array_equal(again.index, kept[0].index)
    for start in (N, N + N_BATCH):  # a tap may hold the rows of two long batches
        target.decode(text(model, N_BATCH, start), start, none(N_BATCH))
        for slot, row in ((0, N - 1), (32, 3)):
            assert tap.read(int(kept[slot].index[0])).tobytes() == before[row].tobytes()
    after = rows.to_host()
    assert (np.abs(after - before).max(axis=1) > 0.01 * np.abs(before).max()).all()
    moved = kept[32].keep(5)  # from slot to slot
    assert tap.read(int(moved.index[0])).tobytes() == before[3].tobytes()
    assert not tap.read(int(tap.zero().index[0])).any()


def test_every_slot_is_apart_from_every_other(model: Model, target: Context) -> None:
    """32 slots and one for each sequence; neither the zero row nor a token's is among them."""
    tap = tap_of(target)
    rows = tap.rows(N)
    data = rows.to_host()
    kept = [rows.part(slot, slot + 1).keep(slot) for slot in range(33)]
    index = [int(row.index[0]) for row in kept]
    assert len({*index, int(tap.zero().index[0]), *rows.index.tolist()}) == 33 + 1 + N
    for slot, row in enumerate(index):
        assert tap.read(row).tobytes() == data[slot].tobytes()
    assert rows.to_host().tobytes() == data.tobytes()


def test_a_row_that_is_written_is_read_and_used(
    model: Model, target: Context, draft: Context
) -> None:
    """For sessions that are saved and restored."""
    tap, data = tap_of(target), np.random.default_rng(2).standard_normal(model.n_embd, "f4")
    row = tap.write(7, data)
    assert tap.read(int(row.index[0])).tobytes() == data.tobytes()
    token = text(model, 1)
    found = synced(draft, token, row)
    assert found == synced(draft, token, HostRows(data[None]))
    assert found != synced(draft, token, tap.zero())
    target.decode(text(model, 3, N), N, none(3))
    assert tap.read(int(row.index[0])).tobytes() == data.tobytes()


# -- refusals: an exception each, and the context goes on ------------------------------------------


@pytest.fixture
def unharmed(model: Model, target: Context, draft: Context) -> Iterator[None]:
    """The draft cache is the same before and after, however often something was refused."""
    hidden = shifted(tap_of(target).rows(N), tap_of(target).zero())
    before = synced(draft, text(model, N), hidden)
    yield
    assert state(draft) == before, "what was refused has changed the cache"
    assert synced(draft, text(model, N), hidden) == before


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("wrong", [-1, 1 + 33 + 3 * 64 + 2 * N_BATCH, 2**31 - 1, -(2**31)])
def test_a_row_out_of_range(model: Model, target: Context, draft: Context, wrong: int) -> None:
    tap = tap_of(target)
    index = np.array([0, 1, wrong], dtype=np.int32)
    with pytest.raises((UsageError, DecodeError), match="refused"):
        draft.decode(text(model, 3), N, none(3), TapRows(tap, index))
    with pytest.raises(UsageError, match="does not exist"):
        tap.read(wrong)
    with pytest.raises(UsageError, match="does not exist"):
        tap.keep(wrong, 0)


@pytest.mark.parametrize("slot", [-1, 33, 2**31 - 1])
def test_a_slot_out_of_range(model: Model, target: Context, slot: int) -> None:
    tap = tap_of(target)
    before = tap.rows(N).to_host()
    with pytest.raises(UsageError, match="does not exist"):
        tap.keep(int(tap.rows(N).index[0]), slot)
    with pytest.raises(UsageError, match="does not exist"):
        tap.write(slot, np.zeros(model.n_embd, dtype=np.float32))
    assert tap.rows(N).to_host().tobytes() == before.tobytes()
    with pytest.raises(UsageError, match="shape"):
        tap.write(0, np.zeros(model.n_embd + 1, dtype=np.float32))


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("n_rows", [0, 2, 4])
def test_another_number_of_rows(model: Model, target: Context, draft: Context, n_rows: int) -> None:
    rows = tap_of(target).rows(N).part(0, n_rows)
    with pytest.raises(UsageError, match=f"{n_rows} hidden rows for 3 tokens"):
        draft.decode(text(model, 3), N, none(3), rows)


def test_rows_for_a_target(model: Model, target: Context, draft: Context) -> None:
    rows = tap_of(target).rows(3)
    before = target.save_state()
    with pytest.raises(UsageError, match="belong to a draft context"):
        target.decode(text(model, 3), N, none(3), rows)
    lib, index = target.library.lib, target.library.ffi.from_buffer("int32_t[]", rows.index)
    assert not lib.llama_mtp_set_hidden_rows(target.handle, target.handle, index, 3)
    target.decode(text(model, 3), N, none(3))
    assert target.save_state() != before


@pytest.mark.usefixtures("unharmed")
def test_rows_of_a_context_without_a_tap(model: Model, target: Context, draft: Context) -> None:
    with context(model, need_embd_pre_norm=False) as plain:
        plain.decode(text(model, 3), 0, none(3))
        nowhere: Any = SimpleNamespace(context=plain)
        rows = TapRows(nowhere, np.arange(3, dtype=np.int32))
        with pytest.raises((UsageError, DecodeError), match="refused"):
            draft.decode(text(model, 3), N, none(3), rows)
        lib, ffi = plain.library.lib, plain.library.ffi
        assert lib.llama_mtp_tap_row(plain.handle, 0) == -1
        assert lib.llama_mtp_tap_keep(plain.handle, 0, 0) == -1
        assert not lib.llama_mtp_tap_read(plain.handle, 0, ffi.new("float[]", model.n_embd))
        assert lib.llama_mtp_tap_write(plain.handle, 0, ffi.new("float[]", model.n_embd)) == -1
        assert lib.llama_mtp_get_tap_info(plain.handle).device == ffi.NULL


def test_rows_of_a_model_of_another_width(
    run_python: RunPython, demo_file: Path, moe_file: Path
) -> None:
    """In a process of its own: ggml would end this one."""
    code = """
import sys
import numpy as np
from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.errors import DecodeError, UsageError
common = dict(n_ctx=64, n_batch=8, n_ubatch=8, n_threads=1, need_embd_pre_norm=True)
tokens, none = np.arange(8, dtype=np.int32), np.zeros(8, dtype=np.int8)
with Model(sys.argv[1]) as model, Model(sys.argv[2]) as other:
    target = Context(other, ContextOptions(**common))
    draft = Context(model, ContextOptions(**common, mtp_head=True))
    target.decode(tokens, 0, none)
    try:
        draft.decode(tokens, 0, none, target.tap.rows(8))
    except (UsageError, DecodeError):
        draft.decode(tokens, 0, none, np.zeros((8, model.n_embd), dtype=np.float32))
        print("refused")
"""
    done = run_python(code, demo_file, moe_file)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-2000:]


def test_rows_of_a_refused_batch_are_not_used_later(
    model: Model, target: Context, draft: Context
) -> None:
    """Neither by the next batch, whose rows come as arrays, nor do they refuse it."""
    tap, tokens = tap_of(target), text(model, N)
    data = on_host(tap.rows(N))
    wanted = synced(draft, tokens, data)
    pending = tap.rows(N).index[::-1].copy()
    for n in (N, 3):  # of as many tokens as the next batch, and of fewer
        draft.clear()
        draft.decode(tokens[:5], 0, none(5), data.part(0, 5))
        with pytest.raises((UsageError, DecodeError)):  # positions that are there already
            draft.decode(tokens[:n], 0, none(n), TapRows(tap, pending[:n]))
        assert synced(draft, tokens, data) == wanted
    # The C function alone, for another number of tokens: refused once, then forgotten.
    lib, index = draft.library.lib, draft.library.ffi.from_buffer("int32_t[]", pending)
    for n in (4, 6):
        draft.clear()
        assert lib.llama_mtp_set_hidden_rows(draft.handle, target.handle, index, n)
        with pytest.raises((UsageError, DecodeError)):
            draft.decode(tokens[:5], 0, none(5), data.part(0, 5))
        assert synced(draft, tokens, data) == wanted


def test_rows_of_a_closed_target(model: Model) -> None:
    """The draft context goes on without it, with arrays or with another target."""
    target = context(model)
    target.decode(text(model, N), 0, none(N))
    with context(model, target, mtp_head=True) as draft:
        tap, rows = tap_of(target), tap_of(target).rows(N)
        data = on_host(rows)
        wanted = synced(draft, text(model, N), rows)
        target.close()
        for use in (
            lambda: synced(draft, text(model, N), rows),
            lambda: tap.read(0),
            lambda: tap.keep(0, 0),
            lambda: tap.write(0, data.data[0]),
            lambda: tap.rows(1),
        ):
            with pytest.raises(ContextClosedError):
                use()
        assert synced(draft, text(model, N), data) == wanted
        with context(model) as other:  # where the first one's memory was, perhaps
            other.decode(text(model, N), 0, none(N))
            assert synced(draft, text(model, N), tap_of(other).rows(N)) == wanted


def test_contexts_may_be_closed_in_any_order(run_python: RunPython, demo_file: Path) -> None:
    """In a process of its own: a fault there would end this one."""
    code = """
import sys
import numpy as np
from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions
common = dict(n_ctx=64, n_batch=8, n_ubatch=8, n_threads=1, need_embd_pre_norm=True)
tokens, none = np.arange(8, dtype=np.int32), np.zeros(8, dtype=np.int8)
with Model(sys.argv[1]) as model:
    for order in ("td", "dt", "t", "d", ""):
        target = Context(model, ContextOptions(**common))
        draft = Context(model, ContextOptions(**common, mtp_head=True), target)
        for start in (0, 8):
            target.decode(tokens, start, none)
            draft.decode(tokens, start, none, target.tap.rows(8))
        for which in order:
            {"t": target, "d": draft}[which].close()
        if order == "t":
            draft.decode(tokens, 16, none, np.zeros((8, model.n_embd), dtype=np.float32))
print("done")
"""
    done = run_python(code, demo_file)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_rows_of_short_batches_stay(model: Model) -> None:
    """Until LLAMA_MTP_SHORT further tokens have come in short batches, long ones in between or not;
    to the bit, in any sizes."""
    rng = np.random.default_rng(7)
    short = int(native.load().lib.LLAMA_MTP_SHORT)
    with context(model, n_ctx=2048, n_batch=N_BATCH, n_ubatch=N_BATCH) as made:
        tap, position, kept = tap_of(made), 0, []  # (row, its data, short tokens since)
        while position < 1200:
            long = rng.random() < 0.1
            n = int(rng.integers(short + 1, N_BATCH) if long else rng.integers(1, short + 1))
            n = 1 if not long and rng.random() < 0.5 else n
            made.decode(text(model, n, position), position, none(n))
            position += n
            rows, data = tap.rows(n).index.tolist(), made.hidden_rows().copy()
            if not long:
                kept = [(row, was, since + n) for row, was, since in kept]
                kept = [one for one in kept if one[2] <= short]
                kept += [(row, was, 0) for row, was in zip(rows, data, strict=True)]
            assert len({row for row, _, _ in kept}) == len(kept)
            for row, was, _ in kept:
                assert tap.read(row).tobytes() == was.tobytes()
