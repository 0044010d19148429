"""Texts drawn with MTP are as frequent as the target's logits say, also when drafts are bad.

What is expected is computed by numpy from plain decoding's logits: distributions.py. Broken
acceptance is seen: test_wrong_acceptance_is_seen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.sampling.sampler import Sampler

from .distributions import PLAIN, WAYS, Exact, compare, reference
from .support import decode, plain_context, settings

#: What follows is neither certain nor open, so texts stay likely for some tokens.
PROMPT = " self._cmd = cmd\n"
#: What begins like what came before: for what is about repetition.
ALIKE = " self._cmd = cmd\n        self._args = args\n        self"
SAMPLINGS = {
    "cool": Sampling(temperature=0.6, top_k=40, top_p=0.95, min_p=0.05),
    "plain": PLAIN,
    "top-k": replace(PLAIN, top_k=5),
    "hot top-p": replace(PLAIN, temperature=1.6, top_p=0.7),
    "repeat": replace(PLAIN, temperature=0.9, repeat_penalty=1.5, repeat_last_n=6),
    "frequency": replace(PLAIN, frequency_penalty=0.7, repeat_last_n=30),
    "presence": replace(PLAIN, presence_penalty=1.5, repeat_penalty=1.2, repeat_last_n=30),
    "top-n-sigma": replace(PLAIN, top_n_sigma=1.2, temperature=1.5, top_k=40),
    "typical": replace(PLAIN, typical_p=0.6),
    "typical of few": replace(PLAIN, typical_p=0.9, top_n_sigma=1.5, logit_bias={70: -np.inf}),
    "dry": replace(
        PLAIN, dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=1, dry_sequence_breakers=()
    ),
    "xtc": replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.05, top_k=30),
}
#: With drafts of another length than 3.
DEPTHS = {"cool": 1, "plain": 2, "hot top-p": 4}


@pytest.fixture(scope="module")
def exact(demo: Model) -> Exact:
    return Exact(demo, demo.tokenize(PROMPT))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_frequencies_of_texts(demo: Model, exact: Exact, name: str, way: dict[str, object]) -> None:
    depth = DEPTHS.get(name, 3)
    with Session(demo, settings(depth, **way)) as session:
        found, limit, accepted = compare(exact, session, SAMPLINGS[name], depth)
    assert found < limit
    assert 0.1 < accepted < 0.9, "drafts must have been both accepted and rejected"


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "xtc"])
def test_what_is_drawn_from(demo: Model, name: str) -> None:
    """The distribution that is given out is that of the logits, of rows one after the other; what
    came before counts, the prompt included. Asking for it does not change what is drawn next."""
    sampling, prompt = replace(SAMPLINGS[name], seed=1), demo.tokenize(ALIKE)
    answer = demo.tokenize("._cmd = cmd\n        self._args", add_special=False)
    every, differs = np.arange(demo.n_vocab, dtype=np.int32), 0.0
    asked, other = (Sampler(demo, sampling, prompt) for _ in range(2))
    with plain_context(demo, n_outputs_max=len(answer)) as context:
        decode(context, prompt)
        outputs = np.ones(len(answer), dtype=np.int8)
        context.decode(np.array(answer, dtype=np.int32), len(prompt), outputs)
        for row, token in enumerate(answer):
            for sampler in (asked, other):
                sampler.accept(token)
            logits, history = context.logits(row), [*prompt, *answer[: row + 1]]
            wanted = reference(logits, history, sampling)
            found = asked.distribution(context, row).probabilities_of(every)
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            usual = reference(logits, (), PLAIN)
            differs = max(differs, float(np.abs(wanted - usual).max()))
        assert asked.sample(context, row) == other.sample(context, row)
    assert name == "plain" or differs > 0.05, "it changes nothing here"


def test_a_breaker_ends_a_repetition(demo: Model) -> None:
    """A breaker inside a repetition shortens it, so the penalty is smaller."""
    prompt = demo.tokenize(ALIKE)
    sharp = replace(SAMPLINGS["dry"], dry_multiplier=50.0, dry_allowed_length=3, seed=1)
    found = []
    with plain_context(demo) as context:
        decode(context, prompt)
        for breakers in ((), ("\n",), ("self", "\n", " ")):
            chosen = replace(sharp, dry_sequence_breakers=breakers)
            found.append(Sampler(demo, chosen, prompt).distribution(context, len(prompt) - 1))
    every = np.arange(demo.n_vocab, dtype=np.int32)
    one, _, three = (each.probabilities_of(every) for each in found)
    assert np.abs(one - three).max() > 0.3


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_greedy_choice_is_certain(demo: Model, text: list[int], penalty: float) -> None:
    prompt = text[:20]
    sampler = Sampler(demo, Sampling(repeat_penalty=penalty), prompt)
    with plain_context(demo) as context:
        decode(context, prompt)
        row = len(prompt) - 1
        found = sampler.distribution(context, row)
        assert found.ids.tolist() == [sampler.sample(context, row)]
        assert found.probabilities.tolist() == [1.0]
