"""bench/hostile.py: the seed decides what is sent, answers are judged, and a short run."""

from __future__ import annotations

import random

import hostile
import pytest
from load import Answer


def test_the_seed_decides_what_is_sent() -> None:
    """Requests of every kind, none larger than the largest body and a little."""
    first, again, other = (
        [hostile.many(draw).kind, *(kind(draw) for kind in hostile.KINDS[2:])]
        for draw in map(random.Random, (1, 1, 2))
    )
    assert first == again != other
    assert {"value", "grammar", "stream", "half", "body", "http", "strange host"} <= {
        one.kind for one in first[1:]
    }


def test_an_answer_is_right_or_not() -> None:
    right = "one two three"
    for text, verdict in {"one two three": "right", "one six": "wrong", "one two": "wrong"}.items():
        assert hostile.judge(Answer(0.0, text=text), right) == verdict, text
    assert hostile.judge(Answer(0.0, text=right, error="429"), right) == "failed"


@pytest.mark.long
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Answers are right; times and memory need longer to be told."""
    hostile.main(["--minutes", "0.3", "--questions", "6"])
    said = capsys.readouterr().out
    assert "honest answers" in said and "wrong" not in said and "failed" not in said
    assert "- statuses of 500 and above: 0" in said
    assert "- processes that SIGTERM has left: 0" in said
