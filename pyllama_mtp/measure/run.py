"""One run of a matrix: its runners, its header, the records to a file and into memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyllama_mtp.measure.classprompts import Prompts
from pyllama_mtp.measure.header import Build, make_header
from pyllama_mtp.measure.libraryprocess import LibraryProcess, Load
from pyllama_mtp.measure.matrix import Event, Matrix
from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.profile import Profile, profile_prompt
from pyllama_mtp.measure.recordfile import Record, Records, Run, Writer, run_to_resume
from pyllama_mtp.measure.runner import Runner, SideBySide, open_session

if TYPE_CHECKING:
    from pyllama_mtp import Model, Sampling, Settings
    from pyllama_mtp.measure.plan import Plan

#: Makes a context manager around the run of a matrix; it yields the function to call with events.
Watch = Callable[[Matrix], AbstractContextManager[Callable[[Event], None]]]


@dataclass
class Request:
    """A checked request for a matrix.

    Attributes:
        command: for the header.
        libraries: as given, one for each label of the plan; "" is the library that is loaded.
        placement: arguments of `Model`, for the processes of further libraries.
        texts: to cut prompts from; None: the package's own.
        prompts: where the text comes from, in words.
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
    advice: str | None = None
    resume: bool = False
    profile: bool = False
    usual_depths: bool = False
    peer_dir: str | None = None
    peer_python: str | None = None


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
        cells = run.cells.items()
        retried = run.header["plan"].get("peers", ())  # other programs may work by now
        matrix = Matrix(
            model,
            request.plan,
            settings=request.settings,
            sampling=request.sampling,
            runners={**own, **peers},
            profilers=_profilers(own, model) if request.profile else {},
            prompts=Prompts(model, request.texts, request.plan.output_mode),
            run=run.id,
            budget_s=request.budget_s,
            measured=run.measured,
            skipped=[key for key, cell in cells if cell.skipped and cell.program not in retried],
            profiled=[key for key, cell in cells if cell.profile],
        )
        matrix.check()
        keep = [found.add]
        if request.output:
            advice = (request.advice,) if request.advice else ()
            keep.insert(0, stack.enter_context(Writer(request.output, header, *advice)).write)
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
    runners: dict[str, Runner | LibraryProcess] = {labels[0]: Runner(partial(open_session, model))}
    builds = {labels[0]: build}
    for label, name in zip(labels[1:], request.libraries[1:], strict=True):
        load = Load(name, label, str(model.path), dict(request.placement), any(request.plan.depths))
        process = stack.enter_context(closing(LibraryProcess(load)))
        runners[label], builds[label] = process, process.loaded()
    return runners, builds


def _profilers(
    runners: Mapping[str, Runner | LibraryProcess], model: Model
) -> dict[str, Callable[[Settings, list[int]], Profile]]:
    here = partial(profile_prompt, partial(open_session, model))
    return {
        name: one.profile if isinstance(one, LibraryProcess) else here
        for name, one in runners.items()
    }


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
        stamp = ("", "", "", "")
        try:
            peer = find(name, request.peer_dir, request.peer_python, gpu=n_gpu_layers != 0)
            stamp = (peer.version, peer.upstream_commit, peer.series, peer.backend)
            runners[name] = PeerRunner(peer, *files)
        except PeerError as error:
            say(f"{error}; the others are measured")
            runners[name] = PeerRunner(error, *files)
        builds[name] = Build(*stamp, {}, name)
    return runners


def _begin(
    request: Request,
    model: Model,
    builds: dict[str, Build],
    found: Records,
    say: Callable[[str], None],
) -> tuple[Run, Record | None]:
    """The run, and its header if it is new; else the last run of the file is resumed."""
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
        return found.runs[header["run"]], header
    found.runs[earlier.id] = earlier
    say(
        f"going on with run {earlier.id}: {len(earlier.measured)} of {request.plan.n_samples} "
        "samples are there"
    )
    return earlier, None
