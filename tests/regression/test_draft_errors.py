"""What a draft is refused for: an exception each, which says why, and the context goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from pyllama_mtp import Model
from pyllama_mtp.drafting.head import set_draft_head
from pyllama_mtp.errors import (
    FatalDecodeError,
    InvalidBatchError,
    NoKVSlotError,
    PyllamaMtpError,
    UsageError,
)
from pyllama_mtp.llama.batch import Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, reserve_rounds

from ..trimmed import head_rows
from .support import made_up
from .twocontexts import context, every, one_sequence

N = 20


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def unharmed(model: Model) -> Iterator[Context]:
    """Two sequences of three; whatever was refused, the caches and the drafts are the same."""
    with context(model, n_seq_max=3, unified=True, n_rs_seq=3) as found:
        for seq in range(2):
            found.decode_batch(one_sequence(made_up(model, N, 50 * seq), seq=seq))
        before = [bytes(found.save_state(seq=seq)) for seq in range(2)]
        drafts = compute_drafts(found, ints(7, 9), ints(0, 1), 4).tolist()
        yield found
        assert [bytes(found.save_state(seq=seq)) for seq in range(2)] == before
        assert compute_drafts(found, ints(7, 9), ints(0, 1), 4).tolist() == drafts
        found.decode_batch(one_sequence(made_up(model, 4, 300), N, outputs=every(4)))
        assert found.remove(N + 1)
        assert compute_drafts(found, ints(7), ints(0), 2).shape == (2, 1)


WRONG: dict[str, tuple[Ints, Ints, int]] = {
    "an empty sequence": (ints(7), ints(2), 3),
    "an empty one among others": (ints(7, 8), ints(0, 2), 3),
    "a sequence twice": (ints(7, 8), ints(1, 1), 3),
    "a sequence that does not exist": (ints(7), ints(3), 3),
    "a sequence far beyond": (ints(7), ints(2**31 - 1), 3),
    "a sequence below 0": (ints(7), ints(-1), 3),
    "a token below 0": (ints(-1), ints(0), 3),
    "a token too large": (ints(7, 10**6), ints(0, 1), 3),
    "no steps": (ints(7), ints(0), 0),
    "steps below 0": (ints(7), ints(0), -1),
    "no sequences": (ints(), ints(), 3),
    "tokens for fewer sequences": (ints(7), ints(0, 1), 3),
    "tokens for more": (ints(7, 8), ints(0), 3),
}


@pytest.mark.parametrize(("tokens", "seqs", "n"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_drafted(unharmed: Context, tokens: Ints, seqs: Ints, n: int) -> None:
    with pytest.raises((UsageError, InvalidBatchError), match=r"is empty, or there|it takes one"):
        compute_drafts(unharmed, tokens, seqs, n)
    with pytest.raises(UsageError, match="-1 candidates"):
        compute_drafts(unharmed, ints(7), ints(0), 3, n_candidates=-1)


@pytest.mark.parametrize(("n_seqs", "n"), [(0, 1), (4, 1), (1, -1), (-1, 3)])
def test_what_cannot_be_reserved(unharmed: Context, n_seqs: int, n: int) -> None:
    with pytest.raises(PyllamaMtpError):
        reserve_rounds(unharmed, n_seqs, [n])
    reserve_rounds(unharmed, 1, [2])


def test_no_room_in_the_cache(model: Model) -> None:
    """A draft needs cells for as long as it runs."""
    with context(model, n_ctx=256, n_batch=256, n_ubatch=256) as found:
        found.decode_batch(one_sequence(made_up(model, 250)))
        wanted, before = (
            compute_drafts(found, ints(7), ints(0), 6).tolist(),
            bytes(found.save_state()),
        )
        for n in (7, 60, 2000):
            with pytest.raises(NoKVSlotError, match="no room in the KV cache"):
                compute_drafts(found, ints(7), ints(0), n)
            assert bytes(found.save_state()) == before
        assert compute_drafts(found, ints(7), ints(0), 6).tolist() == wanted
        found.decode_batch(one_sequence(made_up(model, 6, 700), 250))
        with pytest.raises(NoKVSlotError):
            compute_drafts(found, ints(7), ints(0), 1)
        found.clear()
        found.decode_batch(one_sequence(made_up(model, 250)))
        assert compute_drafts(found, ints(7), ints(0), 6).tolist() == wanted


@pytest.mark.parametrize("mtp_head", [False, True])
def test_contexts_of_other_kinds(model: Model, mtp_head: bool) -> None:
    """The draft is refused, and the context goes on."""
    with context(model, with_mtp=False, mtp_head=mtp_head) as other:
        with pytest.raises(UsageError, match="context with_mtp"):
            compute_drafts(other, ints(7), ints(0), 3)
        with pytest.raises(PyllamaMtpError):
            reserve_rounds(other, 1, [3])
        hidden = np.zeros((3, model.n_embd), dtype=np.float32) if mtp_head else None
        other.decode(made_up(model, 3), 0, every(3), hidden)
        assert other.argmax(2) >= 0


def test_sequences_with_caches_of_their_own(model: Model) -> None:
    """Even one of them: the steps would not be parts of the inputs. A context of one has them."""
    with context(model, n_seq_max=2) as apart:
        for seq in range(2):
            apart.decode_batch(one_sequence(made_up(model, N), seq=seq))
        before = bytes(apart.save_state())
        for seqs in (ints(0), ints(0, 1)):
            with pytest.raises(UsageError, match="unified"):
                compute_drafts(apart, seqs + 7, seqs, 3)
        assert bytes(apart.save_state()) == before
        apart.decode_batch(one_sequence(made_up(model, 3), N))
    with context(model, n_seq_max=1, unified=False) as single:
        single.decode_batch(one_sequence(made_up(model, N)))
        assert compute_drafts(single, ints(7), ints(0), 3).shape == (3, 1)


def test_hidden_rows_of_outputs_only(model: Model) -> None:
    """The block needs those of all tokens; upstream's tap may leave them beside it."""
    with pytest.raises(UsageError, match="hidden rows of all tokens"):
        context(model, tap="outputs")
    with context(model, tap="all") as found, context(model) as wanted:
        for one in (found, wanted):
            one.decode_batch(one_sequence(made_up(model, N)))
        rows = found.hidden_rows().copy()
        drafts = [compute_drafts(one, ints(7), ints(0), 4).tolist() for one in (found, wanted)]
        assert drafts[0] == drafts[1]
        assert found.hidden_rows().tobytes() == rows.tobytes()
        assert found.argmax(N - 1) == wanted.argmax(N - 1)


def refuses_nan(found: Context) -> None:
    """A draft is an exception, and not the end of the process; what the trunk has is as it was."""
    found.decode_batch(one_sequence(made_up(found.model, 5)))
    for n in (1, 3):
        with pytest.raises(FatalDecodeError, match="the model's logits are NaN"):
            compute_drafts(found, ints(7), ints(0), n)
    assert found.argmax(4) >= 0 and found.past() == 5


def test_a_nan_in_a_chain(demo_file: Path, tmp_path: Path) -> None:
    """Damaged weights of the MTP block, and a damaged row of a draft head."""
    data = bytearray(demo_file.read_bytes())
    (norm,) = (t for t in GGUFReader(demo_file).tensors if "shared_head_norm" in t.name)
    np.frombuffer(data, "<f4", int(norm.n_elements), int(norm.data_offset))[:] = np.nan
    (tmp_path / "nan.gguf").write_bytes(data)
    with Model(tmp_path / "nan.gguf") as model, context(model) as found:
        refuses_nan(found)
    ids = np.arange(3, 100, dtype=np.int32)
    with Model(demo_file) as model, context(model) as found:
        rows = head_rows(model.info, ids)
        rows.data.view("<f2")[40] = np.nan
        set_draft_head(found, rows, ids)
        refuses_nan(found)


def test_a_model_without_such_a_block(demo_file: Path, model: Model) -> None:
    """A file whose block is left out. The library would refuse by itself."""
    with Model(demo_file, mtp=False) as bare:
        with pytest.raises(UsageError, match="a model with an MTP head"):
            context(bare)
        bare.has_mtp = True
        with pytest.raises(UsageError, match="has no MTP block for the context"):
            context(bare)
        with context(bare, with_mtp=False) as plain:
            plain.decode(made_up(bare, 3), 0, every(3))
            assert plain.argmax(2) >= 0
