"""Long generations do not leak: resident memory is flat over tens of thousands of tokens."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from pyllama_mtp import BatchSession, Model, Sampling, Session
from pyllama_mtp.drafting import ngram

from .support import settings

STATM = Path("/proc/self/statm")
N_CTX = 512
#: Memory that the allocator may still move by in the second half, bytes: 40 bytes a token would be
#: seen with auto. In the first half it may grow once more, after other tests of the process.
SLACK = 384 * 1024

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")


@pytest.fixture(autouse=True)
def few_past_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What n-gram drafts keep of earlier texts is at its bound long before the second half."""
    monkeypatch.setattr(ngram, "PAST", 1000)


def resident() -> int:
    """Bytes of this process in memory that are not a file's."""
    gc.collect()
    pages = [int(word) for word in STATM.read_text().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


def growth(marks: list[int]) -> int:
    """Bytes by which memory grew in the second half, but for its largest step.

    A leak grows in every generation. One step is the allocator's, or of another thread of the
    process that runs the tests.
    """
    late = marks[len(marks) // 2 :]
    return late[-1] - late[0] - max(after - before for before, after in pairwise(late))


def assert_flat(measure: Callable[[], list[int]]) -> None:
    """A leak grows the second time, too; threads that other tests have left do not."""
    first = measure()
    if growth(first) >= SLACK:
        second = measure()
        assert growth(second) < SLACK, (first, second)


@pytest.mark.long
@pytest.mark.parametrize(
    ("n_tokens", "depth", "options"),
    [
        pytest.param(27_000, "auto", {}, id="auto"),
        pytest.param(10_500, 4, {"rollback": "replay"}, id="replay"),
        pytest.param(10_500, 4, {"draft_sampling": True}, id="drawn drafts"),
        pytest.param(10_500, 4, {"prompt_sync": "full", "p_min": 0.4}, id="full"),
    ],
)
def test_memory_is_flat(
    demo: Model, text: list[int], n_tokens: int, depth: int | str, options: dict[str, object]
) -> None:
    """Every round accepts another number of drafts; the context is filled again and again."""

    def measure() -> list[int]:
        done, drafted, accepted, marks = 0, 0, 0, []
        with Session(demo, settings(depth, **{"n_ctx": N_CTX, **options})) as session:
            while done < n_tokens:
                drawn = Sampling(temperature=1.3, top_k=0, seed=done)
                prompt = text[done % 50 : done % 50 + 60]
                run = session.generate(
                    prompt, max_tokens=N_CTX - 80, sampling=drawn, ignore_eos=True
                ).run()
                done += run.telemetry.n_generated
                drafted += sum(run.telemetry.drafted)
                accepted += sum(run.telemetry.accepted)
                del run
                marks.append(resident())
        assert drafted / 10 < accepted < drafted * 9 / 10
        return marks

    assert_flat(measure)


@pytest.mark.long
def test_memory_of_several_sequences_is_flat(demo: Model, text: list[int]) -> None:
    def measure() -> list[int]:
        marks = []
        with BatchSession(demo, settings(3, n_ctx=512), n_sequences=3) as session:
            for number in range(13):
                prompts = [text[i : i + 20 + 7 * i] for i in range(5)]
                drawn = Sampling(temperature=0.9, seed=number)
                batch = session.generate(
                    prompts, max_tokens=200, sampling=drawn, ignore_eos=True
                ).run()
                assert batch.telemetry.n_generated == 1000
                marks.append(resident())
        return marks

    assert_flat(measure)
