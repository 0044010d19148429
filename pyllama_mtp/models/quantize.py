"""Quantize a model file as llama.cpp does: by the library's own ``llama_model_quantize()``.

A file type such as q4_k_m is a mixture: the library chooses a type for each tensor. It is called
twice: first for a dry run, whose choices are checked before anything is written, then to write. It
runs in a process of its own (:mod:`..quantizechild`), because it cannot be interrupted, and because
an assertion that fails on one of its threads ends the process.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from gguf import LlamaFileType

from pyllama_mtp import child
from pyllama_mtp.errors import DiskFullError, PyllamaMtpError, UsageError
from pyllama_mtp.files import check_room, check_target, complete
from pyllama_mtp.models.ggufheader import (
    FLOATS,
    NOT_WEIGHTS,
    TENSOR_TYPES,
    TensorEntry,
    read_header,
)
from pyllama_mtp.models.ggufinfo import validate_model_file
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.sidecar import NO_HEAD
from pyllama_mtp.settings import available_threads

#: Called with (bytes done, bytes in all), after every tensor or piece.
Progress = Callable[[int, int], None]

#: Numbers of the file types by llama-quantize's names. Q2_0 is in the pinned tree but not in every
#: release of the gguf package; NVFP4 files are not made by quantizing.
FILE_TYPES = {
    kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").lower(): int(kind)
    for kind in LlamaFileType
    if kind.name not in ("GUESSED", "MOSTLY_NVFP4")
} | {"q2_0": 41}
#: ggml's numbers of the types that matrices can have.
WEIGHT_TYPES = {
    name.lower(): number
    for number, (name, *_) in sorted(TENSOR_TYPES.items())
    if name not in NOT_WEIGHTS
}

_SIZES = {name: (n_elements, n_bytes) for name, n_elements, n_bytes in TENSOR_TYPES.values()}
_NUMBERS = {name: number for number, (name, *_) in TENSOR_TYPES.items()}
_WORTH_THREADS = 1 << 18  # bytes of rows; starting threads takes as long as converting fewer
_TENSOR = re.compile(r"\[ *\d+/ *\d+\] (\S+) +- \[.*\], type = +(\w+),")
_CHOSEN = re.compile(r"size = .*\((\w+)\)$")

log = logging.getLogger("pyllama_mtp.llama.native")


def quantize_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    file_type: str,
    *,
    head_type: str | None = None,
    requantize: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
    force: bool = False,
) -> Path:
    """Write `source` with its tensors quantized, and return the new file's path.

    The file appears under its name only when it is complete; until then it has another name beside
    it, and is removed on any failure, Ctrl-C included.

    Args:
        source: a model in F32, F16 or BF16; of one that is split, the first file.
        file_type: a key of :data:`FILE_TYPES`, e.g. ``q4_k_m``.
        head_type: a key of :data:`WEIGHT_TYPES`, for the matrices of the MTP block; None: as
            `file_type` has them.
        requantize: accept a quantized source, which loses more than quantizing once.
        n_threads: 0: one for each core.
        force: overwrite an existing file.

    Raises:
        UsageError: an unknown type, one that needs an importance matrix or does not fit the model,
            a quantized source, a target that exists, is the source, or cannot be written.
        ModelFileError: the source is no model that this package drives, or is damaged.
        DiskFullError: too little space before or while writing.
    """
    check_types(file_type, head_type)
    info = validate_model_file(source, head_type is not None, NO_HEAD)
    target = Path(target)
    check_target(target, force, source)
    types = choose_types(info, file_type, head_type)
    _check_requantizing(info, types, requantize)
    needed = sum(stored_bytes(t.shape, types[t.name]) for t in info.tensors)
    check_room(target, needed)
    with complete(target) as part:
        request = {**_request(info, file_type, head_type), "target": os.fspath(part)}
        request |= {"requantize": requantize, "n_threads": n_threads}
        try:
            _write(info, request, progress)
            read_header(part)  # which is as long as its tensors say
        except PyllamaMtpError as error:
            if "iostream" in str(error):  # all that the library says of a failed write
                raise DiskFullError(
                    f"writing {target} ({needed / 1e9:.2f} GB) failed: no space, a quota or a size "
                    "limit; the partial file was removed"
                ) from error
            raise
    return target


def check_types(file_type: str, head_type: str | None) -> None:
    """Refuse unknown types, and types that do not go together.

    Raises:
        UsageError: the message lists the known types.
    """
    for what, name, known in (("", file_type, FILE_TYPES), ("head ", head_type, WEIGHT_TYPES)):
        if name is not None and name not in known:
            raise UsageError(f"unknown {what}type {name!r}; allowed: {', '.join(known)}")
    if head_type is not None and file_type.upper() in FLOATS:
        raise UsageError(
            f"a head type goes with a quantized type, not with {file_type}: the library leaves the "
            "head as the other tensors"
        )


def choose_types(info: GGUFInfo, file_type: str, head_type: str | None) -> dict[str, str]:
    """The type that the library would store each tensor in, by the tensor's name.

    Raises:
        UsageError: the library refuses, or needs an importance matrix, which it does not get here.
    """
    request = {**_request(info, file_type, head_type), "target": "", "dry_run": True}
    types, name = {}, ""
    needs_imatrix = False
    with closing(_library(request)) as lines:
        for line in lines:
            needs_imatrix |= "will require an imatrix" in line
            if said := _TENSOR.search(line):
                name, types[said[1]] = said[1], said[2].upper()
            elif name and (said := _CHOSEN.search(line)):
                types[name] = said[1].upper()
    if needs_imatrix:
        raise UsageError(
            f"{file_type}{f' with a head in {head_type}' if head_type else ''} needs an importance "
            "matrix, which this command does not take; choose a type of 3 bits or more, such as "
            "q3_k_m, or use llama-quantize --imatrix"
        )
    missing = [tensor.name for tensor in info.tensors if tensor.name not in types]
    if missing:
        raise PyllamaMtpError(f"the library does not say what becomes of {missing[0]}")
    return types


def stored_bytes(shape: tuple[int, ...], name: str) -> int:
    """Bytes of a tensor of this shape in a type, which is spelled as in GGUF."""
    n_elements, n_bytes = _SIZES[name]
    return math.prod(shape) // n_elements * n_bytes


Rows = npt.NDArray[np.uint8]


def row_converter(tensor: TensorEntry, kind: str) -> Callable[[Rows], Rows]:
    """What gives rows of a matrix another type, by ggml's own functions and on all threads: from
    [n, bytes per row] to [n, bytes per new row].

    Args:
        kind: a key of WEIGHT_TYPES.

    Raises:
        UsageError: the type needs an importance matrix, or a row is not a whole number of its
            blocks; or the matrix has a type that cannot be read.
    """
    from pyllama_mtp.llama import native

    library = native.load()
    ffi, lib = library.ffi, library.lib
    number, (block, _), n_values = WEIGHT_TYPES[kind], _SIZES[kind.upper()], tensor.shape[0]
    is_f32 = tensor.type == "F32"
    to_float = lib.ggml_get_type_traits(_NUMBERS[tensor.type]).to_float
    why = "" if is_f32 or to_float else f"{tensor.type} cannot be read"
    if lib.ggml_quantize_requires_imatrix(number):
        why = "it needs an importance matrix; use one that needs none, such as 'q4_0' or 'q2_k'"
    elif n_values % block:
        why = (
            f"it has blocks of {block} values, and a row has {n_values}; use a type with smaller "
            "blocks, such as 'q4_0' or 'q8_0'"
        )
    if why:
        raise UsageError(f"{tensor.name} cannot become {kind!r}: {why}")

    def convert_part(rows: Rows) -> Rows:
        values = rows.view(np.float32) if is_f32 else np.empty((len(rows), n_values), np.float32)
        if not is_f32:
            to_float(ffi.from_buffer(rows), ffi.from_buffer("float[]", values), values.size)
        out = np.empty((len(rows), stored_bytes((n_values,), kind.upper())), dtype=np.uint8)
        buffers = ffi.from_buffer("float[]", values), ffi.from_buffer(out)
        lib.ggml_quantize_chunk(number, *buffers, 0, len(rows), n_values, ffi.NULL)
        return out

    def convert(rows: Rows) -> Rows:
        if rows.size < _WORTH_THREADS:
            return convert_part(rows)
        n_threads = min(available_threads(), len(rows))
        with ThreadPoolExecutor(n_threads) as pool:
            return np.concatenate([*pool.map(convert_part, np.array_split(rows, n_threads))])

    return convert


def padded_data(
    tensors: Iterable[Iterable[bytes]], alignment: int, total: int, progress: Progress | None
) -> Iterator[bytes]:
    """The data of a file's tensors, whose pieces are given, with the padding after each tensor.

    Args:
        total: bytes in all, for `progress`.
    """
    done = 0
    for pieces in tensors:
        for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)
        yield bytes(-done % alignment)
        done += -done % alignment
    if progress is not None:
        progress(total, total)


def _check_requantizing(info: GGUFInfo, types: Mapping[str, str], allowed: bool) -> None:
    quantized = {t.type for t in info.tensors if t.type not in FLOATS and types[t.name] != t.type}
    if quantized and not allowed:
        raise UsageError(
            f"{info.path} is quantized already ({', '.join(sorted(quantized))}), and would lose "
            "more than by quantizing once; give the F16 or BF16 file, or allow it with --requantize"
        )


# -- the library, in a process of its own ----------------------------------------------------------


def _request(info: GGUFInfo, file_type: str, head_type: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {"source": info.path, "ftype": FILE_TYPES[file_type]}
    if head_type is not None:
        blocks = range(info.n_layer, info.n_layer + info.n_mtp_layers)
        request["head"] = [[rf"^blk\.{i}\.", WEIGHT_TYPES[head_type]] for i in blocks]
    return request


def _write(info: GGUFInfo, request: dict[str, Any], progress: Progress | None) -> None:
    sizes = {tensor.name: tensor.nbytes for tensor in info.tensors}
    total, done, size = sum(sizes.values()), 0, 0
    with closing(_library(request)) as lines:
        for line in lines:
            if said := _TENSOR.search(line):
                done, size = done + size, sizes.get(said[1], 0)
                if progress is not None:
                    progress(done, total)
    if progress is not None:
        progress(total, total)


def _library(request: dict[str, Any]) -> Generator[str, None, None]:
    """Call the library in a new process, and yield the lines of its log; closing ends the process.

    Raises:
        UsageError: the library refused.
        PyllamaMtpError: its process ended in another way.
    """
    with subprocess.Popen(
        child.command("pyllama_mtp.quantizechild:serve", request),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        said: list[str] = []
        try:
            assert process.stdout is not None
            for line in _lines(process.stdout, said):
                log.debug("%s", line)
                yield line
        except BaseException:
            process.kill()
            raise
    words = child.last_words("; ".join(said))
    if process.returncode == child.REFUSED:
        raise UsageError(f"{request['source']} cannot be quantized: {words}")
    if process.returncode:
        raise PyllamaMtpError(f"the process that quantizes ended ({process.returncode}): {words}")


def _lines(file: IO[str], said: list[str]) -> Iterator[str]:
    """Yield the library's messages; its errors and other output go to `said`."""
    for line in file:
        level, _, text = line.rstrip("\n").partition("\t")
        if level in ("DEBUG", "WARNING"):
            yield text
        elif text or level:
            said.append((text or level).removeprefix("llama_model_quantize: "))
