"""Time budgets: lengths of time, and where a run stops."""

from __future__ import annotations

import pytest

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import duration, parse_duration


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
