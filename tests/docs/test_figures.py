"""Every measured figure of README, docs/ and the READMEs of patches/ and bench/ is a cell of a
table in bench/results, which a comment after it names: `1.59<!-- fig: FILE#HEADING/ROW/COLUMN -->`.

A ROW is words, joined by `+`, that the cells of one row alone have. Above a table, `<!-- figs:
FILE#HEADING ... -->` names the tables that its rows are from: its columns have their names, its
cells their text. FILE is relative to the repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pictures
import pytest
from benchkit.speedpage import ratio_table

from pyllama_mtp import bench

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "patches/README.md", ROOT / "bench/README.md"]
NUMBER = re.compile(r"(?<![\w.,#-])\d[\d,]*(?:\.\d+)?(?=x\b|(?![\w.]*\w))")
#: Numbers that say how much or how fast: with a decimal point, or with such a unit.
UNITS = re.compile(
    r"x\b|[\s-]?(?:%|(?:times|s|ms|us|(?:micro|milli)?seconds?|minutes?|hours?|tok/s"
    r"|tokens\s(?:per|a)\ssecond)\b)"
)
HIDDEN = r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|<!--.*?-->"
TABLE = r"<!-- figs: ([^\n]*) -->\n((?:\|[^\n]*\n)+)"
#: Numbers of that form that nobody measured: versions, what publishers say, limits of the code.
#: Another number in such words is not exempt.
EXEMPT = (
    *("Python 3.10 ", "for 95 %", "Qwen3.5, 3.6 and 3.8", "Qwen3.5, 3.6, 3.8"),
    *("Qwen3.5, 3.6 with experts", "Ling 3.0", "GLM-4.5, 4.6, 4.7", "16.5 to 17.6 GB"),
    *("(UD-Q4_K_XL 17.6 GB, UD-Q4_K_M 16.5 GB)", "(1.4 GB)", "(0.9 GB)", "(0.9 GB each)"),
    *("(0.7 GB)", "GBNF | 2; 0.5 |", "GBNF | 0.05; 0.5, and 1 for any", "(schemas: 1.5 GiB)"),
    *("busy for 5 s", "within 20 seconds", "20 seconds and three redirects", "| 600 s |"),
    *("10 seconds to answer", "after 5 s of computing", "for 2 s at most, GBNF for 0.5 s"),
    *("than 50 ms a token (GBNF: 0.5 s)", "a single token of 1 s", "none; 1 s in the shim"),
)


def cells(line: str) -> list[str]:
    return [cell.replace("`", "").strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


@cache
def table(name: str) -> list[dict[str, str]]:
    """The rows of the tables under a heading, FILE#HEADING: cells by column."""
    file, _, wanted = name.partition("#")
    rows, head, here = list[dict[str, str]](), list[str](), False
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ").lower()
            here = re.sub(r"[^\w -]", "", title).replace(" ", "-") == wanted
        elif not line.startswith("|"):
            head = []
        elif here and not head:
            head = cells(line)
        elif here and "---" not in line and "--:" not in line:
            rows.append(dict(zip(head, cells(line), strict=True)))
    return rows


def row(name: str, words: str) -> dict[str, str]:
    """The only row with all these words as cells, or else within cells; {}: there is no such."""
    parts = words.split("+")
    exact = [one for one in table(name) if {*parts} <= {*one.values()}]
    near = [one for one in table(name) if all(part in " | ".join(one.values()) for part in parts)]
    found = exact or near
    return found[0] if len(found) == 1 else {}


def spans(pattern: str, text: str) -> list[range]:
    return [range(*one.span()) for one in re.finditer(pattern, text, re.S | re.M)]


def figures(text: str) -> Iterator[tuple[re.Match[str], str | None]]:
    """The figures of a page, and the cell that each quotes; None: of a table that is quoted."""
    hidden, tables = spans(HIDDEN, text), spans(TABLE, text)
    for number in NUMBER.finditer(text):
        if any(number.start() in span for span in hidden):
            continue
        quoted = re.compile(r"[^\d<]*<!-- fig: (.*?) -->").match(text, number.end())
        if any(number.start() in span for span in tables):
            yield number, None
        elif quoted or "." in number[0] or UNITS.match(text, number.end()):
            yield number, quoted[1] if quoted else ""


def wrong_figures(text: str) -> list[str]:
    """Figures of a page that no result backs."""
    wrong = list[str]()
    words = ("".join(r"\s+" if c == " " else re.escape(c) for c in one) for one in EXEMPT)
    exempt = spans("|".join(words), text)
    for number, quoted in figures(text):
        file, _, rest = (quoted or "").partition("#")
        heading, key, column = rest.split("/", 2) if rest else ("", "", "")
        known = row(f"{file}#{heading}", key).get(column, "") if rest else ""
        here = any(number.start() in span for span in exempt)
        if quoted is not None and not here and number[0] not in NUMBER.findall(known):
            wrong.append(f"{text[number.start() - 40 : number.end()]}: {quoted or 'no result'}")
    for names, lines in re.findall(TABLE, text):
        head, _, *rows = map(cells, lines.splitlines())
        for key, *values in rows:
            known_rows = [row(name, key) for name in names.split()]
            for column, value in zip(head[1:], values, strict=True):
                if value not in (there := [one.get(column) for one in known_rows]):
                    wrong.append(f"{key}, {column}: {value}, but {there}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_figures_are_cells_of_results(page: Path) -> None:
    assert not wrong_figures(page.read_text(encoding="utf-8"))


def changed(text: str, factor: float) -> Iterator[tuple[str, str]]:
    """Each figure of a page, and the page with this figure changed."""
    for number, _ in figures(text):
        digits = len(number[0].partition(".")[2])
        value = float(number[0].replace(",", ""))
        other = f"{value * factor:,.{digits}f}"
        if other == number[0]:
            other = f"{value + 10**-digits:,.{digits}f}"
        yield number[0], f"{text[: number.start()]}{other}{text[number.end() :]}"


def test_a_changed_figure_is_found() -> None:
    """Of all figures, each changed by 5 % and by 20 %, alone, at least 98 % are found."""
    missed, n = list[str](), 0
    for page in PAGES:
        for factor in (0.8, 0.95, 1.05, 1.2):
            for figure, text in changed(page.read_text(encoding="utf-8"), factor):
                n += 1
                missed += [f"{page.name}: {figure} times {factor}"] * (not wrong_figures(text))
    assert n > 200 and len(missed) <= 0.02 * n, missed


@pytest.mark.parametrize(
    ("samples", "page"),
    [(n, "speed") for n in ("filetypes", "long", "peers")]
    + [("images", "kinds"), ("architectures", "kinds"), ("golden", "golden")]
    + [("sequences", "serving")],
)
def test_tables_are_those_of_the_samples(samples: str, page: str) -> None:
    folder = ROOT / "bench/results"
    made = ratio_table(bench.read(folder / f"{samples}.jsonl").cells)
    assert made in (folder / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("draw", [pictures.speed, pictures.context])
def test_figures_in_pictures_are_those_of_results(draw: Callable[[], bytes]) -> None:
    """`python bench/pictures.py speed.svg context.svg` draws them again."""
    there = (ROOT / f"docs/pictures/{draw.__name__}.svg").read_text(encoding="utf-8")
    shown = re.compile(r">([^<>]*\d[^<>]*)</text>")
    assert shown.findall(draw().decode()) == shown.findall(there) != []
