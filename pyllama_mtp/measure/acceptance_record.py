"""The file of an acceptance run: JSON lines, a header, then one line per prompt and per cost table.

Each line is written as soon as it is measured, so a run that is cut short loses nothing. The first
line is a `Header`, with "schema": 1 and "kind": "acceptance". The others are of the kinds "prompt",
a `PromptResult` with "class" for `kind` and without misses, and "costs", a `CostResult` with the
fields of its `costs` beside the others.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pyllama_mtp.drafting.depth import Costs
from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import append
from pyllama_mtp.measure.recordtypes import Count, Positive, checked

#: Raised when the meaning of a field changes.
SCHEMA = 1
RUN, PROMPT, COSTS = KINDS = ("acceptance", "prompt", "costs")


class Header(Struct, frozen=True, kw_only=True):
    """The plan of a run, its library and machine.

    Attributes:
        model: file name without its folder.
        variant, upstream_commit, series, backend, machine: as in a cell of a matrix.
        depth: drafts per round.
        max_tokens: most tokens generated per prompt.
        prompts: where the prompts come from, in words.
        planned: generations in the whole run.
        settings: fields of `Settings`, those of `Sampling` under "sampling".
        time: when the run began, UTC, ISO 8601.
    """

    model: str
    variant: str
    upstream_commit: str
    series: str
    backend: str
    depth: Positive
    max_tokens: Positive
    prompts: str
    planned: Count
    settings: dict[str, Any]
    machine: dict[str, Any]
    time: str


class Miss(Struct, frozen=True):
    """A draft that the target would not have chosen.

    Attributes:
        generated: tokens generated before it in its text.
        position: in its round, from 1.
        drafted, actual: token ids, the head's and the target's.
        context: the text of a few tokens before it.
    """

    generated: int
    position: int
    drafted: int
    actual: int
    drafted_text: str
    actual_text: str
    context: str


class PromptResult(Struct, frozen=True, rename={"kind": "class"}):
    """One generation.

    Attributes:
        kind: class of the prompt.
        prompt: its number within its class, from 1.
        context_length: tokens that the prompt was padded to with other text; None: no padding.
        n_prompt, n_generated: tokens, padding included.
        finish_reason: "eos", "length", or "interrupted".
        accepted: accepted drafts of every round that was offered all drafts. The last rounds, which
            were offered fewer for lack of tokens left to generate, are left out. Before round r,
            1 + the sum of (accepted + 1) over the rounds before it tokens had been generated.
        ended: an accepted end token cut the last round; the drafts after it were not judged.
        decode_s: seconds of all rounds.
        misses: one for every round with a rejected draft; not part of the record.
    """

    kind: str
    prompt: Positive
    context_length: Positive | None
    n_prompt: Count
    n_generated: Count
    finish_reason: str
    accepted: tuple[Count, ...]
    ended: bool
    decode_s: Annotated[float, Meta(ge=0, lt=1e12)]
    misses: tuple[Miss, ...] = ()


class CostResult(Struct, frozen=True):
    """Measured costs in seconds after `n_prompt` tokens; a plain step is without MTP.
    `context_length` is None for the prompts as they are."""

    context_length: Positive | None
    n_prompt: Count
    costs: Costs


@dataclass
class Run:
    """A header and the results so far."""

    header: Header
    results: list[PromptResult] = field(default_factory=list)
    costs: list[CostResult] = field(default_factory=list)

    def add(self, found: PromptResult | CostResult) -> None:
        """Take the next result."""
        if isinstance(found, CostResult):
            self.costs.append(found)
        else:
            self.results.append(found)

    def costs_at(self, context_length: int | None) -> Costs | None:
        """Costs at a context length, if they were measured."""
        return next((c.costs for c in self.costs if c.context_length == context_length), None)


def record(item: Header | PromptResult | CostResult) -> dict[str, Any]:
    """The object of a line."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    if isinstance(item, Header):
        return {"schema": SCHEMA, "kind": RUN, **fields}
    if isinstance(item, CostResult):
        costs = fields.pop("costs")
        return {"kind": COSTS, **fields, **costs}
    del fields["misses"]
    return {"kind": PROMPT, **fields}


def miss_record(result: PromptResult, miss: Miss) -> dict[str, Any]:
    """A line of the log of misses."""
    where = {"class": result.kind, "prompt": result.prompt, "context_length": result.context_length}
    return {**where, **msgspec.structs.asdict(miss)}


class Lines:
    """A new file of JSON lines, each brought to the disk before the next is measured.

    Raises:
        UsageError: the file exists, or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = Path(path).open("xb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UsageError(f"cannot create {path}: {error.strerror}; name another file") from None
        self._path, self._written = Path(path), 0

    def write(self, *objects: dict[str, Any]) -> None:
        """Append all of them. Raises DiskFullError: none of them, the file is unharmed."""
        lines = [json.dumps(each, ensure_ascii=False, allow_nan=False) for each in objects]
        if lines:
            append(self._file.fileno(), ("\n".join(lines) + "\n").encode("utf-8"), self._path)
            self._written += len(lines)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """Close; a failure before anything was written leaves no file."""
        self._file.close()
        if kind is not None and not self._written:
            self._path.unlink(missing_ok=True)


# -- reading ---------------------------------------------------------------------------------------


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a file of an acceptance run.

    Raises:
        UsageError: unreadable, of an unknown version, or a damaged line; names file and line.
    """
    from pyllama_mtp.measure.workload import read_text

    run: Run | None = None
    for number, line in enumerate(read_text(path, "acceptance").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line)
            if run is None:
                run = Run(_header(found))
            else:
                run.add(_result(found, run.header.depth))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
        except (msgspec.DecodeError, RecursionError):
            damaged = "damaged, not a whole JSON object; remove it"
            raise UsageError(f"{path}, line {number}: {damaged}") from None
    assert run is not None, "read_text refuses an empty file"
    return run


def _header(found: Any) -> Header:
    if not isinstance(found, dict) or found.get("kind") != RUN:
        raise UsageError("not the header of an acceptance run; was it made by 'accept --output'?")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"version {found.get('schema')!r} is not known; known: {SCHEMA}")
    header: Header = checked(Header, found, "a whole header")
    return header


def _result(found: Any, depth: int) -> PromptResult | CostResult:
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind == PROMPT:
        result: PromptResult = checked(PromptResult, found, "a whole result")
        if max(result.accepted, default=0) > depth:
            raise UsageError(f"damaged, {max(result.accepted)} accepted of {depth} drafts")
        return result
    if kind == COSTS:
        table: CostResult = checked(CostResult, {**found, "costs": found}, "a whole table of costs")
        if table.costs.limit != depth:
            raise UsageError(f"damaged, costs of {table.costs.limit} drafts in a run with {depth}")
        return table
    raise UsageError(f"damaged, of kind {kind!r}; known are {PROMPT!r} and {COSTS!r}")
