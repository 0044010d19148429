"""Files of measurements: reading them into cells, and appending to them so that nothing is lost.

recordtypes.py describes the lines.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import append, write_error
from pyllama_mtp.measure import acceptance_record, recordtypes
from pyllama_mtp.measure.cells import DRAFT_MTP, NO_MTP, SCHEMA, Cell
from pyllama_mtp.measure.recordtypes import checked

#: The beginning of every line; a last line that begins otherwise is not ours and never cut off.
_BEGINNING = b'{"schema": 2, "kind": "'
Record = dict[str, Any]


def to_line(record: Record) -> bytes:
    """A record as one line, with its line break."""
    text = json.dumps({"schema": SCHEMA, **record}, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def cell_key(record: Record) -> str:
    """The same for all records of one cell of a run, and for no others."""
    return json.dumps([record["cell"], record["settings"]], sort_keys=True)


# -- records to cells ------------------------------------------------------------------------------


@dataclass
class Run:
    """One run: its header, and its cells by key in the order of the file.

    Attributes:
        measured: (key of the cell, number of the repeat) of every sample.
    """

    header: Record
    cells: dict[str, Cell] = field(default_factory=dict)
    measured: set[tuple[str, int]] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The id of the run."""
        return str(self.header["run"])

    def add(self, line: recordtypes.OfCell, key: str) -> None:
        """Take the next line of the cell with this key.

        Raises:
            UsageError: a sample twice, or of a build that the header does not name.
        """
        if key not in self.cells:
            self.cells[key] = self._cell(line)
        cell = self.cells[key]
        cell.time = line.time
        if isinstance(line, recordtypes.Profile):
            cell.profile = msgspec.to_builtins(line.profile)
        elif isinstance(line, recordtypes.Skipped):
            cell.skipped = line.reason
        elif isinstance(line, recordtypes.Generation):
            if (key, line.repeat) in self.measured:
                raise UsageError(f"repeat {line.repeat} of this cell is there already")
            self.measured.add((key, line.repeat))
            cell.skipped = None  # a resumed run could measure the cell
            cell.samples.append(line.sample)
            cell.repeats.append(line.repeat)
            cell.memory = line.memory

    def _cell(self, line: recordtypes.OfCell) -> Cell:
        header, cell = self.header, line.cell
        build = header["builds"].get(cell.build)
        if build is None:
            raise UsageError(f"its run has no build {cell.build!r}")
        settings = {**header["settings"], **line.settings}
        rates = settings.get("synthetic_acceptance")
        identity = msgspec.structs.asdict(cell)
        del identity["build"]
        return Cell(
            model=header["model"]["name"],
            mode=DRAFT_MTP if cell.n_max else NO_MTP,
            repeat=header["plan"]["repeat"],
            synthetic_acceptance=list(rates) if rates else None,
            settings={**settings, "sampling": header["sampling"]},
            machine=header["machine"],
            slow_types=header.get("slow_types", {}),
            run=self.id,
            **{name: build[name] for name in recordtypes.Build.__struct_fields__},
            **identity,
        )


@dataclass
class Records:
    """The runs of a file, or the results of a run so far.

    Attributes:
        end: bytes up to the end of the last whole line.
        unclosed: that line has no line break.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    end: int = 0
    unclosed: bool = False

    @property
    def cells(self) -> list[Cell]:
        """All cells with their figures."""
        found = [cell for run in self.runs.values() for cell in run.cells.values()]
        for cell in found:
            cell.summarize()
        return found

    def add(self, record: Record) -> None:
        """Take the next record.

        Raises:
            UsageError: it does not fit the schema, or the records before it.
        """
        line: recordtypes.Line = checked(
            recordtypes.Line, {"schema": SCHEMA, **record}, "a record of a matrix"
        )
        run = self.runs.get(line.run)
        if isinstance(line, recordtypes.Run):
            if run is not None:
                raise UsageError(f"run {line.run} has begun already")
            self.runs[line.run] = Run(record)
        elif run is None:
            raise UsageError(f"run {line.run} has not begun")
        elif not isinstance(line, recordtypes.Dropped):
            run.add(line, cell_key(record))


# -- reading ---------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> Records:
    """Read a file. An unfinished last line, from a program that was killed, is left out.

    Raises:
        UsageError: the file cannot be read, or a line is damaged, of an unknown schema or does not
            fit; the message begins with "FILE, line N:".
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    found, at = Records(), 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        closed = line.endswith(b"\n")
        try:
            if line.strip():
                _take(found, line)
        except UsageError as error:
            if not closed and _BEGINNING.startswith(line[: len(_BEGINNING)]):
                break
            raise UsageError(f"{path}, line {number}: {error}") from None
        at += len(line)
        found.end, found.unclosed = at, not closed
    return found


def _take(found: Records, line: bytes) -> None:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"damaged, not a line of JSON ({error})") from None
    given: dict[str, Any] = record if isinstance(record, dict) else {}
    if given.get("kind") in acceptance_record.KINDS:
        raise UsageError(
            "a record of acceptance (of 'pyllama-mtp accept'), not of a matrix; "
            "'pyllama-mtp accept --read' shows such a file"
        )
    if "schema" not in given:
        raise UsageError("not a record of a matrix: no object with a schema")
    if given["schema"] != SCHEMA:
        raise UsageError(
            f"schema {given['schema']!r} is unknown; this version reads {SCHEMA}. "
            "A later version of pyllama-mtp wrote it"
        )
    found.add(record)


# -- writing ---------------------------------------------------------------------------------------


#: The command line's advice where a file cannot be appended to.
NAME_ANOTHER = "name another file with --output"


def check_output(path: str | os.PathLike[str], advice: str = NAME_ANOTHER) -> None:
    """Refuse, before anything is measured, a file that records cannot be appended to.

    Args:
        advice: what the message says to do.

    Raises:
        UsageError: the file cannot be written, or it exists and holds something else.
    """
    path = Path(path)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
            return
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; {advice}") from None
    try:
        read_file(path)
    except UsageError as error:
        raise UsageError(
            f"{error}\n{path} exists and does not hold measurements that can be appended to; "
            f"{advice}"
        ) from None


class Writer:
    """Appends records to a file; each is on the disk when :meth:`write` returns.

    A context manager. The first record makes the file, with the header, if there is one, before it.
    A line that an earlier run left unfinished is cut off. From then on no other writer can open the
    file. `advice`: as of :func:`check_output`.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: Record | None, advice: str = NAME_ANOTHER
    ) -> None:
        self._path, self._header, self._advice = Path(path), header, advice
        self._file: int | None = None

    def write(self, record: Record) -> None:
        """Append a record.

        Raises:
            UsageError: another process is writing to this file, or it was damaged meanwhile.
            DiskFullError: there is no room for the record; the file is as it was.
        """
        if self._file is None:
            self._file = self._open()
        line = to_line(record)
        if self._header is not None:
            line = to_line(self._header) + line
        append(self._file, line, self._path)
        self._header = None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise write_error(error, self._path) from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another process is measuring into {self._path}; wait for it, or "
                    f"{self._advice}"
                ) from None
            except OSError:
                pass  # a file system without locks
            found = read_file(self._path)
            os.ftruncate(file, found.end)
            if found.unclosed:
                append(file, b"\n", self._path)
        except BaseException:
            os.close(file)
            raise
        return file

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


# -- going on with a run ---------------------------------------------------------------------------

#: Parts of a header that must be the same, and the keys that count of others; None: all keys.
_COMPARED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("model", "builds", "plan", "settings", "sampling")),
    "machine": ("cpu", "cores", "devices", "arch"),
}
#: Keys of a header that must be the same; it has them only if they were given.
_GIVEN = ("workers", "tensor_split", "options")


def last_run(path: str | os.PathLike[str], model: str) -> Run | None:
    """The last run of a file with a model of this name, or else the last one; None: no run yet."""
    runs = [*read_file(path).runs.values()] if Path(path).exists() else []
    own = [run for run in runs if run.header["model"]["name"] == model]
    return next(reversed(own or runs), None)


def run_to_resume(path: str | os.PathLike[str], header: Record) -> Run | None:
    """The last run of a file with the model, to go on with; None: no run yet.

    Raises:
        UsageError: it measured something else; the message names the first field that differs.
    """
    run = last_run(path, header["model"]["name"])
    if run is None:
        return None
    parts = [(part, run.header[part], header[part], keys) for part, keys in _COMPARED.items()]
    for part, old, new, keys in [*parts, ("run", run.header, header, _GIVEN)]:
        for name in keys or dict.fromkeys((*old, *new)):
            if (was := old.get(name)) != (now := new.get(name)):
                raise UsageError(
                    f"--resume: {part}.{name} was {was!r} in the last run of {path} and is {now!r} "
                    "now; give the options of that run, or begin a new one without --resume"
                )
    return run


def read_cells(path: str | os.PathLike[str]) -> list[Cell]:
    """The cells of :func:`read_file`, run by run."""
    return read_file(path).cells
