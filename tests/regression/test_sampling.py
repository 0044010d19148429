"""At temperature > 0 each token takes one number of one generator, in order: a seed gives the
same text with and without MTP. That the text is a draw from the target's own distribution is in
test_distribution.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pyllama_mtp import Model, Sampling, Session

from ..marks import usual
from .support import assert_same_tokens, rounding, settings

WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
HOT = Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize("sampling", [WARM, HOT], ids=["usual", "hot"])
@pytest.mark.parametrize("depth", usual(3, long=[1]))
def test_a_seed_gives_the_same_text(
    demo: Model, text: list[int], sampling: Sampling, depth: int
) -> None:
    """Rounding may move a draw across the border of two tokens: about one token in a hundred where
    batch sizes differ by 0.004 in a logit and the distribution is flat. That leaves some nine texts
    of ten equal; a generator out of step gives no equal text at all."""
    equal, accepted, n_seeds = 0, 0, 20
    with Session(demo, settings(0)) as off, Session(demo, settings(depth)) as on:
        for seed in range(n_seeds):
            prompt, drawn = text[seed : seed + 20], replace(sampling, seed=seed)
            options = {"max_tokens": 12, "sampling": drawn, "ignore_eos": True}
            with_mtp = on.generate(prompt, **options).run()
            equal += with_mtp.tokens == off.generate(prompt, **options).run().tokens
            accepted += sum(with_mtp.telemetry.accepted)
    assert accepted > n_seeds
    assert equal >= 0.5 * n_seeds


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_max_tokens(demo: Model, text: list[int], n: int) -> None:
    """Exactly so many, however they fall into rounds."""
    with Session(demo, settings(4)) as session:
        run = session.generate(text[:20], max_tokens=n, ignore_eos=True).run()
    assert len(run.tokens) == run.telemetry.n_generated == n
    assert (run.text, run.finish_reason) == (demo.detokenize(run.tokens, special=False), "length")


def test_stop_strings(demo: Model, text: list[int]) -> None:
    """Text ends before the first stop string, wherever it lies in a round or across tokens."""
    with Session(demo, settings(4)) as on:
        options = {"max_tokens": 24, "ignore_eos": True}
        whole = on.generate(text[:20], **options).run().text
        assert len(whole) > 20
        for at, length in itertools.product((0, 1, 5, 11, 17), (1, 2, 6)):
            stop = whole[at : at + length]
            run = on.generate(text[:20], stop=[stop, "\0never"], **options).run()
            assert run.text == whole[: whole.index(stop)]
            assert run.finish_reason == "stop"
            pieces = on.generate(text[:20], stop=[stop], **options)
            assert "".join(pieces) == run.text


def test_end_token(demo: Model, demo_prompts: list[str], text: list[int]) -> None:
    """An end token ends the generation, is not in the text, and nothing comes after it."""
    gap = rounding(demo, text[:97])
    ended = 0
    with Session(demo, settings(0)) as off, Session(demo, settings(4)) as on:
        for prompt in demo_prompts[:10]:
            tokens = demo.tokenize(prompt, parse_special=True)
            plain = off.generate(tokens, max_tokens=60).run()
            mtp = on.generate(tokens, max_tokens=60).run()
            assert_same_tokens(demo, tokens, mtp.tokens, plain.tokens, gap)
            assert not any(demo.is_end(token) for token in mtp.tokens[:-1])
            if mtp.finish_reason == "eos":
                ended += 1
                assert demo.is_end(mtp.tokens[-1])
                assert mtp.text == demo.detokenize(mtp.tokens[:-1])
    assert ended, "no prompt came to an end token: it was not tested"


def test_a_temperature_next_to_zero_is_greedy(demo: Model, text: list[int]) -> None:
    cold = replace(HOT, temperature=1e-42)
    with Session(demo, settings(0)) as session:
        greedy = session.generate(text[:9], max_tokens=8).run().tokens
        assert session.generate(text[:9], max_tokens=8, sampling=cold).run().tokens == greedy
