"""Grammars, logit biases and penalties hold for verification as they do for plain decoding."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from pyllama_mtp import Model, Sampling, Session
from pyllama_mtp.errors import UsageError

from .distributions import PLAIN, WAYS
from .support import alone, settings

CALL = 'root ::= "f(" [a-z]+ ("," " "? [a-z]+)* ")"'
MATCH = re.compile(r"f\([a-z]+(, ?[a-z]+)*\)?|f\(?|f\([a-z, ]*")
GREEDY = Sampling()
#: So cold that it is greedy, but goes the way of drawn drafts.
COLD = Sampling(temperature=0.001, seed=3)
DRAWN = {"draft_sampling": True}, COLD
TRIED = [
    ("grammar", {}, GREEDY),
    ("grammar", *DRAWN),
    ("bias", *DRAWN),
    ("penalty", {"prompt_sync": "full"}, GREEDY),
    ("penalty", *DRAWN),
]


def equal_texts(
    model: Model, text: list[int], plain: Sampling, drafted: Sampling, **options: object
) -> tuple[int, int, int]:
    """Over six prompts: how many texts are equal without and with MTP (rounding may change one of
    six), how many `plain` changes, how many drafts are accepted."""
    equal = changed = accepted = 0
    with Session(model, settings(0)) as off, Session(model, settings(3, **options)) as on:
        for start in range(0, 60, 10):
            prompt = text[start : start + 20]
            wanted = off.generate(prompt, max_tokens=20, sampling=plain).run()
            found = on.generate(prompt, max_tokens=20, sampling=drafted).run()
            equal += found.tokens == wanted.tokens
            changed += off.generate(prompt, max_tokens=20).run().tokens != wanted.tokens
            accepted += sum(found.telemetry.accepted)
    return equal, changed, accepted


@pytest.mark.parametrize(("constraint", "options", "sampling"), TRIED)
def test_the_text_is_that_of_plain_decoding(
    demo: Model, text: list[int], constraint: str, options: dict[str, object], sampling: Sampling
) -> None:
    usual = alone(demo, text[:20], 20)
    asked = {
        "grammar": {"grammar": CALL},
        "bias": {"logit_bias": {usual[2]: -math.inf, usual[5]: -3.0, demo.eos: -math.inf}},
        "penalty": {"repeat_penalty": 1.3, "repeat_last_n": 32},
    }[constraint]
    plain, drafted = replace(GREEDY, **asked), replace(sampling, **asked)
    equal, changed, accepted = equal_texts(demo, text, plain, drafted, **options)
    assert equal >= 5
    assert changed, "it changed nothing: it was not tested"
    assert accepted


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_grammar_holds_at_any_temperature(
    demo: Model, text: list[int], options: dict[str, object]
) -> None:
    with Session(demo, settings(3, **options)) as session:
        for seed in range(20):
            drawn = replace(PLAIN, grammar=CALL, seed=seed)
            run = session.generate(text[:20], max_tokens=12, sampling=drawn).run()
            assert MATCH.fullmatch(run.text), run.text
            assert (run.finish_reason == "eos") == run.text.endswith(")")


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose(
    demo: Model, text: list[int], temperature: float, options: dict[str, object]
) -> None:
    """An error that says so, and a session that works afterwards."""
    nothing = dict.fromkeys(range(demo.n_vocab), -math.inf)
    sampling = Sampling(temperature=temperature, logit_bias=nothing)
    with Session(demo, settings(2, **options)) as session:
        with pytest.raises(UsageError, match="exclude every token"):
            session.generate(text[:20], max_tokens=9, sampling=sampling).run()
        assert len(session.generate(text[:20], max_tokens=9, ignore_eos=True).run().tokens) == 9
