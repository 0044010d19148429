"""Prompts of an exact length, by class: text, a question after text, a request for long code."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.promptset import CLASSES, Prompt, prompts_for
from pyllama_mtp.measure.workload import Workload, docstrings, special_prefix, stdlib_texts

if TYPE_CHECKING:
    from pyllama_mtp import Model

#: Classes of plain text, which the model continues.
TEXTS = ("text", "source")
#: The request after the text in the chat of output mode "code".
CODE_REQUEST = (
    "\n\nThe text above is the context. Now write a long, complete program that builds on it: many "
    "functions and classes, with all of their code, docstrings and tests. Write code only, and "
    "leave nothing out.\n"
)
_PLACE = "@@THE-TEXT-GOES-HERE@@"


def check_class(name: str) -> None:
    """Raises UsageError when there are no prompts of a class."""
    known = (*TEXTS, *CLASSES)
    if name not in known:
        raise UsageError(f"unknown class of prompts {name!r}; known are {', '.join(known)}")


def padded_tokens(
    model: Model, prompt: Prompt, n_tokens: int, text: Workload, repeat: int = 0
) -> list[int]:
    """The prompt's tokens with real text before it, `n_tokens` in all.

    In a chat the text is the beginning of what the user says, and the question follows it.

    Args:
        repeat: every number takes another piece of `text`.

    Raises:
        UsageError: the prompt alone has as many tokens, or more.
    """
    rendered = prompt.render(model, before=_PLACE)
    head, found, tail = rendered.partition(_PLACE)
    if not found:  # the template changes the text: padding goes before all of it
        head, tail = "", prompt.render(model)
    before = model.tokenize(head, add_special=True, parse_special=True)
    after = model.tokenize("\n\n" + tail, add_special=False, parse_special=True)
    room = n_tokens - len(before) - len(after)
    if room < 1:
        raise UsageError(
            f"{n_tokens} tokens are too few for a {prompt.kind} prompt, which has "
            f"{len(before) + len(after)} itself; ask for longer ones"
        )
    special = len(special_prefix(model))
    return before + text.prompt(room + special, repeat)[special:] + after


class Prompts:
    """The prompts of a matrix, by class.

    Prompts of the classes "text" and "source" are text, which the model continues. The other
    classes ask the questions of :mod:`.promptset` in a chat, with text before them to reach the
    length; the demo model has questions of its own.

    Args:
        model: tokenizes the text.
        texts: the text of every class; None: docstrings, or sources for code.
        output_mode: "text": see above. "code": a chat that shows the text and asks for long code;
            the template's tokens count as part of the prompt.
    """

    def __init__(
        self, model: Model, texts: list[str] | None = None, output_mode: str = "text"
    ) -> None:
        self._model, self._texts, self._mode = model, texts, output_mode
        self._opened: dict[str, tuple[Workload, list[Prompt]]] = {}

    def prompt(self, prompt_class: str, n_tokens: int, repeat: int) -> list[int]:
        """Exactly `n_tokens` token ids; every repeat has another text, and another question.

        Raises:
            UsageError: no text, too few tokens, or no chat template.
        """
        if prompt_class not in self._opened:
            self._opened[prompt_class] = self._open(prompt_class)
        text, questions = self._opened[prompt_class]
        if not questions:
            return text.prompt(n_tokens, repeat)
        question = questions[repeat % len(questions)]
        return padded_tokens(self._model, question, n_tokens, text, repeat)

    def _open(self, prompt_class: str) -> tuple[Workload, list[Prompt]]:
        """The text and the questions of a class; without questions the text is continued."""
        usual = stdlib_texts if prompt_class in ("code", "source") else docstrings
        texts = usual() if self._texts is None else self._texts
        before, after, questions = list[int](), list[int](), list[Prompt]()
        if self._mode == "code":
            before, after = self._chat()
        elif prompt_class in CLASSES:
            questions = prompts_for(self._model.path, [prompt_class])
        return Workload(self._model, texts, before=before, after=after), questions

    def _chat(self) -> tuple[list[int], list[int]]:
        """The tokens that the chat template puts before and after the text."""
        message = {"role": "user", "content": _PLACE + CODE_REQUEST}
        before, place, after = self._model.apply_chat_template([message]).partition(_PLACE)
        if not place:
            raise UsageError(
                "the chat template of this model changes the text; use --output-mode text"
            )
        tokenize = partial(self._model.tokenize, add_special=False, parse_special=True)
        return tokenize(before), tokenize(after)
