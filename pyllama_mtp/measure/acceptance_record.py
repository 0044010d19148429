"""The file of an acceptance run: JSON lines, a header, then one line per prompt and per cost table.

Lines come as they are measured, so a run that is cut short has lost nothing. What each holds is in
``acceptance-schema-1.json`` beside this module (JSON Schema).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pyllama_mtp.errors import UsageError
from pyllama_mtp.files import append
from pyllama_mtp.measure.acceptance_rates import Rounds
from pyllama_mtp.speculative.costs import Costs

#: Raised when the meaning of a field changes.
SCHEMA = 1
RUN, PROMPT, COSTS = KINDS = ("acceptance", "prompt", "costs")


@dataclass(frozen=True)
class Header:
    """What was measured, with what.

    Attributes:
        model: file name without its folder.
        variant, upstream_commit, series, backend, machine: library and machine, as in a cell of a
            matrix.
        depth: drafts per round.
        max_tokens: most tokens generated per prompt.
        prompts: where they come from, in words.
        planned: generations in the whole run.
        settings: fields of `Settings`, those of `Sampling` under "sampling".
        time: when the run began, UTC, ISO 8601.
    """

    model: str
    variant: str
    upstream_commit: str
    series: str
    backend: str
    depth: int
    max_tokens: int
    prompts: str
    planned: int
    settings: dict[str, Any]
    machine: dict[str, Any]
    time: str


@dataclass(frozen=True)
class Miss:
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


@dataclass(frozen=True)
class PromptResult:
    """One generation.

    Attributes:
        kind: class of the prompt.
        prompt: its number within its class, from 1.
        context_length: tokens that the prompt was padded to; None: none were added.
        n_prompt, n_generated: tokens.
        finish_reason: "eos", "length", or "interrupted".
        accepted: of every round that was offered all drafts, how many the target chose as well.
        ended: see :class:`Rounds`.
        decode_s: seconds of the rounds, those included that were offered fewer drafts.
        misses: one for every round in which not all were accepted; not part of the record.
    """

    kind: str
    prompt: int
    context_length: int | None
    n_prompt: int
    n_generated: int
    finish_reason: str
    accepted: tuple[int, ...]
    ended: bool
    decode_s: float
    misses: tuple[Miss, ...] = field(default=(), compare=False)

    def rounds(self, depth: int) -> Rounds:
        """What the statistics need."""
        return Rounds(depth, self.accepted, self.ended)


@dataclass(frozen=True)
class CostResult:
    """Measured costs (seconds), with `n_prompt` tokens in the context; a plain step is without MTP.

    `context_length` is None for the prompts as they are.
    """

    context_length: int | None
    n_prompt: int
    costs: Costs


@dataclass
class Run:
    """A header and what has been measured so far."""

    header: Header
    results: list[PromptResult] = field(default_factory=list)
    costs: list[CostResult] = field(default_factory=list)

    def add(self, found: PromptResult | CostResult) -> None:
        """One more line."""
        if isinstance(found, CostResult):
            self.costs.append(found)
        else:
            self.results.append(found)

    def costs_at(self, context_length: int | None) -> Costs | None:
        """Costs at a context length, if they were measured."""
        return next((c.costs for c in self.costs if c.context_length == context_length), None)


def record(item: Header | PromptResult | CostResult) -> dict[str, Any]:
    """One line's object."""
    if isinstance(item, Header):
        return {"schema": SCHEMA, "kind": RUN, **dataclasses.asdict(item)}
    if isinstance(item, CostResult):
        rest = {"context_length": item.context_length, "n_prompt": item.n_prompt}
        return {"kind": COSTS, **rest, **dataclasses.asdict(item.costs)}
    fields = dataclasses.asdict(item)
    del fields["misses"]
    return {"kind": PROMPT, "class": fields.pop("kind"), **fields}


def miss_record(result: PromptResult, miss: Miss) -> dict[str, Any]:
    """One line of the log of misses."""
    where = {"class": result.kind, "prompt": result.prompt, "context_length": result.context_length}
    return {**where, **dataclasses.asdict(miss)}


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    lines = read_text(path, "acceptance").split("\n")
    run: Run | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                raise UsageError("damaged, not a whole JSON object; remove it") from None
            if run is None:
                run = Run(_header(found))
            else:
                run.add(_result(found, run.header.depth))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    assert run is not None, "read_text refuses an empty file"
    return run


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_length(value: Any) -> bool:
    return value is None or _is_count(value, 1)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


Check = Callable[[Any], bool]
_HEADER: dict[str, Check] = {
    **dict.fromkeys(("model", "variant", "upstream_commit", "series", "backend"), _is_text),
    **dict.fromkeys(("depth", "max_tokens"), lambda value: _is_count(value, 1)),
    **dict.fromkeys(("prompts", "time"), _is_text),
    "planned": _is_count,
    **dict.fromkeys(("settings", "machine"), _is_object),
}
_PROMPT: dict[str, Check] = {
    "class": _is_text,
    "prompt": lambda value: _is_count(value, 1),
    "context_length": _is_length,
    **dict.fromkeys(("n_prompt", "n_generated"), _is_count),
    "finish_reason": _is_text,
    "accepted": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "ended": lambda value: isinstance(value, bool),
    "decode_s": _is_seconds,
}
_COSTS: dict[str, Check] = {
    "context_length": _is_length,
    "n_prompt": _is_count,
    **dict.fromkeys(
        ("verify", "draft"),
        lambda value: isinstance(value, list) and all(map(_is_seconds, value)),
    ),
}


def _checked(found: dict[str, Any], checks: dict[str, Check]) -> dict[str, Any]:
    """The fields of `checks`; keys that a later writer of this version adds are left out."""
    for name, allowed in checks.items():
        if name not in found:
            raise UsageError(f"damaged, {name!r} is missing")
        if not allowed(found[name]):
            raise UsageError(f"damaged, {name!r} is {found[name]!r}")
    return {name: found[name] for name in checks}


def _header(found: Any) -> Header:
    if not isinstance(found, dict) or found.get("kind") != RUN:
        raise UsageError("not the header of an acceptance run; was it made by 'accept --output'?")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"version {found.get('schema')!r} is not known; known: {SCHEMA}")
    return Header(**_checked(found, _HEADER))


def _result(found: Any, depth: int) -> PromptResult | CostResult:
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind == PROMPT:
        fields = _checked(found, _PROMPT)
        accepted: Sequence[int] = fields.pop("accepted")
        if max(accepted, default=0) > depth:
            raise UsageError(f"damaged, {max(accepted)} accepted of {depth} drafts")
        return PromptResult(kind=fields.pop("class"), accepted=tuple(accepted), **fields)
    if kind == COSTS:
        fields = _checked(found, _COSTS)
        costs = Costs(tuple(fields["verify"]), tuple(fields["draft"]))
        if costs.limit != depth:
            raise UsageError(f"damaged, costs of {costs.limit} drafts in a run with {depth}")
        return CostResult(fields["context_length"], fields["n_prompt"], costs)
    raise UsageError(f"damaged, of kind {kind!r}; known are {PROMPT!r} and {COSTS!r}")
