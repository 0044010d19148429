"""Damaged and hostile files of processed prompts (Session.save) and of draft vocabularies.

A processed prompt has checksums, which a mutation by chance never meets: edits of its parts make
them right again, as whoever means harm would; edits of its bytes do not.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

from fuzzkit.edits import Edit, apply_bytes
from fuzzkit.models import number
from pyllama_mtp.promptfile import HEADER

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 1.5, 1e308, float("nan")),
    *("", "x", "\0", "0", "full", [], {}, [[]], None, True, [0], {"a": 1}, "x" * 10000),
)
Path = list[str | int]


def members(data: bytes) -> dict[str, bytes]:
    """What a processed prompt's file that is known to be good holds, by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def apply_prompt(base: bytes, edits: list[Edit]) -> bytes:
    """A file of a processed prompt with edits."""
    found = members(base)
    header = json.loads(found.pop(HEADER))
    for edit in edits:
        if edit["op"] == "section" and edit["name"] in found:
            found[edit["name"]] = apply_bytes(found[edit["name"]], [edit["edit"]])
        elif edit["op"] == "lose":
            found.pop(edit["name"], None)
    parsed = edit_json({**header, "sections": [*found]}, edits)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in {HEADER: json.dumps(parsed).encode(), **found}.items():
            archive.writestr(zipfile.ZipInfo(name), part)
    return apply_bytes(file.getvalue(), edits)


def apply_vocab(base: bytes, edits: list[Edit]) -> bytes:
    """A file of a draft vocabulary with edits."""
    return apply_bytes(json.dumps(edit_json(json.loads(base), edits)).encode(), edits)


def edit_json(value: Any, edits: list[Edit]) -> Any:
    """A JSON value with the edits "put" (at a path; [] is all of it) and "remove"."""
    for edit in edits:
        if edit["op"] not in ("put", "remove"):
            continue
        path: Path = edit["path"]
        if not path:
            value = edit.get("value")
            continue
        place = value
        try:
            for step in path[:-1]:
                place = place[step]
            if edit["op"] == "put":
                place[path[-1]] = edit["value"]
            else:
                del place[path[-1]]
        except (LookupError, TypeError):
            continue
    return value


def prompt_edits(seed: int, names: list[str], identity: list[str]) -> list[Edit]:
    """The edits of a case.

    Args:
        seed: equal seeds give equal edits.
        names: of the base's sections.
        identity: the names in its identity.
    """
    rng = random.Random(seed)
    edits: list[Edit] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.choice(("header", "state", "state", "state", "size", "bytes", "lose"))
        if kind == "header":
            edits.append(_header_edit(rng, identity))
        elif kind == "bytes":
            edits.append(_byte_edit(rng))
        elif kind == "lose":
            edits.append({"op": "lose", "name": rng.choice(names)})
        else:
            name = rng.choice(names)
            edits.append({"op": "section", "name": name, "edit": _state_edit(rng, kind)})
    return edits


def _header_edit(rng: random.Random, identity: list[str]) -> Edit:
    path: Path = rng.choice(
        (
            ["draft_n_past"],
            ["draft_n_past"],
            ["identity"],
            ["identity", rng.choice(identity)],
            ["sections"],
            ["sections", rng.randrange(4)],
            ["new"],
            [],
        )
    )
    if rng.random() < 0.2 and path:
        return {"op": "remove", "path": path}
    value = rng.choice((rng.choice(VALUES), rng.randrange(64)))
    return {"op": "put", "path": path, "value": value}


def _state_edit(rng: random.Random, kind: str) -> Edit:
    """Within a section: its length, or a number in it, near the front more often than not."""
    if kind == "size":
        at: Any = rng.choice((rng.random(), 0, 1.0, rng.randrange(200)))
        return rng.choice(
            (
                {"op": "truncate", "at": at},
                {"op": "cut", "at": at, "n": rng.choice((1, 4, 8, 100))},
                {"op": "insert", "at": at, "text": "\0", "times": rng.choice((1, 4, 8, 4096))},
            )
        )
    at = rng.choice((4 * rng.randrange(64), 4 * rng.randrange(64), rng.random()))
    if rng.random() < 0.3:
        return {"op": "flip", "at": at, "bit": rng.randrange(8)}
    width = rng.choice((4, 4, 8))
    value = int(number(rng, "Q", rng.randrange(256))) & ((1 << 8 * width) - 1)
    return {"op": "bytes", "at": at, "text": value.to_bytes(width, "little").decode("latin-1")}


def _byte_edit(rng: random.Random) -> Edit:
    at: Any = rng.choice((rng.random(), rng.randrange(300)))
    return rng.choice(
        (
            {"op": "truncate", "at": at},
            {"op": "flip", "at": at, "bit": rng.randrange(8)},
            {"op": "cut", "at": at, "n": rng.choice((1, 4, 100))},
            {"op": "insert", "at": at, "text": rng.choice("\0\xff["), "times": rng.choice((1, 99))},
        )
    )


def vocab_edits(seed: int, n_ids: int) -> list[Edit]:
    """The edits of a case: of the JSON, or of the text that it is."""
    rng = random.Random(seed)
    edits: list[Edit] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.3:
            edits.append(_byte_edit(rng))
            continue
        key = rng.choice(("format", "version", "tokenizer", "source", "ids", "counts"))
        at: Path = [key, rng.randrange(n_ids)] if key in ("ids", "counts") else [key]
        path = rng.choice((at, at, at, [key], []))
        value = rng.choice((rng.choice(VALUES), rng.randrange(3000)))
        deep = {"op": "insert", "at": 0, "text": "[", "times": 10**5}
        edit: Edit = {"op": "put", "path": path, "value": value}
        if path and rng.random() < 0.2:
            edit = {"op": "remove", "path": path}
        edits.append(deep if rng.random() < 0.03 else edit)
    return edits
