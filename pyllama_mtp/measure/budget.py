"""How long the rest of a matrix takes, and what to leave out when time is short. Pure functions.

The time of a group is the median of the times measured at its size and class; before there are any,
it is scaled from other groups by their rough work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import Group

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Kind = tuple[int, str]


def parse_duration(text: str) -> float:
    """Seconds of "90s", "10m", "1.5h"; a plain number is seconds.

    Raises:
        UsageError: anything else, or nothing above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([smh]?)", text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is no length of time; give 90s, 10m or 1h")
    return seconds


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "2 min 05 s", "1 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def estimate(
    measured: Mapping[Kind, Sequence[float]], work: Callable[[int], float]
) -> Callable[[Group], float] | None:
    """Seconds that a group will take; None before anything was measured.

    Args:
        measured: seconds of the finished groups, by size and class.
        work: rough work of a size, in any unit.
    """
    known = {kind: median(times) for kind, times in measured.items() if times}
    if not known:
        return None
    per_work = median(seconds / work(size) for (size, _), seconds in known.items())
    return lambda group: known.get(group.kind, per_work * work(group.size))


def to_drop(
    pending: Sequence[Group],
    done: Mapping[Kind, int],
    cost: Callable[[Group], float],
    left_s: float,
) -> set[Group]:
    """The groups to leave out so that the others fit into `left_s` seconds.

    The n-th repeat of a cell lowers the variance of its figures from 1 / (n - 1) to 1 / n, by
    1 / (n (n - 1)). The last repeat that lowers it the least per second is left out first. The only
    repeat of a size is left out last, the longest first.

    Args:
        pending: groups that are not measured yet.
        done: finished repeats, by size and class.
        cost: seconds of a group.
    """
    kept: dict[Kind, list[Group]] = {}
    for group in sorted(pending, key=lambda group: group.repeat):
        kept.setdefault(group.kind, []).append(group)
    total, dropped = sum(map(cost, pending)), set()
    while total > left_s and any(kept.values()):

        def waste(kind: Kind) -> tuple[bool, float]:
            n = done.get(kind, 0) + len(kept[kind])
            return n > 1, cost(kept[kind][-1]) * (n * (n - 1) if n > 1 else 1)

        worst = max((kind for kind in kept if kept[kind]), key=waste)
        group = kept[worst].pop()
        dropped.add(group)
        total -= cost(group)
    return dropped
