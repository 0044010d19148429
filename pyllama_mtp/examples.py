"""Recipes beside docs/python.md: short programs to read and copy, each a function.

    python -m pyllama_mtp.examples                      # lists them
    python -m pyllama_mtp.examples NAME [MODEL.gguf]    # runs one; no file: on the demo model

A recipe is all in its function; `model` is the path of the file.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import getdoc
from pathlib import Path

import numpy as np

from pyllama_mtp import Model, Session, Settings, bench
from pyllama_mtp.errors import WorkerLostError
from pyllama_mtp.models.demo import demo_path

PROMPT = "def main"


def hidden_states(model: str) -> None:
    """Hidden states of a text as a numpy array, and what they cost beside all logits.

    A hidden state is what the model knows after a token: for probes, classifiers or retrieval. The
    last one has seen the whole text. Decoding with every row as an output gives the same rows, but
    also runs the LM head for each of them and copies the logits of the whole vocabulary.
    """

    def seconds(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    texts = ("def add(a, b):", "def subtract(a, b):", "import os")
    settings = Settings(n_ctx=4096, draft_n_max=0)
    every_row = Settings(n_ctx=4096, draft_n_max=0, prompt_rows="all")
    with (
        Model(model) as opened,
        Session(opened, settings) as session,
        Session(opened, every_row) as outputs,
    ):
        states = [session.hidden_states(text, rows="last")[0] for text in texts]
        units = [state / np.linalg.norm(state) for state in states]
        for text, unit in zip(texts[1:], units[1:], strict=True):
            print(f"{texts[0]!r} and {text!r}: cosine {units[0] @ unit:.2f}")

        tokens = opened.tokenize(Path(textwrap.__file__).read_text(encoding="utf-8"))[:256]
        before = session.hidden_states(tokens, point="pre-norm")
        after = session.hidden_states(tokens)
        print(f"{len(tokens)} tokens: {before.shape} {before.dtype} before and after the norm:")
        norms = (np.linalg.norm(rows, axis=1).mean() for rows in (before, after))
        print("mean norm {:.1f} before it, {:.1f} after it".format(*norms))

        pairs = []
        for _ in range(6):  # the first round warms up
            outputs.reset()
            rows_s = seconds(lambda: session.hidden_states(tokens))
            pairs.append((rows_s, seconds(lambda: outputs.process(tokens))))
    rows, logits = (statistics.median(times) for times in zip(*pairs[1:], strict=True))
    print(f"hidden states {1e3 * rows:.1f} ms, all rows as outputs {1e3 * logits:.1f} ms:", end=" ")
    print(f"{logits / rows:.2f} times")


def matrix(model: str) -> None:
    """The speed of a model here, with MTP and without: a small matrix, as a data frame and a plot.

    In a notebook, end a cell with ``results``. ``pyllama-mtp matrix`` has more options, and can be
    interrupted and resumed. Needs pandas and matplotlib.
    """
    from matplotlib import pyplot

    results = bench.matrix(model, sizes=(64, 256), depths=(0, 3), max_tokens=16, repeat=2)
    print(results)
    columns = ["n_prompt", "n_max", "prefill_tps", "decode_tps", "decode_ratio"]
    print(results.frame()[columns].to_string())
    results.plot("decode")
    pyplot.savefig("speed.png")
    print("wrote speed.png")


def compare_builds(model: str) -> None:
    """Two builds of the library, measured side by side: which figures got better.

    A process can load only one build, so ``pyllama-mtp matrix`` gives each build a process, and
    takes turns. A library may also be a folder with your own build.
    """
    old, new = "upstream", "patched"
    with tempfile.TemporaryDirectory() as folder:
        cells = Path(folder) / "cells.jsonl"
        command = [sys.executable, "-m", "pyllama_mtp", "matrix", "--model", model]
        command += ["--variants", f"{old},{new}", "--output", str(cells)]
        command += ["-p", "256", "--depths", "0,3", "--max-tokens", "24", "--repeat", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        comparison = bench.read(cells).compare_variants(old, new)
    for change in comparison.changes:
        size = "all sizes" if change.n_prompt is None else f"prompt {change.n_prompt}"
        print(
            f"{change.name}, {size}, {change.figure}: {change.ratio:.3f} "
            f"({change.low:.3f} to {change.high:.3f}), {change.verdict}"
        )
    print(f"{len(comparison.faster)} faster, {len(comparison.slower)} slower")


@contextmanager
def _started(*words: str) -> Iterator[str]:
    """The address at which a command of this package listens, which it says in its first line; the
    command ends with the block."""
    command = [sys.executable, "-m", "pyllama_mtp", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            said = process.stdout.readline().split()
            if not said:
                raise SystemExit(f"{words[0]} did not start")
            yield said[-1]
        finally:
            process.terminate()


def drop_in(model: str) -> None:
    """llama-cpp-python, unchanged, on the patched library.

    In a shell: LLAMA_CPP_LIB_PATH=$(pyllama-mtp libdir) python your_script.py. llama-cpp-python
    must be of the same release, and needs no build of its own: CMAKE_ARGS=-DLLAMA_BUILD=OFF pip
    install llama-cpp-python==0.3.36.
    """
    from pyllama_mtp.llama import native

    script = """if True:  # it knows nothing of this package
        import sys
        import llama_cpp

        llama = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
        print("llama-cpp-python", llama_cpp.__version__, "on", llama_cpp.llama_cpp._lib._name)
        answer = llama.create_completion(sys.argv[2], max_tokens=32, temperature=0.0)
        print(sys.argv[2] + answer["choices"][0]["text"])
    """
    folder, _ = native.locate("patched")
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)}
    command = [sys.executable, "-c", script, model, PROMPT]
    raise SystemExit(subprocess.run(command, env=environment).returncode)


def rpc(model: str) -> None:
    """A model spread over two workers, MTP included.

    Here the workers are started on this machine. In real use each runs on a machine of its own
    (``pyllama-mtp rpc-worker --host ADDRESS --port 50052``) and holds its part of the model. The
    machine that generates has the file, and needs memory only for the token embeddings.
    """

    def generate(opened: Model) -> str:
        with Session(opened, Settings(n_ctx=512, n_threads=1, draft_n_max=3)) as session:
            run = session.generate(PROMPT, max_tokens=64).run()
        t = run.telemetry
        print(f"  decode {t.decode_tps:.0f} tok/s, {t.tokens_per_round:.2f} tokens per round")
        return run.text

    print("here:")
    with Model(model) as opened:
        here = generate(opened)
    with ExitStack() as stack:
        workers = [stack.enter_context(_started("rpc-worker", "--threads", "1")) for _ in range(2)]
        print(f"on {' and '.join(workers)}:")
        try:
            # Shares of the layers; without them they go by the workers' free memory.
            with Model(model, rpc_servers=workers, tensor_split=(1, 1)) as opened:
                there = generate(opened)
        except WorkerLostError as error:  # it died, or was silent for rpc_timeout seconds
            raise SystemExit(str(error)) from None
    print(f"{'the same text' if here == there else 'another text (rounding)'}:\n{there}")


def server_client(model: str) -> None:
    """The OpenAI-compatible server, and the `openai` package as its client.

    Here the server is started on a free port; in real use run ``pyllama-mtp serve --model FILE``.
    Needs the `openai` package (pip install openai).
    """
    from openai import OpenAI

    with (
        _started("serve", "--model", model, "--port", "0") as address,
        OpenAI(base_url=address, api_key="any") as client,
    ):
        name = client.models.list().data[0].id
        print(f"{name} at {address}\n{PROMPT}", end="")
        chunks = client.completions.create(
            model=name,
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            if chunk.choices:
                print(chunk.choices[0].text, end="", flush=True)
            if chunk.usage and (details := chunk.usage.completion_tokens_details):
                accepted = details.accepted_prediction_tokens or 0
                drafted = accepted + (details.rejected_prediction_tokens or 0)
                tokens = chunk.usage.completion_tokens
                print(f"\n{tokens} tokens, {drafted} drafted, {accepted} accepted\n")

        answer = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "What does str.split() do?"}],
            max_tokens=24,
            temperature=0,
        )
        print(answer.choices[0].message.content)


RECIPES = (hidden_states, matrix, compare_builds, drop_in, rpc, server_client)


def main() -> None:
    """List the recipes, or run one."""
    by_name = {recipe.__name__: recipe for recipe in RECIPES}
    name, model = (*sys.argv[1:], *[""] * 2)[:2]
    if name in by_name:
        return by_name[name](model or str(demo_path()))
    print("python -m pyllama_mtp.examples NAME [MODEL.gguf], where NAME is one of\n")
    for name, recipe in by_name.items():
        print(f"  {name:16}  {(getdoc(recipe) or '').partition(chr(10))[0]}")


if __name__ == "__main__":
    main()
