"""Chat template of a model file: Jinja, rendered in a sandbox, as Hugging Face's tokenizers do.

The sandbox also bounds time and sizes: see :mod:`pyllama_mtp.templates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from .errors import UsageError
from .templates import Environment


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
        template: Jinja source, from the key ``tokenizer.chat_template`` of the file.
        messages: ``{"role": ..., "content": ...}`` each.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: more template variables, such as ``bos_token`` or ``enable_thinking``.

    Raises:
        UsageError: the template refuses the messages, is not valid Jinja, takes too long or makes
            something too large; says why.
    """
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    try:
        return environment.render(
            template,
            {
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                **variables,
            },
        )
    except Exception as reason:  # a template is a program: it may fail in any way
        raise UsageError(
            f"the model's chat template cannot render these messages: {reason}"
        ) from None
