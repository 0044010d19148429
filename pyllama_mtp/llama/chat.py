"""What a model file says about chats: its template, in Jinja, and how answers are sampled.

A file's chat template is somebody else's program. Templates are rendered as by Hugging Face's
tokenizers, in Jinja's sandbox, which keeps the program from Python's attributes and from changing
its input; not from looping for hours, or doubling a string forty times. So a process of its own
renders them, which is ended when it takes too much time or memory; see :class:`.Workers`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..child import CallError, Workers
from ..errors import UsageError
from ..settings import Sampling

if TYPE_CHECKING:
    import jinja2

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

#: Seconds that a rendering may compute; ten thousand messages take less than one.
MOST_SECONDS = 5.0
#: Characters of a text.
MOST_SIZE = 1 << 24

workers = Workers(f"{__name__}:render_here", MOST_SECONDS)


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
    raise UsageError(message)


@lru_cache(4)
def _compiled(template: str) -> jinja2.Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment.from_string(template)


def render_here(template: str, variables: dict[str, Any]) -> str:
    """:func:`render` in this process, a worker. Raises whatever the template raises."""
    text = _compiled(template).render(variables)
    if len(text) > MOST_SIZE:
        raise UsageError(f"its text has more than {MOST_SIZE:,} characters")
    return text


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
    conversation = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        return str(workers.call(template, {**conversation, **variables}))
    except CallError as reason:  # a template is a program and can fail in any way
        raise UsageError(
            f"the model's chat template cannot render these messages: {reason}"
        ) from reason
