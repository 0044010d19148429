"""The matrix: order, fresh sessions, interruption, cells that are left out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from pyllama_mtp.errors import DecodeAborted, InsufficientMemoryError, UsageError
from pyllama_mtp.measure.matrix import WARM_UP_TOKENS, Build, Event, Matrix, Plan, Variant
from pyllama_mtp.measure.workload import Workload
from pyllama_mtp.settings import Sampling, Settings

PLAN = Plan(sizes=(100, 200), depths=(0, 2, 3), max_tokens=12, repeat=2)
STATES = Plan((100, 200), (0, 3), 12, 2, prompt_rows=("all", "last"), prompt_sync=("full", "kv"))


def make(fake: ModuleType, plan: Plan = PLAN, **changes: Any) -> Matrix:
    model = fake.Model("folder/m.gguf")
    options: dict[str, Any] = {
        "settings": Settings(),
        "sampling": Sampling(),
        "open_session": lambda settings: fake.Session(model, settings),
        "prompts": Workload(model),
        "build": Build.of(fake.Library(), -1),
    }
    return Matrix(model, plan, **{**options, **changes})


def logged(fake: ModuleType, kind: str) -> list[tuple[Any, ...]]:
    return [entry for entry in fake.log if entry[0] == kind]


def test_depths_take_turns(fake: ModuleType) -> None:
    cells = list(make(fake).run())
    assert [entry[1] for entry in logged(fake, "open")] == [0, 2, 3, 0, 2, 3] * 2
    assert [(c.n_prompt, c.n_max) for c in cells] == [(s, d) for s in (100, 200) for d in (0, 2, 3)]
    assert [c.mode for c in cells[:2]] == ["no-mtp", "draft-mtp"]


def switches(settings: Any) -> tuple[Any, ...]:
    return settings.draft_n_max, settings.prompt_rows, settings.prompt_sync, settings.hidden


def test_switches_are_axes_and_take_turns(fake: ModuleType) -> None:
    opened: list[Any] = []

    def open_session(settings: Any) -> Any:
        opened.append(settings)
        return fake.Session(model, settings)

    model = fake.Model("m.gguf")
    cells = list(make(fake, STATES, open_session=open_session).run())
    turn = [
        (0, "last", "auto", "post-norm"),
        (3, "all", "full", "post-norm"),
        (3, "all", "kv", "post-norm"),
        (3, "last", "full", "post-norm"),
        (3, "last", "kv", "post-norm"),
    ]
    assert [switches(settings) for settings in opened] == turn * 4
    assert [c.settings["prompt_sync"] for c in cells[:5]] == ["auto", "full", "kv", "full", "kv"]
    assert [len(c.samples) for c in cells] == [2] * 10


def test_all_variants_of_a_repeat_get_the_same_text(fake: ModuleType) -> None:
    list(make(fake, STATES).run())
    prompts = [entry[1] for entry in logged(fake, "generate")[1::2]]
    assert all(len(set(prompts[start : start + 5])) == 1 for start in range(0, 20, 5))


def test_cells_hold_what_the_prompt_cost(fake: ModuleType) -> None:
    plain, all_full, all_kv, last_full, last_kv = list(make(fake, STATES).run())[:5]
    assert [c.prefill_tps for c in (plain, all_full, all_kv, last_full, last_kv)] == pytest.approx(
        [1000, 1000 / 2.25, 500, 800, 1000]
    )
    assert plain.prompt_sync_share is None
    assert all_full.prompt_sync_share == pytest.approx(0.25 / 2.25)
    assert last_kv.prompt_sync_share == pytest.approx(0.1)
    sample = last_full.samples[0]
    assert (sample.prompt_sync, sample.handoff) == ("full", "device")
    assert sample.time_s["prompt_sync"] == pytest.approx(0.025)
    host = list(make(fake, STATES, settings=Settings(handoff="host")).run())[1]
    assert host.samples[0].handoff == "host"
    assert host.samples[0].hidden_bytes == {"to_host": 400, "from_host": 400}


def test_every_depth_above_zero_has_every_combination() -> None:
    plan = Plan((5,), (0, 2, 4), 1, 1, hidden=("pre-norm", "post-norm"), prompt_sync=("kv",))
    assert plan.variants == (
        Variant(0),
        Variant(2, prompt_sync="kv", hidden="pre-norm"),
        Variant(2, prompt_sync="kv"),
        Variant(4, prompt_sync="kv", hidden="pre-norm"),
        Variant(4, prompt_sync="kv"),
    )
    assert [plan.label(v) for v in plan.variants[:2]] == ["no MTP", "depth 2, hidden pre-norm"]
    assert plan.label(plan.variants[1], short=True) == "depth 2, pre-norm"


def test_what_the_library_cannot_do_is_refused_beforehand(fake: ModuleType) -> None:
    fake.state["has_tap"] = False
    with pytest.raises(UsageError, match=r"^depth 3, rows all, sync kv: prompt_sync 'kv' is not"):
        make(fake, STATES).check()
    assert not logged(fake, "generate") and fake.state["open_sessions"] == 0


def test_the_check_opens_every_variant_and_leaves_memory_to_the_run(fake: ModuleType) -> None:
    fake.refuse_session[(256, 3)] = InsufficientMemoryError("needs 99 GiB, 1 GiB available")
    make(fake).check()
    assert [entry[1] for entry in logged(fake, "open")] == [0, 2]
    assert fake.state["open_sessions"] == 0 and not logged(fake, "generate")


def test_one_session_at_a_time(fake: ModuleType) -> None:
    list(make(fake).run())
    assert {entry[3] for entry in logged(fake, "open")} == {1}
    assert fake.state["open_sessions"] == 0


def test_every_sample_is_warmed_up_reset_and_of_full_length(fake: ModuleType) -> None:
    cells = list(make(fake).run())
    kinds = [entry[0] for entry in fake.log if entry[0] not in ("tokenize", "model closed")]
    assert kinds == ["open", "generate", "reset", "generate", "close"] * 12
    warm_ups, measured = logged(fake, "generate")[::2], logged(fake, "generate")[1::2]
    assert {entry[2] for entry in warm_ups} == {WARM_UP_TOKENS}
    assert all(entry[3] for entry in measured), "EOS must be ignored"
    assert {s.n_generated for c in cells for s in c.samples} == {12}


def test_all_depths_of_a_repeat_get_the_same_text(fake: ModuleType) -> None:
    list(make(fake).run())
    prompts = [entry[1] for entry in logged(fake, "generate")[1::2]]
    by_repeat = [prompts[start : start + 3] for start in range(0, 12, 3)]
    assert all(len(set(group)) == 1 for group in by_repeat)
    assert len({group[0] for group in by_repeat}) == 4
    assert [len(group[0]) for group in by_repeat] == [100, 100, 200, 200]


def test_cells_hold_what_was_measured(fake: ModuleType) -> None:
    cell = list(make(fake).run())[2]
    assert (cell.model, cell.variant, cell.backend, cell.n_max) == ("m.gguf", "patched", "CPU", 3)
    assert (cell.upstream_commit, cell.series) == ("0123456789abcdef", "feedc0dedeadbeef")
    assert cell.prefill_tps == pytest.approx(1000)
    assert cell.decode_tps == pytest.approx(11 / (4 * 0.013))
    assert (cell.drafted, cell.accepted, cell.rounds) == ([8, 8, 8], [8, 8, 0], 8)
    assert cell.acceptance_per_position == [1, 1, 0]
    assert (cell.mean_accepted_length, cell.tokens_per_round) == (2, 3)
    assert cell.memory == {"weights": 1000, "draft_context": 30}
    assert cell.settings["draft_n_max"] == 3 and cell.settings["sampling"]["temperature"] == 0
    assert cell.time.endswith("+00:00")


def test_a_size_is_handed_out_before_the_next_one_begins(fake: ModuleType) -> None:
    cells = make(fake).run()
    for _ in range(3):
        next(cells)
    assert len(logged(fake, "open")) == 6


def test_contexts_are_no_bigger_than_needed_and_alike(fake: ModuleType) -> None:
    list(make(fake, Plan((100, 1000), (0, 3), 12, 1)).run())
    assert [entry[2] for entry in logged(fake, "open")] == [256, 256, 1024, 1024]


def test_an_explicit_context_is_kept(fake: ModuleType) -> None:
    list(make(fake, settings=Settings(n_ctx=2048)).run())
    assert {entry[2] for entry in logged(fake, "open")} == {2048}


def test_synthetic_rates_are_cut_to_the_depth(fake: ModuleType) -> None:
    settings = Settings(synthetic_acceptance=(0.8, 0.7, 0.6))
    cells = list(make(fake, settings=settings).run())
    assert [c.synthetic_acceptance for c in cells[:3]] == [None, [0.8, 0.7], [0.8, 0.7, 0.6]]


def interrupt_by_raising(generation: Any) -> None:
    raise KeyboardInterrupt


def interrupt_by_abort(generation: Any) -> None:
    raise DecodeAborted("stopped", 2)


def interrupt_quietly(generation: Any) -> None:
    generation.finish_reason = "interrupted"


@pytest.mark.parametrize("how", [interrupt_by_raising, interrupt_by_abort, interrupt_quietly])
@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (0, []),
        (2, [(100, 0, 1), (100, 2, 1)]),
        (4, [(100, 0, 2), (100, 2, 1), (100, 3, 1)]),
        (7, [(100, 0, 2), (100, 2, 2), (100, 3, 2), (200, 0, 1)]),
    ],
)
def test_an_interruption_keeps_every_cell_with_a_sample(
    fake: ModuleType, how: Any, sample: int, expected: list[tuple[int, int, int]]
) -> None:
    fake.script[2 * sample + 1] = how
    matrix = make(fake)
    cells = list(matrix.run())
    assert matrix.interrupted
    assert [(c.n_prompt, c.n_max, len(c.samples)) for c in cells] == expected
    assert all(c.decode_tps for c in cells)
    assert fake.state["open_sessions"] == 0, "the session must be closed"
    assert len(logged(fake, "open")) == sample + 1, "nothing may run afterwards"


def test_a_prompt_beyond_the_context_is_skipped_and_the_run_goes_on(fake: ModuleType) -> None:
    matrix = make(fake, Plan((4084, 4085, 50), (0, 2), 12, 2))
    cells = list(matrix.run())
    assert [bool(c.samples) for c in cells] == [True, True, False, False, True, True]
    assert cells[2].skipped is not None
    assert "4085 + 12" in cells[2].skipped and "4096" in cells[2].skipped
    assert cells[2].prefill_tps is None
    assert not matrix.interrupted


def test_a_cell_without_memory_is_skipped_and_the_run_goes_on(fake: ModuleType) -> None:
    fake.refuse_session[(256, 3)] = InsufficientMemoryError("needs 99 GiB, 1 GiB available")
    cells = list(make(fake).run())
    reasons = [c.skipped for c in cells]
    assert reasons == [None, None, "needs 99 GiB, 1 GiB available"] * 2
    assert [len(c.samples) for c in cells] == [2, 2, 0] * 2


def test_progress_tells_of_every_sample(fake: ModuleType) -> None:
    events: list[Event] = []
    list(make(fake, Plan((100, 5000), (0, 2), 12, 2), on_event=events.append).run())
    done = [(e.size, e.variant, e.repeat) for e in events if e.kind == "done"]
    order = [(repeat, Variant(depth)) for repeat in (0, 1) for depth in (0, 2)]
    assert done == [(size, variant, repeat) for size in (100, 5000) for repeat, variant in order]
    assert [e.size for e in events if e.kind == "size"] == [100, 5000]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (((), (0,), 1, 1), "no prompt sizes"),
        (((5,), (), 1, 1), "no depths"),
        (((5,), (-1,), 1, 1), "depths must be 0 or more, not -1"),
        (((0,), (0,), 1, 1), "prompt sizes must be 1 or more, not 0"),
        (((5,), (2, 2), 1, 1), "twice"),
        (((5,), (0,), 0, 1), "max_tokens"),
        (((5,), (0,), 1, 0), "repeat"),
        (((5,), (2,), 1, 1, ("all", "all")), "prompt_rows all, all name one value twice"),
        (((5,), (2,), 1, 1, ("all",), ("kv", "auto")), "auto is kv or full; leave it out"),
        (((5,), (2,), 1, 1, ("all",), ("kv",), ()), "no hidden given"),
    ],
)
def test_plans_that_make_no_sense_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(*plan)


def test_the_backend_is_what_computes(fake: ModuleType) -> None:
    gpu = fake.Device("CUDA0", "a fake GPU", "gpu")
    library = fake.Library((gpu, fake.Device("CUDA1", "another", "gpu"), fake.Device()))
    assert Build.of(library, -1).backend == "CUDA"
    assert Build.of(library, -1).machine["devices"] == ["a fake GPU", "another"]
    assert Build.of(library, 0).backend == "CPU"
    assert Build.of(library, 0).machine["devices"] == []
