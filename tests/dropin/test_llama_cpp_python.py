"""llama-cpp-python, unchanged, writes our text with our libraries, on both variants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native

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


def run(program: str, package: Path, variant: str, *arguments: object) -> dict[str, Any]:
    """What a program prints that imports `llama_cpp`, with LLAMA_CPP_LIB_PATH on a variant."""
    folder, _ = native.locate(variant)
    sources = str(Path(native.__file__).parents[1])
    environment = {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": str(folder),
        "PYTHONPATH": f"{package}{os.pathsep}{sources}",
        native.ENVIRONMENT_VARIABLE: variant,
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tempfile.gettempdir(),  # in the checkout the sources would be imported
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def our_text(demo: Model) -> str:
    with Session(demo, Settings(n_ctx=256, n_threads=1)) as session:
        return "".join(session.generate(PROMPT, max_tokens=N_TOKENS))


@pytest.mark.parametrize("variant", native.VARIANTS)
def test_its_greedy_text_is_ours(
    variant: str, llama_cpp_folder: Path, demo_file: Path, our_text: str
) -> None:
    found = run(PROGRAM, llama_cpp_folder, variant, demo_file, PROMPT, N_TOKENS)
    assert found["text"] == found["streamed"] == our_text != ""
    assert Path(found["library"]).parent == native.locate(variant)[0]
    pin = (Path(__file__).resolve().parents[2] / "vendor" / "llama-cpp.pin").read_text()
    assert f"llama-cpp-python=={found['version']} " in pin


def test_both_in_one_process(llama_cpp_folder: Path, demo_file: Path, our_text: str) -> None:
    found = run(TOGETHER, llama_cpp_folder, "patched", demo_file, PROMPT, N_TOKENS)
    assert found["text"] == found["ours"] == our_text
    assert found["backend"] == native.load().backend(), "no backend is registered twice"
