"""What the sanitizers wrote: one finding per place and kind, and whose code it is in."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

UBSAN = re.compile(r"^(\S+?):(\d+):\d+: runtime error: (.+)$", re.M)
ASAN = re.compile(r"^==\d+==ERROR: AddressSanitizer:? (\S+)", re.M)
LEAK = re.compile(r"^(Direct|Indirect) leak of (\d+) byte\(s\) in (\d+) object\(s\)", re.M)
FRAME = re.compile(r"^\s*#\d+ 0x[0-9a-f]+ in (.+?) (/?[^\s:]+\.[a-z]+):(\d+)", re.M)
# A frame without a line: of a file of libllama that was not instrumented.
LIBRARIES = r"(?:libllama|libggml|libpyllama|_native)[^/+]*"
MODULE = re.compile(rf"^\s*#\d+ 0x[0-9a-f]+ in (.+?) \(\S*/({LIBRARIES})\+0x", re.M)
# Addresses, values and indices differ from run to run; the kind of error does not.
VARYING = re.compile(r"0x[0-9a-f]+|-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")

TOUCHED, UPSTREAM = "code we touch", "upstream's code"


@dataclass(frozen=True)
class Finding:
    """One kind of error at one place."""

    kind: str
    file: str  # relative to llama.cpp's root, or to the project for our own sources
    line: int
    function: str
    whose: str


class Sources:
    """Which compiled lines are ours.

    Args:
        build: the CMake build folder, with both trees in it.
        project: the project's root; bindings/ below it is all ours.
    """

    def __init__(self, build: Path, project: Path) -> None:
        self._patched, self._upstream = build / "tree" / "patched", build / "tree" / "upstream"
        self._build, self._project = build, project
        self._ours = cache(self._find_ours)

    def locate(self, path: str) -> tuple[str, bool] | None:
        """The name of a compiled file and whether it is llama.cpp's; None for foreign files."""
        parts = Path(path).parts
        for tree in ("patched", "upstream"):
            for at in range(len(parts) - 1):
                if parts[at : at + 2] == ("tree", tree):
                    return "/".join(parts[at + 2 :]), True
        for folder, root in (("bindings", self._project), ("generated", self._build)):
            name = "/".join(parts[parts.index(folder) :]) if folder in parts else ""
            if name and (root / name).is_file():
                return name, False
        return None

    def touched(self, path: str, line: int) -> bool:
        """Whether a patch wrote this line, or the whole file is ours."""
        found = self.locate(path)
        if found is None:
            return False
        name, upstreams = found
        if not upstreams:
            return True
        return line in self._ours(name)

    def _find_ours(self, name: str) -> frozenset[int]:
        """Lines of the patched file that upstream's lacks."""
        patched, original = self._patched / name, self._upstream / name
        old, new = (p.read_text(errors="replace").splitlines() for p in (original, patched))
        if old == new:
            return frozenset()
        ours: set[int] = set()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for what, _, _, start, end in matcher.get_opcodes():
            if what in ("insert", "replace"):
                ours |= set(range(start + 1, end + 1))
        return frozenset(ours)


def parse(text: str, sources: Sources) -> Iterable[Finding]:
    """The findings in one log, in its order; frames of files we did not compile are passed over."""
    starts = [*UBSAN.finditer(text), *ASAN.finditer(text), *LEAK.finditer(text)]
    starts.sort(key=lambda match: match.start())
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        report = text[match.end() : following.start() if following else len(text)]
        frames = [(f, p, int(n)) for f, p, n in FRAME.findall(report)]
        if match.re is UBSAN:
            frames.insert(0, (frames[0][0] if frames else "?", match[1], int(match[2])))
            kind = "undefined: " + VARYING.sub("N", match[3])
        elif match.re is ASAN:
            kind = "address: " + match[1]
        else:
            kind = "leak"
        here = [(function, path, line) for function, path, line in frames if sources.locate(path)]
        if match.re is LEAK and here and "/_cffi_backend." in report[: report.find(here[0][1])]:
            continue  # an object of cffi's, which our generated code only asked for
        if not here:
            module = MODULE.search(report)
            if module:
                yield Finding(kind, module[2], 0, module[1].split("(")[0], UPSTREAM)
            elif match.re is not LEAK:  # the interpreter's own leaks are not ours to judge
                yield Finding(kind, "?", 0, frames[0][0] if frames else "?", UPSTREAM)
            continue
        function, path, line = here[0]
        whose = TOUCHED if sources.touched(path, line) else UPSTREAM
        located = sources.locate(path)
        assert located
        yield Finding(kind, located[0], line, function.split("(")[0], whose)


def collect(logs: Iterable[Path], sources: Sources) -> Counter[Finding]:
    """All findings of some logs, with how often each was reported."""
    found: Counter[Finding] = Counter()
    for log in logs:
        found.update(parse(log.read_text(errors="replace"), sources))
    return found


@dataclass(frozen=True)
class Run:
    """How one test file ended."""

    file: str
    result: str
    failed: list[str]
    seconds: float


def summary(runs: list[Run], found: Counter[Finding], leaks: str, left_out: dict[str, str]) -> str:
    """What was found, and what ran."""
    lines = [
        f"{f.whose}: {f.file}:{f.line}, {f.function}: {f.kind}, {n} times"
        for f, n in sorted(found.items(), key=lambda item: (item[0].whose, item[0].file))
    ]
    lines += [f"leaks of a program that loads, generates and ends: {leaks}"]
    lines += [f"{run.file}: {run.result}, {run.seconds:.0f} s" for run in runs]
    lines += [f"failed: {name}" for run in runs for name in run.failed]
    lines += [f"left out: {name}: {why}" for name, why in left_out.items()]
    return "\n".join(lines)
