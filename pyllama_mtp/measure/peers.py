"""Other programs that are measured beside this project, on the same model file and prompts.

Each sample is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from pyllama_mtp.child import end_with_parent, last_words
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama.vision import IMAGE_MARKER
from pyllama_mtp.measure.figures import Sample
from pyllama_mtp.measure.prompts import ImageText, Picture
from pyllama_mtp.measure.records import Build
from pyllama_mtp.measure.runner import WARM_UP_TOKENS, SideBySide, Task
from pyllama_mtp.settings import Settings


class PeerError(PyllamaMtpError):
    """A program is not installed, or failed; the message says what to do, or why."""


#: How to get a program.
_OBTAIN = (
    "`python bench/peers.py` in a checkout builds it from the pinned tree; one on PATH or in the "
    "folder that PYLLAMA_MTP_PEERS names is found too"
)


# -- processes -------------------------------------------------------------------------------------


_STOP_S = 3.0  # a server in the middle of an answer does not end by itself


@contextlib.contextmanager
def running(name: str, command: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """A program without input and without the environment variables that are settings of either
    side. It ends with all that it has started, by force if it does not end by itself. `name`: for
    messages; `streams`: as of Popen.

    Raises:
        PeerError: the program cannot be started.
    """
    settings = ("LLAMA_ARG_", "PYLLAMA_MTP_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=own,
            start_new_session=True,
            preexec_fn=end_with_parent,
            text=True,
            errors="replace",
            **streams,
        )
    except OSError as error:
        raise PeerError(f"{name} cannot be started: {error}") from None

    def tell(number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

    with process:
        try:
            yield process
        finally:
            try:
                if process.poll() is None:
                    tell(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_STOP_S)
            finally:  # also after Ctrl-C in the meantime
                tell(signal.SIGKILL)


def output(name: str, *command: str, timeout_s: float) -> tuple[str, str]:
    """What a program writes to stdout and to stderr until it ends.

    Raises:
        PeerError: the program cannot be started, failed, or took longer.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(name, command, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:  # its output is bytes, of any stream
            said = last_words(((late.stderr or late.stdout) or b"").decode(errors="replace"))
            raise PeerError(f"{name} was not done after {timeout_s:.0f} s: {said}") from None
    if process.returncode:
        said = last_words(err.strip() or out)
        raise PeerError(f"{name} failed ({process.returncode}): {said}")
    return out, err


# -- options ---------------------------------------------------------------------------------------


_ALL_LAYERS = 999


@dataclass(frozen=True)
class PeerOptions:
    """What all programs are given.

    Attributes:
        n_gpu_layers: -1: all.
        head: the file of the MTP head, if it is not `model`.
        mmproj: the file of the image encoder; llama-server only.
    """

    settings: Settings
    model: str
    n_gpu_layers: int
    head: str = ""
    mmproj: str = ""

    def arguments(self) -> list[str]:
        """Arguments of llama-bench and llama-server."""
        settings = self.settings
        return [
            *("-m", self.model),
            *("-b", str(settings.n_batch)),
            *("-ub", str(settings.ubatch)),
            *("-t", str(settings.threads)),
            *("-fa", settings.flash_attn),
            *("-ctk", settings.cache_type_k),
            *("-ctv", settings.cache_type_v),
            *("-ngl", str(self.n_gpu_layers if self.n_gpu_layers >= 0 else _ALL_LAYERS)),
        ]


# -- output ----------------------------------------------------------------------------------------


def made_sample(
    n_prompt: int, n_decoded: int, prefill_tps: float, decode_tps: float, accepted: int = 0
) -> Sample:
    """The sample of a matrix; without drafts per position, which are not known.

    Args:
        n_decoded: tokens in `decode_tps`, without the first token, which comes from the prompt's
            logits. Each verification pass gains a token beside the accepted drafts.
        prefill_tps, decode_tps: tokens per second, above 0 where there are tokens.
        accepted: draft tokens.
    """
    prefill_s = n_prompt / prefill_tps
    decode_s = n_decoded / decode_tps if decode_tps else 0.0
    rounds = (n_decoded - accepted) or n_decoded
    return Sample(
        n_prompt=n_prompt,
        n_generated=n_decoded + 1,
        prefill_s=prefill_s,
        decode_s=decode_s,
        elapsed_s=prefill_s + decode_s,
        prefill_tps=prefill_tps,
        decode_tps=decode_tps,
        drafted=[],
        accepted=[],
        rounds=rounds,
        mean_acceptance_length=n_decoded / rounds if rounds else 0.0,
    )


def parse_llama_bench(text: str) -> tuple[float, int, int]:
    """Tokens per second, tokens of the prompt, and decoded tokens of ``llama-bench -o json -r 1``
    with one test; the number of the other kind of tokens is 0.

    Raises:
        PeerError: not JSON, more or fewer tests than one, or fields missing.
    """
    try:
        (test,) = json.loads(text)
        (speed,) = test["samples_ts"]
        return _rate(speed), int(test["n_prompt"]), int(test["n_gen"])
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(
            f"llama-bench's JSON has no usable field ({error!r}): {text[:200]!r}"
        ) from error


def parse_timings(response: Any, n_context: int = 0) -> Sample:
    """The sample in the `timings` of llama-server's response to a completion.

    `predicted_n` counts the first token; `predicted_per_second`, like our speeds, does not.

    Raises:
        PeerError: no timings, or more or less of the prompt was in the server's cache than
            `n_context` tokens.
    """
    try:
        timings = response["timings"]
        n_decoded = int(timings["predicted_n"]) - 1
        accepted = int(timings.get("draft_n_accepted", 0))
        cached = int(timings["cache_n"])
        prefill = _rate(timings["prompt_per_second"])
        decode = _rate(timings["predicted_per_second"]) if n_decoded > 0 else 0.0
        n_prompt = int(timings["prompt_n"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PeerError(
            f"llama-server's response has no usable timings ({error!r}): {response!r:.200}"
        ) from error
    if cached != n_context:
        raise PeerError(
            f"llama-server took {cached} prompt tokens from its cache, where {n_context} were to be"
        )
    return made_sample(n_prompt, n_decoded, prefill, decode, accepted)


def _rate(value: Any) -> float:
    """Tokens per second. Raises PeerError, TypeError or ValueError for anything else."""
    rate = float(value)
    if not (math.isfinite(rate) and rate > 0):
        raise PeerError(f"a speed of {rate} tokens per second is none")
    return rate


# -- finding a program -----------------------------------------------------------------------------


#: Upstream's programs.
PROGRAMS = ("llama-bench", "llama-server")
#: The environment variable with a folder of programs.
VARIABLE = "PYLLAMA_MTP_PEERS"
#: The build folder of ``bench/peers.py`` in the checkout that this package is imported from.
BUILD_FOLDER = Path(__file__).resolve().parents[2] / "build" / "peers"
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Installed:
    """A program that is there and runs; `command` starts it.

    The variant of its build is its own version; "upstream" for a build of ``bench/peers.py``.
    """

    command: tuple[str, ...]
    build: Build


def find(name: str, folder: str | None = None, *, gpu: bool = True) -> Installed:
    """Find a program, and start it once to see that it runs.

    It is looked for in `folder`, in the folder of the environment variable PYLLAMA_MTP_PEERS, in
    the build folder of ``bench/peers.py``, and on PATH.

    Args:
        gpu: whether the program may use a GPU.

    Raises:
        PeerError: the program is not installed, or does not run; the message says what to do.
    """
    places = [Path(one) for one in (folder, os.environ.get(VARIABLE), BUILD_FOLDER) if one]
    looked_in = [str(place / part) for place in places for part in ("", "bin")]
    path = shutil.which(name, path=os.pathsep.join([*looked_in, os.environ.get("PATH", "")]))
    if path is None:
        raise PeerError(f"{name} is not installed: {_OBTAIN}")
    path = str(Path(path).resolve())
    said = _ask(name, path, "--version")
    # "version: 0.6.0-dev (build 11549, commit 0c1e570)", of older ones "version: 6789 (0c1e570)"
    known = re.search(r"version: (\S+)(?: \((?:build \d+, commit )?(\w+)\))?", said)
    if not known:
        raise PeerError(f"{path} does not say its version as {name} does: {said.strip()[:200]!r}")
    version, commit, series = known[1], known[2] or "", ""
    with suppress(OSError, ValueError, KeyError):  # the description of a build of bench/peers.py
        info = json.loads((Path(path).parents[1] / "peers.json").read_text())
        version, commit, series = "upstream", info["upstream_commit"], info["series"]
    # lines like "  CUDA0: NVIDIA H100 (80000 MiB, 79000 MiB free)"
    listed = _ask(name, path, "--list-devices") if gpu else ""
    devices = {one.rstrip("0123456789") for one in re.findall(r"^  (\w+): ", listed, re.MULTILINE)}
    backend = "+".join(sorted(devices - {"CPU", "BLAS"})) or "CPU"
    return Installed((path,), Build(name, version, commit, series, backend))


def _ask(name: str, *command: str) -> str:
    return "".join(output(name, *command, timeout_s=_ANSWER_S))


# -- llama-server ----------------------------------------------------------------------------------


HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 3600.0
_POLL_S = 0.05
_SERVER = "llama-server"
#: Without the machine's proxy, which is not meant for the loopback interface.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def server_options(options: PeerOptions) -> list[str]:
    """PeerOptions for one slot, equal to ours.

    Upstream's extra work is off: the prompt cache in RAM, context checkpoints, the adjustment of
    sizes to memory. Drafts are sampled in the graph (`--spec-draft-backend-sampling`), upstream's
    default. Acceptance that is imposed is drawn at random by the server.
    """
    settings = options.settings
    words = [
        *options.arguments(),
        *("-tb", str(settings.threads)),
        *("-c", str(settings.n_ctx)),
        *("-np", "1"),
        *("--cache-ram", "0"),
        *("--ctx-checkpoints", "0"),
        *("--fit", "off"),
        "--no-cache-prompt",
        *(("--mmproj", options.mmproj) if options.mmproj else ()),
        *(("--no-mmproj-offload",) if options.mmproj and not options.n_gpu_layers else ()),
    ]
    if not settings.depth_limit:
        return words
    if rates := settings.synthetic_acceptance:
        words += ["--spec-synth-rates", ",".join(map(str, rates))]
    return [
        *words,
        *(("-md", options.head) if options.head else ()),
        *("--spec-type", "draft-mtp"),
        *("--spec-draft-n-max", str(settings.depth_limit)),
        *("--spec-draft-p-min", f"{settings.p_min:g}"),
        *("--spec-draft-threads", str(settings.threads)),
        *("--spec-draft-threads-batch", str(settings.threads)),
        *("--spec-draft-type-k", settings.cache_type_k),
        *("--spec-draft-type-v", settings.cache_type_v),
    ]


def completion_request(prompt: Any, n_predict: int, seed: int) -> dict[str, Any]:
    """A greedy completion by upstream's cheapest sampler chain: the best candidate only.

    Args:
        prompt: token ids, or what :meth:`LlamaServer.image_prompt` gives.
        seed: of the draws that impose acceptance.
    """
    return {
        "prompt": prompt,
        "n_predict": n_predict,
        "samplers": ["top_k"],
        "top_k": 1,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "seed": seed,
    }


class LlamaServer:
    """A llama-server on a free port of the loopback interface, or one that answers as it does. A
    context manager that stops it. `options`: see :func:`server_options`.

    Attributes:
        url: where it listens.
        process: the program.
    """

    def __init__(self, program: str, options: Sequence[str]) -> None:
        self._name, self._command = Path(program).name, [program, *options]

    def __enter__(self) -> LlamaServer:
        """Start it. Raises PeerError when it is not ready in time, or ends."""
        with socket.socket() as probe:  # a port on which nobody listens now
            probe.bind((HOST, 0))
            port = str(probe.getsockname()[1])
        self.url = f"http://{HOST}:{port}"
        command = [*self._command, "--host", HOST, "--port", port]
        with contextlib.ExitStack() as stack:
            self._log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            streams = {"stdout": self._log, "stderr": subprocess.STDOUT}
            self.process = stack.enter_context(running(self._name, command, **streams))
            self._wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                said = last_words(self.said())
                raise PeerError(f"{self._name} ended at its start ({code}): {said}")
            # 503 while the server loads, refused before it listens
            with suppress(OSError, HTTPException, ValueError):
                if self._get("/health").get("status") == "ok":
                    return
            time.sleep(_POLL_S)
        said = last_words(self.said())
        raise PeerError(f"{self._name} was not ready in {START_TIMEOUT_S:.0f} s: {said}")

    def said(self) -> str:
        """What it has written so far. The file's position, where it writes, stays."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self.process.pid

    def _get(self, path: str) -> dict[str, Any]:
        with _opener.open(self.url + path, timeout=5) as answer:
            response = json.load(answer)
        return response if isinstance(response, dict) else {}

    def image_prompt(self, text: str, images: Sequence[str]) -> dict[str, Any]:
        """A prompt with an image for each IMAGE_MARKER of the text; `images`: their files, in
        base64. Raises PeerError: the server takes none."""
        marker = self._get("/props").get("media_marker")
        if not isinstance(marker, str):
            raise PeerError(f"this {_SERVER} takes no images: it names no media_marker")
        said = text.replace(IMAGE_MARKER, marker)
        return {"prompt_string": said, "multimodal_data": [*images]}

    def complete(self, request: Mapping[str, Any]) -> Any:
        """The response to a completion. Raises PeerError when the server refuses or dies."""
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{self.url}/completion", data, headers)
        try:
            with _opener.open(call, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise PeerError(f"{_SERVER} answered {error.code}: {said}") from error
        except ValueError as error:
            raise PeerError(f"{_SERVER} answered what is no JSON: {error}") from error
        except (OSError, HTTPException) as error:
            raise PeerError(f"{_SERVER}: {error}; {last_words(self.said())}") from error


# -- samples ---------------------------------------------------------------------------------------


TIMEOUT_S = 3600.0


class PeerRunner(SideBySide):
    """Samples of one program, one at a time. The program refuses settings when it is started, and
    no process is left running after a sample.

    Args:
        name: see :func:`find`; there is a GPU unless `n_gpu_layers` is 0.
        model, n_gpu_layers, head, mmproj: see :class:`.PeerOptions`.
        picture: of prompts with an image.

    Attributes:
        build: of the program.
        missing: why there is no program, or None; no sample can be measured then.
    """

    def __init__(
        self,
        name: str,
        model: str,
        n_gpu_layers: int,
        head: str = "",
        mmproj: str = "",
        picture: Picture | None = None,
    ) -> None:
        self._model, self._picture = (model, n_gpu_layers, head, mmproj), picture
        self.build = Build(name, "", "", "", "")
        self.missing: PeerError | None = None
        try:
            self._peer = find(name, gpu=n_gpu_layers != 0)
            self.build = self._peer.build
        except PeerError as error:
            self.missing = error

    def begin(self, key: Hashable, task: Task) -> None:
        """Measure the whole sample.

        Raises:
            PeerError: there is no program, it failed, or its output cannot be read.
        """
        if self.missing:
            raise self.missing
        options = PeerOptions(task.settings, *self._model)
        measure = self._by_bench if self.build.program == "llama-bench" else self._by_server
        self._sample = measure(options, task)
        measured = (self._sample.n_prompt, self._sample.n_generated)
        wanted = (len(task.prompts[0]) - task.n_context, task.max_tokens)
        if measured != wanted:
            raise PeerError(
                f"{self.build.program} processed {measured[0]} tokens and generated "
                f"{measured[1]}, where {wanted[0]} and {wanted[1]} were asked for"
            )

    def advance(self, key: Hashable, goal: int) -> int:
        """Return the number of generated tokens."""
        return self._sample.n_generated

    def finish(self, key: Hashable) -> tuple[Sample, dict[str, int]]:
        """Return the sample; its memory is not known."""
        return self._sample, {}

    def _by_server(self, options: PeerOptions, task: Task) -> Sample:
        """By a fresh server, which is warmed up by a short completion."""
        first: Any
        whole: Any
        (prompt,) = task.prompts
        seed = zlib.crc32(repr(prompt).encode()) % 2**31  # imposes acceptance; differs by text
        with LlamaServer(self._peer.command[0], server_options(options)) as server:
            if isinstance(prompt, ImageText):
                images = [self._picture.png()] if self._picture else []
                shorter = prompt.text[: len(prompt.text) * task.warm_up // len(prompt)]
                first, whole = (
                    server.image_prompt(IMAGE_MARKER + text, images)
                    for text in (shorter, prompt.text)
                )
            else:
                first, whole = prompt[: task.warm_up], prompt
            n_first = min(WARM_UP_TOKENS, task.max_tokens)
            server.complete(completion_request(first, n_first, seed))
            request = completion_request(whole, task.max_tokens, seed)
            if task.n_context:
                request["cache_prompt"] = True
                server.complete({**request, "prompt": whole[: task.n_context], "n_predict": 0})
            return parse_timings(server.complete(request), task.n_context)

    def _by_bench(self, options: PeerOptions, task: Task) -> Sample:
        """`pp`: random tokens, with one row of logits per batch, after those in the context; then,
        in another process, `tg` after these and the prompt: random tokens without sampling."""

        def run(*test: object) -> tuple[float, int, int]:
            command = [*self._peer.command, *options.arguments(), *map(str, test)]
            command += ["-r", "1", "-o", "json"]
            return parse_llama_bench(output("llama-bench", *command, timeout_s=TIMEOUT_S)[0])

        (prompt,) = task.prompts
        if isinstance(prompt, ImageText):
            raise PeerError("llama-bench takes no images")
        filled = ("-d", task.n_context) if task.n_context else ()
        n_decode, decode_tps = task.max_tokens - 1, 0.0
        prefill_tps, n_prompt, _ = run("-p", len(prompt) - task.n_context, "-n", 0, *filled)
        if n_decode:
            decode_tps, _, n_decode = run("-p", 0, "-n", n_decode, "-d", len(prompt))
        return made_sample(n_prompt, n_decode, prefill_tps, decode_tps)
