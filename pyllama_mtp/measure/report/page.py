"""Write a report: one page that needs nothing else, pictures, and tables as Markdown and CSV."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import write_whole
from pyllama_mtp.measure import records, series
from pyllama_mtp.measure.cells import Cell
from pyllama_mtp.measure.published import Published
from pyllama_mtp.measure.report import plots, style, tables
from pyllama_mtp.measure.report.curves import KINDS
from pyllama_mtp.measure.report.plots import Plot
from pyllama_mtp.measure.series import Section
from pyllama_mtp.measure.table import waiting_note
from pyllama_mtp.measure.verdict import summary

TITLE = "pyllama-mtp: prefill and decode, with and without MTP"


def write_report(
    cells: Sequence[Cell],
    directory: str | os.PathLike[str],
    *,
    published: Sequence[Published] = (),
    command: str = "",
    commands: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write ``index.html``, ``tables.md``, ``tables.csv``, and each plot as SVG and PNG.

    There is a section per model, machine and class of prompts. Files of the same names are
    replaced, others stay.

    Args:
        cells: what was measured; skipped cells are named with their reason.
        directory: made if it is not there.
        published: figures to draw behind, see ``published.py``.
        command: the command that makes the report, for the page.
        commands: the commands that measured the cells, by run, as far as they are known.

    Returns:
        the files, ``index.html`` first.

    Raises:
        UsageError: no cells, matplotlib is not installed, or the directory cannot be written.
    """
    if not cells:
        raise UsageError("there are no cells to report")
    check_report(directory)
    sections, commands = series.sections(cells), commands or {}
    drawn = [
        [plot for kind in KINDS if (plot := plots.make_plot(section.cells, kind, published))]
        for section in sections
    ]
    written = (tables.markdown(section, commands) for section in sections)
    files: dict[str, bytes] = {
        "index.html": _page(sections, drawn, published, command, commands).encode("utf-8"),
        "tables.md": ("\n\n".join([f"# {TITLE}", *written]) + "\n").encode("utf-8"),
        "tables.csv": records.to_csv(records.records(cells)).encode("utf-8"),
    }
    for number, pictures in enumerate(drawn, start=1):
        suffix = f"-{number}" if len(sections) > 1 else ""
        for plot in pictures:
            files[f"{plot.kind}{suffix}.svg"] = plot.svg[style.WIDE.name].encode("utf-8")
            files[f"{plot.kind}{suffix}.png"] = plot.png
    return _write(Path(directory), files)


def check_report(directory: str | os.PathLike[str]) -> None:
    """Find out before a long measurement whether a report can be made; makes the directory.

    Raises:
        UsageError: matplotlib is not installed, or the directory cannot be written.
    """
    plots.require_matplotlib()
    _write(Path(directory), {})
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _cannot_write(directory, "Permission denied")


def _write(directory: Path, files: dict[str, bytes]) -> list[Path]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(directory, error.strerror) from None
    for name, data in reversed(files.items()):  # the page last, when all it names is there
        write_whole(directory / name, data)
    return [directory / name for name in files]


def _cannot_write(directory: str | os.PathLike[str], reason: str | None) -> UsageError:
    return UsageError(f"cannot write the report to {directory}: {reason}; name another folder")


def _page(
    sections: Sequence[Section],
    drawn: Sequence[Sequence[Plot]],
    published: Sequence[Published],
    command: str,
    commands: Mapping[str, str],
) -> str:
    import jinja2

    from pyllama_mtp import __version__

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=TITLE,
        date=tables.time_words(datetime.now(timezone.utc).isoformat()),
        version=__version__,
        command=command,
        light=_colors({}),
        dark=_colors(style.DARK),
        headings=tables.HEADINGS,
        results=_results(sections),
        sections=[_section(*pair, commands) for pair in zip(sections, drawn, strict=True)],
        published=published,
    )


def _colors(replaced: dict[str, str]) -> dict[str, str]:
    names = ("paper", "ink", "muted", "grid", "warning")
    colors = {name: getattr(style, name.upper()) for name in names}
    return {name: replaced.get(color, color) for name, color in colors.items()}


def _results(sections: Sequence[Section]) -> list[str]:
    """What MTP gains in each section, with its title where there are several."""
    found = [(tables.title(section), summary(section.cells)) for section in sections]
    return [f"{name}: {text}" if len(found) > 1 else text for name, text in found if text]


def _section(
    section: Section, drawn: Sequence[Plot], commands: Mapping[str, str]
) -> dict[str, Any]:
    noise, there = waiting_note(section.cells), {plot.kind for plot in drawn}
    return {
        "title": tables.title(section),
        "noise": " ".join(noise),
        "warning": plots.synthetic_words(section.cells),
        "about": tables.about_section(section, commands),
        "plots": [_picture(plot) for plot in drawn],
        "missing": [
            f"No plot of {plots.TITLES[kind]}: {plots.why_nothing(section.cells, kind)}."
            for kind in KINDS
            if kind not in there
        ],
        "rows": tables.rows(section),
        "notes": [note for note in tables.notes(section) if note not in noise],
    }


def _picture(plot: Plot) -> dict[str, str]:
    shapes = {}
    for name, svg in plot.svg.items():
        for shape, picture in ((name, svg), (f"{name}_dark", style.dark(svg))):
            data = base64.b64encode(picture.encode("utf-8")).decode("ascii")
            shapes[shape] = f"data:image/svg+xml;base64,{data}"
    return {"kind": plot.kind, "alt": plot.alt, **shapes}
