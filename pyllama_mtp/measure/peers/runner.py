"""Measures with another program, with the methods of `measure.runner.Runner`.

The first turn of a sample measures all of it; no process is left running after it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from pyllama_mtp.measure.peers import PeerError, llama_bench, llama_server
from pyllama_mtp.measure.peers.find import Installed
from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import Figures, OutputError, check_lengths
from pyllama_mtp.measure.peers.process import Program
from pyllama_mtp.measure.runner import WARM_UP_TOKENS, Measured, Task
from pyllama_mtp.settings import Settings

TIMEOUT_S = 3600.0


class PeerRunner:
    """Samples of one program.

    Args:
        peer: the program, or the error for which there is none.
        model: path of the model file.
        n_gpu_layers: as in `Model`.
        head: path of the file with the MTP head, if it is not `model`.
    """

    def __init__(
        self, peer: Installed | PeerError, model: str, n_gpu_layers: int, head: str = ""
    ) -> None:
        self._peer, self._model = peer, (model, n_gpu_layers, head)
        self._tasks: dict[int, Task] = {}
        self._measured: dict[int, Measured] = {}

    def check(self, settings: Settings, n_sequences: int = 1) -> None:
        """Do nothing: the program refuses settings when it is started."""

    def begin(self, number: int, task: Task) -> None:
        """Take a sample to be measured. Raises PeerError where there is no program."""
        if isinstance(self._peer, PeerError):
            raise self._peer
        self._tasks[number] = task

    def read(self, number: int, end: int) -> None:
        """Do nothing: :meth:`advance` measures the prompt, too."""

    def advance(self, number: int, goal: int) -> int:
        """Measure the whole sample, whatever the goal; return the number of generated tokens.

        Raises:
            PeerError: the program failed, or its output cannot be read.
        """
        if number not in self._measured:
            assert isinstance(self._peer, Installed)
            task = self._tasks[number]
            options = Options.of(task.settings, *self._model)
            figures = measure(self._peer, options, task)
            check_lengths(self._peer.name, figures, len(task.prompts[0]), task.max_tokens)
            self._measured[number] = Measured(figures.sample(), {})
        return self._tasks[number].max_tokens

    def finish(self, number: int) -> Measured:
        """Return the figures, and forget the sample."""
        del self._tasks[number]
        return self._measured.pop(number)

    def drop(self) -> None:
        """Forget the samples that were not finished."""
        self._tasks.clear()
        self._measured.clear()


def measure(peer: Installed, options: Options, task: Task) -> Figures:
    """Measure one sample with a program. Raises PeerError."""
    settings, prompt = task.settings, task.prompts[0]
    warm_up = (task.warm_up, min(WARM_UP_TOKENS, task.max_tokens))
    if peer.name == "llama-bench":
        return llama_bench.measure(peer.command[0], options, len(prompt), task.max_tokens - 1)
    if peer.name == "llama-cpp-python":
        return _by_llama_cpp_python(peer, options, task, warm_up)
    given = llama_server.server_options(
        options,
        settings.n_ctx,
        settings.depth_limit,
        p_min=settings.p_min,
        rates=settings.synthetic_acceptance,
    )
    seed = zlib.crc32(repr(prompt).encode()) % 2**31  # imposes acceptance; differs by text
    return llama_server.measure(
        *(peer.command[0], given, prompt, task.max_tokens), warm_up=warm_up, seed=seed
    )


def _by_llama_cpp_python(
    peer: Installed, options: Options, task: Task, warm_up: tuple[int, int]
) -> Figures:
    """Plain generation after a warm-up, in a process of its own: see ``llama_cpp_worker.py``."""
    request = {
        "llama": {
            "model_path": options.model,
            "n_gpu_layers": options.n_gpu_layers or 0,
            "n_ctx": task.settings.n_ctx,
            "n_batch": options.n_batch,
            "n_ubatch": options.n_ubatch,
            "n_threads": options.threads,
            "n_threads_batch": options.threads,
            "flash_attn": options.flash_attn != "off",  # there is no "auto"
            "verbose": False,
        },
        "cache_types": {"type_k": options.cache_type_k, "type_v": options.cache_type_v},
        "prompt": task.prompts[0],
        "max_tokens": task.max_tokens,
        "warm_up": warm_up,
    }
    with Program(peer.name, peer.command, json.dumps(request)) as program:
        printed = program.wait(TIMEOUT_S)
        try:
            return _figures(json.loads(printed))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise OutputError(
                f"{peer.name}'s worker printed {printed[:200]!r} ({error!r}); "
                f"{program.last_words()}"
            ) from error


def _figures(answer: Mapping[str, float]) -> Figures:
    n_prompt, n_decoded = int(answer["n_prompt"]), int(answer["n_generated"]) - 1
    return Figures(
        prefill_tps=n_prompt / answer["prefill_s"],
        decode_tps=n_decoded / answer["decode_s"] if n_decoded else None,
        n_prompt=n_prompt,
        n_decoded=n_decoded,
    )
