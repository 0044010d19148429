"""From a run to figures and tables, against values worked out by hand."""

from __future__ import annotations

import io
import json

import msgspec
import pytest

from pyllama_mtp.measure.acceptance_report import (
    Report,
    frequent_misses,
    json_report,
    markdown_report,
    print_report,
)

from . import acceptance_fakes as fakes


def test_classes_and_all_of_them() -> None:
    report = Report.of(fakes.a_run())
    assert [group.name for group in report.classes] == ["code", "text", "all"]
    rates = [group.acceptance.rates() for group in report.classes]
    assert rates == [[3 / 4, 2 / 3], [2 / 4, 1 / 2], [5 / 8, 3 / 5]]
    assert [group.acceptance.mean_accepted for group in report.classes] == [5 / 4, 3 / 4, 1.0]


def test_speed_up_is_tokens_per_round_over_its_time() -> None:
    """Code: 1.75 tokens in 1.5 steps, 1.75 + 0.5 in 2; text: 1.5 in 1.5, 1.75 in 2."""
    code, text, _ = Report.of(fakes.a_run()).classes
    assert code.speed_up == pytest.approx([1.75 / 1.5, 2.25 / 2])
    assert text.speed_up == pytest.approx([1.0, 1.75 / 2])
    assert (code.best_depth, text.best_depth) == (1, 0)


def test_break_even() -> None:
    """Depth 1: 1 + a = 1.5. Depth 2: 1 + a + a^2 = 2, the golden ratio."""
    depths = Report.of(fakes.a_run()).depths
    assert [depth.round for depth in depths] == [1.5, 2.0]
    assert [depth.break_even for depth in depths] == pytest.approx([0.5, (5**0.5 - 1) / 2])


def test_lengths_are_compared_on_the_same_prompts() -> None:
    as_is, longer = Report.of(fakes.a_run()).lengths
    assert (as_is.name, as_is.acceptance.rounds, as_is.n_prompt) == ("as is", 4, 20)
    assert (longer.name, longer.acceptance.rates()) == ("512", [1.0, 0.0])
    assert longer.best_depth is None, "no costs were measured there"


def test_the_verdict_is_what_it_is_worth() -> None:
    run = fakes.a_run()
    assert Report.of(run).verdict == "at the costs measured here depth 1 is the best: 1.08x"
    run.results = [fakes.result("code", 1, 1, 0, 0, 0), fakes.result("text", 1, 0, 0, 0, 0)]
    assert Report.of(run).verdict.startswith("no class reaches 30% at the first position")


def test_frequent_misses() -> None:
    found = frequent_misses(fakes.a_run().misses, 5)
    assert [[*each.values()] for each in found] == [
        [2, " a", "|b", ["code", "text"]], [1, "x", "y", ["code"]],
    ]  # fmt: skip
    assert len(frequent_misses(fakes.a_run().misses, 1)) == 1


def test_markdown() -> None:
    run = fakes.a_run()
    text = markdown_report(run, Report.of(run), misses=1)
    lines = text.splitlines()
    assert "| class | prompts | rounds | draft 1 | draft 2 |" in lines
    assert "| code | 1 | 4 | 75 (30-95) | 67 (21-94) |" in lines
    assert "| text | 50 (15-85) | 25 (5-70) | 0.75 |" in lines, "unconditional"
    assert "| text | 1.00x | 0.88x | no MTP |" in lines
    assert "| break-even acceptance % | 50 | 62 |  |" in lines
    assert "| as is, 20 | 4 | 75 (30-95) | 67 (21-94) | 1 |" in lines
    assert "| 2 | ' a' | '\\|b' | code, text |" in lines
    assert "not complete" not in text and "single prompt" in text


def test_a_run_without_costs_or_end() -> None:
    run = fakes.a_run()
    run.header, run.costs = msgspec.structs.replace(run.header, planned=9), []
    text = markdown_report(run, Report.of(run))
    assert "- not complete: 3 of 9 generations" in text and "no break-even" in text
    assert "Expected" not in text and "misses" not in text


def test_a_run_of_which_nothing_came() -> None:
    run = fakes.a_run()
    run.results, run.costs = [], []
    report = Report.of(run)
    assert report.verdict == ""
    assert "- nothing was measured" in markdown_report(run, report)


def test_the_terminal_shows_the_same_and_reads_no_markup() -> None:
    run = fakes.a_run()
    run.misses.append(fakes.miss("text", "[red]", ":smile:"))
    out = io.StringIO()
    print_report(run, Report.of(run), out, misses=3)
    for word in ("[red]", ":smile:", "75 (30-95)", "verdict: at", "m.gguf"):
        assert word in out.getvalue(), word


def test_json_has_it_all() -> None:
    run = fakes.a_run()
    found = json.loads(json.dumps(json_report(run, Report.of(run), misses=1), allow_nan=False))
    assert (found["schema"], found["kind"]) == (1, "acceptance-report")
    assert found["run"]["depth"] == 2 and found["verdict"].endswith("1.08x")
    assert found["classes"][0]["acceptance"]["conditional"][0]["held"] == 3
    assert found["misses"][0]["times"] == 2
