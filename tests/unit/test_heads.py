"""Which draft head is chosen: by what drafts read, and by what a vocabulary leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from pyllama_mtp.drafting import headrows
from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.drafting.headrows import Coverage, HeadOption, head_options, read_bytes
from pyllama_mtp.models.ggufheader import TensorEntry
from pyllama_mtp.models.modelinfo import GGUFInfo

from ..fakes import like

N_VOCAB = 200_000
SIZES = (16384, 32768, 65536, N_VOCAB)
#: Bytes of a plain step, and of the MTP block.
READ = (400_000_000, 10_000_000)
#: From the most to the least useful: the highest ids first.
RANKED = np.arange(N_VOCAB, dtype=np.int32)[::-1].copy()


def coverage(**options: bool) -> Coverage:
    return Coverage(RANKED, SIZES, **options)


def best(row_bytes: int, text: Coverage | None = None) -> HeadOption:
    return head_options(READ, text or coverage(), row_bytes, SIZES)[0]


def see(text: Coverage, rank: int, n: int) -> None:
    """`n` different tokens of the text, of this rank and the next ones."""
    text.see(RANKED[rank : rank + n], counts=True)


def test_free_rows_are_all_taken_and_dear_ones_avoided() -> None:
    assert best(0).n_rows == N_VOCAB
    assert best(20_000).n_rows == SIZES[0]
    assert best(20_000).n_bytes == 20_000 * SIZES[0]


def test_the_text_decides() -> None:
    """Tokens that a size would leave out speak for a larger one, those inside for a smaller."""
    given, rare, common = 400, coverage(), coverage()
    before = best(given).n_rows
    for _ in range(20):
        common.see(RANKED[:100], counts=True)
    for part in range(10):
        see(rare, 40_000 + 1000 * part, 100)
    assert best(given, common).n_rows < before < best(given, rare).n_rows
    assert rare.outside(32768) > 0.75 > 0.1 > rare.outside(65536)
    assert rare.outside(N_VOCAB) == 0 and common.outside(16384) < 0.02


def test_what_counts_as_outside() -> None:
    """A token is there from its first occurrence on, if the vocabulary follows the text; one of the
    prompt from the start."""
    for follow, n_outside in ((True, 3), (False, 8)):
        text = coverage(follow=follow)
        text.see(RANKED[50_000:50_001], counts=False)
        text.see(RANKED[[50_000, 50_001, 50_001, 50_002, 50_003, 50_001, 50_000, 50_002, 5]], True)
        believed = headrows.PRIOR_WEIGHT * headrows.PRIOR_OUTSIDE
        total = headrows.PRIOR_WEIGHT + 9
        assert text.n_tokens == 9
        assert text.outside(32768) == pytest.approx((believed + n_outside) / total)


def test_texts_of_the_past_count_less() -> None:
    """Tokens of past texts count as outside again until they occur."""
    text = coverage()
    see(text, 40_000, 600)
    before = text.outside(32768)
    text.fade()
    assert text.n_tokens == 300 and 0.5 * before < text.outside(32768) < before
    see(text, 40_000, 600)
    assert text.outside(32768) > before


def test_measured_rounds_replace_what_is_believed() -> None:
    """Verification that costs nothing makes the same drafts dearer by comparison."""
    cheap = Costs((0.0, *(0.04 for _ in range(5))), tuple(0.01 * n for n in range(5)))
    dear = Costs((0.0, *(0.04 * n for n in range(1, 6))), tuple(0.01 * n for n in range(5)))
    byte_s = 0.04 / READ[0]
    given = READ, coverage(), 400, SIZES
    speeds = [
        head_options(*given, measured, byte_s)[0].speed_up for measured in (cheap, None, dear)
    ]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 2 > speeds[2] >= 1


def test_bytes_that_are_read() -> None:
    """Bytes read by a step and the block, without looked-up embeddings and the block's LM head."""
    sizes = {
        "token_embd.weight": 1000,
        "output.weight": 2000,
        "blk.0.attn_q.weight": 30,
        "blk.0.ffn_up_exps.weight": 400,
        "blk.1.attn_q.weight": 5000,
        "blk.1.ffn_up_exps.weight": 40,
        "blk.1.nextn.shared_head_head.weight": 7000,
    }
    tensors = [like(TensorEntry, name=name, nbytes=n) for name, n in sizes.items()]
    info = like(
        GGUFInfo, tensors=tensors, n_layer=1, n_expert=8, n_expert_used=2, tied_embeddings=False
    )
    assert read_bytes(info) == (2000 + 30 + 100, 5000 + 10)
    info.tied_embeddings, info.n_expert = True, 0
    assert read_bytes(info) == (1000 + 2000 + 30 + 400, 5000 + 40)
