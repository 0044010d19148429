"""What the lines of a file of measurements hold, schema 2, by kind.

A file is JSON lines in UTF-8. A run writes a line "run", then a line "sample" for every generation,
as soon as it is finished; "skipped" for every cell that cannot be measured; "dropped" for what a
time budget left out; and, where it was asked for, "profile" for every prompt whose time was taken
apart. Lines of one run have its id in `run`. A file may hold several runs, and a run may go on
later, at the end of the same file. Lines are never changed or removed. A cell is all samples of a
run with the same `cell` and `settings`; its figures are computed when the file is read.

Speeds are tokens per second, times are seconds of wall clock, sizes are bytes or tokens as said. A
last line without a line break was being written when the program was killed, and does not count
unless it is whole. Readers ignore keys that they do not know. The number of the schema grows when
the meaning of a key changes. ``msgspec.json.schema(recordtypes.Line)`` is a JSON Schema of a line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.cells import Sample

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class ModelFile(Struct):
    """`name`: without its folder. `sha256_ends`: SHA-256 of the file's first MiB and its last MiB
    (metadata, tokenizer, and weights), which tells versions of a model apart without reading all.
    """

    name: str
    bytes: int | None = None
    sha256_ends: str | None = None


class Build(Struct):
    """What measured.

    Attributes:
        program: "pyllama-mtp", or the name of another program, such as "llama-server".
        variant: "patched", "upstream", or the name of a folder; of other programs the version, ""
            where there is none.
        upstream_commit: of llama.cpp.
        series: SHA-256 of the patch series; "" without patches.
        backend: what computes: "CPU", "CUDA", "RPC*2" (two workers), "RPC*1+CUDA", ...
    """

    program: str
    variant: str
    upstream_commit: str
    series: str
    backend: str


class Plan(Struct):
    """What is to be measured: every size and class `repeat` times, with another text each time; a
    repeat measures every variant side by side on the same text.

    Attributes:
        sizes: of prompts, in tokens.
        classes: kinds of prompt: "text", "code", "factual", "thinking", "instruction".
        depths: drafts per round; 0 is no MTP, "auto" as many as pay, chosen while generating.
        max_tokens: generated per sample, end tokens ignored.
        libraries: names in the run's `builds`.
        peers: other programs that are measured beside, names in `builds` as well.
        output_mode: "text": the prompt is text, which is continued; "code": a chat that shows the
            text and asks for long code.
        prompts: where their text came from.
        axes: values of further fields of :class:`.Settings`, and of `n_sequences`, by name.
        prompt_step: prompts were processed by turns of so many tokens; 0: one after the other.
    """

    sizes: list[int]
    classes: list[str]
    depths: list[int | str]
    max_tokens: int
    repeat: int
    libraries: list[str] = []
    peers: list[str] = []
    output_mode: Literal["text", "code"] = "text"
    prompts: str = ""
    axes: dict[str, list[Any]] = {}
    prompt_step: int = 0


class CellKey(Struct):
    """What tells cells of a run apart, beside their settings.

    Attributes:
        build: a name in the run's `builds`.
        n_prompt: tokens of the prompt.
        n_max: drafts per round, of an adaptive cell the most; 0 is no MTP.
        max_tokens: to generate, the first one included.
        adaptive: the number of drafts was chosen while generating, from 0 to n_max.
        axes: what it has of the plan's `axes` that matter to it.
    """

    build: str
    n_prompt: Positive
    prompt_class: str
    n_max: Count
    max_tokens: Positive
    adaptive: bool = False
    axes: dict[str, Any] = {}


class _Line(Struct, kw_only=True, tag_field="kind"):
    """`run`: random and unique. `time`: UTC, ISO 8601 with offset."""

    schema: Literal[2]
    run: Annotated[str, Meta(min_length=1)]
    time: str


class Run(_Line, tag="run"):
    """Begins a run: everything that its samples have in common.

    Attributes:
        version: of the package that measured.
        command: as it was typed; of paths the last part only.
        builds: by the name that cells give as `build`.
        machine: enough to compare, nothing that identifies it: cpu, cores (that the process may
            use), memory_bytes, devices, os, arch, python.
        settings: fields of :class:`.Settings` that all cells share; a cell's own replace them.
        sampling: fields of :class:`.Sampling`.
        slow_types: tensor types without a fast path for a few rows on the CPU: their shares, 0 to
            1, of what a plain decode step reads.
        workers: addresses (HOST:PORT) of those that the model was spread over.
        tensor_split: parts of the model that each device was to get; not given: by free memory.
        options: attributes of :class:`.ModelOptions` that were given; of adapters the names and
            scales.
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


class OfCell(_Line):
    """`settings`: fields of :class:`.Settings` that are this cell's own: n_ctx, draft_n_max,
    synthetic_acceptance, and the switches that a plan may vary."""

    cell: CellKey
    settings: dict[str, Any]


class Generation(OfCell, tag="sample"):
    """One that was measured: a fresh session, a warm-up that it forgot, a prompt, a continuation.

    Attributes:
        repeat: which one, from 0. Samples of the same repeat, size and class had the same text and
            stood next to each other in time: pair them for ratios.
        memory: bytes in use, by what they are for.
    """

    repeat: Count
    sample: Sample
    memory: dict[str, int] = {}


class Skipped(OfCell, tag="skipped"):
    """A cell that is not measured, and why: a prompt beyond the context, not enough memory, or a
    program that is not installed or failed. A sample of the cell further down says that it could be
    measured after all."""

    reason: str


class Group(Struct):
    """Samples of one repeat that a time budget left out."""

    n_prompt: int
    prompt_class: str
    repeat: int


class Dropped(_Line, tag="dropped"):
    """What a time budget of `budget_s` seconds left out. A run that goes on may measure it after
    all."""

    budget_s: float
    groups: list[Group]


class NodeCost(Struct):
    """`n` nodes of a graph, by ggml's operation `op` and the `tensor` of weights that they read,
    without its layer; without weights, llama.cpp's name of the node. `s`: seconds."""

    kind: str
    op: str
    tensor: str
    n: Positive
    s: float


class ProfileFigures(Struct):
    """`prompt_s`: of the prompt computed whole. `sum_s`: of all nodes, each computed by itself, so
    this may be more. `kinds`: seconds by kind of operation, made of `costs`. `python_share`: of
    decoding after it, the part of the time, 0 to 1, that is not spent in the native library."""

    n_prompt: Positive
    prompt_s: float
    sum_s: float
    kinds: dict[str, float]
    costs: list[NodeCost]
    python_share: float | None = None


class Profile(OfCell, tag="profile"):
    """Where the time of a prompt goes: it is computed once more, node by node. A cell has the
    prompt of its size and class in common with those of other depths above 0."""

    profile: ProfileFigures


Line = Run | Generation | Skipped | Dropped | Profile


def checked(kind: Any, value: object, what: str) -> Any:
    """JSON's `value` as one of type `kind`, which it must fit; `what` is its name in the message.

    Raises:
        UsageError: it does not fit; the message says where, what is expected and what is there.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"not {what}: {error}") from None
