#!/usr/bin/env python3
"""Run seven of upstream's own tests on both variants of libllama, side by side.

    python tests/upstream/run.py      # builds in build/upstream-tests, then runs everything

libllama is built by the CMake modules that build the shipped one (bindings/cmake), so with its
sources, flags and CPU features; upstream's `common` library and the tests are compiled from the
variant's own tree, because the tests include internal headers. ggml differs from the shipped build
in one option: the CPU backend is linked in, not loaded at run time, which is upstream's default.
GPU backends are not built. CMakeLists.txt, next to this file, is the build; flush_log.cpp is the
one source of ours that it adds to the tests.

A case passes when the program exits with 0 and, where it lists its checks, at least one was run. A
failure that both variants share must be explained in CASES, else it is an error here too.

Exit codes: 0 every result on the patched variant equals the one on the upstream variant, 1 some do
not, or a failure has no explanation, 2 the tests cannot be built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from benchkit.results import markdown_table, project_commit

from pyllama_mtp.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("upstream", "patched")
DEMO = ROOT / "pyllama_mtp" / "models" / "demo" / "demo.gguf"
HEAD = ("test", "both variants")
TIMEOUT = 900.0
CHECKS = r"\b(PASS|PASSED|OK|FAIL|FAILED|SKIP)\b"
KINDS = {"PASSED": "PASS", "OK": "PASS", "FAILED": "FAIL"}


@dataclass(frozen=True)
class Case:
    """One run of one test program.

    Attributes:
        name: what the table calls it.
        program: the executable.
        arguments: `{demo}`, `{models}`, `{threads}` and `{contexts}` are filled in.
        checks: matches the results in the program's output; group 1 is PASS, FAIL, SKIP or the
            like; with two groups, the name of a count and the count. Empty: it lists none.
        fails_because: why both variants fail, when they do.
        fails_with: what the last lines of the output then say.
        gained: checks that the upstream variant skips and the patched one passes.
    """

    name: str
    program: str
    arguments: str = ""
    checks: str = ""
    fails_because: str = ""
    fails_with: str = ""
    gained: int = 0


MODELS = "models of every architecture"
CASES = (
    Case("test-llama-archs", "test-llama-archs", "-s 1", CHECKS),
    Case(f"test-llama-archs, write {MODELS}", "test-llama-archs", "-s 1 -o {models}"),
    Case(
        "test-batch-alloc",
        "test-batch-alloc",
        checks=r"^(tests|assertions|failures|exceptions|skipped) *: (\d+)$",
    ),
    Case(
        f"test-recurrent-state-rollback, {MODELS}",
        "test-recurrent-state-rollback",
        "--models {models} -t {threads}",
        CHECKS,
        gained=2,  # of qwen3next, whose graph keeps snapshots
    ),
    Case(
        "test-recurrent-state-rollback, demo model",
        "test-recurrent-state-rollback",
        "-m {demo} -t {threads}",
    ),
    Case(
        f"test-save-load-state, {MODELS}",
        "test-save-load-state",
        "--models {models} -t {threads}",
        CHECKS,
    ),
    Case(
        "test-save-load-state, demo model", "test-save-load-state", "-m {demo} -t {threads}", CHECKS
    ),
    Case(
        "test-state-restore-fragmented, demo model",
        "test-state-restore-fragmented",
        "-m {demo} -t {threads}",
    ),
    Case(
        "test-backend-sampler, demo model",
        "test-backend-sampler",
        "--model {demo} --device cpu",
        CHECKS,
        fails_because="its part cpu_mixed decodes token 3834, which the demo model lacks, and "
        "the program stops there.",
        fails_with="failed to add token 3834",
    ),
    *(
        Case(
            f"test-backend-sampler, {part}, demo model",
            "test-backend-sampler",
            f"--model {{demo}} --device cpu --test test_{part}",
            CHECKS,
        )
        for part in (
            "set_sampler",
            "multi_output_limit",
            "multi_output_multi_sequence_dist",
            "multi_output_dist_transaction",
            "multi_output_sampling_chain",
            "multi_output_cpu_suffix",
        )
    ),
    Case(
        "test-thread-safety, demo model",
        "test-thread-safety",
        "-m {demo} -p def -n 128 -c 256 -ub 32 -np {contexts} -t 1 --seed 1",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        status: "pass", or why it is not one ("exit 1", "signal SIGABRT", "timeout", "ran nothing").
        counts: how many of its checks had which result.
        seconds: wall time.
        reason: the last lines of the output, unless it passed.
    """

    status: str
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.counts.items()) if n)
        return f"{self.status} ({counts})" if counts else self.status


@dataclass(frozen=True)
class Row:
    """One case on both variants."""

    case: Case
    upstream: Outcome
    patched: Outcome

    @property
    def problem(self) -> str:
        """Why this line does not count as equal; empty when it does."""
        wanted = Counter(self.upstream.counts)
        wanted.update(PASS=self.case.gained, SKIP=-self.case.gained)
        found = Counter(self.patched.counts)
        if self.upstream.status != self.patched.status or wanted != found:
            return "the variants differ"
        if self.upstream.status == "pass":
            return ""
        if not self.case.fails_because:
            return "fails on both variants, and no reason is known"
        known = all(self.case.fails_with in o.reason for o in (self.upstream, self.patched))
        return "" if known else "fails on both variants, and not for the known reason"

    @property
    def outcome(self) -> str:
        """The outcome on both variants, or on each."""
        both = str(self.upstream), f"patched: {self.patched}"
        return both[0] if both[0] == str(self.patched) else "; ".join(both)


class BuildError(Exception):
    """The tests cannot be built; the message says why."""


def count(pattern: str, output: str) -> Counter[str]:
    """The results that a test program printed, by kind."""
    counts: Counter[str] = Counter()
    if pattern:
        for match in re.finditer(pattern, re.sub(r"\x1b\[[0-9;]*m", "", output), re.M):
            kind, *number = match.groups()
            counts[KINDS.get(kind, kind)] += int(number[0]) if number else 1
    return counts


def judge(case: Case, code: int | None, output: str, seconds: float) -> Outcome:
    """The outcome of a run from its exit code (None: it ran past the time limit) and output."""
    counts = count(case.checks, output)
    if code is None:
        status = "timeout"
    elif code < 0:
        status = f"signal {signal.Signals(-code).name}"
    elif code > 0:
        status = f"exit {code}"
    elif case.checks and counts.total() == counts["SKIP"]:
        status = "ran nothing"
    else:
        status = "pass"
    return Outcome(status, counts, seconds, "" if status == "pass" else last_lines(output))


def last_lines(output: str, number: int = 2) -> str:
    """The end of a program's output, without this machine's folders."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", output).replace(f"{ROOT}/", "")
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-number:])


def run_case(case: Case, folder: Path, values: Mapping[str, object], scratch: Path) -> Outcome:
    """Run one case with the programs of `folder`, in the folder `scratch`."""
    arguments = [word.format_map(values) for word in case.arguments.split()]
    foreign = ("LLAMA_", "GGML_", "PYLLAMA_MTP_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    # test-llama-archs and test-backend-sampler ask for four threads, whatever the machine has.
    environment |= {"OMP_THREAD_LIMIT": str(values["threads"]), "OMP_WAIT_POLICY": "passive"}
    environment["GGML_NO_BACKTRACE"] = "1"
    begin = time.monotonic()
    code: int | None = None
    with tempfile.TemporaryFile() as log:  # a file: what came before a crash or time-out is there
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                [folder / "bin" / case.program, *arguments],
                cwd=scratch,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
            ).returncode
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    return judge(case, code, output, time.monotonic() - begin)


def run_variant(folder: Path, threads: int) -> list[Outcome]:
    """Run every case with the programs of one variant, in order."""
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder) as name:
        scratch = Path(name)
        models = scratch / "models"  # about 1 GB, written by the second case
        models.mkdir()
        contexts = min(4, max(1, threads // 2))  # per model; the program loads two models
        values = {"demo": DEMO, "models": models, "threads": threads, "contexts": contexts}
        outcomes = []
        for case in CASES:
            outcome = run_case(case, folder, values, scratch)
            print(f"  {outcome.seconds:6.1f} s  {case.name}: {outcome}", flush=True)
            outcomes.append(outcome)
    return outcomes


def build(folder: Path, variant: str, jobs: int) -> dict[str, Any]:
    """Build a variant's tests in `folder`; returns what CMake reports. Raises BuildError."""
    if not shutil.which("cmake"):
        raise BuildError("cmake is not on PATH; `pip install cmake ninja` provides it")
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    configure = ["cmake", "-S", str(Path(__file__).parent), "-B", str(folder), "-G", generator]
    configure += [f"-DPYLLAMA_TEST_VARIANT={variant}", f"-DPython_EXECUTABLE={sys.executable}"]
    compile_ = ["cmake", "--build", str(folder), "--target", "upstream-tests"]
    for command in (configure, [*compile_, "--parallel", str(jobs)]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            what = " ".join(command[:2])
            raise BuildError(f"{variant}: {what} ... failed:\n{done.stdout.strip()[-4000:]}")
    info: dict[str, Any] = json.loads((folder / "build.json").read_text())
    return info


def render(rows: Sequence[Row], infos: Mapping[str, Mapping[str, Any]], threads: int) -> str:
    """The Markdown file."""
    info, machine = infos["patched"], describe_machine()
    series = ", ".join(f"{name} {infos[name]['series'][:12]}" for name in VARIANTS)
    table = []
    for (program, outcome), same in groupby(rows, lambda row: (row.case.program, row.outcome)):
        first, *more = same
        name = f"{program}, {1 + len(more)} parts alone" if more else first.case.name
        table.append([name, outcome])
    lines = [
        "# Upstream's own tests on both variants",
        "",
        f"Do they pass on our library? {verdict(rows)} `SKIP` is the program's own choice.",
        "",
        *markdown_table(HEAD, table),
        "",
        f"- Date: {datetime.now(timezone.utc):%Y-%m-%d}",
        f"- Command: `python tests/upstream/run.py --threads {threads}`",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['os']}",
        f"- llama.cpp {info['upstream_commit'][:12]}, compiled by {info['compiler']}; "
        f"CPU features: {info['cpu_features']}",
        f"- Patch series: {series}; commit {project_commit()}",
    ]
    failed = [row for row in rows if row.problem or row.upstream.status != "pass"]
    if failed:
        lines += ["", "## Failures"]
    for row in failed:
        lines += ["", f"{row.case.name}: {row.problem or row.case.fails_because}"]
        if row.problem:
            lines += ["", "```"]
            for name, outcome in zip(VARIANTS, (row.upstream, row.patched), strict=True):
                lines.append(f"{name}: {outcome}")
                lines += [f"    {line}" for line in outcome.reason.splitlines()]
            lines.append("```")
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """One sentence over all lines."""
    problems = [row for row in rows if row.problem]
    if problems:
        return f"**{len(problems)} of {len(rows)} runs are not as they should be; see below.**"
    failing = sum(row.upstream.status != "pass" for row in rows)
    both = f"; {failing} fails on both" if failing else ""
    return f"All {len(rows)} runs end alike on both variants{both}."


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run upstream's own tests on both variants.")
    parser.add_argument(
        "--build-dir", type=Path, default=ROOT / "build" / "upstream-tests", help="build folder"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "upstream-tests.md"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="for compiling and for the tests; default: 2"
    )
    args = parser.parse_args(argv)
    folders = {variant: args.build_dir.resolve() / variant for variant in VARIANTS}
    infos = {}
    try:
        for variant in VARIANTS:
            print(f"building, {variant} variant ...", flush=True)
            infos[variant] = build(folders[variant], variant, args.threads)
    except BuildError as error:
        print(f"upstream tests: {error}", file=sys.stderr)
        return 2
    outcomes = {}
    for variant in VARIANTS:
        print(f"running, {variant} variant:", flush=True)
        outcomes[variant] = run_variant(folders[variant], args.threads)
    pairs = zip(CASES, outcomes["upstream"], outcomes["patched"], strict=True)
    rows = [Row(*pair) for pair in pairs]
    text = render(rows, infos, args.threads)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print("\n" + text)
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
