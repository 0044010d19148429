"""reStructuredText of the two manuals -> plain paragraphs, and question/answer pairs from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

ROLE = re.compile(r":[a-zA-Z:+-]+:`([^`<]*?)(?:\s*<[^`>]*>)?`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}")
RULE = re.compile(r"^([=\-~^*+#\"'.])\1{2,}\s*$")
DIRECTIVE = re.compile(r"^(\s*)\.\. ([\w:-]+)::\s*(.*)$")
API = {
    "function", "class", "method", "classmethod", "staticmethod", "attribute", "data",
    "exception", "decorator", "decoratormethod", "setting", "django-admin", "templatetag",
    "templatefilter", "fieldlookup", "opcode", "c:function", "cmdoption",
}  # fmt: skip
KEEP = {"note", "warning", "admonition", "seealso", "tip", "important", "hint", "caution"}
CODE = {"code-block", "sourcecode", "doctest", "testcode", "code"}


@dataclass
class Page:
    """One cleaned page: its text, and (kind, signature, first paragraph) of documented names."""

    paragraphs: list[str] = field(default_factory=list)
    entries: list[tuple[str, str, str]] = field(default_factory=list)


def inline(text: str) -> str:
    """Strip roles, links and other markup of one paragraph; literals keep single backquotes."""
    text = ROLE.sub(lambda m: f"`{m.group(1).lstrip('~!').strip()}`", text)
    text = LINK.sub(r"\1", text)
    text = text.replace("``", "`").replace("\\ ", "").replace("\\*", "*").replace("\\", "")
    text = re.sub(r"\|(\w+)\|", r"\1", text)
    text = re.sub(r"`([^`]+)`_\b", r"\1", text)
    text = text.replace("**", "")
    return re.sub(r"\s+", " ", text).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _blocks(source: str) -> Iterator[list[str]]:
    """Split at blank lines into blocks of lines."""
    lines = (line.rstrip() for line in source.expandtabs(8).splitlines())
    return (list(block) for is_text, block in groupby(lines, bool) if is_text)


class Cleaner:
    """Goes through the blocks of one file; skips tables, grammars, options and link targets."""

    def __init__(self) -> None:
        self.page = Page()
        self.skip_above: float = math.inf  # drop blocks indented deeper than this
        self.code_above: float = math.inf  # blocks deeper than this are code
        self.pending: tuple[str, str] | None = None  # API entry that waits for its paragraph

    def feed(self, block: list[str]) -> None:
        indent = _indent(block[0])
        if indent > self.skip_above:
            return
        self.skip_above = math.inf
        if indent > self.code_above:
            self._code(block)
            return
        self.code_above = math.inf
        if match := DIRECTIVE.match(block[0]):
            self._directive(match, block)
        elif block[0].lstrip().startswith(".."):
            self._comment(block, indent)
        else:
            self._text(block, indent)

    def _comment(self, block: list[str], indent: int) -> None:
        rest = [b for b in block if not b.lstrip().startswith("..")]
        if block[0].lstrip().startswith(".. _") and rest and _indent(rest[0]) == indent:
            self.feed(rest)
        else:
            self.skip_above = indent

    def _directive(self, match: re.Match[str], block: list[str]) -> None:
        indent, name, rest = len(match.group(1)), match.group(2), match.group(3)
        if name in API:
            self.pending = (name, inline(rest)) if rest else None
            body = [b for b in block[1:] if DIRECTIVE.match(b) is None and _indent(b) > indent]
            body = [b for b in body if not b.strip().startswith((":", "async", ".."))]
            if body and _indent(body[0]) == indent + 3:
                self._text(body, indent + 3)
        elif name in KEEP:
            first = [" " * (indent + 3) + rest] if rest and name != "admonition" else []
            body = first + block[1:]
            if body:
                self._text(body, indent + 3)
        elif name in CODE:
            self.code_above = indent
            body = [b for b in block[1:] if not b.strip().startswith(":")]
            if body:
                self._code(body)
        else:
            self.skip_above = indent

    def _code(self, block: list[str]) -> None:
        base = min(_indent(b) for b in block)
        text = "\n".join("    " + b[base:] for b in block)
        if len(block) <= 40 and max(map(len, block)) < 120:
            self.page.paragraphs.append(text)

    def _text(self, block: list[str], indent: int) -> None:
        lines = [b for b in block if not RULE.match(b.strip())]
        if not lines or any(re.search(r"={3,}\s|\+--|--\+|^\s*\|", b) for b in lines):
            return
        if len(lines) < len(block) and len(lines) == 1:
            self.page.paragraphs.append("# " + inline(lines[0]))
            return
        if re.match(r"^:[\w ]+:( |$)", lines[0].lstrip()):
            return
        joined = " ".join(b.strip() for b in lines)
        if joined.endswith("::"):
            self.code_above = indent
            joined = joined[:-2].rstrip() + ":" if len(joined) > 3 else ""
        items = re.split(r"\s(?=[*-] )", joined) if joined.startswith(("* ", "- ")) else [joined]
        text = "\n".join(re.sub(r"^[*-] ", "* ", inline(i)) for i in items)
        if not text or text == ":":
            return
        if lines[0].lstrip().startswith(">>>"):
            self._code(lines)
            return
        self.page.paragraphs.append(text)
        if self.pending:
            self.page.entries.append((*self.pending, text))
            self.pending = None


def clean(source: str) -> Page:
    """Plain text of one reStructuredText file; ASCII only, paragraphs on one line each."""
    cleaner = Cleaner()
    for block in _blocks(source):
        cleaner.feed(block)
    page = cleaner.page
    page.paragraphs = [p for p in page.paragraphs if readable(p)]
    page.entries = [e for e in page.entries if readable(e[2]) and e[1].isascii()]
    return page


def readable(text: str) -> bool:
    """Whether this is ASCII text that is mostly words: no tables, digests or number lists."""
    if not text.isascii() or ("http" in text and len(text) < 120) or "<|" in text:
        return False
    letters = sum(c.isalpha() or c.isspace() for c in text)
    longest = max(map(len, text.split()), default=0)
    return letters >= 0.72 * len(text) and longest < 60
