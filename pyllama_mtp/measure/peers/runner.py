"""Measures with another program as with a library of ours: see `measure.runner.Runner`.

The whole sample is measured at once, when its turn comes; nothing is left running after it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pyllama_mtp.measure.peers import PeerError, llama_bench, llama_cpp_python, llama_server
from pyllama_mtp.measure.peers.find import Installed
from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import Figures, check_lengths
from pyllama_mtp.measure.runner import WARM_UP_TOKENS, Measured, Task
from pyllama_mtp.settings import Settings


class PeerRunner:
    """Samples of one program.

    Args:
        peer: the program; or why there is none, which is raised by :meth:`begin`.
        model: path of the model file.
        n_gpu_layers: as in `Model`.
        head: path of the file with the MTP head, where it is another one.
    """

    def __init__(
        self, peer: Installed | PeerError, model: str, n_gpu_layers: int, head: str = ""
    ) -> None:
        self._peer, self._model = peer, (model, n_gpu_layers, head)
        self._tasks: dict[int, Task] = {}
        self._measured: dict[int, Measured] = {}

    def check(self, settings: Settings, n_sequences: int = 1) -> None:
        """Whether there is one is known already, and it refuses settings when it is started."""

    def begin(self, number: int, task: Task) -> None:
        """Take a sample to be measured.

        Raises:
            PeerError: the program is not installed, or does not run.
        """
        if isinstance(self._peer, PeerError):
            raise self._peer
        self._tasks[number] = task

    def read(self, number: int, end: int) -> None:
        """The prompt is a part of the sample, which is measured at once."""

    def advance(self, number: int, goal: int) -> int:
        """Measure the whole sample, whatever the goal; the number of tokens it has generated.

        Raises:
            PeerError: the program failed, or what it printed cannot be read.
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
        """The figures."""
        del self._tasks[number]
        return self._measured.pop(number)

    def drop(self) -> None:
        """Forget what was not finished."""
        self._tasks.clear()
        self._measured.clear()

    def close(self) -> None:
        """Nothing more will be asked for."""
        self.drop()


def measure(peer: Installed, options: Options, task: Task) -> Figures:
    """One sample by the program of that name. Raises PeerError."""
    settings = task.settings
    warm_up = (task.warm_up, min(WARM_UP_TOKENS, task.max_tokens))
    if peer.name == "llama-bench":
        n_prompt, n_decode = len(task.prompts[0]), task.max_tokens - 1
        return llama_bench.measure(peer.command[0], options, n_prompt, n_decode)
    if peer.name == "llama-cpp-python":
        return llama_cpp_python.measure(
            *(peer.command, options, settings.n_ctx, task.prompts[0], task.max_tokens),
            warm_up=warm_up,
        )
    given = llama_server.server_options(
        options,
        settings.n_ctx,
        settings.depth_limit,
        p_min=settings.p_min,
        rates=settings.synthetic_acceptance,
    )
    return llama_server.measure(
        *(peer.command[0], given, task.prompts[0], task.max_tokens),
        warm_up=warm_up,
        seed=_seed(task.prompts[0]),
    )


def _seed(prompt: Sequence[int]) -> int:
    """Of the draw that imposes acceptance: another one in each repeat, whose texts differ."""
    return zlib.crc32(repr(list(prompt)).encode()) % 2**31
