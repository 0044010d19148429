"""bench/sequences.py: cases, ratios within a round, rates for deeper drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sequences


def sample(tps: float, passes: dict[int, dict[int, int]], gain: float = 1.0) -> dict[str, Any]:
    return {"decode_tps": tps, "passes": passes, "tokens_per_round": gain}


def test_ratios_are_taken_within_a_round() -> None:
    plain, two = {1: {0: 9}}, {2: {0: 9}, 1: {0: 5}}
    samples: sequences.Samples = {
        (1, 0): [sample(10, plain), sample(20, plain), sample(12, plain)],
        (2, 0): [sample(15, two), sample(40, two), sample(30, two)],
        (2, 3): [sample(30, {2: {3: 6, 0: 2}}, 2.5), sample(20, {2: {3: 3, 1: 1}}, 2.4)],
    }
    _, base, mtp = sequences.summarize(samples)
    assert base["scaling"] == 2.0 and base["ratio"] == 1.0 and base["mean_depth"] == 0
    assert mtp["ratios"] == [2.0, 0.5] and mtp["ratio"] == 1.25
    assert mtp["tokens_per_s"] == {"median": 25, "low": 20, "high": 30, "n": 2}
    assert mtp["mean_depth"] == pytest.approx((9 * 3 + 2 * 0 + 1) / 12)


def test_rates_of_further_drafts() -> None:
    assert sequences.extended((0.8, 0.4), 4) == (0.8, 0.4, 0.2, 0.1)
    assert sequences.extended((0.5,), 3) == (0.5, 0.25, 0.125)
    assert sequences.extended((0.9, 0.0), 4) == (0.9, 0.0, 0.0, 0.0)
    assert sequences.extended((0.0, 0.0), 3) == (0.0, 0.0, 0.0)
    assert sequences.extended((0.8, 0.4, 0.2), 1) == (0.8, 0.4, 0.2)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ([], 6),
        (["--depths", "0,8"], 8),
        (["--model", "some.gguf"], None),
        (["--synthetic-acceptance", "none"], None),
        (["--model", "some.gguf", "--synthetic-acceptance", "0.9"], 6),
    ],
)
def test_acceptance_that_is_imposed(options: list[str], rates: int | None) -> None:
    found = sequences.parse_arguments([*options, "--threads", "1"]).rates
    assert found is None if rates is None else len(found) == rates


@pytest.mark.parametrize(
    "options", [["--sequences", "0"], ["--depths", "1,x"], ["--depths", "1,3"], ["--rounds", "0"]]
)
def test_bad_arguments(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sequences.parse_arguments([*options, "--threads", "1"])
    assert ended.value.code == 2 and options[0] in capsys.readouterr().err


def test_every_round_has_every_case_and_begins_with_another() -> None:
    args = sequences.parse_arguments(["--threads", "1"])
    rounds = [sequences.all_cases(args, number) for number in range(4)]
    assert all(sorted(map(str, r)) == sorted(map(str, rounds[0])) for r in rounds)
    assert len(rounds[0]) == 16 and len({r[0] for r in rounds}) == 4
    assert {r[0][1] for r in rounds} == {0, 1, 3, "auto"}, "no depth is always measured first"


def test_prompts(tmp_path: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 30)
    model = SimpleNamespace(n_vocab=50, tokenize=lambda given: list(range(len(given))))
    args = sequences.parse_arguments(["--prompt", "10", "--threads", "1", "--text", str(text)])
    assert sequences.prompts_for(model, args, 3)[2] == list(range(20, 30))
    with pytest.raises(SystemExit, match=r"text.txt has 30 tokens, 40 are needed"):
        sequences.prompts_for(model, args, 4)
    args.text = None
    random = sequences.prompts_for(model, args, 3)
    assert len({*map(tuple, random)}) == 3 and {len(prompt) for prompt in random} == {10}
