"""One run of a matrix: the header of its records, the libraries and other programs, and the samples
written as they come."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pyllama_mtp import machine
from pyllama_mtp import settings as settings_module
from pyllama_mtp.measure.images import Imaging
from pyllama_mtp.measure.peers import PeerRunner
from pyllama_mtp.measure.plan import Plan
from pyllama_mtp.measure.records import (
    Build,
    ModelFile,
    Records,
    Run,
    RunHeader,
    Writer,
    accelerators,
    as_read,
    last_run,
    now,
    run_to_resume,
)
from pyllama_mtp.measure.request import MatrixRequest, without_folders
from pyllama_mtp.measure.runner import LibraryProcess, Runner
from pyllama_mtp.measure.schedule import OWN_SETTINGS, Matrix, MatrixEvent
from pyllama_mtp.measure.text import counted
from pyllama_mtp.measure.verdict import slow_types_of
from pyllama_mtp.settings import STORE, Sampling, Settings

if TYPE_CHECKING:
    from pyllama_mtp.llama.model import Model
    from pyllama_mtp.llama.native import Library

_FINGERPRINT = 2**20  # bytes at either end of a model file


def sampling_record(sampling: Sampling) -> dict[str, Any]:
    """The fields of `Sampling` for JSON, which has no infinity."""
    drawn = dataclasses.asdict(sampling)
    if sampling.logit_bias:
        biases = sampling.logit_bias.items()
        drawn["logit_bias"] = {str(k): v if math.isfinite(v) else str(v) for k, v in biases}
    return drawn


def make_header(
    model: Model,
    library: Library,
    request: MatrixRequest,
    plan: Plan,
    settings: Settings,
    builds: Mapping[str, Build],
) -> RunHeader:
    """The line that begins a new run.

    Args:
        library: that of this process.
        plan, settings: as of :class:`.Matrix`.
        builds: by the plan's names of libraries and peers.
    """
    from pyllama_mtp import __version__

    shared = dataclasses.asdict(settings)
    for name in (*OWN_SETTINGS, *STORE):
        shared.pop(name)
    if not settings.rope.given:
        del shared["rope"]
    options = dict(model.options.given)
    for name in ("n_gpu_layers", "rpc_timeout"):
        options.pop(name, None)
    workers, split = (list(options.pop(name, ())) for name in ("rpc_servers", "tensor_split"))
    if "lora" in options:
        options["lora"] = model.adapters.names
    if "head" in options:
        options["head"] = Path(options["head"]).name
    devices = accelerators(library, request.placement.get("n_gpu_layers", -1))
    return RunHeader(
        run=uuid.uuid4().hex[:12],
        time=now(),
        version=__version__,
        command=[without_folders(word) for word in request.command],
        model=describe_model(model.path),
        builds=dict(builds),
        machine=machine.describe_machine([device.description for device in devices]),
        plan=plan,
        settings=as_read(shared),
        sampling=as_read(sampling_record(request.sampling)),
        slow_types={kind: round(share, 4) for kind, share in slow_types_of(model).items()},
        workers=workers,
        tensor_split=split,
        options=as_read(options),
        loaded={
            "description": model.description,
            "bytes": model.info.weight_bytes,
            "n_params": model.n_params,
        },
    )


def describe_model(path: str | os.PathLike[str]) -> ModelFile:
    """The name, the size and the hash of a model file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_FINGERPRINT))
            file.seek(max(size - _FINGERPRINT, 0))
            digest.update(file.read())
    except OSError:
        return ModelFile(path.name)
    return ModelFile(path.name, size, digest.hexdigest())


# -- one run ---------------------------------------------------------------------------------------


#: Makes a context manager around the run of a matrix; it yields the function to call with events.
Watch = Callable[[Matrix], AbstractContextManager[Callable[[MatrixEvent], None]]]


def run_matrix(
    model: Model, request: MatrixRequest, records: Records, watch: Watch, say: Callable[[str], None]
) -> Matrix:
    """Measure a request with a loaded model; every record goes to the file, then to `records`.
    `say` is called with messages for the user.

    Returns:
        the matrix: whether it was interrupted, and how much is left to do.

    Raises:
        UsageError: settings that the library or the model cannot do, or a run that cannot go on.
    """
    from pyllama_mtp.llama import native

    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    library = native.load()
    build = Build.of(library, n_gpu_layers, request.plan.libraries[0], model.rpc_servers)
    plan = request.plan_for(model, build.variant, say)
    settings = _choose_threads(model, request, say)
    with ExitStack() as stack:
        imaging = None
        if request.picture:
            imaging = stack.enter_context(Imaging(model, request.picture, settings.threads))
            plan = replace(plan, image=imaging.file)
        runners = _runners(request, plan, settings, model, imaging, stack)
        builds = {plan.libraries[0]: build}
        for name, runner in runners.items():
            if isinstance(runner, PeerRunner):
                builds[name] = runner.build
                if runner.missing:
                    say(f"{runner.missing}; the others are measured")
            elif isinstance(runner, LibraryProcess):
                builds[name] = runner.loaded()
        header = make_header(model, library, request, plan, settings, builds)
        run, new = _begin(request, header, records, say)
        matrix = Matrix(model, request, plan, settings, run, runners, imaging)
        matrix.check()
        keep = [records.add]
        if request.output:
            writer = stack.enter_context(Writer(request.output, new))
            keep.insert(0, writer.write)
        matrix.on_event = stack.enter_context(watch(matrix))
        for record in matrix.run():
            for take in keep:
                take(record)
    return matrix


def _choose_threads(model: Model, request: MatrixRequest, say: Callable[[str], None]) -> Settings:
    """The settings with a fixed number of threads, so that samples can be compared: in place of
    "auto", one less than there are cores for each that other programs keep busy. A run that goes on
    keeps its number."""
    cores = settings_module.available_threads()
    if request.settings.n_threads != "auto" or "n_threads" in request.plan.axes:
        return request.settings
    output = request.output if request.resume else None
    if output and (run := last_run(output, Path(model.path).name)):
        threads = run.header.settings.get("n_threads") or cores  # chosen when it began
    else:
        threads = machine.threads_beside(cores, machine.busy_cores()) if cores > 1 else 1
        if threads < cores:
            say(
                f"other programs keep {cores - threads} of {cores} cores busy; measuring with "
                f"{counted(threads, 'thread')} (--threads {cores} uses all)"
            )
    return dataclasses.replace(request.settings, n_threads=threads)


def _runners(
    request: MatrixRequest,
    plan: Plan,
    settings: Settings,
    model: Model,
    imaging: Imaging | None,
    stack: ExitStack,
) -> dict[str, Runner | LibraryProcess | PeerRunner]:
    """By the plan's names: the first library in this process, others and other programs in their
    own."""
    path, picture = str(model.path), request.picture
    runners: dict[str, Runner | LibraryProcess | PeerRunner]
    runners = {plan.libraries[0]: stack.enter_context(closing(Runner(model, imaging)))}
    for label, name in zip(plan.libraries[1:], request.libraries[1:], strict=True):
        options = {**request.placement, "mtp": any(plan.depths)}
        process = LibraryProcess(name, label, path, picture, settings.threads, **options)
        runners[label] = stack.enter_context(closing(process))
    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    files = path, n_gpu_layers, model.info.head, str(imaging.mmproj) if imaging else "", picture
    for name in plan.peers:
        runners[name] = PeerRunner(name, request.peer_dir, *files)
    return runners


def _begin(
    request: MatrixRequest, header: RunHeader, records: Records, say: Callable[[str], None]
) -> tuple[Run, RunHeader | None]:
    """The run, and its header if it is new; else the last run of the file is resumed."""
    output = request.output if request.resume else None
    earlier = run_to_resume(output, header) if output else None
    if earlier is None:
        records.add(header)
        return records.runs[header.run], header
    records.runs[earlier.id] = earlier
    say(
        f"going on with run {earlier.id}: {len(earlier.measured)} of {header.plan.n_samples} "
        "samples are there"
    )
    return earlier, None
