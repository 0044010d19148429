"""Lines by folder; package and tests grow only in a commit that says why.

Prints the lines, and fails if package or tests have more than .ci/lines says. `--accept` writes
that file. A commit that raises it has a line "grows: WHAT, for WHICH ISSUE" in its message.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT, FILE = Path(__file__).resolve().parents[1], ".ci/lines"
FOLDERS = {
    "package": ["pyllama_mtp/*.py"],
    "tests": ["tests/*.py"],
    "bench": ["bench/*.py"],
    "bindings": ["bindings"],
    "patches": ["patches/*.patch"],
    "docs": ["*.md", ":!bench/results"],
}
BOUND = ("package", "tests")
#: So many lines may go before the file must follow.
SLACK = 200


def git(*words: str) -> str:
    """What git prints; "" if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout


def numbers(text: str) -> dict[str, int]:
    """The file's contents, by folder."""
    return {name: int(n) for name, n in map(str.split, text.splitlines())}


if not git("ls-files"):
    print("not a git repository: lines are not counted")
    sys.exit()
counts = dict[str, int]()
for folder, names in FOLDERS.items():
    files = [ROOT / name for name in git("ls-files", *names).splitlines()]
    counts[folder] = sum(file.read_bytes().count(b"\n") for file in files if file.is_file())
    print(f"{folder:9}{counts[folder]:8,} lines")
if "--accept" in sys.argv:
    (ROOT / FILE).write_text("".join(f"{name} {counts[name]}\n" for name in BOUND))

most, last = numbers((ROOT / FILE).read_text()), git("log", "-1", "--format=%H", "--", FILE).strip()
before, after = (numbers(git("show", f"{last}{of}:{FILE}")) for of in ("^", ""))
said = re.search("^grows: .+, for .+", git("log", "-1", "--format=%B", last), re.MULTILINE)
for name in BOUND:
    if not most[name] - SLACK <= counts[name] <= most[name]:
        sys.exit(f"{FILE} says {most[name]:,} for {name}: remove some lines, or run with --accept")
    if before.get(name, after.get(name, 0)) < after.get(name, 0) and not said:
        sys.exit(f'{last[:9]} raises {name} without a line "grows: WHAT, for WHICH ISSUE"')
