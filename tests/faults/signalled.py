"""Commands that get a signal at a random moment: how they end, and what they leave behind.

A trial starts a command in a folder of its own, waits until it has installed its handlers, then for
a random part of the time that the command takes, and sends the signal. It is good when the command
ends within a few seconds with the signal's exit code and its message (or as usual, when it was done
by then), without a traceback, leaves whole files under their names and no others, and no process.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.models.ggufinfo import validate_model_file

from .. import processes

BOUND_S = 60.0  # on a busy machine; a good end takes well under a second
MARK = "PYLLAMA_TEST_MARK"
SAID = {signal.SIGINT: "pyllama-mtp: interrupted", signal.SIGTERM: "pyllama-mtp: terminated"}


def check_whole(path: Path) -> None:
    """Check by a file's ending that it has its end: records, a JSON value, a page, a model."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        assert data.endswith(b"\n") or not data, "it ends within a line"
        for line in data.splitlines():
            json.loads(line)
    elif path.suffix == ".json":
        json.loads(data)
    elif path.suffix == ".gguf":
        validate_model_file(path)
    else:
        end = {".html": b"</html>", ".svg": b"</svg>"}.get(path.suffix, b"")
        assert data and data.rstrip().endswith(end), "its end is missing"


@dataclass(frozen=True)
class Command:
    """A command, endings of the files that it may leave, and how it ends by SIGTERM."""

    words: tuple[str, ...]
    files: tuple[str, ...] = ()
    terminated: int = 143


ONE = ("--threads", "1")
PAIRS = "p.jsonl"
MEASURED = "measured.jsonl"  # in the folder of a trial before it begins

COMMANDS = {
    "generate": Command(
        ("generate", "def f", "--max-tokens", "600", "--ignore-eos", *ONE, "--log-pairs", PAIRS),
        (PAIRS,),
    ),
    "matrix": Command(
        (
            *("matrix", "--prompt-sizes", "32", "--depths", "0,2", "--repeat", "4", *ONE),
            *("--max-tokens", "16", "--variants", "patched,upstream", "--output", "m.jsonl"),
        ),
        ("m.jsonl",),
    ),
    "accept": Command(
        (
            *("accept", "--prompts-per-class", "2", "--max-tokens", "24"),
            *("--context-lengths", "none", *ONE, "--output", "a.jsonl"),
        ),
        ("a.jsonl",),
    ),
    "compare": Command(("compare", MEASURED, MEASURED)),
    "report": Command(("report", MEASURED, "-o", "page"), (".html", ".svg", ".md", ".csv")),
    "tune": Command(("tune", "--limit", "3", "--repeat", "3", "--prompt-size", "128", *ONE)),
    "inspect": Command(("inspect", "{demo}")),
    "synth": Command(
        ("synth", "m.gguf", "--shape", "qwen3.5-0.8b", "--set", "n_layer=4"),
        ("m.gguf",),
    ),
    "draft-vocab": Command(("draft-vocab", "--text", "text.txt", "-o", "v.json"), ("v.json",)),
    "doctor": Command(("doctor",)),
    "rpc-worker": Command(("rpc-worker", *ONE), terminated=0),
}
#: Where a command serves until it is ended, the time in which signals come.
SERVING_S = 2.0


def prepare(folder: Path, measured: bytes) -> None:
    """Write the files that the commands read."""
    (folder / MEASURED).write_bytes(measured)
    (folder / "text.txt").write_text("def read_lines(path):\n    return path\n" * 3000)


def start(name: str, folder: Path, mark: str = "-") -> subprocess.Popen[str]:
    """The command, as a process that has installed its handlers, or has ended."""
    words = [word.replace("{demo}", str(demo_path())) for word in COMMANDS[name].words]
    variables = processes.environment(**{MARK: mark}, OMP_WAIT_POLICY="passive")
    process = processes.start(*words, text=True, errors="replace", cwd=folder, env=variables)
    while not caught(process.pid) >> (signal.SIGTERM - 1) & 1 and process.poll() is None:
        time.sleep(0.002)
    return process


def caught(pid: int) -> int:
    """The signals that a process has handlers for, as a mask."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16)
    return 0


def left_running(mark: str) -> list[int]:
    """Processes that a trial has started, with all that they have started."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (
                (folder / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(folder.name))
    return found


def duration(name: str, folder: Path) -> float:
    """Seconds from installing the handlers to the end, without a signal."""
    process = start(name, folder)
    began = time.monotonic()
    if name == "rpc-worker":
        process.kill()
        process.communicate()
        return SERVING_S
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, f"{name} fails without a signal: {err}{out}"
    return time.monotonic() - began


def trial(name: str, folder: Path, number: signal.Signals, after_s: float) -> str | None:
    """What was wrong with how a command ended; None: nothing, "" it was done before the signal."""
    mark, before = uuid.uuid4().hex, {path.name for path in folder.iterdir()}
    process = start(name, folder, mark)
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return f"it was still there {BOUND_S:.0f} s later: {err[-800:]}"
    code, command = process.returncode, COMMANDS[name]
    stopped = command.terminated if number == signal.SIGTERM else 128 + number
    if code not in (0, stopped):
        return f"exit code {code}: {err[-800:]}"
    if "Traceback" in err + out or "Exception ignored" in err:
        return f"a traceback: {err[-800:]}"
    if code == 128 + number and SAID[number] not in err:
        return f"it did not say that it was stopped: {err[-800:]}"
    deadline = time.monotonic() + BOUND_S  # a killed child needs a moment
    while (pids := left_running(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if pids:
        return f"processes are left: {pids}"
    return _left_files(folder, command, before) or ("" if code == 0 and stopped else None)


def _left_files(folder: Path, command: Command, before: set[str]) -> str | None:
    for path in folder.rglob("*"):
        if path.is_dir() or path.name in before:
            continue
        if not path.name.endswith(command.files) or path.name.startswith("."):
            return f"it left {path.name}"
        try:
            check_whole(path)
        except Exception as error:
            return f"{path.name} is not whole: {error}"
    return None


ABOUT = """Every command got SIGINT and SIGTERM, two and two, half of them at a random moment of its
whole run and half within its first second, from when its handlers are installed on. Good is an end
within 60 seconds with exit code 130 or 143 (rpc-worker: 0 for SIGTERM) and a message, or as usual
if it was done; no traceback, no half-written file, no process left."""
HEAD = "| command | signals | stopped by it | was done before | anything else |"


def measure(folder: Path) -> bytes:
    """A file of measurements, for the commands that read one."""
    words = ("matrix", "--prompt-sizes", "32", "--depths", "0,1", "--repeat", "2", *ONE)
    words += ("--max-tokens", "8", "--output", MEASURED)
    processes.start(*words, cwd=folder).communicate()
    return (folder / MEASURED).read_bytes()


def moments(draw: random.Random, n: int, most_s: float) -> list[float]:
    """`n` random moments: half within the whole time, half within its first second."""
    return [draw.uniform(0, most_s if i % 2 else min(1.0, most_s)) for i in range(n)]
