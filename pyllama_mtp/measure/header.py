"""The record that begins a run: what is measured, with which build, where."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.machine import describe_machine
from pyllama_mtp.measure.plan import SWITCHES, Plan
from pyllama_mtp.measure.recordfile import Record, to_line
from pyllama_mtp.measure.verdict import slow_types_of
from pyllama_mtp.settings import Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.llama.native import Library

_FINGERPRINT = 2**20  # bytes at either end of a model file
#: The fields of `Settings` that every cell has its own value of.
OWN_SETTINGS = ("n_ctx", "draft_n_max", "synthetic_acceptance", *SWITCHES)


@dataclass(frozen=True)
class Build:
    """What the records say of a library and the machine it ran on."""

    variant: str
    upstream_commit: str
    series: str
    backend: str
    machine: dict[str, Any]
    program: str = "pyllama-mtp"

    @classmethod
    def of(
        cls, library: Library, n_gpu_layers: int, label: str = "", workers: Sequence[str] = ()
    ) -> Build:
        """Read it from the loaded `Library`; without GPU layers the backend is the CPU.

        Args:
            label: what the variant is called; default: as its stamp says.
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

    def to_dict(self) -> Record:
        """As in the header of a run."""
        fields = dataclasses.asdict(self)
        del fields["machine"]
        return fields


def now() -> str:
    """The time as records give it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def make_header(
    run: str,
    model: Model,
    plan: Plan,
    *,
    settings: Settings,
    sampling: Sampling,
    builds: Mapping[str, Build],
    prompts: str,
    command: Sequence[str],
    version: str,
) -> Record:
    """The record that begins a run.

    Args:
        builds: by the plan's names of libraries.
        prompts: says where the text of the prompts comes from.
        command: arguments as they were given; paths lose their folders here.
    """
    planned = dataclasses.asdict(plan)
    shared = dataclasses.asdict(settings)
    for name in OWN_SETTINGS:
        shared.pop(name)
    if not settings.rope.given:  # as in files that are older than it
        del shared["rope"]
    for name in ("peers", "prompt_step"):  # as in files that are older than they
        if not planned[name]:
            del planned[name]
    axes = planned.pop("axes")
    planned |= {name: axes.pop(name, (usual,)) for name, usual in SWITCHES.items()}
    planned["draft_vocab"] = [without_folders(name) for name in planned["draft_vocab"]]
    if axes:  # as in files that are older than they
        planned["axes"] = axes
    drawn = dataclasses.asdict(sampling)
    if sampling.logit_bias:  # JSON has no infinity
        biases = sampling.logit_bias.items()
        drawn["logit_bias"] = {k: v if math.isfinite(v) else str(v) for k, v in biases}
    header: Record = {
        "kind": "run",
        "run": run,
        "time": now(),
        "version": version,
        "command": [without_folders(word) for word in command],
        "model": _describe_model(model.path),
        "builds": {label: build.to_dict() for label, build in builds.items()},
        "machine": next(iter(builds.values())).machine,
        "plan": {**planned, "prompts": prompts},
        "settings": shared,
        "sampling": drawn,
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
    """A reason as records give it: of a traceback its last line, of paths their last part."""
    head, traceback, rest = reason.partition("Traceback (most recent call last):")
    if traceback and rest.strip():
        reason = head + rest.strip().splitlines()[-1]
    return re.sub(r"(?:/[^\s/:;,'\"()]+)+/(?=[^\s/:;,'\"()])", "", reason)


def _describe_model(path: str | os.PathLike[str]) -> Record:
    """Name, size and a fingerprint; see the schema."""
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
