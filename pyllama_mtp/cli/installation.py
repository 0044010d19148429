"""Commands about the installation: whether it works, and where its libraries lie."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pyllama_mtp.cli import parsing
from pyllama_mtp.errors import LibraryError, PyllamaMtpError, UsageError


class Doctor:
    """Check the installation: build variant, upstream commit and patches, devices, CPU
    features, GPU, demo model, and a short generation. Says what is wrong and how to
    mend it. With --bench, the text is a report to send.

    Exit code: 0 everything is in order, 1 something is wrong. Lines marked 'note'
    are not faults.

    examples:
      pyllama-mtp doctor
      pyllama-mtp doctor --lib upstream
      pyllama-mtp doctor --json > report.json    (has folder names of this machine)
      pyllama-mtp doctor --bench > report.txt
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parsing.add_lib_option(parser)
        parser.add_argument(
            "--no-self-test",
            action="store_true",
            help="leave out the short generation with the demo model (a few seconds)",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON array of findings")
        parser.add_argument(
            "--bench",
            nargs="?",
            const="",
            metavar="FILE",
            help="add how busy the machine is, and a matrix of this model; without one that of "
            "'pyllama-mtp matrix' (at least 3 repeats; writes half a gigabyte once)",
        )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Run every check and print what it found."""
        if args.bench is not None and args.json:
            raise UsageError("--bench makes a report of text; leave --json out")
        findings: list[Finding] = []
        bench = args.bench is not None
        for finding in check(args.lib, self_test=not args.no_self_test, bench=bench):
            findings.append(finding)
            if not args.json:
                _print(finding)
        wrong = [finding.name for finding in findings if finding.state == "wrong"]
        if args.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            print(f"wrong: {', '.join(wrong)}" if wrong else "everything is in order")
        return 1 if wrong else measure(args.bench, args.lib) if bench else 0


def measure(model: str, lib: str | None) -> int:
    """Print a short matrix of a model, "": a first look; its exit code."""
    from pyllama_mtp.cli import matrix

    words = ["--no-output", "--format", "markdown", *([] if lib is None else ["--lib", lib])]
    if model:
        words += ["-m", model, "-p", "512", "-n", "128", "--depths", "0,1,2,3,auto"]
        words += ["--repeat", "3", "--budget", "5m"]
    parser = argparse.ArgumentParser()
    matrix.add_options(parser)
    print(flush=True)
    return matrix.run(parser.parse_args(words))


_REBUILD = "build it on this machine: pip install --force-reinstall --no-cache-dir ."
_WITH_CUDA = "pip install --force-reinstall --no-cache-dir . -C cmake.define.GGML_CUDA=ON"
_BY_HAND = "run it by hand: pyllama-mtp -vv generate hello"
#: Long enough for a device that compiles its kernels first (a minute on a software GPU).
_SELF_TEST_SECONDS = 300


State = Literal["ok", "note", "wrong"]


@dataclass
class Finding:
    """A line of the report; `remedy` says what to do, unless `detail` says so."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def _print(finding: Finding) -> None:
    detail = finding.detail.replace(f"{Path.home()}/", "~/")  # people send the text
    print(f"{finding.state:6}{finding.name:15}{detail}", flush=True)
    if finding.remedy:
        print(f"{'':21}-> {finding.remedy}", flush=True)


def check(lib: str | None, *, self_test: bool, bench: bool = False) -> Iterator[Finding]:
    """Make every check in turn. A check that fails becomes a finding, and the others go on, even
    where the native library does not load. `bench`: also whether the machine is idle."""
    library: Any = None

    def load() -> Iterator[Finding]:
        nonlocal library
        from pyllama_mtp.llama import native

        library = native.load(lib)
        yield from check_library(library)

    yield from _guarded("machine", check_machine)
    yield from _guarded("libraries", check_libraries)
    yield from _guarded("library", load)
    if library is not None:
        yield from _guarded("CPU features", lambda: check_cpu_features(library))
        yield from _guarded("devices", lambda: check_devices(library))
    yield from _guarded("GPU", lambda: check_gpu(library))
    demo = list(_guarded("demo model", check_demo))
    yield from demo
    if self_test and library is not None and all(f.state == "ok" for f in demo):
        yield from _guarded("self-test", lambda: check_generation(lib))
    if bench:
        yield from _guarded("idle", check_idle)


def _guarded(name: str, checks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What checks find. Our own errors say what to do; others show their type."""
    try:
        yield from checks()
    except PyllamaMtpError as error:
        yield Finding(name, "wrong", str(error))
    except Exception as error:
        yield Finding(name, "wrong", f"{type(error).__name__}: {error}", _REBUILD)


def check_machine() -> Iterator[Finding]:
    """Package, Python, CPU, memory."""
    from pyllama_mtp import __version__
    from pyllama_mtp.machine import describe_machine

    machine = describe_machine()
    memory = machine["memory_bytes"]
    gibibytes = f", {memory / 2**30:.1f} GiB" if memory else ""
    yield Finding("package", "ok", f"pyllama-mtp {__version__}, Python {machine['python']}")
    system = f"{machine['os']} {machine['arch']}"
    detail = f"{machine['cpu']}, {machine['cores']} cores{gibibytes}, {system}"
    yield Finding("machine", "ok", detail)


def check_libraries() -> Iterator[Finding]:
    """The places of native libraries, and whether each holds one."""
    from pyllama_mtp.llama import native

    for label, path, status in native.find_libraries():
        state: State = "ok" if status == "ok" else "note"
        why = "" if state == "ok" else f" ({status})"
        yield Finding("found", state, f"{label}: {path}{why}")


def check_library(library: Any) -> Iterator[Finding]:
    """What the loaded library was built from."""
    stamp = library.stamp
    yield Finding("library", "ok", f"{library.variant}, loaded from {library.folder}")
    yield Finding("upstream", "ok", f"llama.cpp {stamp.get('upstream_commit')}")
    yield Finding("patches", "ok", f"series {str(stamp.get('series'))[:12]}")
    cuda = stamp.get("cuda") or "no"
    yield Finding("build", "ok", f"{stamp.get('compiler')}; CUDA {cuda}")


def check_cpu_features(library: Any) -> Iterator[Finding]:
    """What the build needs of the CPU; a library for another CPU is not loaded."""
    from pyllama_mtp.llama.native import cpu_flags

    needed = library.stamp["cpu_features"]
    if not needed:
        loaded = library.cpu_generation() or "unknown"
        detail = f"built for each generation of CPUs; loaded here: {loaded}"
    elif cpu_flags() is None:
        detail = f"built for {needed}"
    else:
        detail = f"{needed}: this CPU has them all"
    yield Finding("CPU features", "ok", detail)


def check_devices(library: Any) -> Iterator[Finding]:
    """The devices that llama.cpp can compute on."""
    devices = library.devices()
    for device in devices:
        detail = f"{device.name} ({device.kind}): {device.description}"
        if device.total:
            detail += f", {device.free / 2**30:.1f} of {device.total / 2**30:.1f} GiB free"
        yield Finding("device", "ok", detail)
    if not devices:
        yield Finding("device", "wrong", "no backend could be loaded", _REBUILD)
    yield Finding("llama.cpp", "ok", library.system_info())


def check_gpu(library: Any) -> Iterator[Finding]:
    """What computes, and whether an NVIDIA GPU stands idle. `library`: None if it did not load."""
    folder = Path("/proc/driver/nvidia/gpus")
    present = Path("/dev/nvidia0").exists() or (folder.is_dir() and any(folder.iterdir()))
    gpus = [] if library is None else [d.name for d in library.devices() if "gpu" in d.kind]
    computes = f"{', '.join(gpus) or 'the CPU'} {'compute' if len(gpus) > 1 else 'computes'}"
    cuda = library and library.stamp.get("cuda")
    cuda = cuda or any(name.startswith("CUDA") for name in gpus)  # from a wheel of its own
    if not present:
        but = f", for which the build has CUDA ({cuda})" if cuda else ""
        yield Finding("GPU", "ok", f"no NVIDIA GPU here{but}; {computes}")
    elif library is None:
        yield Finding("GPU", "note", "an NVIDIA GPU is here", "make the library load first")
    elif not cuda:
        detail = f"an NVIDIA GPU is here, but this build has no CUDA; {computes}"
        yield Finding("GPU", "note", detail, f"with nvcc installed: {_WITH_CUDA}")
    else:
        yield Finding("GPU", "ok", f"an NVIDIA GPU is here and the build has CUDA; {computes}")


def check_demo() -> Iterator[Finding]:
    """Whether the demo model came with the package."""
    from pyllama_mtp.models.demo import demo_path

    path = demo_path()
    if not path.is_file():
        remedy = "install the package again: the model comes with it"
        yield Finding("demo model", "wrong", f"{path} is missing", remedy)
    elif (data := path.read_bytes()).startswith(b"GGUF"):
        yield Finding("demo model", "ok", f"{path.name}, {len(data) / 2**20:.1f} MiB")
    else:
        detail = f"{path} is not a GGUF file ({len(data)} bytes)"
        yield Finding("demo model", "wrong", detail, _REBUILD)


def check_generation(lib: str | None) -> Iterator[Finding]:
    """A short generation with MTP, in a process of its own: a native crash must not end ours."""
    command = [sys.executable, "-m", "pyllama_mtp", "generate", "--json", "--max-tokens", "16"]
    command += ["--temp", "0", *([] if lib is None else ["--lib", lib]), "def add(a, b):"]
    name, seconds = "self-test", _SELF_TEST_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(name, "wrong", f"no end after {seconds} s", _BY_HAND)
        return
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        yield Finding(name, "wrong", f"the native library ended with {ended}", _REBUILD)
    elif done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(name, "wrong", last, _BY_HAND)
    else:
        answer = json.loads(done.stdout)
        told, text = answer["telemetry"], answer["text"]
        drafts = f"{sum(told['accepted'])} of {sum(told['drafted'])} drafts accepted"
        yield Finding(name, "ok", f"{told['n_generated']} tokens with MTP, {drafts}")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        yield Finding("answer", "ok", f"at temperature 0, SHA-256 {digest}: {text!r}")


def check_idle() -> Iterator[Finding]:
    """Whether other programs keep the machine busy."""
    from pyllama_mtp.machine import LOAD, busy_cores
    from pyllama_mtp.settings import available_threads

    busy = busy_cores(2.0)
    detail = f"other programs keep {busy:.1f} of {available_threads()} cores busy"
    close = "close them: figures beside them are too low" if busy >= LOAD else ""
    yield Finding("idle", "note" if close else "ok", detail, close)


class Libdir:
    """Print the folder of libllama.so and libllama.so.0, for programs that load
    llama.cpp themselves. The ggml libraries and backends lie one folder up, where
    libllama finds them.

    llama-cpp-python of the same release as this package's llama.cpp runs on these
    libraries unchanged, and needs no build of its own:
      CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==0.3.36
      LLAMA_CPP_LIB_PATH=$(pyllama-mtp libdir) python my_script.py

    So do upstream's programs, if they are of the same llama.cpp commit (doctor
    names it) and were linked against its shared libraries. Prompts with MTP get
    faster:
      export LD_LIBRARY_PATH=$(pyllama-mtp libdir)
      llama-server -m FILE --spec-type draft-mtp

    Images and sound need the program's own libmtmd; for llama-cpp-python,
    MTMD_CPP_LIB names its folder.

    examples:
      pyllama-mtp libdir
      pyllama-mtp libdir --lib upstream
    """

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parsing.add_lib_option(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the folder, if what lies there can be used on this machine."""
        from pyllama_mtp.llama import native

        folder, _ = native.locate(args.lib)
        if not (folder / LIBRARY).is_file():
            raise LibraryError(
                f"{folder} holds no {LIBRARY}: it was built by an older version of this package. "
                "Build it again with `pip install --force-reinstall .`."
            )
        print(folder)
        return 0


#: The library that such programs load; see ``bindings/shim/dropin.cpp``.
LIBRARY = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
