"""Options for what an answer must follow."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllama_mtp.grammar import Grammar


def add_options(group: argparse._ArgumentGroup) -> None:
    """What the answer must follow: one of them."""
    found = group.add_mutually_exclusive_group()
    found.add_argument(
        "--grammar", metavar="FILE", help="GBNF with a rule `root` that the text must follow"
    )
    found.add_argument(
        "-j",
        "--json-schema",
        metavar="SCHEMA",
        help="the answer is JSON that fits this schema: JSON text that begins with {, or a file",
    )
    found.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    found.add_argument(
        "--regex", metavar="PATTERN", help="the whole answer matches a regular expression"
    )
    found.add_argument(
        "--lark", metavar="FILE", help="llguidance's Lark grammar with a rule `start`"
    )


def grammar_from(args: argparse.Namespace) -> Grammar | str | None:
    """The grammar of the options; GBNF as its text."""
    from pyllama_mtp.grammar import Grammar
    from pyllama_mtp.measure.workload import read_text

    if args.json_object:
        return Grammar.json_object()
    if args.regex:
        return Grammar.regex(args.regex)
    if args.json_schema:
        given: str = args.json_schema
        text = given if given.lstrip()[:1] == "{" else read_text(given, "JSON schema")
        return Grammar.json_schema(text)
    if args.lark:
        return Grammar.lark(read_text(args.lark, "Lark grammar"))
    return read_text(args.grammar, "grammar") if args.grammar else None
