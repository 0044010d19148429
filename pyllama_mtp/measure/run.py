"""One run of a matrix: the request made possible for model and machine, the header of its records,
the libraries and other programs, and the samples written as they come."""

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
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.images import Imaging
from pyllama_mtp.measure.peers import PeerError, PeerRunner, find
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
from pyllama_mtp.measure.runner import LibraryProcess, Runner, SideBySide
from pyllama_mtp.measure.schedule import (
    OWN_SETTINGS,
    Matrix,
    MatrixEvent,
    MatrixRequest,
    without_folders,
)
from pyllama_mtp.measure.text import counted, size_name
from pyllama_mtp.measure.verdict import slow_types_of
from pyllama_mtp.settings import STORE, Sampling

if TYPE_CHECKING:
    from pyllama_mtp import Model
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
    model: Model, library: Library, request: MatrixRequest, builds: Mapping[str, Build]
) -> RunHeader:
    """The line that begins a new run.

    Args:
        library: that of this process.
        builds: by the plan's names of libraries and peers.
    """
    from pyllama_mtp import __version__

    plan, shared = request.plan, dataclasses.asdict(request.settings)
    for name in (*OWN_SETTINGS, *STORE):
        shared.pop(name)
    if not request.settings.rope.given:
        del shared["rope"]
    if vocabularies := plan.axes.get("draft_vocab"):
        names = tuple(without_folders(str(name)) for name in vocabularies)
        plan = replace(plan, axes={**plan.axes, "draft_vocab": names})
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
    """Measure a request with a loaded model; every record goes to the file, then to `found`. `say`
    is called with messages for the user.

    Returns:
        the matrix: whether it was interrupted, and what it left out.

    Raises:
        UsageError: settings that the library or the model cannot do, or a run that cannot go on.
    """
    from pyllama_mtp.llama import native

    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    library = native.load()
    build = Build.of(library, n_gpu_layers, request.plan.libraries[0], model.rpc_servers)
    if not request.plan.libraries[0]:  # a single library has the name in its stamp
        request = _planned(request, libraries=(build.variant,))
    if request.usual_depths and not model.has_mtp:
        request = _planned(request, depths=(0,))
    request = _choose_threads(model, _possible(model, request, say), say)
    with ExitStack() as stack:
        imaging = None
        if request.picture:
            imaging = stack.enter_context(Imaging(model, request.picture, request.settings.threads))
            request = _planned(request, image=imaging.file)
        own, builds = _runners(request, model, imaging, build, stack)
        peers = _peers(request, model, imaging, n_gpu_layers, builds, say)
        run, header = _begin(request, make_header(model, library, request, builds), records, say)
        profilers = {name: one.profile for name, one in own.items()} if request.profile else {}
        matrix = Matrix(model, request, run, {**own, **peers}, profilers, imaging)
        if needed := matrix.needs():
            say(needed)
        matrix.check()
        keep = [records.add]
        if request.output:
            writer = stack.enter_context(Writer(request.output, header, request.advice))
            keep.insert(0, writer.write)
        matrix.on_event = stack.enter_context(watch(matrix))
        for record in matrix.run():
            for take in keep:
                take(record)
    matrix.remove_contexts()
    return matrix


def _planned(request: MatrixRequest, **changes: Any) -> MatrixRequest:
    """The request with another plan."""
    return dataclasses.replace(request, plan=replace(request.plan, **changes))


def _possible(model: Model, request: MatrixRequest, say: Callable[[str], None]) -> MatrixRequest:
    """The request without depths above the model's limit, which would be measured twice. Raises
    UsageError: see :func:`with_room`."""
    request = with_room(request, model.n_ctx_train)
    most, planned = model.info.most_drafts, request.plan.depths
    depths = tuple(min(d, most) if most and isinstance(d, int) else d for d in planned)
    if depths == planned:
        return request
    say(f"{model.info.fewer_drafts}: deeper is not measured")
    return _planned(request, depths=tuple(dict.fromkeys(depths)))


def with_room(request: MatrixRequest, n_ctx_train: int) -> MatrixRequest:
    """The request for a model trained for so many tokens: without usual sizes that are too long.

    Raises:
        UsageError: a size that does not fit into the context, with what is generated after it.
    """
    limit, whose = n_ctx_train, "the model's context"
    if 0 < request.settings.n_ctx < limit:
        limit, whose = request.settings.n_ctx, "the context asked for"
    sizes, n, before = request.plan.sizes, request.plan.max_tokens, request.plan.contexts[-1]
    fitting = tuple(size for size in sizes if before + size + n <= limit)
    if fitting != sizes:
        if not request.usual_sizes or not fitting:
            filled = f"context {before} + " if before else ""
            raise UsageError(
                f"{filled}prompt {size_name(max(sizes))} + {n} generated: "
                f"{before + max(sizes) + n} tokens exceed {whose}, {limit}"
            )
        request = _planned(request, sizes=fitting)
    return request


def _choose_threads(
    model: Model, request: MatrixRequest, say: Callable[[str], None]
) -> MatrixRequest:
    """The request with a fixed number of threads, so that samples can be compared: in place of
    "auto", one less than there are cores for each that other programs keep busy. A run that goes on
    keeps its number."""
    cores = settings_module.available_threads()
    if request.settings.n_threads != "auto" or "n_threads" in request.plan.axes:
        return request
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
    settings = dataclasses.replace(request.settings, n_threads=threads)
    return dataclasses.replace(request, settings=settings)


def _runners(
    request: MatrixRequest, model: Model, imaging: Imaging | None, build: Build, stack: ExitStack
) -> tuple[dict[str, Runner | LibraryProcess], dict[str, Build]]:
    """The runner and the build of each library: the first in this process, others in their own."""
    labels = request.plan.libraries
    runners: dict[str, Runner | LibraryProcess] = {labels[0]: Runner(model, imaging)}
    stack.callback(runners[labels[0]].close)
    builds = {labels[0]: build}
    for label, name in zip(labels[1:], request.libraries[1:], strict=True):
        options = {**request.placement, "mtp": any(request.plan.depths)}
        picture, n_threads = request.picture, request.settings.threads
        process = LibraryProcess(name, label, str(model.path), picture, n_threads, **options)
        stack.enter_context(closing(process))
        runners[label], builds[label] = process, process.loaded()
    return runners, builds


def _peers(
    request: MatrixRequest,
    model: Model,
    imaging: Imaging | None,
    n_gpu_layers: int,
    builds: dict[str, Build],
    say: Callable[[str], None],
) -> dict[str, SideBySide]:
    """The runners of other programs; their builds are added to `builds`. A missing program is named
    now, and in the table."""
    runners: dict[str, SideBySide] = {}
    mmproj = str(imaging.mmproj) if imaging else ""
    files = str(model.path), n_gpu_layers, model.info.head, mmproj, request.picture
    for name in request.plan.peers:
        try:
            peer = find(name, request.peer_dir, gpu=n_gpu_layers != 0)
            runners[name], builds[name] = PeerRunner(peer, *files), peer.build
        except PeerError as error:
            say(f"{error}; the others are measured")
            runners[name] = PeerRunner(error, *files)
            builds[name] = Build(name, "", "", "", "")
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
        f"going on with run {earlier.id}: {len(earlier.measured)} of {request.plan.n_samples} "
        "samples are there"
    )
    return earlier, None
