"""Describe a function's statements in plain English: the "thinking" text of the training mix."""

from __future__ import annotations

import ast

from .code import Function


def _q(node: ast.AST) -> str:
    """The source of an expression in backquotes."""
    return f"`{ast.unparse(node)}`"


def _short(node: ast.AST) -> bool:
    return len(ast.unparse(node)) <= 70


def sentence(node: ast.stmt) -> str:
    """One sentence for one statement, or '' where there is nothing to say."""
    match node:
        case ast.Return(value=None):
            return "Return without a value."
        case ast.Return(value=value) if _short(value):
            return f"Return {_q(value)}."
        case ast.Raise(exc=ast.AST() as exc) if _short(exc):
            return f"Raise {_q(exc)}."
        case ast.Assign(targets=[target], value=value) if _short(value):
            return f"Set {_q(target)} to {_q(value)}."
        case ast.AugAssign(target=target, value=value) if _short(value):
            return f"Update {_q(target)} with {_q(value)}."
        case ast.Expr(value=ast.Call() as call) if _short(call):
            return f"Call {_q(call)}."
        case ast.Expr(value=ast.Yield(value=ast.AST() as value)) if _short(value):
            return f"Yield {_q(value)}."
        case ast.Pass():
            return "Do nothing."
        case ast.Continue():
            return "Go on with the next item."
        case ast.Break():
            return "Leave the loop."
    return ""


def _head(node: ast.stmt) -> str:
    """The opening words for a compound statement, or ''."""
    match node:
        case ast.If(test=test) if _short(test):
            return f"If {_q(test)} is true:"
        case ast.For(target=target, iter=source) if _short(source):
            return f"For each {_q(target)} in {_q(source)}:"
        case ast.While(test=test) if _short(test):
            return f"While {_q(test)} is true:"
        case ast.With(items=[item, *_]) if _short(item.context_expr):
            return f"With {_q(item.context_expr)} open:"
        case ast.Try():
            return "Try this:"
    return ""


def steps(body: list[ast.stmt], depth: int = 0) -> list[str]:
    """The statements as an indented list of steps."""
    lines: list[str] = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = sentence(node)
        if not text:
            text = _head(node)
            if not text:
                continue
            lines.append("  " * depth + "- " + text)
            lines += steps(node.body, depth + 1)  # type: ignore[attr-defined]
            rest = getattr(node, "orelse", None)
            if rest:
                lines.append("  " * depth + "- Otherwise:")
                lines += steps(rest, depth + 1)
            for handler in getattr(node, "handlers", []):
                kind = ast.unparse(handler.type) if handler.type else "Exception"
                lines.append("  " * depth + f"- If `{kind}` is raised:")
                lines += steps(handler.body, depth + 1)
            continue
        lines.append("  " * depth + "- " + text)
    return lines


def listed(names: list[str]) -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{n}`" for n in names]
    if len(quoted) < 2:
        return "".join(quoted)
    return ", ".join(quoted[:-1]) + " and " + quoted[-1]


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
        takes = f"It takes {count} arguments: {listed(function.arguments)}."
    opening = f"The user asks for a function called `{function.name}`."
    return (
        " ".join(part for part in (opening, goal, takes) if part) + "\n\n"
        "Let me think about this step by step.\n\n"
        + "\n".join(plan)
        + "\n\nNow I can write the code."
    )
