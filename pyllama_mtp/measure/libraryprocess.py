"""A process that loads another library and the same model, and measures on request.

A process can load one library only. Between two requests the process waits at a pipe and computes
nothing. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from functools import partialmethod
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any

from pyllama_mtp import errors
from pyllama_mtp.errors import PyllamaMtpError, UsageError
from pyllama_mtp.measure.peers.process import end_with_parent, last_words

if TYPE_CHECKING:
    from pyllama_mtp.llama.native import Library
    from pyllama_mtp.measure.header import Build

_CLOSING_S = 3.0

#: Switches of the CPU patches, for a whole process: `set_NAME` of :class:`.Library`.
CPU_SWITCHES = ("small_batch", "large_batch", "direct_states", "few_rows_attention")


def split_library(text: str) -> tuple[str, dict[str, str]]:
    """Split "patched:small_batch=off:GOMP_SPINCOUNT=9" into the library and what its process is
    given: CPU_SWITCHES, and environment variables in capitals.

    Raises:
        UsageError: a part that is neither.
    """
    library, *words = text.split(":")
    given = {}
    for word in words:
        name, _, value = word.partition("=")
        if not (name.isupper() and value) and not (name in CPU_SWITCHES and value in ("on", "off")):
            raise UsageError(
                f"{word!r} is nothing that a process can be given: a VARIABLE=VALUE of the "
                f"environment, or on or off for {', '.join(CPU_SWITCHES)}, as in small_batch=off"
            )
        given[name] = value
    return library, given


def load_library(text: str) -> Library:
    """Load a library into this process, with its switches and environment variables."""
    from pyllama_mtp.llama import native

    name, given = split_library(text)
    switches = {name: given.pop(name) for name in CPU_SWITCHES if name in given}
    os.environ.update(given)
    library = native.load(name)
    for switch, value in switches.items():
        if not getattr(library, f"set_{switch}")(value == "on"):
            raise UsageError(f"the CPU backend of this library has no {switch}")
    return library


class LibraryProcess:
    """A :class:`~pyllama_mtp.measure.runner.Runner` in a process of its own, with its methods.

    Every method raises what the runner raises, and PyllamaMtpError if the process has died, with
    the last lines that it wrote to stderr.

    Args:
        library: "upstream", "patched" or a folder, with switches: see :func:`split_library`.
        label: name of the library in messages and records.
        model: path of the model file.
        options: arguments of `Model`: n_gpu_layers, whether to load the MTP head, ...
    """

    def __init__(self, library: str, label: str, model: str, **options: Any) -> None:
        self._label = label
        self._errors: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with it
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, self._errors.name, library, label, model, options)
        self._process = context.Process(target=serve, args=given)
        self._process.start()
        theirs.close()
        self._waiting = True  # for the answer to the loading

    def loaded(self) -> Build:
        """Wait until library and model are loaded: the build of the library."""
        build: Build = self._answer()
        return build

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._waiting = True
        with contextlib.suppress(BrokenPipeError):  # _answer() will raise
            self._pipe.send((method, arguments))
        return self._answer()

    check = partialmethod(_ask, "check")
    begin = partialmethod(_ask, "begin")
    read = partialmethod(_ask, "read")
    advance = partialmethod(_ask, "advance")
    finish = partialmethod(_ask, "finish")
    profile = partialmethod(_ask, "profile")

    def drop(self) -> None:
        """Close the open sessions; a process that was interrupted in a request is ended."""
        if self._waiting or not self._process.is_alive():
            self._process.kill()
        else:
            self._ask("drop")

    def close(self) -> None:
        """End the process, at once if it has not answered the last request."""
        self._pipe.close()
        if self._waiting:
            self._process.kill()
        self._process.join(_CLOSING_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._errors.close()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_CLOSING_S)
            with open(self._errors.name, "rb") as file:  # noqa: PTH123 - it has a name of its own
                said = last_words(file.read().decode(errors="replace"))
            raise PyllamaMtpError(
                f"the process with the {self._label} library has ended "
                f"({self._process.exitcode}): {said}"
            ) from None
        self._waiting = False
        if kind == "done":
            return value
        # An error that takes more than a message becomes its base class.
        found = {one.__name__: one for one in (errors.UsageError, errors.InsufficientMemoryError)}
        raise found.get(kind, PyllamaMtpError)(f"{self._label}: {value}")


# -- the process itself ----------------------------------------------------------------------------


def serve(
    pipe: Connection, stderr: str, library: str, label: str, path: str, options: dict[str, Any]
) -> None:
    """The target of the process: load, then answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent takes Ctrl-C, and ends this process
    end_with_parent()
    with open(stderr, "ab", buffering=0) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)

    from pyllama_mtp import Model
    from pyllama_mtp.measure.header import Build
    from pyllama_mtp.measure.runner import Runner

    try:
        loaded = load_library(library)
        with Model(path, **options) as model:
            runner = Runner(model)
            build = Build.of(loaded, options.get("n_gpu_layers", -1), label, model.rpc_servers)
            pipe.send(("done", build))
            while True:
                try:
                    method, arguments = pipe.recv()
                except EOFError:
                    return runner.drop()
                try:
                    pipe.send(("done", getattr(runner, method)(*arguments)))
                except PyllamaMtpError as error:
                    pipe.send((type(error).__name__, str(error)))
    except PyllamaMtpError as error:
        pipe.send((type(error).__name__, str(error)))
