"""A model file is loaded in a child process first, if loading it might end the interpreter.

Files of some architectures are checked in depth before the native code sees them. Of other files
only the header is checked, and upstream's loader, tokenizer and graphs may fail on the rest. So a
child process (:mod:`.trialchild`) loads the file, reads its vocabulary, and decodes a few tokens;
or it loads an image encoder, and encodes a few pictures. A child that crashes or hangs is an error
here. The file stays in the system's cache.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import child, errors
from ..errors import InsufficientMemoryError, LibraryError, ModelFileError
from ..machine import available_memory
from . import native

if TYPE_CHECKING:
    from ..models.modelinfo import GGUFInfo

#: Seconds that a child may take, and bytes of the file for which it gets a second more.
LEAST_S, BYTES_PER_S = 120.0, 20e6
#: Characters of the child's last words that are quoted.
_SAID = 400
#: What has passed; see :func:`_identity`.
_passed: set[tuple[Any, ...]] = set()
#: Whether this process is such a child.
is_child = False


def try_out(info: GGUFInfo, mtp: bool, no_alloc: bool = False) -> None:
    """Load a file in a child process, once per process unless the file changes.

    Args:
        info: the file, and the file of its MTP head, if that is another one.
        mtp: with its MTP head.
        no_alloc: without its weights: nothing is decoded. Also where only devices have room for
            the weights.

    Raises:
        ModelFileError: the child crashed or hangs, and its last words are quoted; or the child
            raised it.
        InsufficientMemoryError: the child had no memory.
        LibraryError: no child can be started.
    """
    key = _identity(info, mtp)
    no_alloc = no_alloc or info.weight_bytes > available_memory()
    if is_child or (*key, False) in _passed or (*key, no_alloc) in _passed:
        return
    arguments = {"mtp": mtp, "head": info.head or "none", "no_alloc": no_alloc}
    _ask({"path": info.path, "arguments": arguments}, info.path, info.size)
    _passed.add((*key, no_alloc))


def try_encoder(info: GGUFInfo, path: Path) -> None:
    """Load an image encoder for a model, and encode a few pictures, in a child process, once per
    process unless a file changes. For the errors see :func:`try_out`."""
    state = path.stat()
    key = (*_identity(info, False), str(path), state.st_size, state.st_mtime_ns)
    if is_child or key in _passed:
        return
    arguments = {"mtp": False, "head": "none", "no_alloc": True}
    request = {"path": info.path, "arguments": arguments, "encoder": str(path)}
    _ask(request, str(path), state.st_size)
    _passed.add(key)


def _ask(request: dict[str, Any], path: str, size: int) -> None:
    """Have a child process try what the request says. For the errors see :func:`try_out`.

    Args:
        path: the file that is tried; `size`: its bytes.
    """
    request |= {"library": str(native.load().folder)}
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                child.command("pyllama_mtp.trialchild:serve", request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=LEAST_S + size / BYTES_PER_S,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            )
            code, answer = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            code, answer = None, b""
        except OSError as reason:
            raise LibraryError(f"no process can be started to try {path}: {reason}") from None
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if code != 0:
        words = child.last_words("; ".join(dict.fromkeys(lines)), _SAID)
        raise ModelFileError(
            f"{path}: the process that tried to load it {_how_it_ended(code)}: "
            f"{words}. The file is damaged, or not for this llama.cpp",
            path,
        )
    _raise_what_was(json.loads(answer), path)


def _identity(info: GGUFInfo, mtp: bool) -> tuple[Any, ...]:
    """The files' paths, sizes and times."""
    files = dict.fromkeys([info.path, *(tensor.file for tensor in info.tensors)])
    states = ((path, Path(path).stat()) for path in files)
    return mtp, *((path, state.st_size, state.st_mtime_ns) for path, state in states)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "did not come to an end"
    if code < 0:
        return f"was ended ({signal.Signals(-code).name})"
    return f"failed ({code})"


def _raise_what_was(answer: dict[str, str], path: str) -> None:
    """Raises the error that the child has answered with, if any."""
    if not answer:
        return
    kind, message = getattr(errors, answer["error"]), answer["message"]
    if issubclass(kind, ModelFileError):
        raise kind(message, path)
    if issubclass(kind, InsufficientMemoryError | LibraryError):
        raise kind(message)
    raise ModelFileError(f"{path} cannot be used: {message}", path)
