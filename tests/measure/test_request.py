"""A request for a matrix: what is usual, what becomes an axis, what a model's context holds;
lengths of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import duration, parse_duration
from pyllama_mtp.measure.request import MatrixRequest
from pyllama_mtp.settings import AUTO_DEPTH, Settings


def test_settings_of_drafts_are_axes() -> None:
    """Those that are not the default: no MTP is measured with the defaults."""
    settings = Settings(prompt_rows="all", draft_vocab="folder/mine.json", n_batch=64)
    request = MatrixRequest(settings=replace(settings, p_min=0.5))
    axes = {"prompt_rows": ("all",), "draft_vocab": ("mine.json",)}
    assert request.plan.axes == {**axes, "p_min": (0.5,)}
    assert request.vocabularies == {"mine.json": "folder/mine.json"}
    other = MatrixRequest(settings=settings, axes={"prompt_rows": "last", "draft_vocab": 512})
    assert other.plan.axes == {"prompt_rows": ("last",), "draft_vocab": ("512",)}


@pytest.mark.parametrize(
    ("given", "sizes", "depths", "classes"),
    [
        ({}, (512, 1024, 2048), (0, 2, 3, "auto"), ("text",)),
        ({"axes": {"n_context": 64}}, (512,), (0, 2, 3, "auto"), ("source",)),
        ({"sizes": 8, "depths": 2, "classes": "code"}, (8,), (2,), ("code",)),
        (
            {"settings": Settings(synthetic_acceptance=(0.5, 0.25))},
            (512, 1024, 2048),
            (0, 2, "auto"),
            ("text",),
        ),
    ],
)
def test_what_is_usual(given: Any, sizes: Any, depths: Any, classes: Any) -> None:
    plan = MatrixRequest(**given).plan
    assert (plan.sizes, plan.depths, plan.classes) == (sizes, depths, classes)
    deepest = max(key.n_max for key in plan.cells(sizes[0], classes[0]) if not key.adaptive)
    most = {key.n_max for key in plan.cells(sizes[0], classes[0]) if key.adaptive}
    assert most <= {2 if "settings" in given else AUTO_DEPTH} and deepest <= 3


def test_usual_sizes_give_way_and_others_are_refused() -> None:
    assert MatrixRequest(max_tokens=8).fitting_sizes(1100) == (512, 1024)
    assert MatrixRequest(sizes=(9, 90), fewer_sizes=True, max_tokens=8).fitting_sizes(64) == (9,)
    for given in ({"sizes": (9, 90)}, {}):
        with pytest.raises(UsageError, match="exceed the model's context, 64"):
            MatrixRequest(**given, max_tokens=8).fitting_sizes(64)


@pytest.mark.parametrize(
    ("depths", "mtp"), [(None, None), ((0, "auto"), None), (0, False), ((0, 2, "auto"), True)]
)
def test_whether_a_head_is_needed(depths: Any, mtp: bool | None) -> None:
    assert MatrixRequest(depths=depths).mtp is mtp


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h", 3600), ("1.5h", 5400), ("20", 20)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "10 minutes", "1d", "m", "nan", "1h30m"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give 90s, 10m or 1h"):
        parse_duration(text)


def test_durations_in_words() -> None:
    assert [duration(s) for s in (8.4, 125, 4200)] == ["8 s", "2 min 05 s", "1 h 10 min"]
