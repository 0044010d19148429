"""The file of a matrix: its lines, schema 2; reading it into cells, and appending to it so that
nothing is lost.

A file is JSON lines in UTF-8. A run writes a line "run"; a line "sample" for every generation, as
soon as it is finished; and "skipped" for every cell that cannot be measured. All lines of a run
have its id in `run`. A file may hold several runs, and a run may go on later, at the end of the
same file. Lines are never changed or removed. A cell is all samples of a run with the same `cell`;
its figures are computed when the file is read. Older files have the switches of MTP among the
`settings` of a line only, not among the axes of its `cell`.

Speeds are tokens per second, times are seconds of wall clock. A last line without a line break was
being written when the program was killed; it counts only if it is whole. Readers ignore keys that
they do not know. The number of the schema grows when the meaning of a key changes.
``msgspec.json.schema(records.Line)`` is a JSON Schema of a line.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import append, write_error
from pyllama_mtp.measure.figures import OURS, SCHEMA, Cell, Sample
from pyllama_mtp.measure.plan import DRAFT_AXES, IMAGE, Count, Key, Plan

if TYPE_CHECKING:
    from pyllama_mtp.llama.native import Device, Library


class ModelFile(Struct):
    """`name`: without its folder. `sha256_ends`: SHA-256 of the file's first MiB and its last MiB,
    which tells versions of a model apart without reading all of it."""

    name: str
    bytes: int | None = None
    sha256_ends: str | None = None


class Build(Struct, frozen=True):
    """A program that measures.

    Attributes:
        program: "pyllama-mtp", or the name of another program, such as "llama-server".
        variant: "patched", "upstream", or the name of a folder; the version of another program, ""
            where it has none.
        upstream_commit: of llama.cpp.
        series: SHA-256 of the patch series; "" without patches.
        backend: "CPU", "CUDA", "RPC*2" (two workers), "RPC*1+CUDA", ...
    """

    program: str
    variant: str
    upstream_commit: str
    series: str
    backend: str

    @classmethod
    def of(
        cls, library: Library, n_gpu_layers: int, label: str = "", workers: Sequence[str] = ()
    ) -> Build:
        """The build of a loaded library; without GPU layers the backend is the CPU.

        Args:
            label: name of the variant; "": as its stamp says.
            workers: addresses of the model's workers; the backend says how many.
        """
        stamp, devices = library.stamp, accelerators(library, n_gpu_layers)
        names = sorted({device.name.rstrip("0123456789") for device in devices})
        if workers and n_gpu_layers:
            names.insert(0, f"RPC*{len(workers)}")
        return cls(
            OURS,
            label or library.variant,
            str(stamp.get("upstream_commit", "")),
            str(stamp.get("series", "")),
            "+".join(names) or "CPU",
        )


def accelerators(library: Library, n_gpu_layers: int) -> list[Device]:
    """The devices that hold layers of the model."""
    return [device for device in library.devices() if n_gpu_layers and "gpu" in device.kind]


class _Line(Struct, kw_only=True, tag_field="kind"):
    """`run`: random and unique. `time`: UTC, ISO 8601 with offset."""

    schema: Literal[2] = SCHEMA
    run: Annotated[str, Meta(min_length=1)]
    time: str


class RunHeader(_Line, tag="run"):
    """The first line of a run: everything that its samples have in common.

    Attributes:
        version: of the package.
        command: as it was typed; of paths the last part only.
        builds: by the name that cells give as `build`.
        machine: cpu, cores (that the process may use), memory_bytes, devices, os, arch, python;
            nothing that identifies the machine.
        settings: fields of :class:`.Settings` that all cells share; a cell's own replace them.
        sampling: fields of :class:`.Sampling`.
        slow_types: tensor types without a fast path for a few rows on the CPU: their shares, 0 to
            1, of what a plain decode step reads.
        workers: addresses (HOST:PORT) of the RPC workers that held parts of the model.
        tensor_split: parts of the model that each device was to get; not given: by free memory.
        options: attributes of :class:`.ModelOptions` that were given; of adapters the names and
            scales.
        loaded: `description`, `bytes` and `n_params` of the model, as llama-bench prints them.
    """

    version: str
    command: list[str]
    model: ModelFile
    builds: dict[str, Build]
    machine: dict[str, Any]
    plan: Plan
    settings: dict[str, Any]
    sampling: dict[str, Any]
    slow_types: dict[str, float] = {}
    workers: list[str] = []
    tensor_split: list[float] = []
    options: dict[str, Any] = {}
    loaded: dict[str, Any] = {}


class OfCell(_Line):
    """`settings`: this cell's own fields of :class:`.Settings`: n_ctx, draft_n_max,
    synthetic_acceptance, the switches of MTP, and what the plan varies."""

    cell: Key
    settings: dict[str, Any]


class Measured(OfCell, tag="sample"):
    """A measured generation: a fresh session, a warm-up and a reset, a prompt, its continuation.

    Attributes:
        repeat: its number, from 0. Samples of the same repeat, size and class had the same text and
            were measured next to each other in time: pair them for ratios.
        memory: bytes in use, by what they are for.
    """

    repeat: Count
    sample: Sample
    memory: dict[str, int] = {}


class Skipped(OfCell, tag="skipped"):
    """A cell that is not measured, and why: a prompt beyond the context, not enough memory, or a
    program that is not installed or failed. A later sample of the cell takes this back."""

    reason: str


#: Lines of older files: which groups a budget left out, where the time of a prompt went.
_OLDER = ("dropped", "profile")
Line = RunHeader | Measured | Skipped


def as_read(value: Any) -> Any:
    """The value as a reader of JSON sees it: lists for tuples, dicts for Structs."""
    return msgspec.json.decode(msgspec.json.encode(value))


def now() -> str:
    """The time as records give it: UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def checked(kind: Any, value: object, what: str) -> Any:
    """`value`, JSON's bytes or what they stand for, as a `kind`; `what` it is, for the message.

    Raises:
        UsageError: `value` does not fit; the message says where, what is expected and what is
            there.
    """
    try:
        if isinstance(value, bytes):
            return msgspec.json.decode(value, type=kind)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"not {what}: {error}") from None


# -- lines to cells --------------------------------------------------------------------------------


@dataclass
class Run:
    """One run: its header, and its cells by key in the order of the file.

    Attributes:
        measured: (key of the cell, number of the repeat) of every sample.
    """

    header: RunHeader
    cells: dict[Key, Cell] = field(default_factory=dict)
    measured: set[tuple[Key, int]] = field(default_factory=set)

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.header.run

    def add(self, line: Measured | Skipped) -> None:
        """Take the next line of a cell.

        Raises:
            UsageError: a sample twice, or of a build that the header does not name.
        """
        key = self._key(line)
        if key not in self.cells:
            self.cells[key] = self._cell(key, line.settings)
        cell = self.cells[key]
        cell.time = line.time
        if isinstance(line, Skipped):
            cell.skipped = line.reason
        else:
            if (key, line.repeat) in self.measured:
                raise UsageError(f"repeat {line.repeat} of this cell is there already")
            self.measured.add((key, line.repeat))
            cell.skipped = None  # a resumed run could measure the cell
            cell.samples.append(line.sample)
            cell.repeats.append(line.repeat)
            cell.memory = line.memory

    def _key(self, line: OfCell) -> Key:
        """The cell of a line; in older files its switches are among the settings only."""
        varied = [name for name in DRAFT_AXES if name in self.header.plan.axes]
        if not (varied and line.cell.n_max) or line.cell.build in self.header.plan.peers:
            return line.cell
        switches = {name: line.settings[name] for name in varied if name in line.settings}
        return msgspec.structs.replace(line.cell, axes={**switches, **line.cell.axes})

    def _cell(self, key: Key, settings: dict[str, Any]) -> Cell:
        header, build = self.header, self.header.builds.get(key.build)
        if build is None:
            raise UsageError(f"its run has no build {key.build!r}")
        settings = {**header.settings, **settings, "sampling": header.sampling}
        rates = settings.get("synthetic_acceptance")
        return Cell(
            model=header.model.name,
            key=key,
            repeat=header.plan.repeats_of(*key.kind),
            synthetic_acceptance=list(rates) if rates else None,
            settings=settings,
            machine=header.machine,
            slow_types=header.slow_types,
            image=header.plan.image if key.prompt_class == IMAGE else None,
            run=self.id,
            loaded=header.loaded,
            **msgspec.structs.asdict(build),
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
        """All cells, run by run."""
        return [cell for run in self.runs.values() for cell in run.cells.values()]

    @property
    def commands(self) -> dict[str, str]:
        """The command of every run by the run's id, as it was typed (paths without folders)."""
        return {run.id: shlex.join(run.header.command) for run in self.runs.values()}

    def add(self, line: Line) -> None:
        """Take the next line. Raises UsageError: it does not fit those before it."""
        run = self.runs.get(line.run)
        if isinstance(line, RunHeader):
            if run is not None:
                raise UsageError(f"run {line.run} has begun already")
            self.runs[line.run] = Run(line)
        elif run is None:
            raise UsageError(f"run {line.run} has not begun")
        else:
            run.add(line)


# -- reading ---------------------------------------------------------------------------------------

#: Beginnings of lines; a last line that begins otherwise is not ours and never cut off.
_BEGINNINGS = (b'{"kind":"', b'{"schema": 2, "kind": "')


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
    records, at = Records(), 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        closed = line.endswith(b"\n")
        try:
            if line.strip() and (decoded := _decoded(line)):
                records.add(decoded)
        except UsageError as error:
            if not closed and any(start.startswith(line[: len(start)]) for start in _BEGINNINGS):
                break
            raise UsageError(f"{path}, line {number}: {error}") from None
        at += len(line)
        records.end, records.unclosed = at, not closed
    return records


def read_cells(path: str | os.PathLike[str]) -> list[Cell]:
    """The cells of :func:`read_file`, run by run."""
    return read_file(path).cells


def _decoded(line: bytes) -> Line | None:
    """The record; None for one that only older files have."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"damaged, not a line of JSON ({error})") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema is None:
        raise UsageError("not a record of a matrix: no object with a schema")
    if schema != SCHEMA:
        raise UsageError(
            f"schema {schema!r} is unknown; this version reads {SCHEMA}. "
            "A later version of pyllama-mtp wrote it"
        )
    if found.get("kind") in _OLDER:
        return None
    decoded: Line = checked(Line, found, "a record of a matrix")
    return decoded


# -- writing ---------------------------------------------------------------------------------------


def to_line(line: Line) -> bytes:
    """A record as one line, with its line break."""
    return msgspec.json.encode(line) + b"\n"


def check_output(path: str | os.PathLike[str]) -> None:
    """Refuse, before anything is measured, a file that records cannot be appended to.

    Raises:
        UsageError: the file cannot be written, another process is writing to it, or it exists and
            holds something else.
    """
    existed = Path(path).exists()
    with Writer(path, None) as writer:
        writer.open()
    if not existed:
        Path(path).unlink()


class Writer:
    """Appends records to a file; each is on the disk when :meth:`write` returns.

    A context manager. The first record makes the file, with the header, if there is one, before it.
    A line that an earlier run left unfinished is cut off. From then on no other writer can open the
    file.
    """

    def __init__(self, path: str | os.PathLike[str], header: RunHeader | None) -> None:
        self._path, self._header = Path(path), header
        self._file = -1

    def write(self, line: Line) -> None:
        """Append a record.

        Raises:
            UsageError: another process is writing to this file, or it was damaged meanwhile.
            DiskFullError: there is no room for the record; the file is as it was.
        """
        data = to_line(line)
        if self._header is not None:
            data = to_line(self._header) + data
        if self._file < 0:
            there = self.open()
            os.ftruncate(self._file, there.end)
            data = b"\n" * there.unclosed + data
        append(self._file, data, self._path)
        self._header = None

    def open(self) -> Records:
        """Open the file for this process alone; what it holds. Raises UsageError: see
        :func:`check_output`."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise write_error(error, self._path) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise UsageError(
                f"another process is measuring into {self._path}; wait for it, or name another file"
            ) from None
        except OSError:
            pass  # a file system without locks
        try:
            return read_file(self._path)
        except UsageError as error:
            self.__exit__()
            raise UsageError(f"{error}; name another file for measurements") from None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


# -- going on with a run ---------------------------------------------------------------------------

#: Parts of a header that must be the same, and the keys that count; None: all keys.
_COMPARED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("model", "builds", "plan", "settings", "sampling")),
    "machine": ("cpu", "cores", "devices", "arch"),
    "run": ("workers", "tensor_split", "options"),
}


def last_run(path: str | os.PathLike[str], model: str) -> Run | None:
    """The last run of a file with a model of this name; None: there is none.

    Raises:
        UsageError: the file cannot be read.
    """
    runs = read_file(path).runs.values()
    return next((run for run in reversed(runs) if run.header.model.name == model), None)


def refuse_another_run(run: Run, header: RunHeader) -> None:
    """Raises UsageError if a run measured something else than the run of this header would; the
    message names the first field that differs."""
    last, new_header = as_read(run.header), as_read(header)
    last["run"], new_header["run"] = last, new_header
    for part, keys in _COMPARED.items():
        old, new = last[part], new_header[part]
        for name in keys or dict.fromkeys((*old, *new)):
            if (was := old.get(name)) != (now := new.get(name)):
                raise UsageError(
                    f"--resume: {part}.{name} was {was!r} in the last run of the file and is "
                    f"{now!r} now; give the options of that run, or begin a new one without "
                    "--resume"
                )
