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
        *path, last = edit["path"] or [None]
        try:
            place = value
            for step in path:
                place = place[step]
            if last is None:
                value = edit.get("value")
            elif edit["op"] == "put":
                place[last] = edit["value"]
            else:
                del place[last]
        except (LookupError, TypeError):
            continue
    return value


def prompt_edits(seed: int, names: list[str], identity: list[str]) -> list[Edit]:
    """The edits of a case; equal seeds give equal edits.

    Args:
        names: of the base's sections.
        identity: the names in its identity.
    """
    rng = random.Random(seed)
    keys: list[Path] = [["draft_n_past"], ["identity"], ["sections"], ["new"], []]

    def one() -> Edit:
        kind = rng.choice(("header", "section", "section", "section", "bytes", "lose"))
        if kind == "header":
            parts: list[Path] = [["identity", rng.choice(identity)], ["sections", rng.randrange(4)]]
            return _json_edit(rng, rng.choice([*keys, *parts]))
        if kind == "bytes":
            return byte_edit(rng, 300)
        section = {"op": kind, "name": rng.choice(names)}
        return section if kind == "lose" else {**section, "edit": _state_edit(rng)}

    return [one() for _ in range(rng.choice((1, 1, 2, 3)))]


def vocab_edits(seed: int, n_ids: int) -> list[Edit]:
    """The edits of a case: of the JSON, or of the text that it is."""
    rng = random.Random(seed)

    def one() -> Edit:
        if rng.random() < 0.3:
            return byte_edit(rng, 300)
        if rng.random() < 0.03:
            return {"op": "insert", "at": 0, "text": "[", "times": 10**5}
        key = rng.choice(("format", "version", "tokenizer", "source", "ids", "counts"))
        at: Path = [key, rng.randrange(n_ids)] if key in ("ids", "counts") else [key]
        return _json_edit(rng, rng.choice((at, at, at, [key], [])))

    return [one() for _ in range(rng.choice((1, 1, 1, 2, 3)))]


def _json_edit(rng: random.Random, path: Path) -> Edit:
    if rng.random() < 0.2 and path:
        return {"op": "remove", "path": path}
    return {"op": "put", "path": path, "value": rng.choice((*VALUES, *[rng.randrange(3000)] * 20))}


def _state_edit(rng: random.Random) -> Edit:
    """Within a section: bytes, or a number, near the front more often than not."""
    if rng.random() < 0.3:
        return byte_edit(rng, 200)
    at = rng.choice((4 * rng.randrange(64), 4 * rng.randrange(64), rng.random()))
    width = rng.choice((4, 4, 8))
    value = int(number(rng, "Q", rng.randrange(256))) & ((1 << 8 * width) - 1)
    return {"op": "bytes", "at": at, "text": value.to_bytes(width, "little").decode("latin-1")}


def byte_edit(rng: random.Random, front: int) -> Edit:
    """A change of bytes anywhere, or within the first `front`."""
    at: Any = rng.choice((rng.random(), rng.randrange(front)))
    return rng.choice(
        (
            {"op": "truncate", "at": at},
            {"op": "flip", "at": at, "bit": rng.randrange(8)},
            {"op": "cut", "at": at, "n": rng.choice((1, 4, 100))},
            {"op": "insert", "at": at, "text": rng.choice("\0\xff["), "times": rng.choice((1, 99))},
        )
    )
