#!/usr/bin/env python3
"""Build for the NVIDIA GPU present, test, and measure the 27B and 35B-A3B shapes on it.

    python bench/gpu_runbook.py               # what this machine lacks; else the next 9 minutes
    python bench/gpu_runbook.py --dry-run     # all of it on the CPU with tiny models

Run it again as long as its exit code is 3. --work remembers what is done; a build or matrix that
was cut is continued. Each call ends with what was done, the tables, and the archive to send back.

    build      both variants with CUDA for this GPU only, into the Python that runs this
    doctor     checks that they use the GPU, and work without it
    model      random weights with a head that drafts well, 35 GB in IQ4_NL
    tests      the regression and device tests on the GPU; fixed tolerances times 10
    matrix     no MTP and depths 2, 3, 4 and auto, 1k to 32k; no MTP and 3, once, 64k to 192k
    drafting   our way and upstream's (--sync kv,full), over the whole vocabulary
    vocabulary 32k drafted tokens and all
    peers      upstream's llama-server and llama-bench beside ours, with the same CUDA backend

No network is needed if vendor/llama.cpp is laid out (vendor/fetch.py) or PYLLAMA_MTP_SDIST names
the archive, and Python has the modules that the check names. A build takes 40 minutes of one core.

Exit codes: 0 all is done, 1 something failed (the rest went on; the next call tries it again), 2
something is missing or wrong, 3 the time is over: the same command continues.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("qwen3.6-27b", "qwen3.6-35b-a3b")
SIZES = (1024, 8192, 32768, 65536, 131072, 196608)
#: Prompts of this size and more take so long that little is measured with them, and only once.
LONG = 65536
MODULES = (
    *("pip", "scikit_build_core", "cffi", "cmake", "ninja"),
    *("numpy", "gguf", "rich", "jinja2", "msgspec", "pytest", "jsonschema"),
)
#: Free disk for two builds with CUDA and both models.
DISK_BYTES = 45e9
#: Seconds: that a command which is cut has to write its results; that a matrix ends before the time
#: is over; with less than LEAST_S left nothing is started.
GRACE_S, MARGIN_S, LEAST_S = 15.0, 45.0, 60.0
DONE, FAILED, CUT = "done", "failed", "cut"


@dataclass
class Unit:
    """One command.

    Attributes:
        command: words, or a function that makes them of the seconds that are left.
        check: given the output of a command that succeeded: what is wrong or missing ("": nothing).
        output: grows with every attempt; without one, a unit begins anew when it was cut.
        needs: a unit that must be done.
    """

    name: str
    command: Sequence[object] | Callable[[float], Sequence[object]]
    check: Callable[[str], str] = lambda said: ""
    output: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""

    def size(self) -> int:
        """Bytes of its output so far."""
        return self.output.stat().st_size if self.output and self.output.exists() else 0


@dataclass
class Runbook:
    """What a call works with; `units` are those that were begun: status, seconds, message."""

    work: Path
    dry_run: bool
    gpu: dict[str, str] | None
    units: dict[str, dict[str, Any]]

    def save(self) -> None:
        """Write the state in one rename."""
        state = {"dry_run": self.dry_run, "gpu": self.gpu, "units": self.units}
        state |= {"machine": platform.uname()._asdict(), "cores": os.cpu_count()}
        state["commit"] = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
        part = self.work / "state.part"
        part.write_text(json.dumps(state, indent=1) + "\n")
        part.replace(self.work / "state.json")

    def log(self, unit: str) -> Path:
        """Where a command's output goes."""
        return self.work / "logs" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', unit)}.log"


def _said(*command: str) -> str:
    """What a command prints; "" without it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_gpu() -> dict[str, str] | None:
    """Name, driver, compute capability such as "9.0" and memory of the first GPU, or None."""
    fields = "name,driver_version,compute_cap,memory.total"
    return parse_gpu(_said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"))


def parse_gpu(text: str) -> dict[str, str] | None:
    """nvidia-smi's answer; None when it is not understood."""
    parts = [part.strip() for part in text.splitlines()[0].split(",")] if text else []
    if len(parts) != 4 or not re.fullmatch(r"\d+\.\d+", parts[2]):
        return None
    return dict(zip(("name", "driver", "capability", "memory"), parts, strict=True))


def lacking(gpu: dict[str, str] | None, work: Path) -> Iterator[str]:
    """What is missing, and what to do."""
    if gpu is None:
        yield "a GPU: nvidia-smi names none; --dry-run runs everything on the CPU"
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    folders += [
        f"{os.environ[name]}/bin" for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ
    ]
    if shutil.which("nvcc", path=os.pathsep.join(folders)) is None:
        yield "nvcc: install the CUDA toolkit, or set CUDA_HOME to its folder"
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    absent = [name for name in absent if not (name in ("cmake", "ninja") and shutil.which(name))]
    if absent:
        yield f"Python modules: pip install {' '.join(absent).replace('_', '-')}"
    tree = ROOT / "vendor" / "llama.cpp" / "ggml"
    if not tree.is_dir() and "PYLLAMA_MTP_SDIST" not in os.environ:
        yield "upstream's sources: run vendor/fetch.py, or name the archive in PYLLAMA_MTP_SDIST"
    free = shutil.disk_usage(work).free
    if free < DISK_BYTES:
        yield f"disk: {free / 1e9:.0f} GB are free, {DISK_BYTES / 1e9:.0f} are needed (--work)"


def driver(*words: object) -> list[object]:
    """A command of the package's command line."""
    return [sys.executable, "-m", "pyllama_mtp", *words]


def says(wanted: str) -> Callable[[str], str]:
    """`Unit.check` for a word in the output."""
    return lambda said: "" if wanted in said else f"no {wanted!r} in its output"


def preparations(book: Runbook, shapes: Sequence[str]) -> Iterator[Unit]:
    """Build, what the build says of itself, models, tests: a unit for each file."""
    capability = book.gpu["capability"].replace(".", "") if book.gpu else "90"
    command = [sys.executable, "-m", "pip", "install", str(ROOT), "-v", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "-C", f"build-dir={book.work / 'native'}"]
    defines = ["GGML_CUDA=ON", "GGML_CUDA_NCCL=OFF", f"CMAKE_CUDA_ARCHITECTURES={capability}-real"]
    for define in defines:  # machine code of this GPU alone; NCCL is for several
        command += ["-C", f"cmake.define.{define}"]
    if book.dry_run:
        command = [sys.executable, "-c", "import sys; print(*sys.argv[1:])", *command]
    yield Unit("build", command, output=book.log("build"))
    for variant in ("upstream", "patched"):
        used = says("CPU" if book.dry_run else "(gpu)")
        yield Unit(f"doctor {variant}", driver("doctor", "--lib", variant), used, needs="build")
    without = {"CUDA_VISIBLE_DEVICES": ""}
    yield Unit("doctor without a GPU", driver("doctor"), environment=without, needs="build")
    kind = "q8_0" if book.dry_run else "iq4_nl"
    for shape in shapes:
        words = driver("synth", "--shape", shape, "--type", kind, "--pure", "--head-noise", "0.05")
        words += ["--force", book.work / f"{shape}.gguf"]
        yield Unit(f"model {shape}", words, needs="build")
    files = [f for part in ("regression", "devices") for f in (ROOT / "tests" / part).glob("*.py")]
    wanted = "test_snapshots" if book.dry_run else "test_"
    for file in sorted(file for file in files if file.name.startswith(wanted)):
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
        words += ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
        words += ["--n-gpu-layers", "0" if book.dry_run else "-1"]
        words += ["--tolerance-scale", "1" if book.dry_run else "10"]
        yield Unit(f"tests {file.stem}", words, needs="build")


def measurements(book: Runbook, shapes: Sequence[str], sizes: Sequence[int]) -> Iterator[Unit]:
    """No MTP and depths at every size; ways of drafting and draft vocabularies; other programs."""
    short, both = min(sizes), dict.fromkeys([min(sizes), *(n for n in sizes if n == 32768)])
    for size in sizes:
        for shape in shapes:
            depths = "0,2,3,4,auto" if size < LONG else "0,3"
            yield matrix(book, "matrix", shape, size, "--depths", depths)
    ways = ["--depths", "0,3", "--sync", "kv,full", "--draft-vocab", "full"]
    few = 512 if book.dry_run else 32768
    vocabularies = ["--depths", "0,3", "--draft-vocab", f"{few},full"]
    for size in both:
        for shape in shapes:
            yield matrix(book, "drafting", shape, size, *ways)
            yield matrix(book, "vocabulary", shape, size, *vocabularies)
    folder = book.work / "peers"
    if not book.dry_run:
        words = [sys.executable, ROOT / "bench" / "peers.py", "--folder", folder]
        words += ["--define", "GGML_CUDA=OFF"]
        yield Unit("programs", words, output=book.log("programs"), needs="build")
        # Backends are loaded from beside a program, and the variants share ggml's sources.
        code = "import pyllama_mtp, shutil, sys; shutil.copy(pyllama_mtp.__path__[0] + "
        code += "'/lib/libggml-cuda.so', sys.argv[1])"
        copy = [sys.executable, "-c", code, folder / "bin"]
        yield Unit("programs' backend", copy, needs="programs")
    options = ["--depths", "0,2,3", "--peers", "llama-server,llama-bench"]
    for shape in shapes:
        yield matrix(book, "peers", shape, short, *options, "--peer-dir", folder / "bin")


def matrix(book: Runbook, kind: str, shape: str, size: int, *options: object) -> Unit:
    """One size of one shape through `pyllama-mtp matrix`, which goes on with what its file has."""
    output = book.work / "results" / f"{kind}-{shape}-{size}.jsonl"
    repeat, tokens, layers = (1, 6, 0) if book.dry_run else (1 if size >= LONG else 3, 192, -1)
    words = driver("matrix", "--model", book.work / f"{shape}.gguf", "--prompt-sizes", size)
    words += ["--repeat", repeat, "--max-tokens", tokens, "--n-gpu-layers", layers, *options]
    words += ["--resume", "--output", output, "--format", "markdown"]

    def command(left_s: float) -> list[object]:
        return [*words, "--budget", f"{max(1, int(left_s - min(MARGIN_S, left_s / 3)))}s"]

    name = f"{kind} {shape} {size}"
    return Unit(name, command, unmeasured, output, needs=f"model {shape}")


def unmeasured(said: str) -> str:
    """What `pyllama-mtp matrix` says that it left out; "" is nothing."""
    return next((line for line in said.splitlines() if "left out for the budget" in line), "")


def run(command: list[str], log: Any, limit_s: float, **options: Any) -> int | None:
    """Run a command and return its exit code; None: it was cut, and nothing of it survives."""
    grace = min(GRACE_S, limit_s / 4)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    try:
        return process.wait(timeout=limit_s - grace)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)


def attempt(book: Runbook, unit: Unit, left_s: float, whole: bool) -> str:
    """Run one unit for so many seconds at most (`whole`: all of a call); note how it ended."""
    words = unit.command(left_s) if callable(unit.command) else unit.command
    command, begun, before = [str(word) for word in words], time.monotonic(), unit.size()
    print(f"runbook: {unit.name} ...", file=sys.stderr, flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **unit.environment}
    with book.log(unit.name).open("ab") as file:
        start = file.tell()
        # Not in the checkout, where Python would import the sources, not what was installed.
        code = run(command, file, left_s, env=environment, cwd=book.work)
    said = book.log(unit.name).read_bytes()[start:].decode(errors="replace")
    status, message = DONE, ""
    if code:
        last = " | ".join(line.strip()[:200] for line in said.splitlines()[-2:])
        status, message = FAILED, f"exit code {code}: {last}"
    elif message := "the time was over" if code is None else unit.check(said):
        grown = unit.output is not None and unit.size() > before
        status = CUT if grown or (not whole and (code is None or unit.output)) else FAILED
        if code is None and status == FAILED:
            message = "got nowhere in a whole call; give a larger --budget"
    seconds = book.units.get(unit.name, {}).get("seconds", 0) + round(time.monotonic() - begun)
    record = {"status": status, "seconds": seconds, "message": message, "command": command}
    book.units[unit.name] = record
    book.save()
    return status


def run_all(book: Runbook, units: Sequence[Unit], budget_s: float) -> int:
    """What is not done until the time is over, what failed in an earlier call last; exit code."""
    end = time.monotonic() + budget_s
    status = {unit.name: book.units.get(unit.name, {}).get("status", "") for unit in units}
    for unit in sorted(units, key=lambda unit: status[unit.name] == FAILED):
        left = end - time.monotonic()
        if status[unit.name] == DONE:
            continue
        if unit.needs and status[unit.needs] != DONE:
            book.units[unit.name] = {"status": FAILED, "seconds": 0, "message": f"no {unit.needs}"}
        elif left < (2 if book.dry_run else LEAST_S):
            return 3
        else:
            status[unit.name] = attempt(book, unit, left, whole=left > 0.95 * budget_s)
            if status[unit.name] == CUT:
                return 3
    return int(any(book.units[unit.name]["status"] == FAILED for unit in units))


def report(book: Runbook, units: Sequence[Unit]) -> None:
    """Print what was done and measured, and pack what to send back."""
    print("DRY RUN on the CPU: no figure means anything" if book.dry_run else book.gpu)
    for unit in units:
        record = book.units.get(unit.name, {"status": "open", "seconds": 0, "message": ""})
        print(f"{record['status']:7}{record['seconds']:6} s  {unit.name}  {record['message']}")
    for path in sorted((book.work / "results").glob("*.jsonl")):
        lines = book.log(path.stem).read_text(errors="replace").splitlines()
        print("", path.stem, *[line for line in lines if line[:1] == "|"][-12:], sep="\n")
    archive = book.work / "send-back.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for part in ("state.json", "logs", "results"):
            tar.add(book.work / part, part)
    print(f"\nsend back: {archive} ({archive.stat().st_size / 1e6:.1f} MB)")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--budget", type=float, default=9.0, metavar="MINUTES", help="of this call (default: 9)")
    add("--work", type=Path, metavar="DIR", help="default: build/gpu (dry runs: build/gpu-dry)")
    add("--dry-run", action="store_true", help="tiny models on the CPU; figures mean nothing")
    add("--shapes", nargs="+", metavar="NAME", help=f"default: {' '.join(SHAPES)}")
    add("--sizes", type=int, nargs="+", metavar="N", help=f"of prompts, default: {SIZES}")
    args = parser.parse_args(argv)
    usual = ("gpu-dry", ("tiny", "tiny-moe"), (16, 48)) if args.dry_run else ("gpu", SHAPES, SIZES)
    args.work = (args.work or ROOT / "build" / usual[0]).resolve()
    args.shapes = args.shapes or usual[1]
    args.sizes = args.sizes or usual[2]
    return args


def open_work(args: argparse.Namespace, gpu: dict[str, str] | None) -> Runbook:
    """The state of the work folder. Raises ValueError where it is another GPU's."""
    for part in ("logs", "results", "peers/bin"):
        (args.work / part).mkdir(parents=True, exist_ok=True)
    path, now = args.work / "state.json", {"dry_run": args.dry_run, "gpu": gpu}
    state = json.loads(path.read_text()) if path.exists() else {**now, "units": {}}
    if {name: state[name] for name in now} != now:
        of = "a dry run" if state["dry_run"] else state["gpu"]
        raise ValueError(f"{args.work} has the figures of {of}; give another --work folder")
    return Runbook(args.work, args.dry_run, gpu, state["units"])


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    gpu = None if args.dry_run else find_gpu()
    try:
        book = open_work(args, gpu)
    except ValueError as error:
        print(f"runbook: {error}", file=sys.stderr)
        return 2
    if missing := [] if args.dry_run else [*lacking(gpu, args.work)]:
        print(*(f"MISSING  {line}" for line in missing), sep="\n")
        return 2
    units = [*preparations(book, args.shapes)]
    units += measurements(book, args.shapes, args.sizes)
    code = run_all(book, units, 60 * args.budget)
    book.save()
    report(book, units)
    if code == 3:
        print("runbook: the time is over; the same command goes on", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
