"""Measures llama-cpp-python. A program that imports nothing of this package.

With ``--probe`` it prints whether llama-cpp-python can be imported, and its version. Otherwise it
takes a request as JSON on stdin: keyword arguments of ``llama_cpp.Llama``, a prompt in token ids,
the number of tokens to generate.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import time
from typing import Any

#: GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU of ggml-backend.h.
_GPU_TYPES = (1, 2)


def main() -> None:
    """Answer with one JSON object on stdout; the libraries' own output there goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]  # this folder
    found = probe() if "--probe" in sys.argv else measure(json.load(sys.stdin))
    json.dump(found, answer)
    answer.close()


def probe() -> dict[str, Any]:
    """Whether llama-cpp-python is missing, its version, whether it can use a GPU, and the stamp of
    its libllama (empty, unless pyllama-mtp has built that)."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {"missing": True, "version": "", "gpu": False, "stamp": {}}
    llama_cpp: Any = importlib.import_module("llama_cpp")
    found = {"gpu": has_gpu(llama_cpp), "stamp": stamp(llama_cpp)}
    return {"missing": False, "version": llama_cpp.__version__, **found}


def has_gpu(llama_cpp: Any) -> bool:
    """Whether there is a device to offload to: from ggml where that is possible, because
    llama_supports_gpu_offload() is true as soon as the RPC backend is there, even without servers.
    """
    try:
        by_type = llama_cpp.llama_cpp._lib.ggml_backend_dev_by_type
    except AttributeError:
        return bool(llama_cpp.llama_supports_gpu_offload())
    by_type.restype = ctypes.c_void_p
    return any(by_type(kind) for kind in _GPU_TYPES)


def stamp(llama_cpp: Any) -> dict[str, Any]:
    """The upstream commit and patches of the loaded libllama."""
    try:
        function = llama_cpp.llama_cpp._lib.pyllama_stamp
    except AttributeError:
        return {}
    function.restype = ctypes.c_char_p
    said: dict[str, Any] = json.loads(function().decode())
    return said


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load, warm up, reset, generate once: seconds until the first token, and after it."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    types = {
        name: getattr(llama_cpp, f"GGML_TYPE_{value.upper()}")
        for name, value in request["cache_types"].items()
    }
    llama = llama_cpp.Llama(**request["llama"], **types)
    prompt, (n_warm, n_first) = request["prompt"], request["warm_up"]
    generate(llama, prompt[:n_warm], n_first)
    llama.reset()  # nothing of the prompt is taken from the cache
    prefill_s, decode_s = generate(llama, prompt, request["max_tokens"])
    return {"prefill_s": prefill_s, "decode_s": decode_s}


def generate(llama: Any, prompt: list[int], n_tokens: int) -> tuple[float, float]:
    """Seconds until the first token and after it; greedy, end tokens ignored."""
    began = time.perf_counter()
    tokens = llama.generate(prompt, temp=0.0, top_k=1)
    next(tokens)
    first = time.perf_counter()
    for _ in range(n_tokens - 1):
        next(tokens)
    ended = time.perf_counter()
    tokens.close()
    return first - began, ended - first


if __name__ == "__main__":
    main()
