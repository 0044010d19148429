"""Python files -> regular code: parsed, filtered and written back in one style."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LITERAL = 12  # elements of a container literal before it counts as a data table
MAX_LINES = 70  # lines of one definition after rewriting


@dataclass
class Function:
    """One function; `summary` is the first line of its docstring, or empty."""

    name: str
    arguments: list[str]
    summary: str
    code: str
    tree: ast.FunctionDef | ast.AsyncFunctionDef


def _is_data(node: ast.AST) -> bool:
    """Whether a literal inside `node` is a table, a long string or looks encoded."""
    for child in ast.walk(node):
        if isinstance(child, (ast.List, ast.Tuple, ast.Set)) and len(child.elts) > MAX_LITERAL:
            return True
        if isinstance(child, ast.Dict) and len(child.keys) > MAX_LITERAL:
            return True
        if isinstance(child, ast.Constant) and isinstance(child.value, (str, bytes)):
            text = child.value if isinstance(child.value, str) else child.value.decode("latin-1")
            if not text.isascii() or (len(text) > 200 and " " not in text[:80]):
                return True
    return False


def tidy(doc: str | None) -> str:
    """A docstring as plain paragraphs, at most 900 characters; '' if there is none."""
    if not doc or not doc.isascii():
        return ""
    paragraphs = []
    for block in re.split(r"\n\s*\n", doc):
        lines = block.splitlines()
        if re.search(r">>>|^\s*\||={4,}|-{4,}", block, re.M):
            break
        paragraphs.append(" ".join(line.strip() for line in lines))
    text = "\n\n".join(p for p in paragraphs if p).strip()
    text = text.replace("``", "`")
    return text if len(text) <= 900 else text[:900].rpartition(". ")[0] + "."


class _Docstrings(ast.NodeTransformer):
    """Replaces docstrings by the first paragraph of their tidy form."""

    def _visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
        if ast.get_docstring(node) is not None:  # type: ignore[arg-type]
            text = tidy(ast.get_docstring(node)).split("\n\n")[0]  # type: ignore[arg-type]
            body[0] = ast.Expr(ast.Constant(text)) if text else ast.Pass()
            if len(body) > 1 and not text:
                del body[0]
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit  # noqa: N815


def _written(node: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _good(code: str) -> bool:
    lines = code.splitlines()
    return (
        code.isascii()
        and len(lines) <= MAX_LINES
        and max(map(len, lines)) <= 160
        and code.count("\\x") + code.count("\\u") < 3
        and sum(c.isdigit() for c in code) < 0.08 * len(code)
        and "<|" not in code
    )


def parse(source: str) -> ast.Module:
    """The tree with docstrings made plain."""
    tree: ast.Module = _Docstrings().visit(ast.parse(source))
    return tree


def document(tree: ast.Module) -> str:
    """The module's text: docstring, imports, short assignments and definitions that pass."""
    parts: list[str] = []
    doc = tidy(ast.get_docstring(tree))
    if doc:
        parts.append(f'"""{doc}"""')
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    lines = [_written(n) for n in imports]
    parts.append("\n".join(line for line in lines if len(line) < 160))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not _is_data(node) and _good(code := _written(node)):
                parts.append(code)
        elif isinstance(node, ast.ClassDef):
            parts.extend(_class_parts(node))
        elif (
            isinstance(node, ast.Assign)
            and not _is_data(node)
            and len(code := _written(node)) < 100
            and _good(code)
        ):
            parts.append(code)
    return "\n\n".join(p for p in parts if p)


def _class_parts(node: ast.ClassDef) -> Iterator[str]:
    """A class in one piece when short, else a piece with its head and then each method."""
    if _is_data(node) and len(node.body) < 3:
        return
    if not _is_data(node) and _good(code := _written(node)):
        yield code
        return
    methods = [n for n in node.body if not _is_data(n)]
    head = ast.ClassDef(node.name, node.bases, node.keywords, methods[:2] or [ast.Pass()], [])
    if hasattr(node, "type_params"):
        head.type_params = []  # type: ignore[attr-defined]
    if _good(code := _written(head)):
        yield code
    for method in methods[2:]:
        if _good(code := _written(method)):
            yield "\n".join("    " + line if line else line for line in code.splitlines())


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method of at least two statements and at most 28 lines."""
    for parent in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        for node in parent.body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_data(node):
                continue
            code = _written(node)
            summary = tidy(ast.get_docstring(node)).split("\n")[0]
            if not _good(code) or len(code.splitlines()) > 28 or len(node.body) < 2:
                continue
            arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            yield Function(node.name, arguments, summary, code, node)
