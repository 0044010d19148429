"""llama-cpp-python, unchanged, writes our text with our libraries, on both variants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native

from ..processes import RunPython, environment

PROMPT = "def main"
N_TOKENS = 24

PROGRAM = """
import json, sys
import llama_cpp

model, prompt, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llama = llama_cpp.Llama(model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
greedy = {"max_tokens": n_tokens, "temperature": 0.0}
text = llama.create_completion(prompt, **greedy)["choices"][0]["text"]
stream = llama.create_completion(prompt, stream=True, **greedy)
parts = [part["choices"][0]["text"] for part in stream]
library = llama_cpp.llama_cpp._lib._name
print(json.dumps({
    "version": llama_cpp.__version__, "library": library, "text": text, "streamed": "".join(parts),
}))
"""

#: This package and llama-cpp-python in one process, on one library.
TOGETHER = """
import json, sys
import llama_cpp
import pyllama_mtp

model, prompt, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llama = llama_cpp.Llama(model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
options = {"n_ctx": 256, "n_threads": 1}
ours = "".join(pyllama_mtp.stream(model, prompt, max_tokens=n_tokens, **options))
theirs = llama.create_completion(prompt, max_tokens=n_tokens, temperature=0.0)["choices"][0]["text"]
print(json.dumps({"text": theirs, "ours": ours, "backend": pyllama_mtp.native.load().backend()}))
"""


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(run_python: RunPython, llama_cpp_folder: Path, demo_file: Path) -> Run:
    """What a program prints that imports `llama_cpp`, with LLAMA_CPP_LIB_PATH on a variant."""

    def run(program: str, variant: str) -> dict[str, Any]:
        paths = (str(llama_cpp_folder), environment()["PYTHONPATH"])
        variables = {
            "LLAMA_CPP_LIB_PATH": str(native.locate(variant)[0]),
            "PYTHONPATH": os.pathsep.join(paths),
            native.ENVIRONMENT_VARIABLE: variant,
        }
        done = run_python(program, demo_file, PROMPT, N_TOKENS, env=variables)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture(scope="module")
def our_text(demo: Model) -> str:
    with Session(demo, Settings(n_ctx=256, n_threads=1)) as session:
        return "".join(session.generate(PROMPT, max_tokens=N_TOKENS))


@pytest.mark.parametrize("variant", native.VARIANTS)
def test_its_greedy_text_is_ours(variant: str, run: Run, our_text: str) -> None:
    found = run(PROGRAM, variant)
    assert found["text"] == found["streamed"] == our_text != ""
    assert Path(found["library"]).parent == native.locate(variant)[0]
    pin = (Path(__file__).resolve().parents[2] / "vendor" / "drop-in.pin").read_text()
    assert f"llama-cpp-python=={found['version']} " in pin


def test_both_in_one_process(run: Run, our_text: str) -> None:
    found = run(TOGETHER, "patched")
    assert found["text"] == found["ours"] == our_text
    assert found["backend"] == native.load().backend(), "no backend is registered twice"
