"""``pyllama-mtp accept`` with the real library and the demo model."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.measure.acceptance import read_run
from pyllama_mtp.measure.prompts import demo_prompts

from ..processes import Cli, Program, start

SHORT = ("accept", "--threads", "1", "--draft-n-max", "3", "--max-tokens", "48")
QUICK = (*SHORT, "--context-lengths", "none", "--cost-repeats", "0")


def recount(demo: Model, depth: int, max_tokens: int, each: int) -> dict[str, list[list[int]]]:
    """For every class and position the drafts accepted and compared, and the rounds: from the pairs
    that a generation logs, without the code of `accept`."""
    counts: dict[str, list[list[int]]] = {}
    taken: Counter[str] = Counter()
    for prompt in demo_prompts():
        if taken[prompt.kind] == each:
            continue
        taken[prompt.kind] += 1
        settings = Settings(n_ctx=1024, draft_n_max=depth, n_threads=1)
        with Session(demo, settings) as session:
            generation = session.generate(
                prompt.tokens(demo), max_tokens=max_tokens, log_pairs=True
            ).run()
        own = counts.setdefault(prompt.kind, [[0, 0, 0] for _ in range(depth)])
        full = generation.telemetry.drafted[depth - 1]
        number, alive = 0, True
        for pair in generation.telemetry.pairs or ():
            if pair.position == 1:
                number, alive = number + 1, True
            if number > full:
                break
            assert alive, "nothing is judged behind a miss"
            alive = pair.drafted == pair.actual
            own[pair.position - 1][0] += alive
            own[pair.position - 1][1] += 1
            if not alive:
                for position in range(pair.position - 1, depth):
                    own[position][2] += 1
            else:
                own[pair.position - 1][2] += 1
    return counts


def test_rates_are_those_of_the_pairs(program: Program, demo: Model, tmp_path: Path) -> None:
    options = ("--prompts-per-class", "2", "--format", "json", "--pairs", "p.jsonl")
    done = program(*QUICK, *options, "--misses", "1000")
    report = json.loads(done.stdout)
    expected = recount(demo, 3, 48, 2)
    assert sorted(group["name"] for group in report["classes"]) == sorted([*expected, "all"])
    missed = 0
    for group in report["classes"][:-1]:
        for position, (held, judged, rounds) in enumerate(expected[group["name"]]):
            rate = group["acceptance"]["conditional"][position]
            assert (rate["held"], rate["tried"]) == (held, judged)
            assert rate["low"] <= rate["rate"] == held / judged <= rate["high"]
            rate = group["acceptance"]["unconditional"][position]
            assert (rate["held"], rate["tried"]) == (held, rounds)
            missed += judged - held
    log = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text("utf-8").splitlines()]
    assert len(log) == missed == sum(each["times"] for each in report["misses"]) > 0
    for each in log:
        assert each["drafted"] != each["actual"] and each["context"]
        assert demo.detokenize([each["actual"]], True) == each["actual_text"]


def test_a_whole_run_is_written_and_shown_again(program: Program, tmp_path: Path) -> None:
    options = ("--prompts-per-class", "1", "--classes", "code,thinking", "--cost-repeats", "2")
    lengths = ("--context-lengths", "300,200", "--output", "run.jsonl")
    done = program(*SHORT, *options, *lengths, "--format", "markdown")
    run = read_run(tmp_path / "run.jsonl")
    assert [(r.kind, r.context_length) for r in run.results] == [
        (kind, length) for length in (None, 200, 300) for kind in ("code", "thinking")
    ]
    assert [r.n_prompt for r in run.results[2:]] == [200, 200, 300, 300]
    assert [c.context_length for c in run.costs] == [None, 200, 300]
    assert all(len(c.costs.draft) == 4 for c in run.costs)
    out = done.stdout.decode()
    for word in ("break-even", "| 200 |", "| 300 |", "verdict: ", "the demo model's own"):
        assert word in out, word
    again = program("accept", "--read", "run.jsonl", "--format", "markdown")
    assert again.stdout.decode() == out
    assert "[6/6] thinking 1, context 300: first draft accepted in" in done.stderr.decode()


def test_prompts_of_ones_own(program: Program, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "def add(a, b):\\n"}\n')
    program(*QUICK, "--prompts", "mine.jsonl", "--output", "a.jsonl")
    assert {r.kind for r in read_run(tmp_path / "a.jsonl").results} == {"own"}
    (tmp_path / "mine.txt").write_text("What is a list?")
    for extra, n_prompt in ((), 5), (("--chat",), 12):
        name = f"b{len(extra)}.jsonl"
        options = ("--prompt-file", "mine.txt", *extra, "--output", name)
        done = program(*QUICK, *options)
        (result,) = read_run(tmp_path / name).results
        assert result.n_prompt >= n_prompt, extra
    assert "mine.txt" in done.stdout.decode()


def test_ones_own_beside_a_class_of_the_package(program: Program, tmp_path: Path) -> None:
    """A model under another name is not the demo: it gets the package's prompts."""
    from pyllama_mtp.models.demo import demo_path

    (tmp_path / "m.gguf").write_bytes(demo_path().read_bytes())
    (tmp_path / "mine.jsonl").write_text('{"class": "mine", "prompt": "import os\\n"}\n')
    options = ("--prompts", "mine.jsonl", "--classes", "factual", "--prompts-per-class", "1")
    done = program(*QUICK, "--model", "m.gguf", *options, "--format", "json")
    report = json.loads(done.stdout)
    assert report["run"]["prompts"] == "mine.jsonl and the package's own"
    assert [group["name"] for group in report["classes"]] == ["mine", "factual", "all"]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "def add(a, b):\\n"}\n' * 500)
    options = ("--prompts", "mine.jsonl", "--output", "run.jsonl", "--pairs", "p.jsonl")
    process = start(*QUICK, *options, cwd=tmp_path)
    assert process.stderr
    assert b"no model was named" in process.stderr.readline()
    assert process.stderr.readline().startswith(b"[1/500] own 1: ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"pyllama-mtp: interrupted" in err and b"Traceback" not in err
    run = read_run(tmp_path / "run.jsonl")
    assert 1 <= len(run.results) < 500
    assert f"not complete: {len(run.results)} of 500 generations" in out.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--synthetic-acceptance", "0.9,0.9,0.9,0.9"), "imposed acceptance cannot be measured"),
        (("--p-min", "0.5"), "leave --p-min out"),
        (("--draft-n-max", "0"), "0 is not allowed; give 1 or more"),
        (("--classes", "code,cod"), "no prompts of class 'cod'"),
        (("--context-lengths", "4q"), "'4q' is not a whole number"),
        (("--chat",), "--chat is for --prompt-file"),
        (("--prompts", "a.jsonl", "--prompt-file", "b"), "not allowed with"),
        (("--prompts", "nowhere.jsonl"), "cannot read the prompts file nowhere.jsonl"),
        (("--prompts", "bad.jsonl"), "bad.jsonl, line 2: not a prompt"),
        (("--output", "bad.jsonl"), "cannot create bad.jsonl: File exists"),
        (("--pairs", "bad.jsonl"), "cannot create bad.jsonl: File exists"),
        (("--read", "bad.jsonl"), "bad.jsonl, line 1: not the header of an acceptance run"),
        (("--read", "bad.jsonl", "--misses", "3"), "--read measures nothing"),
        (("--model", "m.gguf", "--classes", "code", "--context-lengths", "30"), "too few for a"),
    ],
)
def test_refusals(fake: ModuleType, cli: Cli, options: Any, message: str) -> None:
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    result = cli("accept", *options)
    assert result.code == 2 and message in result.err and not result.out
    loaded = any(entry[0] == "load" for entry in fake.log)
    assert loaded is ("m.gguf" in options), "only a prompt's length takes a model to know"
    assert not [entry for entry in fake.log if entry[0] == "generate"]
    assert Path("bad.jsonl").read_text().endswith('{"promt": "b"}\n')
