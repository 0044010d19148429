"""Describe a function's statements in plain English: the "thinking" text of the training mix."""

from __future__ import annotations

import ast
from typing import Any

from .code import Function


def _words(node: ast.stmt) -> tuple[Any, ...]:
    """The sentence for a statement, or the opening words of a compound one, and the expressions
    that it shows; '' where there is nothing to say."""
    match node:
        case ast.Return(value=None):
            return ("Return without a value.",)
        case ast.Return(value=value):
            return "Return {}.", value
        case ast.Raise(exc=ast.AST() as exc):
            return "Raise {}.", exc
        case ast.Assign(targets=[target], value=value):
            return "Set {} to {}.", target, value
        case ast.AugAssign(target=target, value=value):
            return "Update {} with {}.", target, value
        case ast.Expr(value=ast.Call() as call):
            return "Call {}.", call
        case ast.Expr(value=ast.Yield(value=ast.AST() as value)):
            return "Yield {}.", value
        case ast.Pass():
            return ("Do nothing.",)
        case ast.Continue():
            return ("Go on with the next item.",)
        case ast.Break():
            return ("Leave the loop.",)
        case ast.If(test=test):
            return "If {} is true:", test
        case ast.For(target=target, iter=source):
            return "For each {} in {}:", target, source
        case ast.While(test=test):
            return "While {} is true:", test
        case ast.With(items=[item, *_]):
            return "With {} open:", item.context_expr
        case ast.Try():
            return ("Try this:",)
    return ("",)


def steps(body: list[ast.stmt], depth: int = 0) -> list[str]:
    """The statements as an indented list of steps; those that would show too much are left out."""
    lines: list[str] = []
    indent = "  " * depth
    for node in body:
        text, *shown = _words(node)
        sources = [ast.unparse(part) for part in shown]
        if not text or (sources and len(sources[-1]) > 70):
            continue
        lines.append(f"{indent}- {text.format(*(f'`{source}`' for source in sources))}")
        lines += steps(getattr(node, "body", []), depth + 1)
        if rest := getattr(node, "orelse", None):
            lines += [f"{indent}- Otherwise:", *steps(rest, depth + 1)]
        for handler in getattr(node, "handlers", []):
            kind = ast.unparse(handler.type) if handler.type else "Exception"
            lines += [f"{indent}- If `{kind}` is raised:", *steps(handler.body, depth + 1)]
    return lines


def think(function: Function, goal: str) -> str:
    """The thinking text that comes before the code of `function`; '' if there is little to say."""
    plan = steps(function.tree.body)
    if len(plan) < 2:
        return ""
    count = len(function.arguments)
    if count == 0:
        takes = "It takes no arguments."
    elif count == 1:
        takes = f"It takes one argument, `{function.arguments[0]}`."
    else:
        *most, last = (f"`{name}`" for name in function.arguments)
        takes = f"It takes {count} arguments: {', '.join(most)} and {last}."
    opening = f"The user asks for a function called `{function.name}`."
    return (
        " ".join(part for part in (opening, goal, takes) if part) + "\n\n"
        "Let me think about this step by step.\n\n"
        + "\n".join(plan)
        + "\n\nNow I can write the code."
    )
