"""Options for what an answer must follow."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_mtp.grammar import Grammar


def add_options(group: argparse._ArgumentGroup) -> None:
    """What the answer must follow: one of them (argparse would not wrap a group of so many)."""
    group.add_argument(
        "--grammar", metavar="FILE", help="GBNF with a rule `root` that the text must follow"
    )
    group.add_argument(
        "-j",
        "--json-schema",
        metavar="SCHEMA",
        help="the answer is JSON that fits this schema: JSON text that begins with {, or a file",
    )
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument(
        "--regex", metavar="PATTERN", help="the whole answer matches a regular expression"
    )
    group.add_argument(
        "--lark", metavar="FILE", help="llguidance's Lark grammar with a rule `start`"
    )


def grammar_from(args: argparse.Namespace) -> Grammar | str | None:
    """The grammar of the options; GBNF as its text. Raises UsageError for more than one."""
    from pyllama_mtp.errors import UsageError
    from pyllama_mtp.grammar import Grammar
    from pyllama_mtp.measure.workload import read_text

    names = ("grammar", "json_schema", "json_object", "regex", "lark")
    given = ["--" + name.replace("_", "-") for name in names if getattr(args, name)]
    if len(given) > 1:
        raise UsageError(f"an answer follows one grammar: use one of {', '.join(given)}")
    if args.json_object:
        return Grammar.json_object()
    if args.regex:
        return Grammar.regex(args.regex)
    if args.json_schema:
        schema: str = args.json_schema
        text = schema if schema.lstrip()[:1] == "{" else read_text(schema, "JSON schema")
        return Grammar.json_schema(text)
    if args.lark:
        return Grammar.lark(read_text(args.lark, "Lark grammar"))
    return read_text(args.grammar, "grammar") if args.grammar else None
