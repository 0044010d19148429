"""A process that runs cases, started by fuzzkit/pool.py.

    python -m fuzzkit.worker BASE FOLDER ADDRESS_SPACE_MIB

It reads a line of JSON for each case and writes two: the case's edits, before they are tried, and
the outcome. It runs many cases, because starting Python and loading the library takes longer than
most cases.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer until the end of the input."""
    base, folder, mebibytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)

    from fuzzkit.cases import Cases

    cases = Cases(base, folder)
    limit = _status("VmSize") + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        edits = request.get("edits")
        if edits is None:
            edits = cases.edits(request["kind"], request["seed"])
        answers.write(json.dumps({"edits": edits}) + "\n")
        before = _start_peak()
        result = cases.run(request["kind"], edits)
        peak = (_status("VmHWM") - before) >> 20
        answers.write(json.dumps({**asdict(result), "peak_mib": peak}) + "\n")


def _start_peak() -> int:
    """Resident bytes now; from here on the high-water mark counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
