"""One run of a matrix: its runners, its header, the records to a file and into memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from pyllama_mtp.measure.header import Build, Request, make_header
from pyllama_mtp.measure.libraryprocess import LibraryProcess
from pyllama_mtp.measure.matrix import Event, Matrix
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.recordfile import Record, Records, Run, Writer, run_to_resume
from pyllama_mtp.measure.runner import Runner, SideBySide

if TYPE_CHECKING:
    from pyllama_mtp import Model
    from pyllama_mtp.measure.plan import Plan

#: Makes a context manager around the run of a matrix; it yields the function to call with events.
Watch = Callable[[Matrix], AbstractContextManager[Callable[[Event], None]]]


def run_matrix(
    model: Model, request: Request, found: Records, watch: Watch, say: Callable[[str], None]
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
    build = Build.of(native.load(), n_gpu_layers, request.plan.libraries[0], model.rpc_servers)
    if not request.plan.libraries[0]:  # a single library has the name in its stamp
        request = replace(request, plan=replace(request.plan, libraries=(build.variant,)))
    if request.usual_depths and not model.has_mtp:
        request = replace(request, plan=replace(request.plan, depths=(0,)))
    request = replace(request, plan=_possible(model, request.plan, say))
    with ExitStack() as stack:
        own, builds = _runners(request, model, build, stack)
        peers = _peers(request, model, n_gpu_layers, builds, say)
        run, header = _begin(request, model, builds, found, say)
        profilers = {name: one.profile for name, one in own.items()} if request.profile else {}
        matrix = Matrix(model, request, run, {**own, **peers}, profilers)
        matrix.check()
        keep = [found.add]
        if request.output:
            writer = stack.enter_context(Writer(request.output, header, request.advice))
            keep.insert(0, writer.write)
        matrix.on_event = stack.enter_context(watch(matrix))
        for record in matrix.run():
            for take in keep:
                take(record)
    return matrix


def _possible(model: Model, plan: Plan, say: Callable[[str], None]) -> Plan:
    """The plan without depths above the model's limit, which would be measured twice."""
    most = model.info.most_drafts
    depths = tuple(min(d, most) if most and isinstance(d, int) else d for d in plan.depths)
    if depths == plan.depths:
        return plan
    say(f"{model.info.fewer_drafts}: deeper is not measured")
    return replace(plan, depths=tuple(dict.fromkeys(depths)))


def _runners(
    request: Request, model: Model, build: Build, stack: ExitStack
) -> tuple[dict[str, Runner | LibraryProcess], dict[str, Build]]:
    """The runner and the build of each library: the first in this process, others in their own."""
    labels = request.plan.libraries
    runners: dict[str, Runner | LibraryProcess] = {labels[0]: Runner(model)}
    builds = {labels[0]: build}
    for label, name in zip(labels[1:], request.libraries[1:], strict=True):
        options = {**request.placement, "mtp": any(request.plan.depths)}
        process = LibraryProcess(name, label, str(model.path), **options)
        stack.enter_context(closing(process))
        runners[label], builds[label] = process, process.loaded()
    return runners, builds


def _peers(
    request: Request,
    model: Model,
    n_gpu_layers: int,
    builds: dict[str, Build],
    say: Callable[[str], None],
) -> dict[str, SideBySide]:
    """The runners of other programs; their builds are added to `builds`. A missing program is named
    now, and in the table."""
    from pyllama_mtp.measure.peers.find import find
    from pyllama_mtp.measure.peers.runner import PeerRunner

    runners: dict[str, SideBySide] = {}
    files = str(model.path), n_gpu_layers, model.info.head
    for name in request.plan.peers:
        try:
            peer = find(name, request.peer_dir, request.peer_python, gpu=n_gpu_layers != 0)
            runners[name], builds[name] = PeerRunner(peer, *files), peer.build
        except PeerError as error:
            say(f"{error}; the others are measured")
            runners[name] = PeerRunner(error, *files)
            builds[name] = Build("", "", "", "", {}, name)
    return runners


def _begin(
    request: Request,
    model: Model,
    builds: dict[str, Build],
    found: Records,
    say: Callable[[str], None],
) -> tuple[Run, Record | None]:
    """The run, and its header if it is new; else the last run of the file is resumed."""
    header = make_header(model, request, builds)
    output = request.output if request.resume else None
    earlier = run_to_resume(output, header) if output else None
    if earlier is None:
        found.add(header)
        return found.runs[header["run"]], header
    found.runs[earlier.id] = earlier
    say(
        f"going on with run {earlier.id}: {len(earlier.measured)} of {request.plan.n_samples} "
        "samples are there"
    )
    return earlier, None
