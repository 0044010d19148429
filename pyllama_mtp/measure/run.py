"""One run of a matrix: what measures it, the header, the records to a file and into memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.classprompts import Prompts
from pyllama_mtp.measure.header import Build, make_header
from pyllama_mtp.measure.matrix import Event, Matrix
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.profile import Profile, profile_prompt
from pyllama_mtp.measure.recordfile import Record, Records, Run, Writer, run_to_resume
from pyllama_mtp.measure.runner import Runner, SideBySide, open_session
from pyllama_mtp.measure.worker import Load, WorkerRunner

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Settings
    from pyllama_mtp.measure.plan import Plan

#: Given the matrix that begins: a context manager around it that yields what is told of events.
Watch = Callable[[Matrix], AbstractContextManager[Callable[[Event], None]]]


@dataclass
class Request:
    """What is asked for, checked.

    Attributes:
        command: as the header is to give it.
        libraries: as given, one for each label of the plan; "" is the one that is loaded.
        placement: arguments of `Model`, for the processes of further libraries.
        texts: to cut prompts from; None: the package's own.
        prompts: says where the text comes from.
        output: the file; None: write none.
        advice: what to do about a file that cannot be written.
        resume: go on with the last run in it.
        profile: take the prompts' time apart in the end.
        peer_dir, peer_python: where other programs are, see :func:`.peers.find.find`.
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
    advice: str | None = None
    resume: bool = False
    profile: bool = False
    peer_dir: str | None = None
    peer_python: str | None = None


def run_matrix(
    model: Model, request: Request, found: Records, watch: Watch, say: Callable[[str], None]
) -> Matrix:
    """Measure what is asked for with a loaded model; every record goes to the file, then to
    `found`. `say` is told what the user should know.

    Returns:
        the matrix: whether it was interrupted, and what it left out.

    Raises:
        UsageError: settings that the library or the model cannot do, or a run that cannot go on.
    """
    from pyllama_mtp.llama import native

    n_gpu_layers = request.placement.get("n_gpu_layers", -1)
    build = Build.of(native.load(), n_gpu_layers, request.plan.libraries[0], model.rpc_servers)
    if not request.plan.libraries[0]:  # one library: what its stamp says
        request = replace(request, plan=replace(request.plan, libraries=(build.variant,)))
    request = replace(request, plan=_possible(model, request.plan, say))
    with ExitStack() as stack:
        own, builds = _runners(request, model, build, stack)
        peers = _peers(request, model, n_gpu_layers, builds, say)
        header, before = _begin(request, model, builds, found, say)
        matrix = Matrix(
            model,
            request.plan,
            settings=request.settings,
            sampling=request.sampling,
            runners={**own, **peers},
            profilers=_profilers(own, model) if request.profile else {},
            prompts=Prompts(model, request.texts, request.plan.output_mode),
            run=header["run"],
            budget_s=request.budget_s,
            measured=before.measured if before else (),
            skipped=_still_skipped(before) if before else (),
            profiled=[key for key, cell in before.cells.items() if cell.profile] if before else (),
        )
        matrix.check()
        keep = [found.add]
        if request.output:
            advice = (request.advice,) if request.advice else ()
            new = None if before else header
            keep.insert(0, stack.enter_context(Writer(request.output, new, *advice)).write)
        matrix.on_event = stack.enter_context(watch(matrix))
        for record in matrix.run():
            for take in keep:
                take(record)
    return matrix


def _possible(model: Model, plan: Plan, say: Callable[[str], None]) -> Plan:
    """Without depths that the model cannot draft at, which would be measured twice."""
    info = model.info
    most = info.most_drafts
    depths = tuple(min(d, most) if most and isinstance(d, int) else d for d in plan.depths)
    if depths == plan.depths:
        return plan
    say(f"{info.fewer_drafts}: deeper is not measured")
    return replace(plan, depths=tuple(dict.fromkeys(depths)))


def _runners(
    request: Request, model: Model, build: Build, stack: ExitStack
) -> tuple[dict[str, Runner | WorkerRunner], dict[str, Build]]:
    """What measures with each library, and what those are: the first here, others in processes."""
    labels = request.plan.libraries
    runners: dict[str, Runner | WorkerRunner] = {labels[0]: Runner(partial(open_session, model))}
    builds = {labels[0]: build}
    for label, name in zip(labels[1:], request.libraries[1:], strict=True):
        load = Load(name, label, str(model.path), dict(request.placement), any(request.plan.depths))
        worker = stack.enter_context(closing(WorkerRunner(load)))
        runners[label], builds[label] = worker, worker.loaded()
    return runners, builds


def _profilers(
    runners: Mapping[str, Runner | WorkerRunner], model: Model
) -> dict[str, Callable[[Settings, list[int]], Profile]]:
    here = partial(profile_prompt, partial(open_session, model))
    return {
        name: one.profile if isinstance(one, WorkerRunner) else here
        for name, one in runners.items()
    }


def _peers(
    request: Request,
    model: Model,
    n_gpu_layers: int,
    builds: dict[str, Build],
    say: Callable[[str], None],
) -> dict[str, SideBySide]:
    """What measures with other programs; those that are missing are named now, and in the table.
    What they are is added to `builds`."""
    from pyllama_mtp.measure.peers.find import find
    from pyllama_mtp.measure.peers.runner import PeerRunner

    runners: dict[str, SideBySide] = {}
    files = str(model.path), n_gpu_layers, model.info.head
    for name in request.plan.peers:
        build = Build("", "", "", "", {}, name)
        try:
            peer = find(name, request.peer_dir, request.peer_python, gpu=n_gpu_layers != 0)
        except PeerError as error:
            say(f"{error}; the others are measured")
            runners[name] = PeerRunner(error, *files)
        else:
            runners[name] = PeerRunner(peer, *files)
            stamp = (peer.version, peer.upstream_commit, peer.series, peer.backend)
            build = Build(*stamp, {}, name)
        builds[name] = build
    return runners


def _still_skipped(run: Run) -> set[str]:
    """Cells that a run which goes on cannot measure either; another program may work by now."""
    return {
        key
        for key in run.skipped
        if run.cells[key].program not in run.header["plan"].get("peers", ())
    }


def _begin(
    request: Request,
    model: Model,
    builds: dict[str, Build],
    found: Records,
    say: Callable[[str], None],
) -> tuple[Record, Run | None]:
    """The header of the run, and the run of the file that goes on (None: a new one begins)."""
    from pyllama_mtp import __version__

    header = make_header(
        uuid.uuid4().hex[:12],
        model,
        request.plan,
        settings=request.settings,
        sampling=request.sampling,
        builds=builds,
        prompts=request.prompts,
        command=request.command,
        version=__version__,
    )
    output = request.output if request.resume else None
    earlier = run_to_resume(output, header) if output else None
    if earlier is None:
        found.add(header)
        return header, None
    found.runs[earlier.id] = earlier
    say(
        f"going on with run {earlier.id}: {len(earlier.measured)} of {request.plan.n_samples} "
        "samples are there"
    )
    return earlier.header, earlier
