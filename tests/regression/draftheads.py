"""Contexts with a draft head: drafts after tokens, their logits, and parts of a vocabulary.

Logits are compared with columns of the whole head's, to rounding: with another number of rows
another kernel may run, which adds up in another order. F16 rows then differ by 0.0000002 of the
largest logit; quantized ones, and whatever is computed for a single entry, agreed to the bit on an
AVX-512 machine. Rows of other tokens, or in another order, are off by the size of a logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyllama_mtp import Generation, Model, Sampling, Session
from pyllama_mtp.drafting.head import set_draft_head
from pyllama_mtp.llama.batch import Floats, Ints
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.drafts import compute_drafts, draft_logits

from ..trimmed import head_rows
from .support import made_up, scaled, settings
from .twocontexts import context as context_of
from .twocontexts import one_sequence

#: Sequences of a context, tokens of each.
N_SEQS, N = 3, 20
Newest = Sequence[Sequence[int]]
#: Tokens that drafts follow, draft by draft: of one sequence, or of several together.
NEWEST: dict[str, Newest] = {
    "one": [[7]],
    "some": [[token] for token in range(100, 2000, 200)],
    "together": [[7, 100, 1999], [5, 5], [1200, 3, 44]],
}


def parts(n_vocab: int) -> dict[str, Ints]:
    """Parts of a vocabulary: scattered, in one piece, a single token, the whole."""
    drawn = np.random.default_rng(0).choice(n_vocab, 37, replace=False)
    found = {
        "every seventh": np.arange(0, n_vocab, 7),
        "37": np.sort(drawn),
        "in one piece": np.arange(300, 600),
        "the last one": np.array([n_vocab - 1]),
        "all": np.arange(n_vocab),
    }
    return {name: ids.astype(np.int32) for name, ids in found.items()}


def context(model: Model, **options: object) -> Context:
    """A context with the block, and some sequences in it."""
    found = context_of(model, n_seq_max=N_SEQS, unified=True, **options)
    for seq in range(N_SEQS):
        found.decode_batch(one_sequence(made_up(model, N, 100 * seq), seq=seq))
    return found


def drafted(draft: Context, tokens: Sequence[int], drawn: bool, n: int = 1) -> Ints:
    """[n, len(tokens)] drafts after these tokens, one of each sequence; drawn without noise, which
    is the best ones, or picked."""
    newest, seqs = np.array(tokens, dtype=np.int32), np.arange(len(tokens), dtype=np.int32)
    if not drawn:
        return compute_drafts(draft, newest, seqs, n)
    noise = np.zeros((n, len(tokens), draft.n_head), dtype=np.float32)
    ones = np.ones(len(tokens), dtype=np.float32)
    return compute_drafts(draft, newest, seqs, n, temperatures=ones, noise=noise)


def logits_of(draft: Context, newest: Newest = NEWEST["some"]) -> Floats:
    """[n, n_head] logits of the first draft after each of these tokens."""
    found = []
    for tokens in newest:
        drafted(draft, tokens, True)
        found.append(draft_logits(draft)[0].copy())
    return np.concatenate(found)


def tokens_of(draft: Context, drawn: bool, newest: Newest = NEWEST["some"]) -> list[int]:
    """The first draft after each of these tokens."""
    return [int(token) for tokens in newest for token in drafted(draft, tokens, drawn)[0]]


def generated(
    model: Model,
    prompts: Sequence[Sequence[int]],
    depth: int = 3,
    sampling: Sampling | None = None,
    **options: object,
) -> list[Generation]:
    """Generations of 32 tokens after each prompt, with the same head throughout."""
    found = []
    with Session(model, settings(depth, draft_follow=False, **options)) as session:
        for prompt in prompts:
            session.reset()
            found.append(session.generate(prompt, max_tokens=32, sampling=sampling).run())
    return found


def set_head(draft: Context, ids: Ints) -> None:
    set_draft_head(draft, head_rows(draft.model.info, ids), ids)


def unset_head(draft: Context) -> None:
    """The block's own head again, over the whole vocabulary."""
    null = draft.library.ffi.NULL
    draft.call(draft.library.lib.pyllama_mtp_set_draft_head, 0, null, 0, null, 0)
    draft.draft_ids = None


def assert_part(found: Floats, whole: Floats, ids: Ints) -> None:
    """`found` are these columns of `whole`, and would not pass for their neighbours."""
    wanted, size = whole[:, ids], np.abs(whole).max()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=scaled(1e-5) * size)
    assert np.abs(whole - np.roll(whole, 1, axis=1)).mean() > 0.1 * whole.std()
