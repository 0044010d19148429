"""The lines of a file of measurements, schema 2, by kind.

A file is JSON lines in UTF-8. A run writes a line "run"; a line "sample" for every generation, as
soon as it is finished; "skipped" for every cell that cannot be measured; "dropped" for the groups
that a time budget left out; and, on request, "profile" for every prompt whose nodes were timed. All
lines of a run have its id in `run`. A file may hold several runs, and a run may go on later, at the
end of the same file. Lines are never changed or removed. A cell is all samples of a run with the
same `cell` and `settings`; its figures are computed when the file is read.

Speeds are tokens per second, times are seconds of wall clock. A last line without a line break was
being written when the program was killed; it counts only if it is whole. Readers ignore keys that
they do not know. The number of the schema grows when the meaning of a key changes.
``msgspec.json.schema(recordtypes.Line)`` is a JSON Schema of a line.
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
    """`name`: without its folder. `sha256_ends`: SHA-256 of the file's first MiB and its last MiB,
    which tells versions of a model apart without reading all of it."""

    name: str
    bytes: int | None = None
    sha256_ends: str | None = None


class Build(Struct):
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


class Plan(Struct):
    """What is to be measured: every size and class `repeat` times, with another text each time. A
    repeat measures every variant side by side on the same text.

    Attributes:
        sizes: of prompts, in tokens.
        classes: kinds of prompts: "text", "code", "factual", "thinking", "instruction".
        depths: drafts per round; 0 is no MTP, "auto" chosen while generating.
        max_tokens: generated per sample, end tokens ignored.
        libraries, peers: this project's libraries and other programs; names in `builds`.
        output_mode: "text": the prompt is text, which is continued; "code": a chat that shows the
            text and asks for long code.
        prompts: where the text of the prompts came from.
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
    """The identity of a cell in its run, beside its settings.

    Attributes:
        build: a name in the run's `builds`.
        n_prompt: tokens of the prompt.
        n_max: drafts per round, of an adaptive cell the most; 0 is no MTP.
        max_tokens: to generate, the first token included.
        adaptive: the depth was chosen while generating, from 0 to n_max.
        axes: its values of those of the plan's `axes` that matter to it.
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
    """`settings`: this cell's own fields of :class:`.Settings`: n_ctx, draft_n_max,
    synthetic_acceptance, and the switches that a plan may vary."""

    cell: CellKey
    settings: dict[str, Any]


class Generation(OfCell, tag="sample"):
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


class Group(Struct):
    """Samples of one repeat that a time budget left out."""

    n_prompt: int
    prompt_class: str
    repeat: int


class Dropped(_Line, tag="dropped"):
    """The groups that a budget of `budget_s` seconds left out. A resumed run may measure them."""

    budget_s: float
    groups: list[Group]


class NodeCost(Struct):
    """`n` nodes of a graph with ggml's operation `op`. `tensor`: the weights that they read, or
    llama.cpp's name of the node, without its layer. `s`: seconds."""

    kind: str
    op: str
    tensor: str
    n: Positive
    s: float


class ProfileFigures(Struct):
    """`prompt_s`: seconds of the whole prompt. `sum_s`: seconds of all nodes, each computed by
    itself, which may be more. `kinds`: seconds by kind of operation, the sums of `costs`.
    `python_share`: part, 0 to 1, of the time of decoding that is spent outside the native library.
    """

    n_prompt: Positive
    prompt_s: float
    sum_s: float
    kinds: dict[str, float]
    costs: list[NodeCost]
    python_share: float | None = None


class Profile(OfCell, tag="profile"):
    """Where the time of a prompt goes, computed once more, node by node. Cells of all depths above
    0 have the prompt of their size and class in common."""

    profile: ProfileFigures


Line = Run | Generation | Skipped | Dropped | Profile


def checked(kind: Any, value: object, what: str) -> Any:
    """JSON's `value` as a `kind`, called `what` in the message.

    Raises:
        UsageError: `value` does not fit; the message says where, what is expected and what is
            there.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"not {what}: {error}") from None
