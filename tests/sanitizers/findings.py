"""What the sanitizers wrote: one finding per place and kind, and whose code it is in."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

START = re.compile(
    r"^(?P<path>\S+?):(?P<line>\d+):\d+: runtime error: (?P<undefined>.+)$"
    r"|^==\d+==ERROR: AddressSanitizer:? (?P<address>\S+)",
    re.M,
)
FRAME = re.compile(r"^\s*#\d+ 0x[0-9a-f]+ in (.+?) (/?[^\s:]+\.[a-z]+):(\d+)", re.M)
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
        self._build, self._project = build, project
        self._ours = cache(self._find_ours)

    def locate(self, path: str) -> tuple[str, bool] | None:
        """The name of a compiled file and whether it is llama.cpp's; None for foreign files."""
        inside = re.search(r"(?:^|/)tree/(?:patched|upstream)/(.+)", path)
        if inside:
            return inside[1], True
        for folder, root in (("bindings", self._project), ("generated", self._build)):
            own = re.search(rf"(?:^|/)({folder}/.+)", path)
            if own and (root / own[1]).is_file():
                return own[1], False
        return None

    def touched(self, name: str, upstreams: bool, line: int) -> bool:
        """Whether a patch wrote this line, or the whole file is ours."""
        return not upstreams or line in self._ours(name)

    def _find_ours(self, name: str) -> frozenset[int]:
        """Lines of the patched file that upstream's lacks."""
        trees = (self._build / "tree" / variant / name for variant in ("upstream", "patched"))
        old, new = (path.read_text(errors="replace").splitlines() for path in trees)
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        changes = [op for op in matcher.get_opcodes() if op[0] in ("insert", "replace")]
        return frozenset(at + 1 for *_, start, end in changes for at in range(start, end))


def parse(text: str, sources: Sources) -> Iterator[Finding]:
    """The findings in one log, in its order; frames of files we did not compile are passed over."""
    starts = [*START.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    for match, end in zip(starts, ends, strict=True):
        frames = FRAME.findall(text[match.end() : end])
        function = frames[0][0] if frames else "?"
        kind = f"address: {match['address']}"
        if match["undefined"]:
            frames.insert(0, (function, match["path"], match["line"]))
            kind = "undefined: " + VARYING.sub("N", match["undefined"])
        file, whose, line = "?", UPSTREAM, "0"
        for name, path, at in frames:
            if located := sources.locate(path):
                file, function, line = located[0], name, at
                whose = TOUCHED if sources.touched(*located, int(at)) else UPSTREAM
                break
        yield Finding(kind, file, int(line), function.split("(")[0], whose)


def collect(logs: Iterable[Path], sources: Sources) -> Counter[Finding]:
    """All findings of some logs, with how often each was reported."""
    texts = (log.read_text(errors="replace") for log in logs)
    return Counter(finding for text in texts for finding in parse(text, sources))
