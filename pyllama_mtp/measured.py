"""What was measured on this machine, kept in the user's cache folder for later sessions.

The folder is pyllama-mtp/measured in XDG_CACHE_HOME, or in ~/.cache. It may be deleted at any time:
a file that is not there, damaged or cannot be written only means that a session measures again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import PyllamaMtpError
from .files import cache_folder, write_whole
from .llama.context import Context
from .machine import describe_machine

log = logging.getLogger("pyllama_mtp")
Value = TypeVar("Value")

#: Changes with the meaning of what is kept. And the most files: the oldest make way.
_FORMAT, MOST_FILES = 1, 200

#: Environment variables that ggml, its backends and OpenMP read.
VARIABLES = ("GGML_", "GOMP_", "OMP_", "KMP_", "CUDA_")


def _describe(file: Path) -> tuple[str, int, int]:
    """A file by its path, size and time; 0 and 0: it is gone."""
    with suppress(OSError):
        stat = file.stat()
        return str(file.resolve()), stat.st_size, stat.st_mtime_ns
    return str(file), 0, 0


class Measured:
    """The file of one figure, or some, for a context as it is."""

    def __init__(self, context: Context, *more: object) -> None:
        """The file's name is a hash of all that the figures depend on: the files of model and head
        by name, size and time, how they are loaded, the context's options but its length, the
        library with its switches and variables, the machine, the devices, and `more`."""
        model, options, library = context.model, context.options, context.library
        files = [_describe(Path(file)) for file in (model.path, model.info.head) if file]
        same = replace(options, n_ctx=0, n_batch=0, n_outputs_max=0, trace=False, times=None)
        variables = sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES))
        native = library.stamp, sorted(library.switches.items()), variables
        text, description = library.text, library.lib.ggml_backend_dev_description
        devices = [text(description(device)) for device in model.used_devices]
        key = _FORMAT, files, model.options, same, native, describe_machine(devices), more
        self._name = hashlib.sha256(repr(key).encode()).hexdigest()[:32] + ".json"

    @property
    def path(self) -> Path:
        """The file. Raises UsageError: there is no folder for it."""
        return cache_folder() / "measured" / self._name

    def load(self, kind: type[Value] | Any) -> Value | None:
        """What was stored, of this type; None: nothing that can be read."""
        with suppress(OSError, msgspec.DecodeError, RecursionError, PyllamaMtpError):
            value: Value = msgspec.json.decode(self.path.read_bytes(), type=kind)
            return value
        return None

    def store(self, value: object) -> None:
        """Keep it, as far as the folder can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, msgspec.json.encode(value))
            files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-MOST_FILES]:
                file.unlink(missing_ok=True)
        except (OSError, PyllamaMtpError) as error:
            log.info("what was measured is not kept: %s", error)

    def forget(self) -> None:
        """Have the next session measure again."""
        with suppress(OSError, PyllamaMtpError):
            self.path.unlink(missing_ok=True)
