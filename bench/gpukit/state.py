"""The work folder: what is done, by unit, so that a step that was cut off goes on where it was.

``state.json`` holds, for every unit that ran, its status (done, cut or failed), seconds over all
its attempts, date, and command. It is rewritten in one step after every unit. A folder is for real
runs or for dry runs, never for both, so that figures of a dry run cannot get among measured ones.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

DONE, CUT, FAILED = "done", "cut", "failed"


class RunbookError(Exception):
    """Something that the user can mend; the message says what."""


@dataclass
class Record:
    """What is known of a unit that ran."""

    status: str
    seconds: float = 0.0
    attempts: int = 0
    date: str = ""
    command: str = ""
    message: str = ""


@dataclass
class Work:
    """A work folder and its state.

    Attributes:
        facts: what steps found out and later ones need (GPU, driver), ready for JSON.
    """

    folder: Path
    dry_run: bool
    units: dict[str, Record] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, dry_run: bool) -> Work:
        """The state in `folder`, or a new one.

        Raises:
            RunbookError: the folder is of the other kind, or its state cannot be read.
        """
        folder = folder.resolve()
        path = folder / "state.json"
        try:
            known = json.loads(path.read_text()) if path.exists() else None
            if known is None:
                work = cls(folder, dry_run)
                work.save()
                return work
            units = {name: Record(**record) for name, record in known["units"].items()}
            work = cls(folder, bool(known["dry_run"]), units, known["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunbookError(
                f"the state in {path} cannot be used ({error}); choose another --work folder, or "
                "remove this one"
            ) from error
        if work.dry_run != dry_run:
            kinds = "a dry run", "a real run"
            was, now = kinds if work.dry_run else kinds[::-1]
            raise RunbookError(
                f"{folder} holds {was}; {now} needs a --work folder of its own, so that their "
                "figures stay apart"
            )
        return work

    def save(self) -> None:
        """Write the state in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "state.json"
        document = {
            "dry_run": self.dry_run,
            "facts": self.facts,
            "units": {name: asdict(record) for name, record in self.units.items()},
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)

    def is_done(self, unit: str) -> bool:
        """Whether a unit is finished."""
        return unit in self.units and self.units[unit].status == DONE

    def note(
        self,
        unit: str,
        status: str,
        seconds: float,
        command: Sequence[str] = (),
        message: str = "",
    ) -> None:
        """Remember how an attempt at a unit ended."""
        record = self.units.setdefault(unit, Record(status))
        record.status, record.message = status, message
        record.seconds += seconds
        record.attempts += 1
        record.date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        record.command = shlex.join(_short(word) for word in command)
        self.save()

    def log(self, unit: str) -> Path:
        """Where the output of a unit goes."""
        return self.folder / "logs" / (unit.replace(" ", "-").replace("/", "-") + ".log")


def _short(word: str) -> str:
    """A word of a command without the folders of this machine."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if "/" in value else word
