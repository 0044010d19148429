"""Measures with another program; :meth:`PeerRunner.begin` measures the whole sample."""

from __future__ import annotations

import json
import zlib

from pyllama_mtp.measure.cells import Sample
from pyllama_mtp.measure.peers import PeerError, llama_server
from pyllama_mtp.measure.peers.find import Installed
from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import OutputError, made_sample, parse_llama_bench
from pyllama_mtp.measure.peers.process import Program
from pyllama_mtp.measure.profile import WARM_UP_TOKENS
from pyllama_mtp.measure.runner import Measured, SideBySide, Task

TIMEOUT_S = 3600.0


class PeerRunner(SideBySide):
    """Samples of one program, one at a time. The program refuses settings when it is started, and
    no process is left running after a sample.

    Args:
        peer: the program, or the error for which there is none.
        model, n_gpu_layers, head: see :class:`.Options`.
    """

    def __init__(
        self, peer: Installed | PeerError, model: str, n_gpu_layers: int, head: str = ""
    ) -> None:
        self._peer, self._model = peer, (model, n_gpu_layers, head)

    def begin(self, number: int, task: Task) -> None:
        """Measure the whole sample.

        Raises:
            PeerError: there is no program, it failed, or its output cannot be read.
        """
        if isinstance(self._peer, PeerError):
            raise self._peer
        self._sample = measure(self._peer, Options(task.settings, *self._model), task)
        measured = (self._sample.n_prompt, self._sample.n_generated)
        wanted = (len(task.prompts[0]), task.max_tokens)
        if measured != wanted:
            raise OutputError(
                f"{self._peer.build.program} processed {measured[0]} tokens and generated "
                f"{measured[1]}, where {wanted[0]} and {wanted[1]} were asked for"
            )

    def advance(self, number: int, goal: int) -> int:
        """Return the number of generated tokens."""
        return self._sample.n_generated

    def finish(self, number: int) -> Measured:
        """Return the sample."""
        return Measured(self._sample, {})


def measure(peer: Installed, options: Options, task: Task) -> Sample:
    """Measure one sample with a program. Raises PeerError."""
    prompt = task.prompts[0]
    warm_up = (task.warm_up, min(WARM_UP_TOKENS, task.max_tokens))
    if peer.build.program == "llama-bench":
        return _by_llama_bench(peer, options, len(prompt), task.max_tokens - 1)
    if peer.build.program == "llama-cpp-python":
        return _by_llama_cpp_python(peer, options, task, warm_up)
    seed = zlib.crc32(repr(prompt).encode()) % 2**31  # imposes acceptance; differs by text
    return llama_server.measure(
        *(peer.command[0], llama_server.server_options(options), prompt, task.max_tokens),
        warm_up=warm_up,
        seed=seed,
    )


def _by_llama_bench(peer: Installed, options: Options, n_prompt: int, n_decode: int) -> Sample:
    """`pp`: random tokens, with one row of logits per batch; then, in another process, `tg` at that
    depth: random tokens without sampling. `n_decode` 0: `pp` only."""

    def run(*test: object) -> tuple[float, int, int]:
        command = [*peer.command, *options.arguments(), *map(str, test), "-r", "1", "-o", "json"]
        with Program(peer.build.program, command) as program:
            printed = program.wait(TIMEOUT_S)
            try:
                return parse_llama_bench(printed)
            except OutputError as error:
                raise OutputError(f"{error}; {program.last_words()}") from error

    prefill_tps, n_prompt, _ = run("-p", n_prompt, "-n", 0)
    decode_tps = 0.0
    if n_decode:
        decode_tps, _, n_decode = run("-p", 0, "-n", n_decode, "-d", n_prompt)
    return made_sample(n_prompt, n_decode, prefill_tps, decode_tps)


def _by_llama_cpp_python(
    peer: Installed, options: Options, task: Task, warm_up: tuple[int, int]
) -> Sample:
    """Plain generation after a warm-up, in a process of its own: see ``llama_cpp_worker.py``."""
    settings, prompt, n_decoded = task.settings, task.prompts[0], task.max_tokens - 1
    request = {
        "llama": {
            "model_path": options.model,
            "n_gpu_layers": options.n_gpu_layers,
            "n_ctx": settings.n_ctx,
            "n_batch": settings.n_batch,
            "n_ubatch": settings.n_ubatch,
            "n_threads": settings.threads,
            "n_threads_batch": settings.threads,
            "flash_attn": settings.flash_attn != "off",  # there is no "auto"
            "verbose": False,
        },
        "cache_types": {"type_k": settings.cache_type_k, "type_v": settings.cache_type_v},
        "prompt": prompt,
        "max_tokens": task.max_tokens,
        "warm_up": warm_up,
    }
    with Program(peer.build.program, peer.command, json.dumps(request)) as program:
        printed = program.wait(TIMEOUT_S)
        try:
            answer = json.loads(printed)
            prefill_tps = len(prompt) / answer["prefill_s"]
            decode_tps = n_decoded / answer["decode_s"] if n_decoded else 0.0
            return made_sample(len(prompt), n_decoded, prefill_tps, decode_tps)
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise OutputError(
                f"{peer.build.program}'s worker printed {printed[:200]!r} ({error!r}); "
                f"{program.last_words()}"
            ) from error
