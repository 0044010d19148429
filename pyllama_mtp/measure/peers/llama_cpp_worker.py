"""Measures llama-cpp-python. Run as a program, by its path: it imports nothing of this package.

``--probe``: prints whether it can be imported, and what it is. Otherwise a request as JSON on
stdin: keyword arguments of ``llama_cpp.Llama``, a prompt in token ids, how many tokens to generate.
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
    """Answer with one JSON object on stdout; whatever the libraries print there goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]  # this folder
    found = probe() if "--probe" in sys.argv else measure(json.load(sys.stdin))
    json.dump(found, answer)
    answer.close()


def probe() -> dict[str, Any]:
    """Whether it is missing, its version, whether it can use a GPU, and what its libllama says it
    was built from (nothing, unless it is one of pyllama-mtp's)."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {"missing": True, "version": "", "gpu": False, "stamp": {}}
    llama_cpp: Any = importlib.import_module("llama_cpp")
    return {
        "missing": False,
        "version": llama_cpp.__version__,
        "gpu": has_gpu(llama_cpp),
        "stamp": stamp(llama_cpp),
    }


def has_gpu(llama_cpp: Any) -> bool:
    """Whether there is a device to offload to. llama_supports_gpu_offload() is true as soon as the
    RPC backend is there, whether anybody serves or not, so ggml is asked where that is possible."""
    try:
        by_type = llama_cpp.llama_cpp._lib.ggml_backend_dev_by_type
    except AttributeError:
        return bool(llama_cpp.llama_supports_gpu_offload())
    by_type.restype = ctypes.c_void_p
    return any(by_type(kind) for kind in _GPU_TYPES)


def stamp(llama_cpp: Any) -> dict[str, Any]:
    """What the loaded libllama says about itself."""
    try:
        function = llama_cpp.llama_cpp._lib.pyllama_stamp
    except AttributeError:
        return {}
    function.restype = ctypes.c_char_p
    said: dict[str, Any] = json.loads(function().decode())
    return said


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load, warm up, forget, generate once: seconds until the first token, and from there on."""
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
    return {
        "n_prompt": len(prompt),
        "n_generated": request["max_tokens"],
        "prefill_s": prefill_s,
        "decode_s": decode_s,
    }


def generate(llama: Any, prompt: list[int], n_tokens: int) -> tuple[float, float]:
    """Greedy, end tokens ignored."""
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
