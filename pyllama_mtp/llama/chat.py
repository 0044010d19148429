"""What a model file says about chats: its template, in Jinja, and how answers are sampled.

A file's chat template is somebody else's program. Templates are rendered as by Hugging Face's
tokenizers, in Jinja's sandbox, which keeps the program from Python's attributes and from changing
its input; not from looping for hours, or doubling a string forty times. So a rendering runs in a
thread that is stopped when it takes too long, and ends with an error at an operator that would make
a string, list or number too large. Only memory bounds the result of a single method or filter
(``ljust``, ``replace``).
"""

from __future__ import annotations

import ctypes
import json
import logging
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from ..errors import UsageError
from ..settings import Sampling

#: Keys of a model file under ``general.sampling``, and the attributes of `Sampling`.
FILE_KEYS = {
    "temp": "temperature",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
}

log = logging.getLogger("pyllama_mtp")


def usual_sampling(metadata: Mapping[str, Any]) -> Sampling:
    """The default sampling in chats and of the server: the model file's, else llama.cpp's. Bad
    values are left out, with a warning."""
    sampling = Sampling(temperature=0.8)
    for key, name in FILE_KEYS.items():
        value: Any = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if name in ("top_k", "repeat_last_n") and isinstance(value, int):
            value = max(value, 0)
        try:
            sampling = replace(sampling, **dict[str, Any]({name: value}))
        except UsageError as error:
            log.warning("general.sampling.%s of the model file is not used: %s", key, error)
    return sampling


# -- the template ----------------------------------------------------------------------------------

#: Seconds that a rendering may take; ten thousand messages take less than one.
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
        joined: jinja2.nodes.Expr | None = None
        for part in node.nodes:
            text = jinja2.nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno)
            joined = jinja2.nodes.Add(joined, text, lineno=node.lineno) if joined else text
        assert joined
        return joined


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


def _within_time(render: Callable[[], str]) -> str:
    """`render()`, in a thread that is stopped after MOST_SECONDS. Raises what `render` raises, and
    TemplateLimitError."""
    texts, errors, ended = list[str](), list[BaseException](), threading.Event()

    def run() -> None:
        try:
            texts.append(render())
        except BaseException as error:
            errors.append(error)
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    in_time = False
    try:
        in_time = ended.wait(MOST_SECONDS)
    finally:  # after Ctrl-C as well
        # Python raises it between two of its steps, so after a filter that takes long.
        while thread.is_alive() and not ended.is_set():
            number = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(TemplateLimitError))
            ended.wait(0.05)
    if not in_time:
        raise TemplateLimitError(f"it computes for more than {MOST_SECONDS:g} s")
    if errors:
        raise errors[0]
    return texts[0]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of Hugging Face: Jinja's own escapes HTML and sorts keys."""
    layout: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source, from the file's key ``tokenizer.chat_template``.
        messages: ``{"role": ..., "content": ...}`` each.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: more template variables, such as ``bos_token`` or ``enable_thinking``.

    Raises:
        UsageError: the template refuses the messages, is not valid Jinja, takes too long, or makes
            something too large.
    """
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    conversation = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        return _within_time(partial(environment.render, template, {**conversation, **variables}))
    except Exception as reason:  # a template is a program and can fail in any way
        raise UsageError(
            f"the model's chat template cannot render these messages: {reason}"
        ) from None
