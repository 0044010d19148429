"""The matrix: variants side by side, fresh sessions, interruption, resuming, skipped cells."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

import pyllama_mtp
from pyllama_mtp.errors import InsufficientMemoryError
from pyllama_mtp.llama.contextoptions import Cost
from pyllama_mtp.measure.figures import Cell
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.profile import WARM_UP_TOKENS, cell_profiles, made_profile
from pyllama_mtp.measure.records import Build, Profile, Records, Run, accelerators
from pyllama_mtp.measure.run import TURN_TOKENS, Matrix, MatrixEvent, MatrixRequest, make_header
from pyllama_mtp.measure.runner import Runner
from pyllama_mtp.settings import AUTO_DEPTH, Sampling, Settings

HEADER: Any = SimpleNamespace(run="r")
PLAN = Plan(sizes=(100, 200), depths=(0, 2, 3), max_tokens=12, repeat=2)


def requested(plan: Plan, **changes: Any) -> MatrixRequest:
    return MatrixRequest(**{**vars(MatrixRequest(plan, Settings(), Sampling(), ["a"])), **changes})


def make(
    fake: ModuleType,
    plan: Plan = PLAN,
    runner: Runner | None = None,
    run: Run | None = None,
    profiler: Any = None,
    **changes: Any,
) -> Matrix:
    model = fake.Model("folder/m.gguf")
    runners = dict.fromkeys(plan.libraries, runner or Runner(model))
    profilers = {"": profiler} if profiler else {}
    return Matrix(model, requested(plan, **changes), run or Run(HEADER), runners, profilers)


def collect(fake: ModuleType, matrix: Matrix) -> Records:
    """The records that a file of this run would hold."""
    plan, found = matrix.plan, Records()
    builds = {label: Build.of(fake.Library(), -1, label) for label in plan.libraries}
    library: Any = fake.Library()
    header = make_header(fake.Model("folder/m.gguf"), library, requested(plan), builds)
    for record in (msgspec.structs.replace(header, run="r"), *matrix.run()):
        found.add(record)
    return found


def measure(fake: ModuleType, *plan_and_runner: Any, **changes: Any) -> list[Cell]:
    return collect(fake, make(fake, *plan_and_runner, **changes)).cells


def logged(fake: ModuleType, kind: str) -> list[tuple[Any, ...]]:
    return [entry for entry in fake.log if entry[0] == kind]


def prompts_measured(fake: ModuleType, max_tokens: int = 12) -> list[tuple[int, ...]]:
    """The prompts of all generations of this length, in order: 12 tokens is a sample."""
    return [entry[1] for entry in logged(fake, "generate") if entry[2] == max_tokens]


def test_a_repeat_is_finished_before_the_next_and_turns_go_backwards(fake: ModuleType) -> None:
    cells = measure(fake)
    assert [entry[1] for entry in logged(fake, "open")] == [0, 2, 3] * 2 + [3, 2, 0] * 2
    prompts = prompts_measured(fake)
    groups = [prompts[start : start + 3] for start in range(0, 12, 3)]
    assert [{*map(len, group)} for group in groups] == [{100}, {200}] * 2
    assert all(len({*group}) == 1 for group in groups), "all variants get the same text"
    assert len({group[0] for group in groups}) == 4
    assert [(c.n_prompt, c.n_max) for c in cells] == [(s, d) for s in (100, 200) for d in (0, 2, 3)]
    assert [c.mode for c in cells[:2]] == ["no-mtp", "draft-mtp"]
    assert [c.repeats for c in cells] == [[0, 1]] * 6


def test_tokens_come_by_turns(fake: ModuleType) -> None:
    """No session is more than a turn ahead of another that still generates."""
    reached: list[dict[int, int]] = [{}]

    class Watched(Runner):
        def advance(self, number: int, goal: int) -> int:
            tokens = super().advance(number, goal)
            reached.append({**reached[-1], number: tokens})
            return tokens

    measure(fake, Plan((10,), (0, 2), 5 * TURN_TOKENS, 1), Watched(fake.Model("m.gguf")))
    assert reached[2] == {0: 1, 1: 1}, "both prompts come before the first turn"
    assert all(abs(at[0] - at[1]) <= TURN_TOKENS + 2 for at in reached[2:])
    assert reached[-1] == {0: 5 * TURN_TOKENS, 1: 5 * TURN_TOKENS}


def test_every_sequence_has_a_text_of_its_own(fake: ModuleType) -> None:
    """The first sequence has the text of the cells with one sequence."""
    seen = []

    class Watched(Runner):
        def begin(self, number: int, task: Any) -> None:
            seen.append(task.prompts)
            super().begin(number, dataclasses.replace(task, prompts=task.prompts[:1]))

    plan = Plan((50,), (0,), 5, 2, {"n_sequences": (1, 3)})
    measure(fake, plan, Watched(fake.Model("m.gguf")))
    alone, together = ([prompts for prompts in seen if len(prompts) == n] for n in (1, 3))
    assert len({tuple(prompt) for prompts in together for prompt in prompts}) == 2 * 3
    assert [prompts[0] for prompts in alone] == [prompts[0] for prompts in together]


def test_libraries_and_classes_are_axes(fake: ModuleType) -> None:
    plan = Plan(
        (100,), (0, 3), 12, 1, classes=("text", "source"), libraries=("upstream", "patched")
    )
    cells = measure(fake, plan)
    assert [(c.prompt_class, c.variant, c.n_max) for c in cells] == [
        (kind, library, depth)
        for kind in ("text", "source")
        for library in ("upstream", "patched")
        for depth in (0, 3)
    ]
    prompts = prompts_measured(fake)
    assert len(set(prompts[:4])) == 1 and prompts[0] != prompts[4]


def test_the_check_opens_every_variant_and_leaves_memory_to_the_run(fake: ModuleType) -> None:
    fake.refuse_session[(256, 3)] = InsufficientMemoryError("needs 99 GiB, 1 GiB available")
    make(fake).check()
    assert [entry[1] for entry in logged(fake, "open")] == [0, 2]
    assert fake.state["open_sessions"] == 0 and not logged(fake, "generate")


@pytest.mark.parametrize(("n_batch", "sizes"), [(2048, {100, 200}), (64, {64})])
def test_every_sample_is_fresh_warmed_up_and_of_full_length(
    fake: ModuleType, n_batch: int, sizes: set[int]
) -> None:
    """The warm-up is no longer than a batch."""
    cells = measure(fake, settings=Settings(n_batch=n_batch))
    kinds = [entry[0] for entry in fake.log if entry[0] not in ("tokenize", "model closed")]
    group = ["open", "generate", "reset", "generate"] * 3 + ["close"] * 3
    assert kinds == group * 4
    assert {len(prompt) for prompt in prompts_measured(fake, WARM_UP_TOKENS)} == sizes
    assert all(entry[3] for entry in logged(fake, "generate")), "EOS must be ignored"
    assert {s.n_generated for c in cells for s in c.samples} == {12}


def test_cells_hold_what_was_measured(fake: ModuleType) -> None:
    cell = measure(fake)[2]
    assert (cell.model, cell.variant, cell.backend, cell.n_max) == ("m.gguf", "patched", "CPU", 3)
    assert (cell.upstream_commit, cell.series) == ("0123456789abcdef", "feedc0dedeadbeef")
    assert (cell.program, cell.prompt_class, cell.run) == ("pyllama-mtp", "text", "r")
    assert cell.prefill_tps == pytest.approx(1000)
    assert cell.decode_tps == pytest.approx(11 / (4 * 0.013))
    assert (cell.drafted, cell.accepted, cell.rounds) == ([8, 8, 8], [8, 8, 0], 8)
    assert cell.acceptance_per_position == [1, 1, 0]
    assert (cell.mean_accepted_length, cell.tokens_per_round) == (2, 3)
    assert cell.memory == {"weights": 1000, "draft_context": 30}
    assert cell.settings["draft_n_max"] == 3 and cell.settings["sampling"]["temperature"] == 0
    assert cell.settings["n_batch"] == 2048
    assert cell.time.endswith("+00:00")
    assert set(cell.samples[0].waited_s) == {"prefill", "decode"}
    assert set(cell.samples[0].cpu_s) == {"prefill", "decode"}


@pytest.mark.parametrize(("n_ctx", "sizes"), [(0, [256, 1024]), (2048, [2048, 2048])])
def test_contexts_are_those_asked_for_or_no_bigger_than_needed_and_alike(
    fake: ModuleType, n_ctx: int, sizes: list[int]
) -> None:
    measure(fake, Plan((100, 1000), (0, 3), 12, 1), settings=Settings(n_ctx=n_ctx))
    assert [entry[2] for entry in logged(fake, "open")] == [n for n in sizes for _ in range(2)]


@pytest.mark.parametrize("how", ["interrupt", "abort", "stop"])
@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (0, []),  # a warm-up
        (3, []),
        (8, [(100, 0, 1), (100, 2, 1), (100, 3, 1)]),  # a warm-up of the second group
        (9, [(100, 0, 1), (100, 2, 1), (100, 3, 1)]),
        (15, [(100, 0, 1), (100, 2, 1), (100, 3, 1), (200, 0, 1), (200, 2, 1), (200, 3, 1)]),
    ],
)
def test_an_interruption_keeps_every_finished_sample(
    fake: ModuleType, how: str, generation: int, expected: list[tuple[int, int, int]]
) -> None:
    fake.script[generation] = getattr(fake, how)
    matrix = make(fake)
    cells = collect(fake, matrix).cells
    assert matrix.interrupted and not matrix.measuring
    assert [(c.n_prompt, c.n_max, len(c.samples)) for c in cells] == expected
    assert all(c.decode_tps for c in cells)
    assert fake.state["open_sessions"] == 0, "the sessions must be closed"


def test_a_run_goes_on_with_what_is_missing(fake: ModuleType) -> None:
    """The run was interrupted within a group: samples finished there are not measured again."""
    plan = msgspec.structs.replace(PLAN, depths=(0, AUTO_DEPTH, "auto"))
    first = collect(fake, make(fake, plan))
    whole = first.runs["r"]
    kept = {(key, repeat) for key, repeat in whole.measured if repeat == 0}
    some = min(set(whole.measured) - kept, key=str)
    fake.reset()
    matrix = make(fake, plan, run=Run(HEADER, measured=kept | {some}))
    assert matrix.n_to_do == 5
    found = collect(fake, matrix)
    assert [repeat for cell in found.cells for repeat in cell.repeats] == [1] * 5
    assert found.runs["r"].measured == whole.measured - kept - {some}
    assert matrix.n_to_do == 0


def test_a_cell_without_memory_is_skipped_and_the_run_goes_on(fake: ModuleType) -> None:
    fake.refuse_session[(256, 2)] = InsufficientMemoryError("needs 99 GiB, 1 GiB available")
    cells = measure(fake)
    reasons = {(c.n_prompt, c.n_max): c.skipped for c in cells}
    assert reasons == {
        (size, depth): None if depth != 2 else "needs 99 GiB, 1 GiB available"
        for size in (100, 200)
        for depth in (0, 2, 3)
    }
    assert {(c.n_max, len(c.samples)) for c in cells} == {(0, 2), (2, 0), (3, 2)}


def test_sessions_that_do_not_fit_together_are_measured_in_turn(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds two sessions."""

    def open_session(*given: Any) -> Any:
        if fake.state["open_sessions"] >= 2:
            raise InsufficientMemoryError("two are there already")
        return fake.Session(*given)

    monkeypatch.setattr(pyllama_mtp, "Session", open_session)
    cells = measure(fake)
    assert [len(c.samples) for c in cells] == [2] * 6 and not any(c.skipped for c in cells)
    assert max(entry[3] for entry in logged(fake, "open")) == 2


def test_progress_tells_of_every_sample(fake: ModuleType) -> None:
    events: list[MatrixEvent] = []
    fake.refuse_session[(256, 2)] = InsufficientMemoryError("needs 99 GiB")
    matrix = make(fake, Plan((100,), (0, 2), 12, 2))
    matrix.on_event = events.append
    list(matrix.run())
    done = [(e.group.size, e.variant.depth, e.group.repeat) for e in events if e.kind == "done"]
    assert sorted(done) == [(100, 0, repeat) for repeat in (0, 1)]
    skipped = [(e.group.size, e.variant.depth) for e in events if e.kind == "skipped"]
    assert skipped == [(100, 2)]
    assert [e.left_s is None for e in events[:3]] == [True] * 3
    assert events[-1].left_s == 0


def test_a_budget_leaves_out_the_least_useful_repeats(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time passes only while a prompt is processed: a second per 100 tokens."""
    clock = [0.0]
    monkeypatch.setattr("pyllama_mtp.measure.run.time.monotonic", lambda: clock[0])

    class Slow(Runner):
        def advance(self, number: int, goal: int) -> int:
            if goal == 1:
                clock[0] += self.size / 100
            return super().advance(number, goal)

        def begin(self, number: int, task: Any) -> None:
            self.size = len(task.prompts[0])
            super().begin(number, task)

    plan = Plan((100, 200, 400), (0, 2), 12, 5)
    matrix = make(fake, plan, Slow(fake.Model("m.gguf")), budget_s=24)
    found = collect(fake, matrix)
    repeats = {cell.n_prompt: len(cell.samples) for cell in found.cells}
    assert repeats == {100: 3, 200: 2, 400: 1}, "one each takes 2 + 4 + 8 seconds"
    assert len(matrix.dropped) == 9 and clock[0] <= 24


def test_the_backend_is_what_computes(fake: ModuleType) -> None:
    gpu = fake.Device("CUDA0", "a fake GPU", "gpu")
    library = fake.Library((gpu, fake.Device("CUDA1", "another", "gpu"), fake.Device()))
    assert Build.of(library, -1).backend == "CUDA"
    assert len(accelerators(library, -1)) == 2
    assert Build.of(library, 0).backend == "CPU"
    assert accelerators(library, 0) == []


def test_a_prompt_is_profiled_once_for_each_way_to_process_it(fake: ModuleType) -> None:
    """Profiles come last: one without MTP, one at the first depth, none that is there already."""
    asked = []

    def profiler(settings: Settings, prompt: list[int]) -> Profile:
        asked.append((len(prompt), settings.draft_n_max, settings.prompt_sync))
        return made_profile(len(prompt), 1.0, [Cost("ADD", "l_out", 1, 2.0)])

    plan = msgspec.structs.replace(PLAN, axes={"prompt_sync": ("full", "kv")})
    found = collect(fake, make(fake, plan, profiler=profiler))
    ways = [(0, "auto"), (2, "full"), (2, "kv")]
    assert asked == [(size, *way) for size in (100, 200) for way in ways]
    profiled = [cell for cell in found.cells if cell.profile]
    found_ways = [(c.n_prompt, c.n_max) for c in profiled]
    assert found_ways == [(size, depth) for size in (100, 200) for depth in (0, 2, 2)]
    assert profiled[0].profile.sum_s == 2.0 and profiled[0].samples
    shown = cell_profiles(found.cells)
    assert "a prompt of 200 tokens goes (text):" in shown and "| MTP 2, sync kv: % |" in shown
    assert [*make(fake, plan, profiler=profiler, run=found.runs["r"]).run()] == []


def test_an_interrupted_profile_ends_the_run(fake: ModuleType) -> None:
    def interrupted(settings: Settings, prompt: list[int]) -> Profile:
        raise KeyboardInterrupt

    matrix = make(fake, profiler=interrupted)
    cells = collect(fake, matrix).cells
    assert matrix.interrupted and not matrix.measuring
    assert len(cells) == 6 and not any(cell.profile for cell in cells)
