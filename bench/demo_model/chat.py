"""Chat-format documents of the training mix: factual, instruction and thinking pairs."""

from __future__ import annotations

import hashlib
import random
import re

from .code import Function
from .thinking import think

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"

WORDS = {
    "function": "function", "class": "class", "method": "method", "classmethod": "class method",
    "staticmethod": "static method", "attribute": "attribute", "data": "value",
    "exception": "exception", "decorator": "decorator", "setting": "setting",
    "templatetag": "template tag", "templatefilter": "template filter",
    "fieldlookup": "field lookup", "django-admin": "command",
}  # fmt: skip


def frame(question: str, answer: str) -> str:
    """One user turn and one assistant turn, as the file's chat template writes them."""
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n"


def seeded(text: str) -> random.Random:
    """A generator seeded by the text alone, so that every run makes the same pairs."""
    return random.Random(hashlib.sha256(text.encode()).digest())


def factual(kind: str, signature: str, text: str) -> str:
    """'What is X?' for a name that the manual documents."""
    word = WORDS.get(kind)
    name = re.split(r"[(\s]", signature)[0]
    if not word or not name or len(text) > 900 or len(text) < 30:
        return ""
    callable_ = kind in ("function", "method", "classmethod", "staticmethod")
    questions = (
        (f"What does the {word} `{name}` do?", f"What does `{name}()` do?")
        if callable_
        else (f"What is the {word} `{name}`?", f"What is `{name}`?")
    )
    question = seeded(signature + text).choice(questions)
    shown = f"`{signature}` is a {word}." if len(signature) < 90 else f"`{name}` is a {word}."
    return frame(question, f"{shown} {text}")


def glossary(term: str, text: str) -> str:
    """'What is a <term>?' for an entry of a glossary."""
    question = seeded(term).choice((f"What is {term}?", f"What does the term {term} mean?"))
    return frame(question, text)


def _goal(function: Function) -> str:
    summary = function.summary
    if not summary:
        return ""
    summary = summary[0].upper() + summary[1:]
    return summary if summary.endswith((".", ":", "?")) else summary + "."


def pairs(function: Function) -> list[tuple[str, str]]:
    """(class, document) pairs made from one function."""
    made: list[tuple[str, str]] = []
    goal = _goal(function)
    code = f"```python\n{function.code}\n```"
    draw = seeded(function.code)
    if goal and len(goal) < 300:
        ask = draw.choice(
            (
                f"Write a Python function called `{function.name}`. {goal}",
                f"Please write the function `{function.name}` in Python. {goal}",
                f"Implement `{function.name}` in Python. {goal}",
            )
        )
        say = f"Here is the function `{function.name}`:\n\n{code}"
        made.append(("instruction", frame(ask, say)))
        if draw.random() < 0.35:
            tell = draw.choice(
                (f"Explain what this code does.\n\n{code}", f"What does this code do?\n\n{code}")
            )
            made.append(("instruction", frame(tell, f"The function `{function.name}`: {goal}")))
    thought = think(function, goal)
    if thought and (goal or draw.random() < 0.5):
        ask = f"Think step by step, then write the Python function `{function.name}`."
        ask = f"{ask} {goal}".strip()
        say = f"{THINK}\n{thought}\n{END_THINK}\n\n{code}"
        made.append(("thinking", frame(ask, say)))
    return made
