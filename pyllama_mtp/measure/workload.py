"""Prompts of an exact number of tokens, cut from real text, another text for every repeat.

On random tokens the acceptance of drafts would mean nothing. The text is a file of the user's or,
by default, that of the interpreter's standard library, which is always there and the same on every
machine with the same Python.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pyllama_mtp.errors import UsageError

if TYPE_CHECKING:
    from pyllama_mtp import Model

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
    for source in stdlib_texts():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other Python versions deprecate other syntax
            nodes = ast.walk(ast.parse(source))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
        found = [text for text in texts if text and len(text) >= _LEAST_DOCSTRING]
        if found:
            yield "\n\n".join(found) + "\n\n"
    yield from stdlib_texts()


def read_text(path: str | os.PathLike[str], what: str = "prompt") -> str:
    """A file as text; `what` names it in the error.

    Raises:
        UsageError: no such file, not UTF-8 (the message gives the byte offset), or empty.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the {what} file {path}: {error.strerror}") from None
    return decode_text(data, f"the {what} file {path}")


def decode_text(data: bytes, source: str) -> str:
    """Bytes as text; `source` names them in the error.

    Raises:
        UsageError: not UTF-8, or nothing but white space.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert it first, for example with iconv -t UTF-8"
        ) from None
    if not text.strip():
        raise UsageError(f"{source} is empty; a prompt needs at least one token of text")
    return text


class Workload:
    """Cuts prompts out of one long, endless stream of tokens.

    Repeat r of an n-token prompt follows repeat r - 1 in the stream, so that texts overlap only
    where there is too little text; no two repeats begin at the same token.

    Args:
        model: tokenizes the text.
        texts: the text, document by document; None takes the standard library's sources.
        before, after: tokens around the text of every prompt, which count as part of it.
    """

    def __init__(
        self,
        model: Model,
        texts: Iterable[str] | None = None,
        *,
        before: list[int] | None = None,
        after: list[int] | None = None,
    ) -> None:
        self._model = model
        self._texts = iter(stdlib_texts() if texts is None else texts)
        self._tokens: list[int] = []
        self._prefix = special_prefix(model) + (before or [])
        self._suffix = after or []

    def prompt(self, n_tokens: int, repeat: int = 0) -> list[int]:
        """Exactly `n_tokens` token ids, a leading BOS of the model included.

        Raises:
            UsageError: there is no text at all, or `n_tokens` leaves no room for any.
        """
        around = len(self._prefix) + len(self._suffix)
        n_text = n_tokens - around
        if n_text < 1:
            raise UsageError(
                f"a prompt of {n_tokens} tokens is too short; give at least {around + 1}"
            )
        start = self._start(n_text, repeat)
        self._fill(start + n_text)
        size = len(self._tokens)
        text = [self._tokens[(start + i) % size] for i in range(n_text)]
        return self._prefix + text + self._suffix

    def _start(self, n_text: int, repeat: int) -> int:
        """The place in the stream at which a repeat begins."""
        taken: set[int] = set()
        start = 0
        for number in range(repeat + 1):
            start = number * n_text
            self._fill(start + n_text)
            size = len(self._tokens)
            while start % size in taken and len(taken) < size:
                start += 1
            taken.add(start % size)
        return start

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


def special_prefix(model: Model) -> list[int]:
    """The tokens that the model wants before any text (BOS); usually none for Qwen."""
    plain = model.tokenize("a", add_special=False)
    full = model.tokenize("a", add_special=True)
    return full[: len(full) - len(plain)] if full[-len(plain) :] == plain else []
