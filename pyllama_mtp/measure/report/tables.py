"""The tables of a report, as text for HTML and Markdown, and the notes below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from pyllama_mtp.measure import series, table
from pyllama_mtp.measure.cells import OURS, Cell
from pyllama_mtp.measure.columns import rates_words, synthetic_mark
from pyllama_mtp.measure.ratios import by_cpu_time, ratio_to_plain
from pyllama_mtp.measure.records import records
from pyllama_mtp.measure.report.style import three_digits
from pyllama_mtp.measure.series import Section
from pyllama_mtp.measure.text import NONE, counted, to_markdown
from pyllama_mtp.measure.verdict import summary

#: The heading of each column, and whether it holds words, which are aligned to the left.
HEADINGS = (
    ("prompt tokens", False),
    ("mode", True),
    *(
        column
        for speed in ("prefill tok/s", "decode tok/s")
        for column in ((speed, False), ("range", True), ("to no-MTP", False), ("interval", True))
    ),
    ("tokens / round", False),
    ("accepted % at 1, 2, ...", True),
    ("samples", False),
)


def rows(section: Section) -> list[list[str]]:
    """The text of the table, one line per cell, by prompt size and mode."""
    shown = series.latest(section.cells)
    label = series.Labels(shown)
    # The cell without MTP that a ratio needs may not be shown, so all cells are looked at.
    figures = dict(zip(map(id, section.cells), records(section.cells), strict=True))
    in_order = sorted(shown, key=lambda cell: (cell.n_prompt, cell.adaptive, cell.n_max))
    return [_row(cell, label(cell), figures[id(cell)]) for cell in in_order]


def _row(cell: Cell, label: str, record: dict[str, Any]) -> list[str]:
    beginning = [str(cell.n_prompt), label + synthetic_mark(cell)]
    if not cell.samples:
        return [*beginning, *[NONE] * 10, "0"]
    rounds = record["tokens_per_round"]
    return [
        *beginning,
        *(
            text
            for name in ("prefill_tps", "prefill_ratio", "decode_tps", "decode_ratio")
            for text in _spread(record, name)
        ),
        f"{rounds:.2f}" if rounds else NONE,
        rates_words([cell]),
        str(len(cell.samples)),
    ]


def _spread(record: dict[str, Any], name: str) -> list[str]:
    if record[name] is None:
        return [NONE, NONE]
    value, low, high = (three_digits(record[n]) for n in (name, f"{name}_low", f"{name}_high"))
    return [value, f"{low}-{high}"]


def notes(section: Section) -> list[str]:
    """What the figures are, what is missing and why, and the warning of imposed acceptance."""
    shown = series.latest(section.cells)
    measured = [cell for cell in shown if cell.samples]
    label = series.Labels(shown)
    found = [*map(table.synthetic_warning, table.imposed(shown))]
    if measured:
        by_cpu = " (by the CPU time of the one thread)" if all(map(by_cpu_time, measured)) else ""
        found.append(
            "speeds are medians of the samples; ratios to no-MTP: Hodges-Lehmann, of paired ratios"
            f"{by_cpu}, whose interval {_confidence(section.cells)}; acceptance and "
            "tokens per round are totals over totals"
        )
    found += table.few_drafts_note(measured)
    found += table.example_note(measured)
    found += table.waiting_note(measured)
    if measured and all(cell.n_max for cell in measured):
        found.append("there are no ratios: no MTP (depth 0) was not measured")
    if again := len(section.cells) - len(shown):
        found.append(f"measured more than once, the last counts: {counted(again, 'cell')}")
    found += [
        f"skipped: {label(cell)}, prompt {cell.n_prompt}: {cell.skipped or 'no sample'}"
        for cell in shown
        if not cell.samples
    ]
    return found


def _confidence(cells: Sequence[Cell]) -> str:
    """How probably the intervals hold the true ratio; it depends on the number of pairs."""
    ratios = [ratio_to_plain(cell, cells, "prefill_tps") for cell in cells]
    found = {ratio.n: ratio.confidence for ratio in ratios if ratio}
    if not found:
        return "needs cells with and without MTP"
    said = [f"{100 * found[n]:.3g} % ({counted(n, 'pair')})" for n in sorted(found)]
    return f"holds the true ratio with {', '.join(said)}"


def markdown(section: Section, commands: Mapping[str, str]) -> str:
    """The section as Markdown: heading, build, table, notes."""
    headings, words = zip(*HEADINGS, strict=True)
    table = to_markdown(headings, rows(section), words)
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
    """Machine, build, date and command, by name. `commands`: as recorded, by run."""
    cells = section.cells
    machine = cells[-1].machine
    details = [str(machine[name]) for name in ("os", "arch") if machine.get(name)]
    if memory := machine.get("memory_bytes"):
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
    if times := sorted(cell.time for cell in cells if cell.time):
        days = dict.fromkeys(time_words(time) for time in (times[0], times[-1]))
        found.append(("measured", " to ".join(days)))
    recorded = dict.fromkeys(commands[cell.run] for cell in cells if cell.run in commands)
    return [*found, *(("command", command) for command in recorded)]


def time_words(time: str) -> str:
    """2026-11-20T23:31:02+00:00 as 2026-11-20 23:31 UTC; any other text as it is."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
