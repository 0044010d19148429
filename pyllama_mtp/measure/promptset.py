"""Sets of prompts by class: the package's own, the demo model's, and the user's files.

A set is a file of JSON lines, one prompt each:

    {"class": "code", "prompt": "Write a function that ...", "chat": true, "thinking": false}

Only `prompt` is needed. `chat`: put the prompt into the model's chat template; otherwise the model
continues it. `thinking`: the template's ``enable_thinking``, which lets Qwen3 and later reason
before they answer; left out, the template decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.workload import read_text
from pyllama_mtp.models.demo import demo_path, is_demo

if TYPE_CHECKING:
    from pyllama_mtp import Model

#: The classes for which acceptance is usually published.
CLASSES = ("factual", "thinking", "code", "instruction")
#: The class of prompts without a class.
OWN_CLASS = "own"
_KINDS: dict[str, type] = {"class": str, "prompt": str, "chat": bool, "thinking": bool}


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        kind: its class.
        text: the user's message, or the text to continue.
        chat: put it into the model's chat template.
        thinking: ``enable_thinking`` for the template; None: the template decides.
    """

    kind: str
    text: str
    chat: bool = False
    thinking: bool | None = None

    def render(self, model: Model, before: str = "") -> str:
        """The text for the model, control tokens spelled out.

        Args:
            before: text before the prompt; in a chat it is part of the user's message.

        Raises:
            UsageError: a chat prompt, but the model has no chat template, or the template refuses.
        """
        if not self.chat:
            return before + self.text
        variables = {} if self.thinking is None else {"enable_thinking": self.thinking}
        messages = [{"role": "user", "content": before + self.text}]
        return model.apply_chat_template(messages, **variables)

    def tokens(self, model: Model) -> list[int]:
        """Token ids of :meth:`render`; the template's control tokens become control tokens."""
        return model.tokenize(self.render(model), parse_special=True)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file of JSON lines; empty lines are skipped.

    Raises:
        UsageError: the file cannot be read or holds no prompt; a line is not a prompt. The message
            names file and line.
    """
    found = []
    for number, line in enumerate(read_text(path, "prompts").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_prompt(json.loads(line)))
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, UsageError) else f"not JSON: {error}"
            raise UsageError(f"{path}, line {number}: {reason}") from None
    return found


def _prompt(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise UsageError('not an object; give one per line, as in {"prompt": "Hello"}')
    for name, value in record.items():
        if name not in _KINDS:
            raise UsageError(f"unknown key {name!r}; known are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[name]):
            kind = "text" if _KINDS[name] is str else "true or false"
            raise UsageError(f"{name!r} is {value!r}; it must be {kind}")
    record = {"class": OWN_CLASS, "prompt": "", "chat": False, "thinking": None, **record}
    for name in ("prompt", "class"):
        if not record[name].strip():
            raise UsageError(f"{name!r} is missing or empty")
    return Prompt(*(record[name] for name in _KINDS))


def check_classes(classes: Sequence[str]) -> None:
    """Raises UsageError for a class without prompts."""
    for name in classes:
        if name not in CLASSES:
            raise UsageError(f"no prompts of class {name!r}; there are {', '.join(CLASSES)}")


def package_prompts(classes: Sequence[str] = CLASSES) -> list[Prompt]:
    """The package's own prompts of these classes, 24 each, written for this project.

    Raises:
        UsageError: a class without prompts.
    """
    check_classes(classes)
    folder = Path(__file__).with_name("prompts")
    return [prompt for name in classes for prompt in read_prompts(folder / f"{name}.jsonl")]


def prompts_for(model_path: str | os.PathLike[str], classes: Sequence[str]) -> list[Prompt]:
    """The prompts of these classes that fit a model: the package's, or the demo model's own.

    Raises:
        UsageError: a class without prompts.
    """
    if not is_demo(model_path):
        return package_prompts(classes)
    check_classes(classes)
    own = demo_prompts()
    return [prompt for name in classes for prompt in own if prompt.kind == name]


def demo_prompts() -> list[Prompt]:
    """The demo model's own prompts, held out of its training."""
    return read_prompts(demo_path().with_name("prompts.jsonl"))
