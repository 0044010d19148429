"""One measurement of our driver in a process of its own, as the peers are measured.

Run as a program: one JSON object (a `Request`) on stdin; one JSON line on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # In place of this folder, whose statistics.py is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchkit.paths import ensure_driver
from pyllama_mtp.measure.peers.process import child_environment

STATUS = Path("/proc/self/status")


class DriverError(Exception):
    """The measured process failed; the message is what it said."""


@dataclass(frozen=True)
class Request:
    """What the process does: generate once and report that.

    Attributes:
        lib: "patched", "upstream", or a folder with libraries.
        mtp: load the MTP head.
        settings: fields of pyllama_mtp.Settings.
        prompt: token ids.
        max_tokens: tokens to generate, the first one included.
    """

    model: str
    lib: str
    mtp: bool
    settings: dict[str, Any]
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What the process reports.

    Attributes:
        telemetry: Telemetry.to_dict() of the measured generation.
        memory: Session.memory(), bytes.
        resident: bytes by /proc/self/status: VmHWM (the high-water mark), RssAnon and RssFile, each
            "start" (driver imported and library loaded), "loaded" (weights), "ready" (contexts),
            "end" (after generating). Empty where there is no such file.
        system_info: llama.cpp's line about backends and features.
        stamp: of the library.
        n_ctx: context length in tokens.
    """

    telemetry: dict[str, Any]
    memory: dict[str, int]
    resident: dict[str, dict[str, int]]
    system_info: str
    stamp: dict[str, Any]
    n_ctx: int


def measure(request: Request) -> Answer:
    """Run the request in a fresh process.

    Raises:
        DriverError: it failed; what it printed is the message.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asdict(request)),
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise DriverError(f"our driver failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def resident() -> dict[str, int]:
    """This process's memory in bytes, from /proc/self/status; empty on other systems."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return {}
    return parse_status(lines)


def parse_status(lines: list[str]) -> dict[str, int]:
    """VmHWM, VmRSS, RssAnon and RssFile of a /proc/PID/status, in bytes."""
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile"):
            found[name] = int(value.split()[0]) * 1024
    return found


def serve(request: Request) -> Answer:
    """The child's work."""
    ensure_driver()
    from pyllama_mtp import Model, Session, Settings
    from pyllama_mtp.llama import native

    library = native.load(request.lib)
    marks = {"start": resident()}
    if request.settings.get("synthetic_acceptance"):
        rates = tuple(request.settings["synthetic_acceptance"])
        request.settings["synthetic_acceptance"] = rates
    with Model(request.model, mtp=request.mtp) as model:
        marks["loaded"] = resident()
        with Session(model, Settings(**request.settings)) as session:
            marks["ready"] = resident()
            generation = session.generate(
                request.prompt, max_tokens=request.max_tokens, ignore_eos=True
            ).run()
            marks["end"] = resident()
            return Answer(
                generation.telemetry.to_dict(),
                session.memory(),
                marks,
                library.system_info(),
                library.stamp,
                session.n_ctx,
            )


if __name__ == "__main__":
    print(json.dumps(asdict(serve(Request(**json.load(sys.stdin))))))
