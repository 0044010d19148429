"""Jinja for templates that come with a model file: a sandbox, and bounds on time and sizes.

A file's chat template is somebody else's program. Jinja's sandbox keeps the program from Python's
attributes and from changing its input; not from looping for hours, or doubling a string forty
times. Here a rendering ends with an error when it has computed for too long, and at an operator
that would make a string, list or number too large. Only memory bounds the result of a single method
or filter (``ljust``, ``replace``).
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

#: Seconds of computing (CPU time) of a rendering; ten thousand messages take less than one.
MOST_SECONDS = 10.0
#: Characters of a string or items of a list that an operator may make, and characters of a text.
MOST_SIZE = 1 << 24
#: Bits of a number.
MOST_BITS = 4096


class TemplateLimitError(jinja2.TemplateError):
    """The template takes too long, or makes something too large."""


class _Concatenation(jinja2.visitor.NodeTransformer):
    """``a ~ b`` as ``a|string + b|string``, which is the same and can be intercepted."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        found: jinja2.nodes.Expr | None = None
        for part in node.nodes:
            text = jinja2.nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno)
            found = jinja2.nodes.Add(found, text, lineno=node.lineno) if found else text
        assert found
        return found


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox for immutable data, with operators that refuse results that are too large."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """``left operator right``. Raises TemplateLimitError."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if numbers and _bits(operator, left, right) > MOST_BITS:
            raise TemplateLimitError(f"it makes a number of more than {MOST_BITS:,} bits")
        if not numbers and _size(operator, left, right) > MOST_SIZE:
            raise TemplateLimitError(
                f"it makes something of more than {MOST_SIZE:,} characters or items"
            )
        return super().call_binop(context, operator, left, right)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Compile and render. Raises TemplateLimitError, and whatever the template raises."""
        tree = _Concatenation().visit(self.parse(source))
        template = jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))
        pieces, size = [], 0
        with _clocked():
            for piece in template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_SIZE:
                    raise TemplateLimitError(f"its text has more than {MOST_SIZE:,} characters")
        return "".join(pieces)


def _bits(name: str, left: int, right: int) -> int:
    """An upper bound of the result's bits."""
    if name == "**":
        return left.bit_length() * max(right, 0)
    return left.bit_length() + right.bit_length()


def _size(name: str, left: Any, right: Any) -> int:
    """About how long the result is; 0 where it has no length."""
    sizes = [operator.length_hint(side, 0) for side in (left, right)]
    times = [max(side, 0) for side in (left, right) if isinstance(side, int)]
    return sum(sizes) * times[0] if name == "*" and times else sum(sizes)


@contextmanager
def _clocked() -> Iterator[None]:
    """A block that may compute for MOST_SECONDS in this thread; then its next line raises an error.

    A debugger's trace function rests meanwhile.
    """
    end, before = time.thread_time() + MOST_SECONDS, sys.gettrace()

    def look(frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
        nonlocal end
        if time.thread_time() > end:
            end += MOST_SECONDS  # time to handle the error
            raise TemplateLimitError(f"it computes for more than {MOST_SECONDS:g} s")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
