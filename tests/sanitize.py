#!/usr/bin/env python3
"""Build the patched variant with AddressSanitizer and UBSan, and run the native tests on it.

    python tests/sanitize.py                        # build, run everything, print the summary
    python tests/sanitize.py tests/ffi              # some files or folders
    python tests/sanitize.py --summary-only         # from the runs so far

Each test file runs in a process of its own, with a time limit, as many at once as there are jobs;
what ran is kept in the build folder, so that an interrupted run loses only what was under way.
First deliberate errors in the shim must be reported: a build that reports nothing proves nothing.
Exit codes: 0 no finding in code we touch, 1 some, 2 an error whose message says what to do. Needs
g++ (or CXX) with its sanitizer runtimes, cmake, ninja, and the ordinary build, whose upstream
variant the tests compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sanitizers.build import ROOT, SanitizeError, assemble, build, environment
from sanitizers.findings import TOUCHED, Run, Sources, collect, summary

BUILD = ROOT / "build" / "sanitize"
NATIVE = ("tests/ffi", "tests/regression", "tests/unit")
SOAK = "bench/soak.py"
#: What cannot run with the sanitizers, and why.
LEFT_OUT = {
    "tests/regression/test_long_run.py": "reads resident memory, where ASan keeps what was freed",
}
PROBE = """
import ctypes, sys
from pyllama_mtp.llama import native
folder = native.load().folder
assert str(folder).startswith(sys.argv[1]), f"{folder} is not the instrumented build"
shim = ctypes.CDLL(str(folder / "libpyllama-mtp.so"))
libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p
size, offset = map(int, sys.argv[2:])
shim.pyllama_abort_poll(ctypes.c_void_p(libc.calloc(1, size) + offset))
"""
#: Size and offset of what the probe passes for a pointer to 32 aligned bytes, by what is reported.
PROBES = {"undefined": (64, 1), "address": (8, 0)}
LEAKS = """
import gc, sys
import pyllama_mtp
from pyllama_mtp.models.demo import demo_path
for depth in (0, 3):
    with pyllama_mtp.Model(demo_path()) as model:
        settings = pyllama_mtp.Settings(draft_n_max=depth, n_ctx=512, n_threads=1)
        with pyllama_mtp.Session(model, settings) as session:
            print(len(session.generate("def main", max_tokens=40).run().tokens))
gc.collect()
"""


def run_probe(package: Path, logs: Path, sources: Sources) -> None:
    """Deliberate errors in the shim: each sanitizer must report its own, and as ours."""
    for wanted, place in PROBES.items():
        folder = logs / wanted
        variables = environment(package, folder, leaks=False)
        command = [sys.executable, "-c", PROBE, str(package), *map(str, place)]
        done = subprocess.run(command, env=variables, cwd=package, capture_output=True, text=True)
        found = collect(folder.iterdir(), sources)
        if not any(
            finding.kind.startswith(wanted)
            and finding.whose == TOUCHED
            and finding.file.endswith("shim.cpp")
            for finding in found
        ):
            raise SanitizeError(
                f"a deliberate error ({wanted}) was not reported, but {list(found)}:\n"
                f"{done.stdout}{done.stderr[-2000:]}"
            )


def run_file(file: str, package: Path, logs: Path, limit: float) -> Run:
    """One test file, in a process of its own."""
    variables = environment(package, logs, leaks=False)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(ROOT / file)]
    begin = time.monotonic()
    output = logs / "output.txt"
    with output.open("w") as stream:
        both: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run(command, env=variables, cwd=package, timeout=limit, **both)
            outcome = "" if done.returncode in (0, 1) else f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome = f"stopped after {limit:.0f} s"
    text = output.read_text(errors="replace")
    counts = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|error|skipped|deselected).*?)(?: =+)?$",
                        text, re.M)  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(tests/\S+)", text, re.M)
    result = re.sub(r" in [\d.]+s.*", "", counts[-1]) if counts else "no result"
    result = f"{result}; {outcome}" if outcome else result
    return Run(file, result, failed, time.monotonic() - begin)


def run_soak(package: Path, logs: Path, steps: int) -> Run:
    """Random use of every setting (bench/soak.py). Its word on memory does not count here: ASan
    keeps what was freed."""
    variables = environment(package, logs, leaks=False)
    command = [sys.executable, str(ROOT / SOAK), "--steps", str(steps)]
    begin = time.monotonic()
    done = subprocess.run(command, env=variables, cwd=package, capture_output=True, text=True)
    (logs / "output.txt").write_text(done.stdout + done.stderr)
    equal = re.search(r"^\| equal \| (\d+)", done.stdout, re.M)
    result = f"{equal[1]} equal" if equal else f"ended with {done.returncode}"
    failed = [] if equal and "an answer differs" not in done.stdout else ["bench/soak.py"]
    return Run(f"bench/soak.py --steps {steps}", result, failed, time.monotonic() - begin)


def run_leaks(package: Path, logs: Path, sources: Sources) -> str:
    """Load, generate, close, end: what LeakSanitizer says of blocks that our code allocated."""
    variables = environment(package, logs, leaks=True)
    command = [sys.executable, "-c", LEAKS]
    done = subprocess.run(command, env=variables, cwd=package, capture_output=True, text=True)
    text = "\n".join(log.read_text(errors="replace") for log in logs.glob("*san.*")) + done.stderr
    if "LeakSanitizer has encountered a fatal error" in text:
        return "LeakSanitizer does not run on this machine"
    if len(done.stdout.split()) != 2:
        raise SanitizeError(f"the program for the leaks failed:\n{text[-3000:]}")
    all_leaks = len(re.findall(r"^(?:Direct|Indirect) leak of", text, re.M))
    leaks = {f: n for f, n in collect(logs.glob("*san.*"), sources).items() if f.kind == "leak"}
    lines = [f"- {f.whose}: {f.function} ({f.file}:{f.line})" for f in leaks]
    told = f"{all_leaks} reports in all, {len(leaks)} with a frame of llama.cpp, ggml or ours"
    return "\n".join([told + (":" if lines else "."), *lines])


def selected(paths: list[str]) -> list[str]:
    """Test files, relative to the project's root."""
    files: list[str] = []
    for path in paths or NATIVE:
        place = ROOT / path
        if not place.exists():
            raise SanitizeError(f"{path} is not there: give files or folders below the project")
        found = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        files += [file.relative_to(ROOT).as_posix() for file in found]
    return [file for file in files if file not in LEFT_OUT]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description="The native tests under AddressSanitizer and UndefinedBehaviorSanitizer."
    )
    top.add_argument("paths", nargs="*", help=f"default: {SOAK} {' '.join(NATIVE)}")
    top.add_argument("--build", type=Path, default=BUILD, help="default: %(default)s")
    top.add_argument("--no-build", action="store_true", help="the folder's build is current")
    top.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="compilers, and then test files, at once; default: %(default)s",
    )
    top.add_argument(
        "--time-limit",
        type=float,
        default=3600,
        metavar="S",
        help="for one file; default: %(default)s",
    )
    top.add_argument("--soak-steps", type=int, default=60, metavar="N", help="of bench/soak.py")
    top.add_argument("--summary-only", action="store_true", help="from what ran so far")
    return top


def run_all(args: argparse.Namespace, folder: Path, sources: Sources) -> None:
    """Build, probe, leaks, and each file; each leaves a folder of logs with a record in it."""
    if not args.no_build:
        build(folder, "address,undefined", args.jobs)
    package = assemble(folder)
    stamp = time.strftime("%H%M%S")
    run_probe(package, folder / "probe" / stamp, sources)
    print("a deliberate error is reported", flush=True)
    (folder / "leaks.txt").write_text(run_leaks(package, folder / "leaks" / stamp, sources))
    files = selected([path for path in args.paths if path != SOAK]) if args.paths != [SOAK] else []
    if not args.paths or SOAK in args.paths:
        files.insert(0, SOAK)

    def run(file: str) -> None:
        logs = folder / "runs" / file.replace("/", "-").removesuffix(".py")
        shutil.rmtree(logs, ignore_errors=True)
        if file == SOAK:
            done = run_soak(package, logs, args.soak_steps)
        else:
            done = run_file(file, package, logs, args.time_limit)
        (logs / "run.json").write_text(json.dumps(vars(done)))
        print(f"{done.file}: {done.result}, {done.seconds:.0f} s", flush=True)

    with ThreadPoolExecutor(args.jobs) as at_once:
        list(at_once.map(run, files))  # raises what a run raised


def summarize(folder: Path, sources: Sources) -> int:
    """Print the summary of all runs in the build folder; returns how many findings are ours."""
    records = sorted((folder / "runs").glob("*/run.json"))
    if not records:
        raise SanitizeError(f"nothing ran yet in {folder}: run without --summary-only")
    runs = [Run(**json.loads(record.read_text())) for record in records]
    done = {run.file for run in runs}
    for run, record in zip(runs, records, strict=True):
        text = (record.parent / "output.txt").read_text(errors="replace")
        causes = re.findall(r"^E +([\w.]+(?:Error|Expired))\b", text, re.M)
        if len(causes) == len(run.failed):
            run.failed[:] = [f"{n}: {c}" for n, c in zip(run.failed, causes, strict=True)]
    left_out = LEFT_OUT | {file: "did not run" for file in selected([]) if file not in done}
    logs = [log for record in records for log in record.parent.glob("*san.*")]
    found = collect(logs, sources)
    print(summary(runs, found, (folder / "leaks.txt").read_text(), left_out))
    return sum(finding.whose == TOUCHED for finding in found)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    folder = args.build.resolve()
    sources = Sources(folder, ROOT)
    try:
        if not args.summary_only:
            run_all(args, folder, sources)
        ours = summarize(folder, sources)
    except SanitizeError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    print(f"{ours} findings in code we touch")
    return 1 if ours else 0


if __name__ == "__main__":
    raise SystemExit(main())
