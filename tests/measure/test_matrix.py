"""The matrix: variants side by side, fresh sessions, interruption, resuming, skipped cells."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import pyllama_mtp
from pyllama_mtp import Generation, Model
from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError
from pyllama_mtp.llama import native
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import Build, Records, Run
from pyllama_mtp.measure.request import MatrixRequest
from pyllama_mtp.measure.run import TURN_TOKENS, Matrix, make_header
from pyllama_mtp.measure.runner import WARM_UP_TOKENS, Runner
from pyllama_mtp.settings import AUTO_DEPTH, Settings

from ..cli.conftest import Watched, interrupt

HEADER: Any = SimpleNamespace(run="r")
PLAN = Plan(sizes=(20, 40), depths=(0, 2, 3), max_tokens=9, repeat=2)
SETTINGS = Settings(n_threads=1, n_ubatch=64)


def make(
    model: Model,
    plan: Plan = PLAN,
    runner: Runner | None = None,
    run: Run | None = None,
    **changes: Any,
) -> Matrix:
    runners = dict.fromkeys(plan.libraries, runner or Runner(model))
    request = MatrixRequest(**changes)
    settings = changes.get("settings", SETTINGS)
    return Matrix(model, request, plan, settings, run or Run(HEADER), runners)


def collect(model: Model, matrix: Matrix) -> Records:
    """The records that a file of this run would hold."""
    plan, found, library = matrix.plan, Records(), native.load()
    builds = {label: Build.of(library, -1, label) for label in plan.libraries}
    header = make_header(model, library, MatrixRequest(), plan, SETTINGS, builds)
    for record in (msgspec.structs.replace(header, run="r"), *matrix.run()):
        found.add(record)
    return found


def measure(model: Model, *plan_and_runner: Any, **changes: Any) -> list[Cell]:
    return collect(model, make(model, *plan_and_runner, **changes)).cells


def prompts_measured(watched: Watched, max_tokens: int = 9) -> list[tuple[int, ...]]:
    """The prompts of all generations of this length, in order: 9 tokens is a sample."""
    return [p for p, options in watched.of("generate") if options["max_tokens"] == max_tokens]


def test_a_repeat_is_finished_before_the_next_and_turns_go_backwards(
    demo: Model, watched: Watched
) -> None:
    cells = measure(demo)
    assert [depth for depth, *_ in watched.of("open")] == [0, 2, 3] * 2 + [3, 2, 0] * 2
    prompts = prompts_measured(watched)
    groups = [prompts[start : start + 3] for start in range(0, 12, 3)]
    assert [{*map(len, group)} for group in groups] == [{20}, {40}] * 2
    assert all(len({*group}) == 1 for group in groups), "all variants get the same text"
    assert len({group[0] for group in groups}) == 4
    assert [(c.n_prompt, c.n_max) for c in cells] == [(s, d) for s in (20, 40) for d in (0, 2, 3)]
    assert [c.mode for c in cells[:2]] == ["no-mtp", "draft-mtp"]
    assert [c.repeats for c in cells] == [[0, 1]] * 6


def test_tokens_come_by_turns(demo: Model) -> None:
    """No session is more than a turn ahead of another that still generates."""
    reached: list[dict[int, int]] = [{}]

    class Turns(Runner):
        def advance(self, key: Any, goal: int) -> int:
            tokens = super().advance(key, goal)
            reached.append({**reached[-1], key.n_max: tokens})
            return tokens

    measure(demo, Plan((10,), (0, 2), 5 * TURN_TOKENS, 1), Turns(demo))
    assert reached[2] == {0: 1, 2: 1}, "both prompts come before the first turn"
    assert all(abs(at[0] - at[2]) <= TURN_TOKENS + 2 for at in reached[2:])
    assert reached[-1] == {0: 5 * TURN_TOKENS, 2: 5 * TURN_TOKENS}


def test_every_sequence_has_a_text_of_its_own(demo: Model) -> None:
    """The first sequence has the text of the cells with one sequence."""
    seen = []

    class Noted(Runner):
        def begin(self, key: Hashable, task: Any) -> None:
            seen.append(task.prompts)
            super().begin(key, task)

    measure(demo, Plan((50,), (0,), 5, 2, {"n_sequences": (1, 3)}), Noted(demo))
    alone, together = ([prompts for prompts in seen if len(prompts) == n] for n in (1, 3))
    assert len({tuple(prompt) for prompts in together for prompt in prompts}) == 2 * 3
    assert [prompts[0] for prompts in alone] == [prompts[0] for prompts in together]


TOO_LARGE = InsufficientMemoryError("needs 99 GiB, 1 GiB available")


def test_the_check_opens_every_variant_and_leaves_memory_to_the_run(
    demo: Model, watched: Watched
) -> None:
    watched.refused[3] = TOO_LARGE
    make(demo).check()
    assert [depth for depth, *_ in watched.of("open")] == [0, 2]
    assert watched.n_open == 0 and not watched.of("generate")


@pytest.mark.parametrize(("n_batch", "sizes"), [(2048, {20, 40}), (16, {16})])
def test_every_sample_is_fresh_warmed_up_and_of_full_length(
    demo: Model, watched: Watched, n_batch: int, sizes: set[int]
) -> None:
    """The warm-up is no longer than a batch."""
    cells = measure(demo, settings=Settings(n_batch=n_batch, n_ubatch=16, n_threads=1))
    group = ["open", "generate", "reset", "generate"] * 3 + ["close"] * 3
    assert [kind for kind, *_ in watched.log] == group * 4
    assert {len(prompt) for prompt in prompts_measured(watched, WARM_UP_TOKENS)} == sizes
    assert all(options["ignore_eos"] for _, options in watched.of("generate"))
    assert {s.n_generated for c in cells for s in c.samples} == {9}


def test_a_header_names_no_folder(demo: Model) -> None:
    words = ["matrix", "--model=/home/me/m.gguf", "--variants", "patched,/home/me/other"]
    header = make_header(demo, native.load(), MatrixRequest(command=words), PLAN, SETTINGS, {})
    assert header.command == ["matrix", "--model=m.gguf", "--variants", "patched,other"]


@pytest.mark.parametrize(("n_ctx", "sizes"), [(0, [256, 512]), (768, [768, 768])])
def test_contexts_are_those_asked_for_or_no_bigger_than_needed_and_alike(
    demo: Model, watched: Watched, n_ctx: int, sizes: list[int]
) -> None:
    measure(demo, Plan((20, 400), (0, 3), 2, 1), settings=Settings(n_ctx=n_ctx, n_threads=1))
    assert [n for _, n, _ in watched.of("open")] == [n for n in sizes for _ in range(2)]


def abort(generation: Generation) -> None:
    """Ctrl-C that aborts a decode."""
    raise DecodeAborted("stopped", 2)


FIRST = [(20, 0, 1), (20, 2, 1), (20, 3, 1)]


@pytest.mark.parametrize(
    ("generation", "how", "expected"),
    [
        (0, Generation.stop, []),  # a warm-up
        (8, abort, FIRST),  # a warm-up of the second group
        (15, interrupt, [*FIRST, (40, 0, 1), (40, 2, 1), (40, 3, 1)]),
    ],
)
def test_an_interruption_keeps_every_finished_sample(
    demo: Model,
    watched: Watched,
    generation: int,
    how: Callable[[Generation], None],
    expected: list[tuple[int, int, int]],
) -> None:
    watched.script[generation] = how
    matrix = make(demo)
    cells = collect(demo, matrix).cells
    assert matrix.interrupted
    assert [(c.n_prompt, c.n_max, len(c.samples)) for c in cells] == expected
    assert all(c.decode_tps for c in cells)
    assert watched.n_open == 0, "the sessions must be closed"


def test_a_run_goes_on_with_what_is_missing(demo: Model) -> None:
    """The run was interrupted within a group: samples finished there are not measured again."""
    plan = msgspec.structs.replace(PLAN, depths=(0, AUTO_DEPTH, "auto"))
    whole = collect(demo, make(demo, plan)).runs["r"]
    kept = {(key, repeat) for key, repeat in whole.measured if repeat == 0}
    some = min(set(whole.measured) - kept, key=str)
    matrix = make(demo, plan, run=Run(HEADER, measured=kept | {some}))
    assert matrix.n_to_do == 5
    found = collect(demo, matrix)
    assert [repeat for cell in found.cells for repeat in cell.repeats] == [1] * 5
    assert found.runs["r"].measured == whole.measured - kept - {some}
    assert matrix.n_to_do == 0


def test_a_cell_without_memory_is_skipped_and_the_run_goes_on(
    demo: Model, watched: Watched
) -> None:
    watched.refused[2] = TOO_LARGE
    cells = measure(demo)
    reasons = {(c.n_prompt, c.n_max): c.skipped for c in cells}
    assert reasons == {
        (size, depth): str(TOO_LARGE) if depth == 2 else None
        for size in (20, 40)
        for depth in (0, 2, 3)
    }
    assert {(c.n_max, len(c.samples)) for c in cells} == {(0, 2), (2, 0), (3, 2)}


def test_sessions_that_do_not_fit_together_are_measured_in_turn(
    demo: Model, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds two sessions."""
    session = pyllama_mtp.session.Session

    def open_session(*given: Any) -> Any:
        if watched.n_open >= 2:
            raise TOO_LARGE
        return session(*given)

    monkeypatch.setattr(pyllama_mtp.session, "Session", open_session)
    cells = measure(demo)
    assert [len(c.samples) for c in cells] == [2] * 6 and not any(c.skipped for c in cells)
    assert max(n_open for _, _, n_open in watched.of("open")) == 2


def test_after_the_budget_no_further_group_begins(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only while a prompt is processed: a second per 10 tokens. First repeats come
    first, so that every size is measured once before one is measured again."""
    clock = [0.0]
    monkeypatch.setattr("pyllama_mtp.measure.run.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(Runner):
        def advance(self, key: Hashable, goal: int) -> int:
            if goal == 1:
                clock[0] += self.size / 10
            return super().advance(key, goal)

        def begin(self, key: Hashable, task: Any) -> None:
            self.size = len(task.prompts[0])
            super().begin(key, task)

    plan = Plan((10, 20, 40), (0, 2), 3, 5)
    for budget_s, least, repeats in (
        (0.1, 0, [1]),
        (6.1, 0, [1, 1, 1]),  # 2 + 4, then 8 seconds
        (17, 0, [2, 2, 1]),
        (0.1, 2, [2, 2, 2]),
    ):
        clock[0] = 0.0
        matrix = make(demo, plan, Slow(demo), budget_s=budget_s, least_repeats=least)
        cells = collect(demo, matrix).cells
        assert [len(cell.samples) for cell in cells if cell.n_max] == repeats
        assert matrix.n_to_do == 2 * (15 - sum(repeats))
