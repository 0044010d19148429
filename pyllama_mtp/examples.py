"""Recipes: short programs to read and copy, each a function that shows one thing.

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

from pyllama_mtp import BatchSession, Model, Session, Settings, bench, stream
from pyllama_mtp.errors import WorkerLostError
from pyllama_mtp.models.demo import demo_path

PROMPT = "def main"


# -- generating ------------------------------------------------------------------------------------


def stream_text(model: str) -> None:
    """Text as it comes, with MTP, and how many drafts were accepted."""
    print(PROMPT, end="")
    for text in stream(model, PROMPT, max_tokens=48):
        print(text, end="", flush=True)
    print("\n")

    with Model(model) as opened, Session(opened, Settings(n_ctx=512, draft_n_max=3)) as session:
        t = session.generate(PROMPT, max_tokens=48).run().telemetry
    print(f"prefill {t.prefill_tps:.0f} tok/s, decode {t.decode_tps:.0f} tok/s")
    print(f"{t.n_generated} tokens in {t.rounds} rounds, {sum(t.accepted)} of them drafted")
    rates = ", ".join(f"{rate:.0%}" for rate in t.acceptance_per_position)
    print(f"drafts accepted by position: {rates}")


def chat(model: str) -> None:
    """A chat of several turns; each turn processes only what is new.

    The session keeps what it has processed, for the model and for the MTP head, so a turn costs
    what it adds, however long the conversation is.
    """
    questions = ("What does str.split() do?", "And str.join()?", "Which of them gives a list?")
    messages: list[dict[str, str]] = []
    with Model(model) as opened, Session(opened, Settings(n_ctx=1024)) as session:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = session.chat(messages, max_tokens=24)
            print(f"> {question}")
            for text in answer:
                print(text, end="", flush=True)
            messages.append({"role": "assistant", "content": answer.text})
            t = answer.telemetry
            print(f"\n[{t.n_prompt} tokens of prompt, {t.n_cached} of them processed before]\n")


def batch(model: str) -> None:
    """A batch of prompts, several at a time; each gets the same text as alone.

    As many prompts as there are places are decoded together; the others wait.
    """
    prompts = [PROMPT, "class Reader:\n", "for line in", "import os\n\n\ndef", "def read(path"]
    settings = Settings(n_ctx=256)  # of each sequence
    with Model(model) as opened, BatchSession(opened, settings, n_sequences=2) as session:
        done = session.generate(prompts, max_tokens=16).run()
    for prompt, answer in zip(prompts, done.results, strict=True):
        n, why = answer.telemetry.n_generated, answer.finish_reason
        print(f"{prompt!r}: {n} tokens ({why}): {answer.text!r}")
    rounds = sum(sum(of_depth.values()) for of_depth in done.telemetry.passes.values())
    print(f"{len(prompts)} prompts, {rounds} rounds, {done.telemetry.decode_tps:.0f} tok/s")


def save_prompt(model: str) -> None:
    """A long prompt, processed once and kept in a file for other sessions.

    The file holds the model's state and the MTP head's, so drafts work at once as well.
    """
    document = Path(textwrap.__file__).read_text(encoding="utf-8")[:2000]
    asked = f"{document}\n\n\n{PROMPT}"
    settings = Settings(n_ctx=2048, draft_n_max=3)
    with Model(model) as opened, tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "document.prompt"
        with Session(opened, settings) as session:
            t = session.process(document)
            session.save(saved)
            size = saved.stat().st_size / 2**20
            print(f"{t.n_prompt} tokens in {t.prefill_s:.2f} s, saved as {size:.1f} MiB")
            expected = session.generate(asked, max_tokens=32).run().text
        with Session(opened, settings) as session:  # usually in another process
            session.restore(saved)
            answer = session.generate(asked, max_tokens=32).run()
    t = answer.telemetry
    print(f"restored; {t.n_prompt - t.n_cached} tokens were left, {t.prefill_s:.2f} s")
    print(f"{sum(t.accepted)} drafts accepted")
    print("the same text" if answer.text == expected else "another text")


def draft_vocabulary(model: str) -> None:
    """Draft only tokens that your own text uses: cheaper drafts, the same answers.

    Tokens outside the draft vocabulary are never drafted, so fewer drafts are accepted where the
    answer needs them; the model itself always chooses from all tokens. ``pyllama-mtp draft-vocab``
    writes such a file for ``--draft-vocab FILE``.
    """
    from pyllama_mtp.models import draftvocab

    size, texts = 512, [Path(textwrap.__file__).read_text(encoding="utf-8")]
    tokenizer = draftvocab.read_tokenizer(model)
    with Model(model) as opened, tempfile.TemporaryDirectory() as folder:
        ids = [opened.tokenize(text, add_special=False) for text in texts]
        ranking = draftvocab.measure_ranking(ids, draftvocab.default_ranking(tokenizer))
        counts = np.zeros(tokenizer.n_vocab, np.int64)
        counts[ranking.ids] = ranking.counts
        best = draftvocab.best(ranking.ids, size, tokenizer)  # special tokens stay
        share = counts[best].sum() / counts.sum()
        print(f"the best {size} of {tokenizer.n_vocab} tokens are {share:.1%} of the text")

        file = Path(folder) / "mine.json"
        draftvocab.save(file, draftvocab.Ranking(best, counts[best]), tokenizer, "my text")
        answers = []
        for choice in ("full", str(file)):
            settings = Settings(n_ctx=512, draft_n_max=3, draft_vocab=choice)
            with Session(opened, settings) as session:
                answer = session.generate(f"import heapq\n\n\n{PROMPT}", max_tokens=64).run()
            t = answer.telemetry
            print(
                f"draft vocabulary {Path(choice).stem}: {t.tokens_per_round:.2f} tokens per round"
            )
            answers.append(answer.text)
    print("the same text" if answers[0] == answers[1] else "another text")


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


# -- measuring -------------------------------------------------------------------------------------


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


def choose_depth(model: str) -> None:
    """How many tokens to draft per round on this machine: costs and advice.

    Then it compares the recommended depth with no MTP, and with "auto", which decides as it goes.
    """
    from pyllama_mtp.drafting.depth import best_depth
    from pyllama_mtp.measure.worth import TYPICAL_ACCEPTANCE, costs_of, tune_markdown

    with Model(model) as opened:
        results = bench.matrix(opened, sizes=64, depths=(0, 1, 2, 4), max_tokens=32, repeat=3)
        costs = costs_of(results)
        assert costs is not None, "every depth was measured"
        print(tune_markdown(costs))
        depth = best_depth(costs, [TYPICAL_ACCEPTANCE] * costs.limit)

        print("\non this prompt:")
        for draft_n_max in (0, depth, "auto"):
            settings = Settings(n_ctx=512, draft_n_max=draft_n_max)
            with Session(opened, settings) as session:
                t = session.generate(PROMPT, max_tokens=96).run().telemetry
            print(f"  draft_n_max={draft_n_max!r}: decode {t.decode_tps:.0f} tok/s")


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


# -- other programs and machines -------------------------------------------------------------------


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


# -- the command line ------------------------------------------------------------------------------


#: In the order of the list.
RECIPES = (
    *(stream_text, chat, batch, save_prompt, draft_vocabulary, hidden_states),
    *(matrix, choose_depth, compare_builds, drop_in, rpc, server_client),
)


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
