"""The prefill benchmark with workers that compute nothing: order, settings, figures, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prefill
import pytest
from benchkit.worker import Load, Prefill, Prompt

STAMP = {"upstream_commit": "0c1e57098bba", "compiler": "GNU 12", "cpu_features": "avx2"}
STAMP |= {"pyllama_stamp": "1", "series": "7ffaa8541e19aaaa"}


class FakeWorker:
    """Answers with figures that follow from the settings; `log` is shared by all of them."""

    log: list[tuple[str, Any]]
    before: Callable[[int], None]
    newer: str

    def __init__(self, variant: str) -> None:
        self.variant, self.closed = variant, False
        FakeWorker.made.append(self)

    made: list[FakeWorker]

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *rest: object) -> None:
        self.closed = True

    def ask(self, request: Any) -> dict[str, Any]:
        if isinstance(request, Load):
            stamp = {**STAMP, "variant": self.variant}
            stamp["compiler"] += self.newer if self.variant == "upstream" else ""
            return {"stamp": stamp, "system_info": "CPU : AVX2 = 1", "devices": []}
        if isinstance(request, Prompt):
            return {"tokens": [request.number] * request.n_tokens}
        assert isinstance(request, Prefill)
        FakeWorker.before(len(self.log))
        self.log.append((self.variant, request))
        n_prompt, settings = len(request.prompt) - 1, request.settings
        seconds = 2.0 if settings.get("prompt_rows") == "all" else 1.0
        telemetry = {
            "n_prompt": n_prompt,
            "prefill_s": seconds,
            "prefill_tps": n_prompt / seconds,
            "prompt_sync": "full",
            "time_s": {"prompt_sync": 0.25 * (settings.get("prompt_sync") == "full")},
        }
        return {"telemetry": telemetry, "idle_s": 1.0, "idle_cpu_s": 0.001}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.log, FakeWorker.made = [], []
    FakeWorker.before, FakeWorker.newer = lambda number: None, ""
    monkeypatch.setattr(prefill, "Worker", FakeWorker)
    return FakeWorker


def arguments(tmp_path: Path, *more: str) -> list[str]:
    model = tmp_path / "m.gguf"
    output = ("--output", str(tmp_path / "prefill-x.md"))
    return ["--model", str(model), "--sizes", "100,300", "--rounds", "2", *output, *more]


def test_cases_take_turns_at_every_size(fake: type[FakeWorker], tmp_path: Path) -> None:
    assert prefill.main(arguments(tmp_path)) == 0
    asked = [(variant, len(request.prompt)) for variant, request in fake.log]
    turn = ["patched", "patched", "upstream", "patched"]  # no MTP, K/V only, upstream, all rows
    order = [*turn, *turn], [*turn[::-1], *turn[::-1]]
    sizes = [100] * 4 + [300] * 4
    assert asked == [(v, n + 1) for round_ in order for v, n in zip(round_, sizes, strict=True)]
    switches = [
        {k: request.settings.get(k) for k in ("draft_n_max", "prompt_rows", "prompt_sync")}
        for _, request in fake.log[4:8]
    ]
    assert switches == [
        {"draft_n_max": 0, "prompt_rows": None, "prompt_sync": None},
        {"draft_n_max": 3, "prompt_rows": None, "prompt_sync": None},
        {"draft_n_max": 3, "prompt_rows": None, "prompt_sync": None},
        {"draft_n_max": 3, "prompt_rows": "all", "prompt_sync": "full"},
    ]
    assert [r.settings["draft_n_max"] for _, r in fake.log[8:12]] == [3, 3, 3, 0], "backwards"


def test_the_slow_case_may_have_fewer_rounds(fake: type[FakeWorker], tmp_path: Path) -> None:
    prefill.main(arguments(tmp_path, "--rounds", "3", "--defect-rounds", "1"))
    slow = [n for n, (_, r) in enumerate(fake.log) if r.settings.get("prompt_rows") == "all"]
    assert slow == [3, 7] and len(fake.log) == 4 + 4 + 4 * 3
    text = (tmp_path / "prefill-x.md").read_text()
    assert "| all rows (1 of 3 rounds) |" in text and "| K/V only " in text
    assert "K/V only (" not in text


def test_each_switch_by_itself(fake: type[FakeWorker], tmp_path: Path) -> None:
    assert prefill.main(arguments(tmp_path, "--each-switch")) == 0
    names = ("draft_n_max", "prompt_rows", "prompt_sync")
    found = [(v, *(r.settings.get(name) for name in names)) for v, r in fake.log[1:3]]
    assert found == [("upstream", 0, None, None), ("patched", 3, None, "full")]


def test_every_case_of_a_round_gets_the_same_text_and_context(
    fake: type[FakeWorker], tmp_path: Path
) -> None:
    prefill.main(arguments(tmp_path, "--depth", "5", "--threads", "2"))
    for start, (size, number) in enumerate([(100, 0), (300, 0), (100, 1), (300, 1)]):
        turn = [request for _, request in fake.log[4 * start : 4 * start + 4]]
        assert {tuple(request.prompt) for request in turn} == {(number,) * (size + 1)}
        assert {request.settings["n_ctx"] for request in turn} == {256 if size == 100 else 512}
        assert {request.settings["n_threads"] for request in turn} == {2}
        assert {request.settings["draft_n_max"] for request in turn} == {0, 5}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {100, 300}),
        (("--warmup", "32"), {32}),
        (("--n-batch", "128"), {100, 128}),
        (("--sizes", "250"), {250}),  # the generated tokens need more than one step of context
    ],
)
def test_the_warm_up_is_as_long_as_a_batch_or_as_asked_for(
    fake: type[FakeWorker], tmp_path: Path, options: tuple[str, ...], expected: set[int]
) -> None:
    prefill.main(arguments(tmp_path, *options))
    assert {request.warmup_prompt for _, request in fake.log} == expected
    assert {request.warmup_tokens for _, request in fake.log} == {32}
    room = min(r.settings["n_ctx"] - r.warmup_prompt - r.warmup_tokens for _, r in fake.log)
    assert room > 3


def test_an_interruption_keeps_whole_rounds(
    fake: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(number: int) -> None:
        if number == 13:  # in the second round
            raise KeyboardInterrupt

    fake.before = interrupt
    assert prefill.main(arguments(tmp_path)) == 130
    result = json.loads((tmp_path / "prefill-x.json").read_text())
    assert result["rounds"] == {"done": 1, "planned": 2}
    kept = [len(given) for by_case in result["samples"].values() for given in by_case.values()]
    assert kept == [1] * 8
    assert all(worker.closed for worker in fake.made)
    assert "300 tokens" in capsys.readouterr().out


def test_an_interruption_in_the_first_round_writes_nothing(
    fake: type[FakeWorker], tmp_path: Path
) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    fake.before = interrupt
    assert prefill.main(arguments(tmp_path)) == 130
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(fake: type[FakeWorker], tmp_path: Path) -> None:
    assert prefill.main(arguments(tmp_path, "--dry-run")) == 0
    assert not list(tmp_path.iterdir())
    assert max(len(request.prompt) for _, request in fake.log) < 100


def test_the_files_say_how_it_was_measured(
    fake: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([(0.25, 0, 0), (0.75, 0, 0), (1.5, 0, 0)])
    monkeypatch.setattr(prefill.os, "getloadavg", lambda: next(loads))
    monkeypatch.setattr("sys.argv", ["prefill.py", "--model", str(tmp_path / "m.gguf")])
    prefill.main(arguments(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["prefill-x.json", "prefill-x.md"]
    text = (tmp_path / "prefill-x.md").read_text()
    for words in (
        "- Command: `python bench/prefill.py --model m.gguf`",
        "- Our library: patched, patch series 7ffaa8541e19",
        "- Upstream's library: patch series 7ffaa8541e19",
        "- Model: m.gguf\n",
        "- Rounds: 2 of 2, interleaved",
        "- Load average: 0.25 at the start, 1.50 at the end",
        "depth 3",
        "a warm-up of 100 or 300 prompt and 32 generated",
    ):
        assert words in text, words
    result = json.loads((tmp_path / "prefill-x.json").read_text())
    assert len(result["samples"]["300"]["K/V only"]) == 2
    assert result["cases"]["upstream"] == {"library": "upstream"}
    assert "pyllama_stamp" not in result["build"]
    for path in tmp_path.iterdir():
        assert str(tmp_path) not in path.read_text()


def test_the_table(fake: type[FakeWorker], tmp_path: Path) -> None:
    prefill.main(arguments(tmp_path))
    lines = (tmp_path / "prefill-x.md").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| 300 tokens"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[at + 2 : at + 6]]
    assert rows[:2] == [
        ["no MTP", "300.0 (300.0-300.0)", "1.000", "-", "-"],
        ["all rows", "150.0 (150.0-150.0)", "0.500", "0.500-0.500", "12.5 %"],
    ]
    assert [(row[0], row[-1]) for row in rows[2:]] == [("upstream", "-"), ("K/V only", "-")]
    assert len({len(line) for line in lines[at : at + 6]}) == 1


def test_builds_that_differ_are_named(fake: type[FakeWorker], tmp_path: Path) -> None:
    prefill.main(arguments(tmp_path))
    assert "differ" not in (tmp_path / "prefill-x.md").read_text()
    fake.newer = ".3"
    prefill.main(arguments(tmp_path))
    assert "- Note: the libraries differ in compiler\n" in (tmp_path / "prefill-x.md").read_text()


def sample(tps: float, sync_s: float = 0.0, prefill_s: float = 1.0) -> dict[str, Any]:
    return {"prefill_tps": tps, "prefill_s": prefill_s, "prompt_sync_s": sync_s}


def test_ratios_are_taken_within_a_round() -> None:
    """The ratio of the medians would be 40 / 100, that of the lowest 30 / 50."""
    by_case = {
        "no MTP": [sample(100.0), sample(200.0), sample(50.0)],
        "K/V only": [sample(90.0, 0.5), sample(30.0, 0.1, 9.0), sample(40.0)],
    }
    found = prefill.summarize(by_case)["K/V only"]
    assert found["to_base"] == {"median": 0.8, "low": 0.15, "high": 0.9, "n": 3}
    assert found["prefill_tps"]["median"] == 40.0
    assert found["prompt_sync_share"] == pytest.approx(0.6 / 11)


def test_a_worker_that_was_not_idle_is_named() -> None:
    idle = {"patched": {"s": 100.0, "cpu_s": 0.9}, "upstream": {"s": 100.0, "cpu_s": 30.0}}
    lines = prefill.condition_lines({"load_average": {"start": 1, "end": 2}, "idle": idle})
    (note,) = [line for line in lines if line.startswith("- Note")]
    assert "upstream library used 30.0 % of a core" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "512,x"), "whole numbers"),
        (("--sizes", "0"), "at least 1 token"),
        (("--sizes", "512,512"), "each one once"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--defect-rounds", "9"), "from 1 to --rounds"),
        (("--depth", "0"), "--depth must be at least 1"),
        (("--output", "result.txt"), "must end in .md"),
        (("--output", "no/such/folder/x.md"), "there is no folder"),
    ],
)
def test_bad_options(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        prefill.parse_arguments(list(options))
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
