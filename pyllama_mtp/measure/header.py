"""A request for a matrix, and the record that begins its run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.cells import OURS
from pyllama_mtp.measure.machine import describe_machine
from pyllama_mtp.measure.plan import SWITCHES, Plan
from pyllama_mtp.measure.recordfile import NAME_ANOTHER, Record, to_line
from pyllama_mtp.measure.verdict import slow_types_of
from pyllama_mtp.settings import Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.llama.native import Library

_FINGERPRINT = 2**20  # bytes at either end of a model file
#: The fields of `Settings` for which every cell has its own value.
OWN_SETTINGS = ("n_ctx", "draft_n_max", "synthetic_acceptance", *SWITCHES)


@dataclass
class Request:
    """A checked request for a matrix.

    Attributes:
        settings, sampling: of every cell; `draft_n_max` and the switches are set to the variant's,
            `n_ctx` 0 to what the cells of a size need, and synthetic rates are cut to the depth.
        command: as it was given; paths lose their folders in the records.
        prompts: where the text comes from, in words.
        libraries: as given, one for each label of the plan; "" is the library that is loaded.
        placement: arguments of `Model`, for the processes of further libraries.
        texts: to cut prompts from; None: the package's own.
        budget_s: seconds after which nothing further begins; None: no limit.
        output: the file; None: no file.
        advice: what to do about a file that cannot be written.
        resume: go on with the last run in the file.
        profile: time the nodes of the prompts in the end.
        usual_depths: the depths are the default; without an MTP head only 0 is measured.
        peer_dir, peer_python: see :func:`.peers.find.find`.
    """

    plan: Plan
    settings: Settings
    sampling: Sampling
    command: Sequence[str]
    prompts: str
    libraries: tuple[str, ...] = ("",)
    placement: Mapping[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None
    budget_s: float | None = None
    output: str | None = None
    advice: str = NAME_ANOTHER
    resume: bool = False
    profile: bool = False
    usual_depths: bool = False
    peer_dir: str | None = None
    peer_python: str | None = None


@dataclass(frozen=True)
class Build:
    """A library or another program, and the machine it ran on, as in the records."""

    variant: str
    upstream_commit: str
    series: str
    backend: str
    machine: dict[str, Any]
    program: str = OURS

    @classmethod
    def of(
        cls, library: Library, n_gpu_layers: int, label: str = "", workers: Sequence[str] = ()
    ) -> Build:
        """The build of a loaded library; without GPU layers the backend is the CPU.

        Args:
            label: name of the variant; "": as its stamp says.
            workers: addresses of the model's workers; the backend says how many.
        """
        stamp = library.stamp
        accelerators = [d for d in library.devices() if n_gpu_layers and "gpu" in d.kind]
        names = sorted({device.name.rstrip("0123456789") for device in accelerators})
        if workers and n_gpu_layers:
            names.insert(0, f"RPC*{len(workers)}")
        return cls(
            variant=label or library.variant,
            upstream_commit=str(stamp.get("upstream_commit", "")),
            series=str(stamp.get("series", "")),
            backend="+".join(names) or "CPU",
            machine=describe_machine([device.description for device in accelerators]),
        )


def now() -> str:
    """The time as records give it: UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def sampling_record(sampling: Sampling) -> Record:
    """The fields of `Sampling` for JSON, which has no infinity."""
    drawn = dataclasses.asdict(sampling)
    if sampling.logit_bias:
        biases = sampling.logit_bias.items()
        drawn["logit_bias"] = {str(k): v if math.isfinite(v) else str(v) for k, v in biases}
    return drawn


def make_header(model: Model, request: Request, builds: Mapping[str, Build]) -> Record:
    """The record that begins a new run. Fields that older files lack are left out where not given.

    Args:
        builds: by the plan's names of libraries and peers.
    """
    from pyllama_mtp import __version__

    planned = dataclasses.asdict(request.plan)
    shared = dataclasses.asdict(request.settings)
    for name in OWN_SETTINGS:
        shared.pop(name)
    if not request.settings.rope.given:
        del shared["rope"]
    for name in ("peers", "prompt_step"):
        if not planned[name]:
            del planned[name]
    axes = planned.pop("axes")
    planned |= {name: axes.pop(name, (usual,)) for name, usual in SWITCHES.items()}
    planned["draft_vocab"] = [without_folders(name) for name in planned["draft_vocab"]]
    if axes:
        planned["axes"] = axes
    header: Record = {
        "kind": "run",
        "run": uuid.uuid4().hex[:12],
        "time": now(),
        "version": __version__,
        "command": [without_folders(word) for word in request.command],
        "model": _describe_model(model.path),
        "builds": {
            label: {name: value for name, value in vars(build).items() if name != "machine"}
            for label, build in builds.items()
        },
        "machine": next(iter(builds.values())).machine,
        "plan": {**planned, "prompts": request.prompts},
        "settings": shared,
        "sampling": sampling_record(request.sampling),
    }
    if slow := slow_types_of(model):
        header["slow_types"] = {kind: round(share, 4) for kind, share in slow.items()}
    given = dict(model.options.given)
    for name in ("n_gpu_layers", "rpc_timeout"):
        given.pop(name, None)
    for name, key in (("rpc_servers", "workers"), ("tensor_split", "tensor_split")):
        if name in given:
            header[key] = list(given.pop(name))
    if "lora" in given:
        given["lora"] = model.adapters.names
    if "head" in given:
        given["head"] = Path(given["head"]).name
    if given:
        header["options"] = given
    return dict(json.loads(to_line(header)))  # as a reader sees it: lists for tuples


def without_folders(word: str) -> str:
    """An argument without the folders of its paths: "--model=m.gguf", "patched,folder"."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + ",".join(Path(part).name or part for part in value.split(","))


def brief(reason: str) -> str:
    """A reason for the records: of a traceback the last line, of paths the last part."""
    head, traceback, rest = reason.partition("Traceback (most recent call last):")
    if traceback and rest.strip():
        reason = head + rest.strip().splitlines()[-1]
    return re.sub(r"(?:/[^\s/:;,'\"()]+)+/(?=[^\s/:;,'\"()])", "", reason)


def _describe_model(path: str | os.PathLike[str]) -> Record:
    """See :class:`.recordtypes.ModelFile`."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_FINGERPRINT))
            file.seek(max(size - _FINGERPRINT, 0))
            digest.update(file.read())
    except OSError:
        return {"name": path.name, "bytes": None, "sha256_ends": None}
    return {"name": path.name, "bytes": size, "sha256_ends": digest.hexdigest()}
