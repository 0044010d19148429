#!/usr/bin/env python3
"""Build the patched variant with AddressSanitizer and UBSan, and run the native tests on it.

    python tests/sanitize.py                        # build, run everything, print what was found
    python tests/sanitize.py tests/ffi --no-build   # some files or folders

Each test file runs in a process of its own, with a time limit, as many at once as there are jobs;
its output and logs stay in the build folder, under runs/. First deliberate errors in the shim must
be reported: a build that reports nothing proves nothing.

Exit codes: 0 no finding in code we touch, 1 some, 2 an error whose message says what to do. Needs
g++ (or CXX) with its sanitizer runtimes, cmake, ninja, and the ordinary build, whose upstream
variant the tests compare with.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sanitizers.build import ROOT, SanitizeError, assemble, build, environment
from sanitizers.findings import TOUCHED, Finding, Sources, collect

BUILD = ROOT / "build" / "sanitize"
NATIVE = ("tests/ffi", "tests/regression", "tests/unit")
#: Random use of every setting. Its word on memory does not count: ASan keeps what was freed.
SOAK = "bench/soak.py"
#: What cannot run with the sanitizers: it reads resident memory, too.
LEFT_OUT = "tests/regression/test_long_run.py"

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


def run_probe(package: Path, logs: Path, sources: Sources) -> None:
    """Deliberate errors in the shim: each sanitizer must report its own, and as ours."""
    for wanted, place in PROBES.items():
        folder = logs / wanted
        shutil.rmtree(folder, ignore_errors=True)
        variables = environment(package, folder)
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


def run_file(file: str, package: Path, logs: Path, args: argparse.Namespace) -> str:
    """Run one test file, or SOAK, in a process of its own; returns how it ended."""
    shutil.rmtree(logs, ignore_errors=True)
    if file == SOAK:
        command = [sys.executable, str(ROOT / SOAK), "--steps", str(args.soak_steps)]
    else:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE"]
        command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(ROOT / file)]
    variables, output = environment(package, logs), logs / "output.txt"
    with output.open("w") as stream:
        try:
            code: object = subprocess.run(
                command,
                env=variables,
                cwd=package,
                timeout=args.time_limit,
                stdout=stream,
                stderr=subprocess.STDOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {args.time_limit:.0f} s"
    text = output.read_text(errors="replace")
    if file == SOAK:
        equal = re.search(r"^\| equal \| (\d+)", text, re.M)
        return f"{equal[1] if equal else 0} equal" + ", and some not" * ("answer differs" in text)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", text)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(tests/\S+)", text, re.M)
    return ", ".join([*counts, *[f"ended with {code}"] * (code not in (0, 1)), *failed])


def selected(paths: list[str]) -> list[str]:
    """SOAK and test files, relative to the project's root."""
    files: list[str] = []
    for path in paths or [SOAK, *NATIVE]:
        place = ROOT / path
        if not place.exists():
            raise SanitizeError(f"{path} is not there: give files or folders below the project")
        found = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        files += [file.relative_to(ROOT).as_posix() for file in found]
    return [file for file in files if file != LEFT_OUT]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description="The native tests under AddressSanitizer and UndefinedBehaviorSanitizer."
    )
    top.add_argument("paths", nargs="*", help=f"default: {SOAK} {' '.join(NATIVE)}")
    top.add_argument("--build", type=Path, default=BUILD, help="default: %(default)s")
    top.add_argument("--no-build", action="store_true", help="the folder's build is current")
    top.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="at once; default: %(default)s"
    )
    top.add_argument(
        "--time-limit", type=float, default=3600, help="s, for a file; default: %(default)s"
    )
    top.add_argument("--soak-steps", type=int, default=60, help=f"of {SOAK}; default: %(default)s")
    return top


def run_all(args: argparse.Namespace, folder: Path, sources: Sources) -> Counter[Finding]:
    """Build, probe, and each file; prints how each ended, and returns what was found."""
    if not args.no_build:
        build(folder, "address,undefined", args.jobs)
    package = assemble(folder)
    run_probe(package, folder / "probe", sources)
    print("a deliberate error is reported", flush=True)

    def run(file: str) -> Counter[Finding]:
        logs = folder / "runs" / file.replace("/", "-").removesuffix(".py")
        print(f"{file}: {run_file(file, package, logs, args)}", flush=True)
        return collect(logs.glob("*san.*"), sources)

    with ThreadPoolExecutor(args.jobs) as at_once:
        return sum(at_once.map(run, selected(args.paths)), Counter())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    folder = args.build.resolve()
    try:
        found = run_all(args, folder, Sources(folder, ROOT))
    except SanitizeError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    for f, n in sorted(found.items(), key=lambda item: (item[0].whose, item[0].file)):
        print(f"{f.whose}: {f.file}:{f.line}, {f.function}: {f.kind}, {n} times")
    ours = sum(finding.whose == TOUCHED for finding in found)
    print(f"{ours} findings in code we touch")
    return 1 if ours else 0


if __name__ == "__main__":
    raise SystemExit(main())
