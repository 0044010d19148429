"""Drafts of a head in a context of its own are compared with those of a reference that has nothing
to keep in step; what is computed for them; over a part of the vocabulary.

All weights of these models are random, so that each is of consequence for drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.drafting.head import draft_head, set_draft_head
from pyllama_mtp.errors import PromptFileError, UsageError
from pyllama_mtp.llama.batch import Floats, Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.models.architectures import ARCHITECTURES
from pyllama_mtp.sampling.acceptance import Distribution
from pyllama_mtp.sampling.sampler import Sampler

from .. import architectures
from ..architectures import write_model
from ..marks import usual
from ..trimmed import head_rows
from .support import N_CTX, alone, settings
from .test_architectures import N_BLOCKS, Recorded, prompt_of
from .traced import Traced

APART = [name for name, one in ARCHITECTURES.items() if not one.in_trunk]
#: Of contexts that take a whole text at once.
WHOLE: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_CTX, "n_ubatch": N_CTX, "n_threads": 1}


pytestmark = pytest.mark.usefixtures("at_once")


@pytest.fixture(scope="module", params=architectures.architectures(APART))
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """A model of each of these architectures."""
    path = tmp_path_factory.mktemp("apart") / f"{request.param}.gguf"
    n_blocks = N_BLOCKS if ARCHITECTURES[request.param].several_heads else 1
    with Model(write_model(request.param, path, n_blocks)) as model:
        yield model


def drafts_of(model: Model, text: Sequence[int], n: int, among: Ints) -> list[int]:
    """The `n` drafts that follow a text, each a token of `among`, as upstream's server has them.

    For each draft an empty cache takes the whole text, and the drafts before it; the last token in
    a decode of its own. Several MTP blocks draft a token each.
    """
    ids = np.array(text, dtype=np.int32)
    own = ContextOptions(**WHOLE, mtp_head=True, tap="outputs")
    with Context(model, ContextOptions(**WHOLE, tap="all")) as target:
        target.decode(ids[:-1], 0, np.zeros(len(ids) - 1, np.int8))
        # A token pairs with the hidden state of the one before it, the first token with zeros.
        hidden = np.concatenate([np.zeros((1, model.n_embd), np.float32), target.hidden_rows()])
        with Context(model, own, target=target) as head:
            for block in range(n):
                head.clear()
                head.set_block(block if model.info.n_mtp_layers > 1 else 0)
                before = len(ids) - 1
                head.decode(ids[:-1], 0, np.zeros(before, np.int8), hidden[:-1])
                head.decode(ids[-1:], before, last(1), hidden[-1:])
                best = among[head.logits(0)[among].argmax()]
                ids = np.append(ids, best)
                hidden = np.concatenate([hidden, head.hidden_rows()])
    return [int(token) for token in ids[len(text) :]]


def last(n: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Output marks of a batch whose last row is wanted."""
    return (np.arange(n) == n - 1).astype(np.int8)


@pytest.mark.parametrize("depth", usual(3, long=[1]))
@pytest.mark.parametrize("vocabulary", ["full", 512])
def test_drafts_are_those_of_the_whole_text(
    other: Model, monkeypatch: pytest.MonkeyPatch, depth: int, vocabulary: str | int
) -> None:
    """So blocks, tokens and hidden states belong together, and what is kept in step is."""
    recorded, prompt = Recorded(monkeypatch), prompt_of(other, 61)
    chosen = settings(depth, draft_vocab=vocabulary, draft_follow=False)
    with Session(other, chosen) as session:
        found = session.generate(prompt, max_tokens=16, ignore_eos=True).run().tokens
    assert found == alone(other, prompt, 16)
    head, text = draft_head(other.info, vocabulary), [*prompt, *found]
    among = head.ids if head else np.arange(other.n_vocab, dtype=np.int32)
    assert len(among) == (other.n_vocab if vocabulary == "full" else vocabulary)
    assert {len(drafts) for drafts in recorded.rounds} == {depth}
    # The graph of hy_v3 hands on the state of a batch's first row, not of its output row: what
    # follows the second draft is right in neither program.
    right = 2 if other.architecture == "hy_v3" else depth
    for start, drafts in [*zip(recorded.starts, recorded.rounds, strict=True)][::3]:
        assert drafts[:right] == drafts_of(other, text[: start + 1], depth, among)[:right], start


def test_blocks_that_no_draft_needs_do_not_run(
    other: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a saved prompt, which then lacks their K and V, is for no more drafts."""
    blocks, set_block = set[int](), Context.set_block

    def noted(context: Context, block: int) -> None:
        blocks.add(block)
        set_block(context, block)

    monkeypatch.setattr(Context, "set_block", noted)
    prompt, file, several = prompt_of(other, 20), tmp_path / "prompt", other.info.most_drafts
    for depth, another in ((1, 2), (2, 3), (3, 2)):
        blocks.clear()
        with Session(other, settings(depth)) as session:
            session.generate(prompt, max_tokens=8, ignore_eos=True).run()
            session.save(file)
        assert blocks == set(range(depth if several else 1))
        with Session(other, settings(depth)) as session:
            assert session.restore(file) > len(prompt)
        with Session(other, settings(another)) as session:
            if several:
                with pytest.raises(PromptFileError, match=r"mtp apart.*, \d of its blocks"):
                    session.restore(file)
            else:
                assert session.restore(file) > len(prompt)


def test_the_lm_head_runs_for_rows_that_are_read(other: Model) -> None:
    """In the trunk for the last row of a prompt, in the MTP head for none of them."""
    tokens, outputs = np.array(prompt_of(other, 40), np.int32), last(40)

    def n_rows(context: Traced) -> int:
        wide = (node for node in context.nodes() if node.shape[0] == other.n_vocab)
        return sum(node.rows for node in wide if node.op == "MUL_MAT")

    own = ContextOptions(**WHOLE, mtp_head=True, tap="outputs")
    with Traced(other, ContextOptions(**WHOLE, tap="all")) as target:
        target.decode(tokens, 0, outputs)
        assert n_rows(target) == 1
        with Traced(other, own, target=target) as head:
            for wanted in (np.zeros(40, np.int8), outputs):
                head.clear()
                head.decode(tokens, 0, wanted, target.hidden_rows())
                assert n_rows(head) == wanted.sum()


@pytest.mark.parametrize("option", [{}, {"draft_head_type": "q4_0"}, {"p_min": 0.01}])
def test_a_draft_vocabulary_that_follows_the_text(other: Model, option: dict[str, Any]) -> None:
    prompt = prompt_of(other, 40)
    with Session(other, settings(2, draft_vocab=256, **option)) as session:
        run = session.generate(prompt, max_tokens=12, ignore_eos=True).run()
    assert run.tokens == alone(other, prompt, 12)
    assert run.telemetry.draft_vocab["replaced"] > 0 and sum(run.telemetry.drafted) > 0


def test_drafts_are_drawn_from_a_part_of_the_vocabulary(
    other: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, seen, propose = draft_head(other.info, 256), list[Floats](), Sampler.propose

    def noted(sampler: Sampler, logits: Floats, ids: Ints | None) -> tuple[int, Distribution]:
        seen.append(logits.copy())
        return propose(sampler, logits, ids)

    monkeypatch.setattr(Sampler, "propose", noted)
    with Session(other, settings(2, draft_vocab=256, draft_sampling=True)) as session:
        sampling = Sampling(temperature=1.0, seed=2)
        session.generate(prompt_of(other, 40), max_tokens=12, sampling=sampling).run()
    assert head and len(seen) > 2
    outside = np.setdiff1d(np.arange(other.n_vocab), head.ids)
    for logits in seen:
        assert np.isfinite(logits[head.ids]).all() and (logits[outside] == -np.inf).all()


def test_blocks_with_lm_heads_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They draft over the whole vocabulary: rows are of one LM head."""
    monkeypatch.setitem(architectures._KEPT, "step35", "shared_head_head")
    with Model(write_model("step35", tmp_path / "two.gguf", 2)) as model:
        assert any(tensor.name.startswith("blk.3.nextn.shared") for tensor in model.info.tensors)
        with pytest.raises(UsageError, match="have LM heads of their own"):
            Session(model, settings(2, draft_vocab=512))
        with Session(model, settings(2)) as session:
            (context,), ids = session._engine.head.contexts, np.arange(9, dtype=np.int32)
            with pytest.raises(UsageError, match="a draft head is not possible here"):
                set_draft_head(context, head_rows(model.info, ids), ids)
