"""What rounds cost is measured when contexts are made, and kept; no text depends on it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pyllama_mtp import BatchSession, Model, Session, calibration
from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.drafting.drafter import HeadDrafter
from pyllama_mtp.engine import Engine
from pyllama_mtp.llama import native
from pyllama_mtp.machine import Threads
from pyllama_mtp.round import speculate
from pyllama_mtp.sequence import Drafts, Sequence

from .support import cached, engine_of, greedy, settings

AUTO = dataclasses.replace(settings(0), draft_n_max="auto", ngram=False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files, in a cache of its own, on a machine that counts as idle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "waited_for_core", lambda: 0.0)
    monkeypatch.setattr(calibration, "BUDGET_S", 0.05)
    yield tmp_path / "pyllama-mtp" / "measured"


def costs_of(session: Session | BatchSession, n: int = 1) -> Costs:
    depths = engine_of(session).drafting.depths
    assert depths
    return depths.costs.costs(n)


def files(folder: Path) -> list[Path]:
    return [*folder.glob("*.json")]


@pytest.mark.parametrize("options", [{}, {"rollback": "replay"}, {"prompt_sync": "full"}])
def test_nothing_is_left_of_the_rounds(
    demo: Model, text: list[int], options: dict[str, str]
) -> None:
    """Texts and counts are those of contexts that have measured nothing."""
    with Session(demo, dataclasses.replace(AUTO, **options)) as session:  # type: ignore[arg-type]
        assert costs_of(session).limit == engine_of(session).depth
        assert cached(session) == [] and engine_of(session).target.past() == 0
        got = session.generate(text[:60], max_tokens=40, ignore_eos=True).run()
    with Session(demo, settings(0)) as session:
        expected = session.generate(text[:60], max_tokens=40, ignore_eos=True).run()
    assert got.tokens == expected.tokens
    assert got.telemetry.n_cached == 0
    assert sum(got.telemetry.accepted) + got.telemetry.rounds == 39


def test_drafts_cost_what_they_take(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head that takes 5 ms for each."""
    draft = HeadDrafter.draft

    def slow(self: HeadDrafter, sequences: list[Sequence], n_max: int) -> list[Drafts]:
        time.sleep(0.005 * n_max)
        return draft(self, sequences, n_max)

    monkeypatch.setattr(HeadDrafter, "draft", slow)
    with Session(demo, AUTO) as session:
        costs = costs_of(session)
    assert all(costs.draft[n] > 0.005 * n for n in range(1, costs.limit + 1))


def test_measured_once(demo: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further session reads the file, whatever the length of its context."""
    with BatchSession(demo, dataclasses.replace(AUTO, n_ubatch=32), 3) as session:
        first = [costs_of(session, n) for n in (1, 2, 3)]
    assert len(files(folder)) == 1
    monkeypatch.setattr(calibration, "measure_costs", lambda *_: pytest.fail("measured again"))
    with BatchSession(demo, dataclasses.replace(AUTO, n_ubatch=32, n_ctx=300), 3) as session:
        assert [costs_of(session, n) for n in (1, 2, 3)] == first


def test_what_changes_the_speed_is_measured_anew(
    demo: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings; switches and variables, which `matrix --variants` compares; and devices."""
    library = native.load()
    library.switches.clear()  # those of other tests
    n_files = itertools.count(1)

    def another(**options: object) -> None:
        with Session(demo, dataclasses.replace(AUTO, **options)):  # type: ignore[arg-type]
            assert len(files(folder)) == next(n_files), options

    for options in ({}, {"n_threads": 2}, {"cache_type_k": "q8_0"}, {"draft_vocab": 300}):
        another(**options)
    library.set_cpu_switch("large_batch", False)
    try:
        another()
    finally:
        library.set_cpu_switch("large_batch", library.has_tap)
        library.switches.clear()
    monkeypatch.setenv("GOMP_SPINCOUNT", "17")
    another()
    cpu = library.handles("cpu")[:1]
    monkeypatch.setattr(Model, "used_devices", property(lambda _: cpu))
    another()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"1": {"verify": [0, -1], "draft": [0]}}',
        b'{"1": {"verify": [0, 1], "draft": [0]}}',  # of another depth
    ],
)
def test_a_damaged_file_is_measured_anew(demo: Model, folder: Path, damage: bytes) -> None:
    with Session(demo, settings(3)):
        assert not folder.exists(), "fixed depths measure nothing"
    with Session(demo, AUTO):
        (file,) = files(folder)
    whole = len(file.read_bytes())
    file.write_bytes(damage)
    with Session(demo, AUTO) as session:
        assert costs_of(session).limit
    assert len(file.read_bytes()) > whole / 2


@pytest.mark.parametrize("home", [True, False])
def test_nowhere_to_keep_it(
    demo: Model, folder: Path, monkeypatch: pytest.MonkeyPatch, home: bool
) -> None:
    """A folder that cannot be made; no home, as in a container whose user is a number."""
    folder.parent.write_bytes(b"a file in its place")
    if not home:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with Session(demo, AUTO) as session:
        assert costs_of(session).limit


def test_a_round_is_what_is_measured(demo: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft is accepted, and p_min stops none."""
    rounds = []

    def seen(engine: Engine, sequences: list[Sequence]) -> dict[str, float]:
        times = speculate(engine, sequences)
        rounds.append([(len(one.drafts.tokens), len(one.chosen)) for one in sequences])
        return times

    monkeypatch.setattr(calibration, "speculate", seen)
    with BatchSession(demo, dataclasses.replace(AUTO, n_ubatch=32, p_min=0.9), 2) as session:
        limit = engine_of(session).depth
    assert {n for one in rounds for n, _ in one} >= {0, limit // 2, limit}
    assert {n for one in rounds for _, n in one} == {1} and {len(one) for one in rounds} == {1, 2}


def test_a_busy_machine_is_not_remembered(
    demo: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter((0.0, 60.0))
    monkeypatch.setattr(calibration, "waited_for_core", lambda: next(waits))
    with Session(demo, AUTO) as session:
        assert costs_of(session).limit
    assert not files(folder)


@pytest.mark.parametrize("dropped", [False, True])
def test_costs_of_fewer_threads_are_not_remembered(
    demo: Model, folder: Path, monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    class Dropping(Threads):
        def took(self, kind: object, seconds: float) -> None:
            self.n = 2 - dropped

    monkeypatch.setattr("pyllama_mtp.llama.context.Threads", Dropping)
    monkeypatch.setattr("pyllama_mtp.llama.context.TINY", 0)
    monkeypatch.setattr("pyllama_mtp.settings.available_threads", lambda: 2)
    with Session(demo, dataclasses.replace(AUTO, n_threads="auto")) as session:
        assert costs_of(session).limit
    assert len(files(folder)) == (not dropped)


def test_what_rounds_teach_is_kept(demo: Model, text: list[int], folder: Path) -> None:
    """Costs of a machine a thousand times slower, as rounds have corrected them."""
    with Session(demo, AUTO):
        (file,) = files(folder)
    costs = msgspec.json.decode(file.read_bytes(), type=dict[int, Costs])
    slow = {
        n: Costs(*([1000 * s for s in of] for of in (one.verify, one.draft)))
        for n, one in costs.items()
    }
    file.write_bytes(msgspec.json.encode(slow))
    with Session(demo, AUTO) as session:
        greedy(session, text[:40], 400)
    with Session(demo, AUTO) as session:
        assert costs_of(session).plain < 0.5 * slow[1].plain


def test_figures_say_why_fewer_are_drafted(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two sequences' rows cost twice as much as one's, and a draft as much as a step."""
    dear = Costs((0.0, *(float(n) for n in range(1, 8))), (0.0, *(float(n) for n in range(1, 7))))
    cheap = Costs((0.0, *[1.0] * 7), (0.0, *[0.01] * 6))
    monkeypatch.setattr(calibration, "measure_costs", lambda _, n: {1: cheap, 2: dear}[n])
    with BatchSession(demo, dataclasses.replace(AUTO, n_ubatch=32), 2) as session:
        run = session.generate([text[:20], text[5:30]], max_tokens=20, ignore_eos=True).run()
        why = "2 sequences: drafts do not pay here"
        told = [run.telemetry, *(one.telemetry for one in run.results)]
        assert [one.why_fewer_drafts for one in told] == [why] * 3
        run = session.generate([text[:20]], max_tokens=20, ignore_eos=True).run()
        assert run.telemetry.why_fewer_drafts == ""
