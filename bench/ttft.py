#!/usr/bin/env python3
"""Time to the first token over HTTP, compared with upstream's llama-server, in one run.

    python bench/ttft.py                                   # the synthetic 0.8B model, all sizes
    python bench/ttft.py --model FILE --sizes 616 --repeats 1

Both servers have four places and their defaults for prompts (a store of 8 GiB in memory); ours also
has a folder for prompts. The same chats are sent to both, one after the other, the order reversed
in every other repeat:

    new         a chat of so many tokens that begins like no other
    identical   the same again
    other end   the same text with another question at its end
    once more   a third question there
    continued   the first chat with an answer and another question
    back        the same chat, continued, after 20 others
    restart     continued once more, after both servers were started again

llama-server runs without MTP, which is its faster way here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
from benchkit import model, results
from benchkit.servers import OurServer

from pyllama_mtp import Model
from pyllama_mtp.measure.peers import LlamaServer, find
from pyllama_mtp.measure.prompts import stdlib_texts

QUESTIONS = ("What is this about?", "Who wrote the text above, and why?", "How long is it?")
OTHERS, N_OTHER, N_ANSWER, PLACES, N_CTX = 20, 160, 8, 4, 8192

Messages = list[dict[str, str]]


def first_token(server: LlamaServer, messages: Messages) -> tuple[float, str]:
    """Seconds until the first token of an answer comes, and the answer."""
    body = {"messages": messages, "max_tokens": N_ANSWER, "temperature": 0, "stream": True}
    url = f"{server.url}/v1/chat/completions"
    began, seconds, text = time.perf_counter(), 0.0, ""
    with httpx.stream("POST", url, json=body, timeout=600, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
            said = choices[0].get("delta", {}).get("content") or ""
            seconds = seconds or (time.perf_counter() - began if said else 0.0)
            text += said
    if not seconds:
        raise SystemExit(f"no token has come: {text!r}")
    return seconds, text


class Chats:
    """Chats of a number of tokens, of text that is the same in every run."""

    def __init__(self, path: Path) -> None:
        with Model(path, mtp=False) as words:
            tokens = words.tokenize("\n".join(stdlib_texts())[:60_000])
            self._pieces = [words.detokenize([token]) for token in tokens]

    def make(self, number: int, n: int, question: str) -> Messages:
        """Chat `number`: a document of `n` tokens, less the question."""
        at = 37 * number % len(self._pieces)
        document = "".join([*self._pieces[at:], *self._pieces][: max(n - 24, 1)])
        return [{"role": "user", "content": f"Text {number}.\n{document}\n{question}"}]


def measure(
    both: Sequence[LlamaServer], chats: Chats, n: int, repeat: int
) -> dict[str, list[float]]:
    """Seconds of ours and llama-server's for every case, of one chat."""
    order = (0, 1) if repeat % 2 == 0 else (1, 0)
    found, answers = dict[str, list[float]](), ["", ""]
    number = 1000 * repeat + n

    def ask(case: str, messages: Sequence[Messages]) -> None:
        seconds = [0.0, 0.0]
        for i in order:
            seconds[i], answers[i] = first_token(both[i], messages[i])
        found[case] = seconds
        print(f"  {n} tokens, {case}: {seconds[0]:.3f} s, llama-server {seconds[1]:.3f} s")

    def longer(i: int, question: str) -> Messages:
        said = {"role": "assistant", "content": answers[i] or "."}
        return [*begun[i], said, {"role": "user", "content": question}]

    @contextmanager
    def running(other: int) -> Iterator[None]:
        """Both servers, started; the first request of a server builds its graphs."""
        with both[0], both[1]:
            for server in both:
                first_token(server, chats.make(other, N_OTHER, QUESTIONS[0]))
            yield

    with running(9_000_000 + repeat):
        begun = [chats.make(number, n, QUESTIONS[0])] * 2
        ask("new", begun)
        ask("identical", begun)
        first = [*answers]
        for case, question in zip(("other end", "once more"), QUESTIONS[1:], strict=True):
            ask(case, [chats.make(number, n, question)] * 2)
        answers[:] = first
        begun = [longer(i, QUESTIONS[1]) for i in (0, 1)]
        ask("continued", begun)
        begun = [longer(i, QUESTIONS[2]) for i in (0, 1)]
        for other in range(OTHERS):
            for server in both:
                first_token(server, chats.make(number + 50 * other + 7, N_OTHER, QUESTIONS[0]))
        ask("back", begun)
        begun = [longer(i, QUESTIONS[0]) for i in (0, 1)]
    with running(9_500_000 + repeat):
        ask("restart", begun)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="FILE", help="default: a synthetic 0.8B")
    parser.add_argument("--sizes", type=int, nargs="+", default=[616, 4000], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    path, threads = model.model_file(args.model), str(args.threads)
    theirs = ["-m", str(path), "-t", threads, "-tb", threads, "-np", str(PLACES)]
    theirs += ["-c", str(PLACES * N_CTX), "--kv-unified", "--fit", "off"]
    peer = LlamaServer(*find("llama-server").command, theirs)
    chats, seconds = Chats(path), defaultdict[str, list[list[float]]](list)
    for n in args.sizes:
        for repeat in range(args.repeats):
            with tempfile.TemporaryDirectory() as folder:
                sizes = ["--n-ctx", N_CTX, "--n-sequences", PLACES, "--cache-dir", folder]
                both = [OurServer(path, args.threads, *sizes), peer]
                for case, pair in measure(both, chats, n, repeat).items():
                    seconds[f"{n}, {case}"].append(pair)
    rows = []
    for case, pairs in seconds.items():
        ours, peers = map(median, zip(*pairs, strict=True))
        rows.append([case, f"{ours:.3f}", f"{peers:.3f}", f"{peers / ours:.1f}"])
    about = f"Model: {path.name}; {threads} threads; medians of {args.repeats} repeats"
    results.show([about], ["tokens, prompt", "ours, s", "llama-server, s", "ratio"], rows)


if __name__ == "__main__":
    main()
