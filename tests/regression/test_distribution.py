"""Texts drawn with MTP are as frequent as the target's logits say, also when drafts are bad.

Many short texts of one prompt are counted and compared with their exact probabilities, which numpy
computes from plain decoding's logits. Each text comes from a round of the full depth and what must
follow it where drafts fail. Seeds are fixed; with others, a comparison would be red by chance once
in 1 / FALSE_ALARM times (test_sampling.py). Broken acceptance is: test_wrong_acceptance_is_seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model, Sampling, Session, generate
from pyllama_mtp.speculative.acceptance import Verdict
from pyllama_mtp.speculative.drafter import Drafter, Drafts
from pyllama_mtp.speculative.sampling import Sampler

from .support import last_logits, plain_context, settings
from .test_sampling import chi_square, probabilities

Text = tuple[int, ...]

#: What follows is neither certain nor open, so texts stay likely for some tokens.
PROMPT = " self._cmd = cmd\n"
N_TEXTS = 400
#: A text whose beginning is expected so often is told from others by its next token.
EXPANDED = 20
#: The fewest texts that a cell of its own is expected to get.
LEAST = 5
#: Any token that has no cell of its own.
OTHER = -1
#: More texts than this in cells that expect none or one: chance gives them once in a million.
MOST_UNEXPECTED = 8

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SAMPLINGS = {
    "cool": Sampling(temperature=0.6, top_k=40, top_p=0.95, min_p=0.05),
    "plain": PLAIN,
    "top-k": replace(PLAIN, top_k=5),
    "hot top-p": replace(PLAIN, temperature=1.6, top_p=0.7),
}
#: How drafts are made and judged.
WAYS = [
    pytest.param({}, id="best drafts"),
    pytest.param({"draft_sampling": True}, id="drawn drafts"),
]


class Exact:
    """The target's probabilities of texts after a prompt. Logits are kept for all samplings."""

    def __init__(self, model: Model, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self._model = model
        self._logits: dict[Text, npt.NDArray[np.float32]] = {}

    def following(self, text: Text, sampling: Sampling) -> npt.NDArray[np.float64]:
        """[n_vocab] float64: of the token after `text`."""
        if text not in self._logits:
            self._logits[text] = last_logits(self._model, [*self.prompt, *text])
        return probabilities(self._logits[text], sampling)

    def cells(
        self, sampling: Sampling, length: int, text: Text = (), share: float = 1.0
    ) -> dict[Text, float]:
        """Probabilities of beginnings of texts, of which every text of `length` has just one.

        A beginning that is likely is told apart by its likely next tokens; the others are OTHER.
        """
        if len(text) == length or share * N_TEXTS < EXPANDED:
            return {text: share}
        shares = share * self.following(text, sampling)
        likely = [int(token) for token in np.flatnonzero(shares * N_TEXTS >= LEAST)]
        found = {(*text, OTHER): share - float(shares[likely].sum())}
        for token in likely:
            found |= self.cells(sampling, length, (*text, token), float(shares[token]))
        return found


def cell(text: Text, cells: dict[Text, float]) -> Text:
    """The one that `text` belongs to."""
    for n in range(len(text), -1, -1):
        for beginning in (text[:n], (*text[:n], OTHER)):
            if beginning in cells:
                return beginning
    raise AssertionError(f"no cell for {text}")


@pytest.fixture(scope="module")
def exact(demo: Model) -> Exact:
    return Exact(demo, demo.tokenize(PROMPT))


def compare(
    exact: Exact, session: Session, sampling: Sampling, depth: int
) -> tuple[float, float, float]:
    """The chi-square statistic of N_TEXTS texts, its limit, and the share of drafts accepted."""
    length = depth + 2  # one of the prefill, and a round that is all accepted
    cells = exact.cells(sampling, length)
    counts: Counter[Text] = Counter()
    drafted = accepted = 0
    for seed in range(N_TEXTS):
        drawn = replace(sampling, seed=seed)
        run = session.generate(
            exact.prompt, max_tokens=length, sampling=drawn, ignore_eos=True
        ).run()
        counts[cell(tuple(run.tokens), cells)] += 1
        drafted += sum(run.telemetry.drafted)
        accepted += sum(run.telemetry.accepted)
    rare = [text for text, share in cells.items() if share * N_TEXTS < LEAST]
    if sum(cells[text] for text in rare) * N_TEXTS < 1:  # too few for the chi-square
        assert sum(counts[text] for text in rare) <= MOST_UNEXPECTED
    expected = [N_TEXTS * share for share in cells.values()]
    found, limit = chi_square([counts[text] for text in cells], expected)
    return found, limit, accepted / drafted


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "depth"), [("cool", 1), ("plain", 2), ("top-k", 3), ("hot top-p", 4)]
)
def test_frequencies_of_texts(
    demo: Model, exact: Exact, name: str, depth: int, way: dict[str, object]
) -> None:
    with Session(demo, settings(depth, **way)) as session:
        found, limit, accepted = compare(exact, session, SAMPLINGS[name], depth)
    assert found < limit
    assert 0.1 < accepted < 0.9, "drafts must have been both accepted and rejected"


def spoil(monkeypatch: pytest.MonkeyPatch, usual: Sequence[int]) -> None:
    """Drafts become any of the `usual` tokens, wherever they stand."""
    rng, real = np.random.default_rng(3), Drafter.draft

    def draft(self: Drafter, *args: Any) -> list[Drafts]:
        made = real(self, *args)
        return [Drafts([int(rng.choice(usual)) for _ in one.tokens]) for one in made]

    monkeypatch.setattr(Drafter, "draft", draft)


@pytest.mark.parametrize(("name", "depth"), [("cool", 3), ("plain", 1)])
def test_frequencies_with_bad_drafts(
    demo: Model, exact: Exact, monkeypatch: pytest.MonkeyPatch, name: str, depth: int
) -> None:
    """Most of them are wrong, some of them right by chance."""
    cells = exact.cells(SAMPLINGS[name], depth + 2)
    usual = {token for text in cells for token in text[1:] if token != OTHER}
    spoil(monkeypatch, sorted(usual))
    with Session(demo, settings(depth)) as session:
        found, limit, accepted = compare(exact, session, SAMPLINGS[name], depth)
    assert found < limit
    assert 0.02 < accepted < 0.3


def half_of_all(
    drafts: Sequence[int], sample_row: Callable[[int], int], ends: Callable[[int], bool]
) -> Verdict:
    """Takes a draft on the toss of a coin, whatever the target says."""
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        tokens.append(sample_row(row))
        if row == len(drafts) or hash((*drafts, *tokens)) % 2:
            break
        tokens[-1] = drafts[row]
    return Verdict(tokens)


def second_draw(
    drafts: Sequence[int], sample_row: Callable[[int], int], ends: Callable[[int], bool]
) -> Verdict:
    """Where a draft fails, draws from p once more instead of from p without the draft."""
    tokens: list[int] = []
    for row in range(len(drafts) + 1):
        tokens.append(sample_row(row))
        if row == len(drafts) or tokens[-1] != drafts[row]:
            tokens[-1] = sample_row(row)
            break
    return Verdict(tokens)


@pytest.mark.parametrize("wrong", [half_of_all, second_draw])
def test_wrong_acceptance_is_seen(
    demo: Model, exact: Exact, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Verdict]
) -> None:
    monkeypatch.setattr(generate, "accept_best", wrong)
    with Session(demo, settings(3)) as session:
        found, limit, _ = compare(exact, session, SAMPLINGS["top-k"], 3)
    assert found > limit


def penalised(logits: npt.NDArray[np.float32], recent: Sequence[int]) -> npt.NDArray[np.float32]:
    """With the repetition penalty of `PENALTY`."""
    out: npt.NDArray[np.float32] = np.array(logits)
    for token in set(recent):
        out[token] *= 1 / 1.5 if out[token] > 0 else 1.5
    return out


PENALTY = Sampling(temperature=0.9, repeat_penalty=1.5, repeat_last_n=6, seed=1)


@pytest.mark.parametrize("name", [*SAMPLINGS, "penalty"])
def test_what_is_drawn_from(demo: Model, text: list[int], name: str) -> None:
    """The distribution that is given out is that of the logits, of nine rows one after the other;
    asking for it does not change what is drawn next."""
    sampling = SAMPLINGS.get(name, PENALTY)
    prompt, answer = text[:20], text[20:29]
    asked, other = (Sampler(demo, replace(sampling, seed=1), prompt) for _ in range(2))
    with plain_context(demo, n_outputs_max=len(answer)) as context:
        context.decode(np.array(prompt, dtype=np.int32), 0, np.zeros(len(prompt), dtype=np.int8))
        outputs = np.ones(len(answer), dtype=np.int8)
        context.decode(np.array(answer, dtype=np.int32), len(prompt), outputs)
        every = np.arange(demo.n_vocab, dtype=np.int32)
        for row, token in enumerate(answer):
            logits = context.logits(row)
            if name == "penalty":
                logits = penalised(logits, [*prompt, *answer[:row]][-sampling.repeat_last_n :])
            found = asked.distribution(context, row).probabilities_of(every)
            np.testing.assert_allclose(found, probabilities(logits, sampling), atol=1e-6)
            for sampler in (asked, other):
                sampler.accept(token)
        last = len(answer) - 1
        assert asked.sample(context, last) == other.sample(context, last)


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_greedy_choice_is_certain(demo: Model, text: list[int], penalty: float) -> None:
    prompt = text[:20]
    sampler = Sampler(demo, Sampling(repeat_penalty=penalty), prompt)
    with plain_context(demo) as context:
        outputs = np.zeros(len(prompt), dtype=np.int8)
        outputs[-1] = 1
        context.decode(np.array(prompt, dtype=np.int32), 0, outputs)
        row = len(prompt) - 1
        found = sampler.distribution(context, row)
        assert found.ids.tolist() == [sampler.sample(context, row)]
        assert found.probabilities.tolist() == [1.0]
