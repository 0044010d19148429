"""Candidates: the best tokens of an output row, with their logits, picked where the logits are.

The reference is the row of all logits that the same decode leaves with the switch off. The graphs
are equal up to the logits, so nothing here needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.sampling.sampler import MOST_CANDIDATES

from ..marks import usual
from .support import made_up, settings
from .test_greedy_tokens import REQUESTED, N, edited, marks_of
from .twocontexts import trunk

WANTED = REQUESTED["some"]
WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.05)


@pytest.fixture(params=[False, True], ids=["plain", "with_mtp"])
def target(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    with trunk(model, with_mtp=request.param) as found:
        yield found


def decode(target: Context, n_candidates: int | None) -> None:
    """The same batch; `n_candidates` None: with all logits."""
    target.clear()
    target.set_greedy(n_candidates is not None)
    target.set_candidates(n_candidates or 0)
    target.decode(made_up(target.model, N), 0, marks_of(WANTED))


@pytest.mark.parametrize("n", [1, 2, 10, 40, 255, 100_000])
def test_they_are_the_best_ones(target: Context, n: int) -> None:
    decode(target, None)
    rows = {row: target.logits(row).copy() for row in WANTED}
    before = target.output_bytes
    decode(target, n)
    assert target.output_bytes - before == len(WANTED) * (4 + 8 * min(n, target.model.n_vocab))
    for row, logits in rows.items():
        best = np.argsort(-logits, kind="stable")[:n]
        ids, values = target.candidates(row)
        assert ids.tolist() == best.tolist()
        assert values.tobytes() == logits[best].tobytes()
        assert target.argmax(row) == best[0]


def test_equal_logits(moe_file: Path, tmp_path: Path) -> None:
    """All logits are equal where the rows of the head are; ids are the first ones, each once."""

    def change(rows: npt.NDArray[np.float16]) -> None:
        rows[:] = rows[0]

    file = edited(moe_file, tmp_path / "equal.gguf", "output.weight", change)
    with Model(file) as model, trunk(model) as found:
        for n in (7, 600, model.n_vocab):
            decode(found, n)
            ids, values = found.candidates(WANTED[-1])
            assert ids.tolist() == list(range(n)) and len(set(values.tolist())) == 1


def test_none_were_asked_for(target: Context) -> None:
    decode(target, 0)
    with pytest.raises(UsageError, match="set_candidates"):
        target.candidates(WANTED[0])
    decode(target, 5)
    with pytest.raises(UsageError, match="not marked as an output row"):
        target.candidates(1)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("top_k", usual(1, 40, long=[MOST_CANDIDATES]))
def test_sampling_among_them_is_sampling_among_all(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch, top_k: int, depth: int
) -> None:
    """The same seed gives the same text, whether the samplers get k logits or all."""
    texts, copied = [], []
    for most in (MOST_CANDIDATES, 0):
        monkeypatch.setattr("pyllama_mtp.sampling.sampler.MOST_CANDIDATES", most)
        with Session(demo, settings(depth)) as session:
            for seed in range(5):
                drawn = replace(WARM, top_k=top_k, seed=seed)
                run = session.generate(
                    text[:30], max_tokens=24, sampling=drawn, ignore_eos=True
                ).run()
                texts.append(run.tokens)
                copied.append(run.telemetry.output_bytes)
    assert texts[:5] == texts[5:]
    if native.load().has_tap and top_k == 40:
        assert max(copied[:5]) * 4 < min(copied[5:])


def test_what_needs_all_logits_gets_them(demo: Model, text: list[int]) -> None:
    """A penalty or a bias may lift a token that is not among the best."""
    rare = {int(token): 30.0 for token in text[:1]}
    with Session(demo, settings(2)) as session:
        for asked in (replace(WARM, logit_bias=rare), replace(WARM, top_k=0, logit_bias=rare)):
            run = session.generate(text[:30], max_tokens=6, sampling=asked, ignore_eos=True).run()
            assert set(run.tokens) == set(rare)
