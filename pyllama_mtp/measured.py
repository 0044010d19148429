"""What was measured on this machine, kept in the user's cache folder for later sessions.

The folder is pyllama-mtp/measured in XDG_CACHE_HOME, or in ~/.cache. It may be deleted at any time:
a file that is not there, damaged or cannot be written only means that a session measures again.
"""

from __future__ import annotations

import hashlib
import logging
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


class Measured:
    """The file of one figure, or some, for a context as it is."""

    def __init__(self, context: Context, *more: object) -> None:
        """The file's name is a hash of all that the figures depend on: the model's file by name,
        size and time, how it is loaded, the context's options but its length, the library, the
        machine, and `more`."""
        model, options = context.model, context.options
        file = [str(model.path.resolve())]
        with suppress(OSError):
            stat = model.path.stat()
            file += [str(stat.st_size), str(stat.st_mtime_ns)]
        same = replace(options, n_ctx=0, n_batch=0, n_outputs_max=0, trace=False, times=None)
        key = _FORMAT, file, model.options, same, context.library.stamp, describe_machine(), more
        self._name = hashlib.sha256(repr(key).encode()).hexdigest()[:32] + ".json"

    @property
    def path(self) -> Path:
        """The file. Raises UsageError: there is no folder for it."""
        return cache_folder() / "measured" / self._name

    def load(self, kind: type[Value] | Any) -> Value | None:
        """What was stored, of this type; None: nothing that can be read."""
        with suppress(OSError, msgspec.DecodeError, PyllamaMtpError):
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
