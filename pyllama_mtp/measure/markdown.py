"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def to_markdown(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[bool] = ()
) -> str:
    """A table; `words` says of each column whether it has words, aligned to the left (default:
    figures everywhere)."""
    rule = [":--" if left else "--:" for left in words] or ["--:"] * len(headings)
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *escaped])
