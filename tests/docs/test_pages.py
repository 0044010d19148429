"""README and docs/: Python blocks run, commands parse, links lead somewhere, named tests exist; and
the Dockerfile."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllama_mtp.cli import build_parser
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.ggufinfo import read_gguf
from pyllama_mtp.models.mmproj import write_synthetic_mmproj

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "patches/README.md", *sorted((ROOT / "bench").glob("**/*.md"))]


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


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def leads_somewhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHERS], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not leads_somewhere(page, link)]


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


def test_pages_of_results_are_short() -> None:
    pages = [*(ROOT / "bench/results").glob("*.md")]
    assert len(pages) > 5 and not [
        page.name for page in pages if len(page.read_text("utf-8").splitlines()) > 60
    ]


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


def test_the_dockerfile() -> None:
    """What it starts is a command of ours; its extras and its build options are there."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    program, *words = json.loads(entry)
    assert program == "pyllama-mtp"
    build_parser(words[0]).parse_args([*words, "-m", "model.gguf"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for group in re.findall(r"\[(\w+(?:,\w+)*)\]'", text):
        assert all(f"\n{extra} = [" in project for extra in group.split(","))
    known = (ROOT / "bindings/cmake/CpuFeatures.cmake").read_text(encoding="utf-8")
    options = re.findall(r"cmake\.define\.(\w+)", text)
    assert options and all(f"option({name} " in known for name in options)
