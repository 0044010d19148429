"""What a model file says about chats: its template, in Jinja, and how answers are sampled.

Templates are rendered as by Hugging Face's tokenizers, in a sandbox that bounds time and sizes: see
:mod:`pyllama_mtp.llama.templates`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2

from ..errors import UsageError
from ..settings import Sampling
from .templates import Environment

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
    found = Sampling(temperature=0.8)
    for key, name in FILE_KEYS.items():
        value: Any = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if name in ("top_k", "repeat_last_n") and isinstance(value, int):
            value = max(value, 0)
        try:
            found = replace(found, **dict[str, Any]({name: value}))
        except UsageError as error:
            log.warning("general.sampling.%s of the model file is not used: %s", key, error)
    return found


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
    given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        return environment.render(template, {**given, **variables})
    except Exception as reason:  # a template is a program and can fail in any way
        raise UsageError(
            f"the model's chat template cannot render these messages: {reason}"
        ) from None
