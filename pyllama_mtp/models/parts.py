"""Models that are split into several files, NAME-00001-of-00003.gguf and so on.

The first file has the metadata; each file has a tensor table of its own (upstream's
tools/gguf-split). Like the loader, this module is given the first file and finds the others by
their names.
"""

from __future__ import annotations

import re
from pathlib import Path

from pyllama_mtp.models.ggufheader import Header, Value, read_header

#: Name, number and count of a part.
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_U16 = 2  # the type of split.no; any other type would end the process in the loader
_MOST_PARTS = 999


def join_parts(header: Header) -> None:
    """Add the tensors and the sizes of a model's other files to the header of its first file.

    A model in one file stays as it is.

    Raises:
        ModelFileError: not the first file, not named as parts are, or a part that is missing,
            damaged or of another model.
    """
    count = _number(header.metadata.get("split.count", 1))
    if count is None or count > _MOST_PARTS:
        raise header.error(f"split.count is {header.metadata['split.count']!r}")
    if count < 2:
        return
    first = part_path(header, 1, count)
    if _number(header.metadata.get("split.no")) != 0:
        raise header.error(f"this is one of {count} parts of a model; give the first, {first.name}")
    if first != Path(header.path):
        raise header.error(f"it is the first of {count} parts, and named as another one")
    names = {tensor.name for tensor in header.tensors}
    for number in range(2, count + 1):
        path = part_path(header, number, count)
        if not path.exists():
            raise header.error(
                f"part {number} of {count} is missing: no file {path.name} beside it"
            )
        part = read_header(path)
        if part.metadata.get("split.no") != number - 1 or part.types["split.no"] != _U16:
            raise part.error(f"it is not part {number} of {header.path}: split.no is another")
        twice = next((tensor.name for tensor in part.tensors if tensor.name in names), None)
        if twice is not None:
            raise part.error(f"tensor {twice!r} is in an earlier part, too")
        names |= {tensor.name for tensor in part.tensors}
        header.tensors += part.tensors
        header.size += part.size
    total = header.metadata.get("split.tensors.count")
    if total != len(names):
        raise header.error(f"its {count} parts have {len(names)} tensors, not {total!r}")


def part_path(header: Header, number: int, count: int) -> Path:
    """The path of part ``number``, counted from 1, beside the file of a header.

    Raises:
        ModelFileError: the header's file is not named as a part of such a model.
    """
    found = PART_NAME.fullmatch(Path(header.path).name)
    if not found or int(found[3]) != count:
        raise header.error(
            f"one of {count} parts of a model, which must be named NAME-00001-of-{count:05}.gguf "
            "and so on; name them so, or join them with 'llama-gguf-split --merge'"
        )
    return Path(header.path).with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf")


def _number(value: Value | None) -> int | None:
    return value if type(value) is int and value >= 0 else None
