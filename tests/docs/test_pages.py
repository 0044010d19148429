"""README and docs/: Python blocks run, commands parse, links lead somewhere, named tests exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllama_mtp.cli import build_parser
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.mmproj import write_synthetic_mmproj

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `pyllama-mtp` in blocks for a shell, and in tables of commands."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"^\| `(pyllama-mtp [^`]*)` \|", text, re.M)
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] == ["pyllama-mtp"]:
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, with the demo model as model.gguf, which sees, and a picture."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(demo_path())
    write_synthetic_mmproj(tmp_path / "mmproj-F16.gguf", read_gguf(demo_path()).n_embd)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (96, 64), "red").save(tmp_path / "photo.jpg")
    names: dict[str, object] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for block in blocks(page, "python"):
            exec(compile(block, page.name, "exec"), names)
    assert said.getvalue() or not blocks(page, "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page: Path) -> None:
    for words in commands(page):
        build_parser(words[0]).parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def figures(page: Path) -> Iterator[tuple[str, str]]:
    """The measured figures of a page, and their lines: numbers with two decimals, and what is so
    many times as fast."""
    text = re.sub(
        r"^```(?!text)\w+\n.*?^```$|`[^`\n]+`", "", page.read_text("utf-8"), flags=re.S | re.M
    )
    for line in text.replace("Python 3.10", "").splitlines():
        found = re.findall(r"(?<![\w.\-])\d+\.\d\d(?![\w.]*\w)", line)
        for pair in re.findall(r"(?:(\d+\.\d+) to )?(\d+\.\d+) times", line):
            found += [number for number in pair if number]
        yield from ((figure, line) for figure in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_come_from_the_result_files_that_the_page_links(page: Path) -> None:
    """Rounded; and if a line is about one type of file, from a line about this type."""
    links = re.findall(r"\]\(([^)#]*bench/results/[^)#]+\.md)\)", page.read_text("utf-8"))
    results = [
        line for link in links for line in (page.parent / link).read_text("utf-8").split("\n")
    ]

    def is_known(figure: str, line: str) -> bool:
        types = re.findall(r"\bI?Q\d\w*", line)
        rows = [row for row in results if len(types) != 1 or types[0].lower() in row.lower()]
        known = map(float, re.findall(r"\d+\.\d+", "\n".join(rows)))
        half = 0.5001 * 10 ** -len(figure.partition(".")[2])
        return any(abs(float(figure) - number) <= half for number in known)

    assert not [(figure, line) for figure, line in figures(page) if not is_known(figure, line)]


def test_tests_that_patches_and_pages_name_are_there() -> None:
    named = {
        (source.name, name)
        for source in (*PAGES, ROOT / "bench/README.md", *(ROOT / "patches").glob("*.[mp]*"))
        for name in re.findall(r"\btest_\w+\.py", source.read_text(encoding="utf-8"))
    }
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert named and not {(source, name) for source, name in named if name not in there}


def test_scripts_that_pages_and_results_name_are_there() -> None:
    results = [*(ROOT / "bench/results").glob("*.md")]
    texts = [page.read_text("utf-8") for page in (*PAGES, *results, ROOT / "bench/README.md")]
    named = {name for text in texts for name in re.findall(r"python ((?:\w+/)+\w+\.py)", text)}
    assert len(named) > 5 and not [name for name in named if not (ROOT / name).exists()]


def test_results_are_few_files() -> None:
    """Samples that bench/publish.py keeps while it measures do not count before they are added."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    words = ["git", "-C", str(ROOT), "ls-files", "bench/results"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    assert 0 < len(listed) <= 15


def test_the_readme_is_short_and_names_every_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert all(f"({page.relative_to(ROOT)})" in text for page in PAGES[1:])
    assert len(list(commands(PAGES[0]))) >= 5 and len(blocks(PAGES[0], "python")) >= 2


def test_the_table_of_architectures() -> None:
    """It is the code's; `python -c "from pyllama_mtp.models.architectures import table;
    print(table())"` writes it."""
    from pyllama_mtp.models.architectures import table

    assert table() in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
