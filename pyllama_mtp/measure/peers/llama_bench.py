"""Plain prefill and decode as llama-bench measures them, one process per measurement."""

from __future__ import annotations

from dataclasses import replace

from pyllama_mtp.measure.peers.options import Options
from pyllama_mtp.measure.peers.output import Figures, OutputError, parse_llama_bench
from pyllama_mtp.measure.peers.process import Program

TIMEOUT_S = 3600.0


def prefill(program: str, options: Options, n_prompt: int, *more: str) -> Figures:
    """`pp`: a prompt of random tokens, with one row of logits per batch. `more`: further options.

    Raises:
        PeerError: llama-bench failed, or its output cannot be read; as :func:`decode`.
    """
    return _run(program, options, ["-p", str(n_prompt), "-n", "0", *more])


def decode(program: str, options: Options, n_prompt: int, n_decode: int) -> Figures:
    """`tg` at depth: decode steps of random tokens after n_prompt tokens, without sampling."""
    return _run(program, options, ["-p", "0", "-n", str(n_decode), "-d", str(n_prompt)])


def _run(path: str, options: Options, test: list[str]) -> Figures:
    command = [path, *options.arguments(), *test, "-r", "1", "-o", "json"]
    with Program("llama-bench", command) as program:
        printed = program.wait(TIMEOUT_S)
        try:
            return parse_llama_bench(printed)
        except OutputError as error:
            raise OutputError(f"{error}; {program.last_words()}") from error


def measure(program: str, options: Options, n_prompt: int, n_decode: int) -> Figures:
    """Prefill, then decode, in two processes; `n_decode` 0: prefill only."""
    first = prefill(program, options, n_prompt)
    if not n_decode:
        return first
    second = decode(program, options, n_prompt, n_decode)
    return replace(second, prefill_tps=first.prefill_tps, n_prompt=first.n_prompt)
