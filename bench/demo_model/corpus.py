"""The corpus: clean every source, make the chat pairs, split by file, write JSON lines.

Each line is `{"class": ..., "source": ..., "text": ...}` with one of CLASSES. A file belongs to the
held-out part if the first byte of the sha256 of its path is below HELDOUT; all that is made from
the file goes there, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from . import chat, code, prose
from .sources import fetch

CLASSES = ("prose", "code", "factual", "instruction", "thinking")
HELDOUT = 10  # of 256: about 4 % of the files
MAX_DOCUMENT = 6000  # characters; longer pages are cut at paragraph ends

SKIP_CODE = re.compile(
    r"(^|/)(test|tests|encodings|lib2to3/(tests|fixer|pgen)|pydoc_data|idlelib|turtledemo"
    r"|distutils|locale|migrations|__phello__|tkinter/test|ensurepip|msilib)(/|_|$)"
    r"|/(stringprep|keyword|token|opcode|symbol|sre_constants|_sysconfigdata\w*|this|antigravity"
    r"|entities|nturl2path|pydoc|turtle|_aix_support|formats|jsi18n|_compat_pickle|mimetypes"
    r"|imghdr|sndhdr|colorsys|quopri|uu|crypt|nntplib|telnetlib|errorcodes)\.py$"
)
SKIP_PROSE = re.compile(
    r"(^|/)(changelog|license|copyright|contents|genindex|releases|c-api|distutils|_theme|_ext"
    r"|topiclist|errno|stringprep|codecs|curses|token|unicodedata|msilib|winreg|index)(\.|/|$)"
    r"|spelling|requirements|Makefile|/dis\.rst|whatsnew/2"
)


def _pieces(paragraphs: list[str]) -> Iterator[str]:
    """Join paragraphs into documents of at most MAX_DOCUMENT characters."""
    piece: list[str] = []
    size = 0
    for paragraph in paragraphs:
        if size + len(paragraph) > MAX_DOCUMENT and piece:
            yield "\n\n".join(piece)
            piece, size = [], 0
        piece.append(paragraph)
        size += len(paragraph)
    if size > 200:
        yield "\n\n".join(piece)


def from_code(text: str) -> Iterator[tuple[str, str]]:
    """(class, document) of one Python file."""
    tree = code.parse(text)
    module = code.document(tree)
    if len(module) > 300:
        for piece in _pieces(module.split("\n\n")):
            yield "code", piece
    for function in code.functions(tree):
        yield from chat.pairs(function)


def from_prose(text: str, name: str) -> Iterator[tuple[str, str]]:
    """(class, document) of one reStructuredText file."""
    page = prose.clean(text)
    for piece in _pieces(page.paragraphs):
        yield "prose", piece
    for kind, signature, paragraph in page.entries:
        if document := chat.factual(kind, signature, paragraph):
            yield "factual", document
    if "glossary" in name:
        for term, paragraph in glossary_entries(text):
            yield "factual", chat.glossary(term, paragraph)


def glossary_entries(text: str) -> Iterator[tuple[str, str]]:
    """(term, first paragraph) of a page that holds a `glossary` directive."""
    for match in re.finditer(r"^ {3,4}(\S[^\n]*)\n((?: {6,8}\S[^\n]*\n)+)", text, re.M):
        paragraph = prose.inline(match.group(2))
        if prose.readable(paragraph) and len(match.group(1)) < 50:
            yield prose.inline(match.group(1)), paragraph


def files(roots: dict[str, Path]) -> Iterator[tuple[str, Path]]:
    """(name that decides the split, path) of every file that is read, in a fixed order."""
    for package, root in sorted(roots.items()):
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not re.search("/(js_)?tests/", name) and wanted(name):
                yield f"{package}/{name}", path


def wanted(name: str) -> bool:
    """Whether a file is read at all: code outside tests and tables, manual pages that are prose."""
    if name.endswith(".py"):
        return not SKIP_CODE.search(name) and "/docs/" not in name
    manual = "_sources" in name or "/docs/" in name
    return manual and name.endswith(".txt") and not SKIP_PROSE.search(name)


def documents(roots: dict[str, Path]) -> Iterator[dict[str, str]]:
    """Every document once (exact repeats are dropped), with its class and source file."""
    seen: set[str] = set()
    for name, path in files(roots):
        text = path.read_text(encoding="utf-8")
        for kind, document in from_code(text) if path.suffix == ".py" else from_prose(text, name):
            if document not in seen and document.isascii():
                seen.add(document)
                yield {"class": kind, "source": name, "text": document}


def build(work: Path) -> dict[str, dict[str, int]]:
    """Fetch, clean and split into train.jsonl and heldout.jsonl; returns characters per class."""
    roots = fetch(work)
    counts: dict[str, Counter[str]] = {"train": Counter(), "heldout": Counter()}
    with (work / "train.jsonl").open("w") as train, (work / "heldout.jsonl").open("w") as held:
        for record in documents(roots):
            is_held = hashlib.sha256(record["source"].encode()).digest()[0] < HELDOUT
            part, file = ("heldout", held) if is_held else ("train", train)
            file.write(json.dumps(record) + "\n")
            counts[part][record["class"]] += len(record["text"])
    return {part: dict(count) for part, count in counts.items()}
