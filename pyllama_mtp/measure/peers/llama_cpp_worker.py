"""Measures llama-cpp-python. Run as a program, by its path: it imports nothing of this package.

``--probe``: prints whether it can be imported, and what it is. Otherwise a request as JSON on
stdin: keyword arguments of ``llama_cpp.Llama``, a prompt in token ids, how many tokens to generate.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answer with one JSON object on stdout; whatever the libraries print there goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    del sys.path[0]  # this folder
    found = probe() if "--probe" in sys.argv else measure(json.load(sys.stdin))
    json.dump(found, answer)
    answer.close()


def probe() -> dict[str, Any]:
    """Whether it is missing, its version, and whether it can use a GPU."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {"missing": True, "version": "", "gpu": False}
    llama_cpp: Any = importlib.import_module("llama_cpp")
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    return {"missing": False, "version": llama_cpp.__version__, "gpu": gpu}


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
