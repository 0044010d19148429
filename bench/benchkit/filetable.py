"""What bench/filetypes.py has measured: its records, the ratios that are asked for, the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchkit.results import markdown_table
from benchkit.rivals import IK, UPSTREAM
from benchkit.sample import Sample
from pyllama_mtp.measure.ratios import typical_ratio

OURS, BENCH = "ours", "llama-bench"
#: By round.
Speeds = Mapping[int, float]

# What the ratios should be at least, by file; "" is any other.
_GAIN = {
    **dict.fromkeys(("dense-q4_k_m", "dense-q4_0"), 1.5),
    **dict.fromkeys(("dense-q5_k_m", "dense-q6_k", "dense-iq4_xs"), 1.4),
    **{"dense-q8_0": 1.82, "moe-q8_0": 1.35, "moe-q4_k_m": 1.25},
}
_TO_IK = {"dense-q4_k_m": 1.2, "dense-q8_0": 1.4}
_TO_SERVER, _AUTO, _PLAIN, _LONG = 1.4, 0.97, 0.98, 0.9


@dataclass(frozen=True)
class Job:
    """A file after a context of so many tokens, with a type of cache."""

    file: str
    context: int
    cache: str

    def __str__(self) -> str:
        return f"{self.file}, {self.context:,} tokens, {self.cache} cache"


@dataclass
class Records:
    """Every sample as a row: the job's fields, round, side, part, case and those of a Sample.

    Parts: "prefill", "decode", "alone" (decode, with no session beside it), "long". Cases: drafts
    per round, "0" without MTP, "auto"; of ik_llama.cpp also with " -rtr".
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, job: Job, number: int, side: str, part: str, samples: Mapping[str, Sample]
    ) -> None:
        """Samples by case."""
        key = {**asdict(job), "round": number, "side": side, "part": part}
        self.rows += [{**key, "case": case, **s.to_dict()} for case, s in samples.items()]

    def of(self, job: Job, side: str, part: str) -> dict[str, dict[int, dict[str, Any]]]:
        """Rows by case and round."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        wanted = {**asdict(job), "side": side, "part": part}.items()
        for row in self.rows:
            if wanted <= row.items():
                found.setdefault(row["case"], {})[row["round"]] = row
        return found

    def speeds(self, job: Job, side: str, part: str = "decode") -> dict[str, Speeds]:
        """Tokens per second by case and round."""
        rate = "prefill_tps" if part == "prefill" else "decode_tps"
        return {
            case: {number: row[rate] for number, row in rows.items()}
            for case, rows in self.of(job, side, part).items()
        }

    def rounds(self, job: Job) -> int:
        """How many are finished."""
        wanted = asdict(job).items()
        return len({row["round"] for row in self.rows if wanted <= row.items()})

    def near_best(self, job: Job, side: str, within: float, part: str = "decode") -> list[str]:
        """Cases so near their side's fastest, as a share of its speed; fastest first, no "auto"."""
        speeds = self.speeds(job, side, part).items()
        typical = {case: median(by.values()) for case, by in speeds if case != "auto"}
        least = within * max(typical.values(), default=0.0)
        return sorted((c for c in typical if typical[c] >= least), key=lambda c: -typical[c])


def paired(ours: Speeds, theirs: Speeds) -> Speeds:
    """The ratios of the rounds that both have."""
    return {n: ours[n] / theirs[n] for n in ours if n in theirs}


@dataclass(frozen=True)
class Claim:
    """A ratio that is asked for.

    Attributes:
        ratios: by round.
        least: what it should be; None: it is only shown.
    """

    file: str
    what: str
    ratios: Speeds
    least: float | None = None

    @property
    def value(self) -> float:
        """The figure to quote."""
        return typical_ratio([*self.ratios.values()]).value

    def row(self) -> list[str]:
        """Of the table."""
        low, high = min(self.ratios.values()), max(self.ratios.values())
        judged = ["-", "-"]
        if self.least is not None:
            judged = [f"{self.least:g}", "yes" if self.value >= self.least else "NO"]
        between = f"{low:.3f}-{high:.3f}"
        return [self.file, self.what, f"{self.value:.3f}", between, str(len(self.ratios)), *judged]


def claims(records: Records, jobs: Sequence[Job]) -> Iterator[Claim]:
    """All that can be made of what is there; the first job has the context to compare with."""
    for job in jobs:
        base = Job(job.file, jobs[0].context, job.cache)
        if job == base:
            made = _of_file(records, job) if job.cache == jobs[0].cache else iter(())
        else:
            made = _of_context(records, job, base)
        yield from (claim for claim in made if claim.ratios)


def _of_file(records: Records, job: Job) -> Iterator[Claim]:
    ours, alone = records.speeds(job, OURS), records.speeds(job, OURS, "alone")
    depth, gain = best_gain(ours)
    if not gain:
        return
    yield Claim(job.file, f"depth {depth} / no MTP", gain, _GAIN.get(job.file))
    best = records.near_best(job, OURS, 0.0)[0]
    server_bar = _TO_SERVER if job.file.startswith("dense") else None
    for side, bar in ((UPSTREAM, server_bar), (IK, _TO_IK.get(job.file))):
        theirs = records.speeds(job, side)
        for case in _complete(records.near_best(job, side, 0.0), theirs)[:1]:
            what = f"{_named(best)} / {side}'s best, {_named(case)}"
            yield Claim(job.file, what, paired(ours[best], theirs[case]), bar)
    long = records.speeds(job, OURS, "long")
    for case in _complete(records.near_best(job, OURS, 0.0, "long"), long)[:1]:
        what = f"auto / best fixed, {_named(case)}, long"
        yield Claim(job.file, what, paired(long["auto"], long[case]), _AUTO)
    bench = records.speeds(job, BENCH)
    yield Claim(job.file, "no MTP / llama-bench", _pair(alone, "0", bench, "0"), _PLAIN)
    own, theirs = (records.speeds(job, side, "prefill") for side in (OURS, BENCH))
    yield Claim(job.file, "prefill / llama-bench's", _pair(own, "0", theirs, "0"), _PLAIN)
    drafting = next((case for case in own if case != "0"), "")
    yield Claim(job.file, "prefill, MTP on / off", _pair(own, drafting, own, "0"))
    for case in records.near_best(job, IK, 0.0, "prefill")[:1]:
        theirs = records.speeds(job, IK, "prefill")
        yield Claim(job.file, f"prefill / {IK}'s, {_named(case)}", _pair(own, "0", theirs, case))


def _of_context(records: Records, job: Job, base: Job) -> Iterator[Claim]:
    """The gain of MTP after a longer context, as a part of that after the first."""
    (depth, long), (_, short) = (best_gain(records.speeds(j, OURS)) for j in (job, base))
    ratios = paired(long, short)
    what = f"{job.cache} cache: gain after {job.context:,} (depth {depth}) / after {base.context:,}"
    yield Claim(job.file, what, ratios, _LONG)


def best_gain(speeds: Mapping[str, Speeds]) -> tuple[str, Speeds]:
    """The fixed depth that gains most over no MTP, and its ratios; none: "" and nothing."""
    plain = speeds.get("0", {})
    gains = {
        case: paired(by, plain) for case, by in speeds.items() if case.isdigit() and case != "0"
    }
    gains = {case: ratios for case, ratios in gains.items() if ratios}
    return max(gains.items(), key=lambda gain: median(gain[1].values()), default=("", {}))


def _complete(cases: list[str], speeds: Mapping[str, Speeds]) -> list[str]:
    """Those with every round that any has; the others were left behind."""
    most = max((len(speeds[case]) for case in cases), default=0)
    return [case for case in cases if len(speeds[case]) == most]


def _pair(ours: Mapping[str, Speeds], a: str, theirs: Mapping[str, Speeds], b: str) -> Speeds:
    return paired(ours.get(a, {}), theirs.get(b, {}))


def _named(case: str) -> str:
    depth, _, option = case.partition(" ")
    name = "no MTP" if depth == "0" else f"depth {depth}" if depth.isdigit() else depth
    return f"{name} {option}".strip()


def claims_table(found: list[Claim]) -> list[str]:
    """Markdown lines."""
    head = ["file", "what", "ratio", "per round", "rounds", "at least", "holds"]
    return markdown_table(head, [claim.row() for claim in found])


def speeds_table(records: Records, jobs: list[Job]) -> list[str]:
    """Medians of decode speed, and tokens per round, by side and case; and of prefill."""
    cases = list(dict.fromkeys(row["case"].partition(" ")[0] for row in records.rows))
    cases = [*sorted((case for case in cases if case.isdigit()), key=int), "auto"]
    rows = []
    for job in jobs:
        for side in (OURS, UPSTREAM, IK):
            for option in ("", " -rtr"):
                found = records.of(job, side, "decode")
                if not any(f"{case}{option}" in found for case in cases):
                    continue
                pre = records.speeds(job, side, "prefill").get(f"0{option}", {})
                cells = [_cell([*found.get(f"{case}{option}", {}).values()]) for case in cases]
                shown = f"{median(pre.values()):.0f}" if pre else "-"
                rows.append([str(job), f"{side}{option}", shown, *cells])
        bench, pre = records.of(job, BENCH, "decode"), records.speeds(job, BENCH, "prefill")
        if bench:
            cells = [_cell([*bench.get(case, {}).values()]) for case in cases]
            rows.append([str(job), BENCH, f"{median(pre['0'].values()):.0f}", *cells])
    return markdown_table(["job", "side", "prefill", *map(_named, cases)], rows)


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    speed = f"{median(row['decode_tps'] for row in rows):.1f}"
    n, rounds = (sum(row[name] for row in rows) for name in ("n_decoded", "rounds"))
    return f"{speed} ({n / rounds:.2f})" if rounds else speed
