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
import ctypes, json, sys
import llama_cpp

model, prompt, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
llama = llama_cpp.Llama(model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
greedy = {"max_tokens": n_tokens, "temperature": 0.0}
text = llama.create_completion(prompt, **greedy)["choices"][0]["text"]
stream = llama.create_completion(prompt, stream=True, **greedy)
parts = [part["choices"][0]["text"] for part in stream]
library = llama_cpp.llama_cpp._lib._name

# What is passed arrives, and what the library gives arrives: the values of its default parameters,
# and what a context has of those that are not the defaults.
params = llama_cpp.llama_context_default_params()
names = [name for name, kind in params._fields_ if issubclass(kind, ctypes._SimpleCData)]
defaults = {name: getattr(params, name) for name in names}
polled = []
poll = llama_cpp.ggml_abort_callback(lambda data: bool(polled.append(data)))
params.n_ctx, params.n_batch, params.n_seq_max, params.n_threads = 512, 64, 3, 1
params.kv_unified, params.embeddings = True, True
params.abort_callback, params.abort_callback_data = poll, 7
context = llama_cpp.llama_init_from_model(llama._model.model, params)
tokens = (ctypes.c_int32 * 2)(5, 6)
batch = llama_cpp.llama_batch_get_one(tokens, 2)
print(json.dumps({
    "version": llama_cpp.__version__, "library": library, "text": text, "streamed": "".join(parts),
    "defaults": defaults,
    "n_ctx_seq": llama_cpp.llama_n_ctx_seq(context),
    "n_seq_max": llama_cpp.llama_n_seq_max(context),
    "code": llama_cpp.llama_decode(context, batch),
    "embeddings": bool(llama_cpp.llama_get_embeddings_ith(context, -1)),
    "polled": sorted(set(polled)),
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

#: A program whose struct is that of a newer llama.cpp, with one field more.
NEWER = """
import ctypes, sys
import llama_cpp

fields = [*llama_cpp.llama_context_params._fields_]
place = [name for name, _ in fields].index("abort_callback")
fields.insert(place, ("moe_cache_size", ctypes.c_size_t))
Params = type("Params", (ctypes.Structure,), {"_fields_": fields})
library = llama_cpp.llama_cpp._lib
library.llama_context_default_params.restype = Params
library.llama_init_from_model.argtypes = [ctypes.c_void_p, Params]
params = library.llama_context_default_params()
params.moe_cache_size, params.samplers, params.n_samplers = 0, None, 0
params.offload_kqv = params.op_offload = True
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(
    sys.argv[1].encode(), llama_cpp.llama_model_default_params()
)
print(library.llama_init_from_model(model, params))
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
def test_its_greedy_text_is_ours_and_parameters_arrive(
    variant: str, run: Run, our_text: str
) -> None:
    found = run(PROGRAM, variant)
    assert found["text"] == found["streamed"] == our_text != ""
    assert Path(found["library"]).parent == native.locate(variant)[0]
    pin = (Path(__file__).resolve().parents[2] / "vendor" / "drop-in.pin").read_text()
    assert f"llama-cpp-python=={found['version']} " in pin
    defaults = native.load().lib.llama_context_default_params()
    ours = {name for name in dir(defaults) if isinstance(getattr(defaults, name), (int, float))}
    shared = ours & found["defaults"].keys()
    assert ours - shared <= {"moe_cache_size"} and len(shared) > 20
    assert {name: getattr(defaults, name) for name in shared} == {
        name: pytest.approx(found["defaults"][name]) for name in shared
    }
    assert found["n_ctx_seq"] == 512, "unified: each sequence may use all"
    assert found["n_seq_max"] == 3
    assert found["code"] == 0 and found["embeddings"] and found["polled"] == [7]


def test_a_program_with_another_struct_is_refused(
    run_python: RunPython, llama_cpp_folder: Path, demo_file: Path
) -> None:
    paths = (str(llama_cpp_folder), environment()["PYTHONPATH"])
    folder = str(native.locate("patched")[0])
    variables = {"LLAMA_CPP_LIB_PATH": folder, "PYTHONPATH": os.pathsep.join(paths)}
    done = run_python(NEWER, demo_file, env=variables)
    assert done.returncode == 0 and done.stdout == "None\n", done.stderr
    assert "llama-cpp-python 0.3.36, whose llama_context_params has other fields" in done.stderr


def test_both_in_one_process(run: Run, our_text: str) -> None:
    found = run(TOGETHER, "patched")
    assert found["text"] == found["ours"] == our_text
    assert found["backend"] == native.load().backend(), "no backend is registered twice"
