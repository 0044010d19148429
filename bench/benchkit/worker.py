"""A process that keeps a model loaded with one library and measures prefill when it is asked to.

Between requests it waits for a line and computes nothing, so that others can be measured
meanwhile. Run as a program: one JSON object per line on stdin (first a `Load`, then `Prompt` and
`Prefill`), one JSON line on stdout for each. The library is the one of PYLLAMA_MTP_LIB.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if __name__ == "__main__":
    # In place of this folder, whose statistics.py is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchkit.ours import DriverError
from benchkit.paths import ensure_driver
from pyllama_mtp.measure.peers.process import child_environment

if TYPE_CHECKING:
    from pyllama_mtp import Model

CLOSING_S = 3.0


@dataclass(frozen=True)
class Load:
    """Load the model with its MTP head. Answer: stamp, system_info, devices in use."""

    model: str
    n_gpu_layers: int = -1


@dataclass(frozen=True)
class Prompt:
    """Cut a prompt of `n_tokens` out of real text, another for every `number`. Answer: tokens."""

    n_tokens: int
    number: int
    file: str | None = None


@dataclass(frozen=True)
class Prefill:
    """Measure one prefill in a fresh session. Answer: telemetry; and, as with a Prompt, the seconds
    that the process had waited (`idle_s`) and the CPU time it had used meanwhile (`idle_cpu_s`).

    Attributes:
        settings: fields of pyllama_mtp.Settings.
        prompt: token ids. All but the last are processed, on which the next generation would begin.
        warmup_prompt, warmup_tokens: tokens that the warm-up processes and generates; the session
            forgets them.
    """

    settings: dict[str, Any]
    prompt: list[int]
    warmup_prompt: int
    warmup_tokens: int


Request = Load | Prompt | Prefill


class Worker:
    """The process, seen from outside. A context manager.

    Args:
        variant: "patched" or "upstream".

    Raises (every method):
        DriverError: the process failed; what it printed is the message.
    """

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with it
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**child_environment(), "PYLLAMA_MTP_LIB": variant},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; we end it
        )

    def ask(self, request: Request) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin and self._process.stdout
        line = json.dumps({"kind": type(request).__name__, **asdict(request)})
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            return dict(json.loads(answer))
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip()[-2000:]
        raise DriverError(f"our driver with the {self.variant} library failed ({code}): {said}")

    def close(self) -> None:
        """End the process, at once if it is in the middle of something."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()


# -- the process itself ----------------------------------------------------------------------------


def serve(lines: Iterator[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    from pyllama_mtp import Model, native

    load = json.loads(next(lines))
    assert load.pop("kind") == "Load"
    library = native.load()
    with Model(load["model"], n_gpu_layers=load["n_gpu_layers"]) as model:
        gpus = [
            d.description for d in library.devices() if load["n_gpu_layers"] and "gpu" in d.kind
        ]
        answer = {"stamp": library.stamp, "system_info": library.system_info(), "devices": gpus}
        while True:
            print(json.dumps(answer), file=answers, flush=True)
            idle_since = (time.perf_counter(), time.process_time())
            line = next(lines, None)
            if line is None:
                return
            idle_s = time.perf_counter() - idle_since[0]
            idle_cpu_s = time.process_time() - idle_since[1]
            request = json.loads(line)
            if request.pop("kind") == "Prompt":
                answer = {"tokens": cut(model, Prompt(**request))}
            else:
                answer = prefill(model, Prefill(**request))
            answer |= {"idle_s": idle_s, "idle_cpu_s": idle_cpu_s}


def cut(model: Model, request: Prompt) -> list[int]:
    """The prompt, the same for the same request and model."""
    from pyllama_mtp.measure.workload import Workload, read_text

    texts = None if request.file is None else [read_text(request.file)]
    return Workload(model, texts).prompt(request.n_tokens, request.number)


def prefill(model: Model, request: Prefill) -> dict[str, Any]:
    """Warm up, forget, process the prompt; both caches are complete at the end of the time."""
    from pyllama_mtp import Session, Settings

    with Session(model, Settings(**request.settings)) as session:
        prompt = request.prompt[: request.warmup_prompt]
        session.generate(prompt, max_tokens=request.warmup_tokens, ignore_eos=True).run()
        session.reset()
        return {"telemetry": session.process(request.prompt).to_dict()}


def main() -> None:
    """Serve on stdin and stdout; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ensure_driver()
    from pyllama_mtp import PyllamaMtpError

    try:
        serve(iter(sys.stdin.readline, ""), answers)
    except PyllamaMtpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
