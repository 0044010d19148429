"""Run by test_calls.py with failing.cpp preloaded: calls that fail, each with what it raised.

Arguments: the model's file, and a number of threads: then the main one of them fails, and no other
call does. Prints "name: error" for each call, and "end" last.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pyllama_mtp import Model, Sampling
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.sampling.sampler import Sampler

TOKENS = np.arange(5, 13, dtype=np.int32)
ALL = np.ones(8, dtype=np.int8)
SAMPLING = Sampling(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.9,
    top_n_sigma=3,
    xtc_probability=0.5,
    logit_bias={7: 1.0},
    repeat_penalty=1.1,
    dry_multiplier=0.8,
    seed=1,
)
symbols = ctypes.CDLL(None)


@contextmanager
def failing(what: str) -> Iterator[None]:
    switch = ctypes.c_int.in_dll(symbols, f"failing_{what}")
    switch.value = 1
    try:
        yield
    finally:
        switch.value = 0


def attempt(name: str, what: str, call: Callable[[], object]) -> None:
    try:
        with failing(what):
            call()
        print(f"{name}: nothing", flush=True)
    except PyllamaMtpError as error:
        print(f"{name}: {type(error).__name__}", flush=True)


def context_of(model: Model, n_threads: int = 1, **options: Any) -> Context:
    sizes = {"n_ctx": 64, "n_batch": 16, "n_ubatch": 16, "n_outputs_max": 16}
    return Context(model, ContextOptions(**sizes, n_threads=n_threads, **options))


def decoded(model: Model, greedy: bool = False, **options: Any) -> Context:
    context = context_of(model, **options)
    context.set_greedy(greedy)
    context.set_candidates(2 if greedy else 0)
    context.decode(TOKENS, 0, ALL)
    return context


def compute(path: str, n_threads: int) -> None:
    with Model(path) as model, context_of(model, n_threads) as context:
        attempt("computing", "computation", lambda: context.decode(TOKENS, 0, ALL))


def directly(context: Context) -> None:
    """As a program in C would: nothing but the library could catch an exception."""
    library = ctypes.CDLL(str(native.locate()[0] / "libllama.so.0"))
    library.llama_mtp_reserve.restype = ctypes.c_bool
    library.llama_mtp_get_failure.restype = ctypes.c_char_p
    handle = ctypes.c_void_p(int(context.library.ffi.cast("uintptr_t", context.handle)))
    short = ctypes.c_bool()
    with failing("allocations"):
        done = library.llama_mtp_reserve(handle, 1, 1)
    why = library.llama_mtp_get_failure(ctypes.byref(short))
    print(f"in C: {done}, {why.decode()}, {short.value}", flush=True)


def call(path: str) -> None:
    with Model(path) as model:
        with decoded(model) as context:
            attempt("logits", "waits", lambda: context.logits(7))
        with decoded(model, greedy=True) as context:
            attempt("greedy", "waits", lambda: context.argmax(7))
        with decoded(model, greedy=True) as context:
            attempt("candidates", "waits", lambda: context.candidates(7))
        with decoded(model, tap="all") as context:
            attempt("nextn rows", "waits", context.hidden_rows)
        with decoded(model, need_embd_pre_norm=True) as context:
            attempt("pre-norm rows", "waits", context.hidden_rows)
        with decoded(model) as context:
            attempt("size of a state", "allocations", context.save_state)
        with decoded(model) as context:
            attempt("memory", "allocations", context.memory)
        with decoded(model, with_mtp=True, n_rs_seq=1) as context:
            attempt("round at once", "buffers", lambda: context.can_draft_and_decode(1, 1))
        with decoded(model, with_mtp=True, n_rs_seq=1) as context:
            directly(context)
        attempt("samplers", "allocations", lambda: Sampler(model, SAMPLING))
        sampler = Sampler(model, Sampling(temperature=0.8, repeat_penalty=1.1, seed=1))
        attempt("accept", "allocations", lambda: sampler.accept(7))
        sampler.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        compute(sys.argv[1], int(sys.argv[2]))
    else:
        call(sys.argv[1])
    print("end")
