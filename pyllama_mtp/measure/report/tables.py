"""The tables of a report, as text for HTML and Markdown, and the notes below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pyllama_mtp.measure import series, table
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.columns import shown_rates
from pyllama_mtp.measure.markdown import to_markdown
from pyllama_mtp.measure.ratios import base_of, by_cpu_time, paired_ratios, typical_ratio
from pyllama_mtp.measure.records import records
from pyllama_mtp.measure.report.style import three_digits
from pyllama_mtp.measure.series import OURS, Section
from pyllama_mtp.measure.verdict import summary

_NONE = "-"


@dataclass(frozen=True)
class Heading:
    """The heading of a column; `figures` are aligned to the right."""

    text: str
    figures: bool = True


HEADINGS = (
    Heading("prompt tokens"),
    Heading("mode", figures=False),
    Heading("prefill tok/s"),
    Heading("range", figures=False),
    Heading("to no-MTP"),
    Heading("interval", figures=False),
    Heading("decode tok/s"),
    Heading("range", figures=False),
    Heading("to no-MTP"),
    Heading("interval", figures=False),
    Heading("tokens / round"),
    Heading("accepted % at 1, 2, ...", figures=False),
    Heading("samples"),
)


def rows(section: Section) -> list[list[str]]:
    """The text of the table, one line per cell, by prompt size and mode."""
    shown = series.latest(section.cells)
    label = series.Labels(shown)
    order = sorted(
        range(len(shown)), key=lambda i: (shown[i].n_prompt, shown[i].adaptive, shown[i].n_max)
    )
    figures = {
        id(cell): record for cell, record in zip(shown, _records(section, shown), strict=True)
    }
    return [_row(shown[i], label(shown[i]), figures[id(shown[i])]) for i in order]


def _records(section: Section, shown: Sequence[Cell]) -> list[dict[str, Any]]:
    """Of the cells shown; their partners without MTP may be among those that are not."""
    by_cell = dict(zip(map(id, section.cells), records(section.cells), strict=True))
    return [by_cell[id(cell)] for cell in shown]


def _row(cell: Cell, label: str, record: dict[str, Any]) -> list[str]:
    mark = " SYNTHETIC" if cell.synthetic_acceptance and cell.n_max else ""
    if not cell.samples:
        return [str(cell.n_prompt), label + mark, *[_NONE] * 10, "0"]
    rates = (_NONE if rate is None else f"{100 * rate:.0f}" for rate in shown_rates([cell]))
    rounds = record["tokens_per_round"]
    return [
        str(cell.n_prompt),
        label + mark,
        *(
            text
            for name in ("prefill_tps", "prefill_ratio", "decode_tps", "decode_ratio")
            for text in _spread(record, name)
        ),
        f"{rounds:.2f}" if rounds else _NONE,
        " ".join(rates) or _NONE,
        str(len(cell.samples)),
    ]


def _spread(record: dict[str, Any], name: str) -> list[str]:
    if record[name] is None:
        return [_NONE, _NONE]
    value, low, high = (three_digits(record[n]) for n in (name, f"{name}_low", f"{name}_high"))
    return [value, f"{low}-{high}"]


def notes(section: Section) -> list[str]:
    """What the figures are, what is missing and why, and the warning of imposed acceptance."""
    shown = series.latest(section.cells)
    measured = [cell for cell in shown if cell.samples]
    label = series.Labels(shown)
    found = [*map(table.synthetic_warning, table.imposed(shown))]
    if measured:
        found.append(
            "speeds are medians of the samples; ratios to no-MTP: Hodges-Lehmann, of paired ratios"
            f"{_taken_by(measured)}, whose interval {_confidence(section.cells)}; acceptance and "
            "tokens per round are totals over totals"
        )
    found += table.few_drafts_note(measured)
    found += table.example_note(measured)
    found += table.waiting_note(measured)
    plain = {cell.n_max for cell in measured}
    if plain and 0 not in plain:
        found.append("there are no ratios: no MTP (depth 0) was not measured")
    again = len(section.cells) - len(shown)
    if again:
        times = "1 cell" if again == 1 else f"{again} cells"
        found.append(f"measured more than once, the last counts: {times}")
    found += [
        f"skipped: {label(cell)}, prompt {cell.n_prompt}: {cell.skipped or 'no sample'}"
        for cell in shown
        if not cell.samples
    ]
    return found


def _taken_by(measured: Sequence[Cell]) -> str:
    by_cpu = all(map(by_cpu_time, measured))
    return " (by the CPU time of the one thread)" if by_cpu else ""


def _confidence(cells: Sequence[Cell]) -> str:
    """How probably the intervals hold the true ratio; it depends on the number of pairs."""
    found: dict[int, float] = {}
    for cell in cells:
        base = base_of(cell, cells) if cell.n_max and cell.samples else None
        paired = paired_ratios(cell, base, "prefill_tps") if base else []
        if paired:
            found[len(paired)] = typical_ratio(paired).confidence
    if not found:
        return "needs cells with and without MTP"
    pairs = sorted(found)
    said = [f"{100 * found[n]:.3g} % ({n} pair{'' if n == 1 else 's'})" for n in pairs]
    return f"holds the true ratio with {', '.join(said)}"


def markdown(section: Section, commands: Mapping[str, str]) -> str:
    """The section as Markdown: heading, build, table, notes."""
    words = (not heading.figures for heading in HEADINGS)
    table = to_markdown([heading.text for heading in HEADINGS], rows(section), words)
    about = [f"- {name}: {value}" for name, value in about_section(section, commands)]
    return "\n".join(
        [
            f"## {title(section)}",
            "",
            *((text, "") if (text := summary(section.cells)) else ()),
            *about,
            "",
            table,
            "",
            *(f"- {note}" for note in notes(section)),
        ]
    )


def title(section: Section) -> str:
    """The model, and the class of prompts if it is not the default text."""
    return section.model + ("" if section.prompt_class == "text" else f": {section.prompt_class}")


def about_section(section: Section, commands: Mapping[str, str]) -> list[tuple[str, str]]:
    """Machine, build, date and command, by name; `commands` are those recorded, by run."""
    cells = section.cells
    times = sorted(cell.time for cell in cells if cell.time)
    machine = cells[-1].machine
    memory = machine.get("memory_bytes")
    details = [str(machine[name]) for name in ("os", "arch") if machine.get(name)]
    if memory:
        details.insert(0, f"{memory / 2**30:.0f} GiB")
    if machine.get("python"):
        details.append(f"Python {machine['python']}")
    builds = dict.fromkeys(
        ("" if cell.program == OURS else f"{cell.program}: ") + series.build_words(cell)
        for cell in cells
    )
    found = [
        ("machine", "; ".join([section.machine, *details])),
        ("build", "; ".join(builds)),
        ("generated", ", ".join(f"{n} tokens" for n in sorted({c.max_tokens for c in cells}))),
    ]
    if times:
        days = list(dict.fromkeys(time_words(time) for time in (times[0], times[-1])))
        found.append(("measured", " to ".join(days)))
    recorded = dict.fromkeys(commands[cell.run] for cell in cells if cell.run in commands)
    found += [("command", command) for command in recorded]
    return found


def time_words(time: str) -> str:
    """2026-11-20T23:31:02+00:00 as 2026-11-20 23:31 UTC; what is no such time as it is."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
