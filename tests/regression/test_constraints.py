"""Grammars and logit biases where tokens are drawn, and where nothing is left to choose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pyllama_mtp import Model, Session

from .distributions import PLAIN, WAYS
from .support import settings

CALL = 'root ::= "f(" [a-z]+ ("," " "? [a-z]+)* ")"'
MATCH = re.compile(r"f\([a-z]+(, ?[a-z]+)*\)?|f\(?|f\([a-z, ]*")


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
