#!/usr/bin/env python3
"""Time to the first token over HTTP, beside upstream's llama-server, in one run.

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

llama-server runs without MTP, which is its faster way here. Writes results/ttft.md and .json.
Exit codes: 0 done, 2 a program is missing or failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import model, results

from pyllama_mtp import Model
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.measure.peers import LlamaServer, PeerError, find
from pyllama_mtp.measure.prompts import stdlib_texts

CASES = ("new", "identical", "other end", "once more", "continued", "back", "restart")
QUESTIONS = ("What is this about?", "Who wrote the text above, and why?", "How long is it?")
OTHERS, N_OTHER, N_ANSWER, PLACES, N_CTX = 20, 160, 8, 4, 8192

Messages = list[dict[str, str]]


class Ours(LlamaServer):
    """`pyllama-mtp serve`."""

    def __init__(self, options: Sequence[str]) -> None:
        program = Path(sysconfig.get_path("scripts"), "pyllama-mtp")  # the installed one
        super().__init__(str(program), ["serve", *options])

    def __exit__(self, *raised: object) -> None:
        """Let it end by itself: it stores its prompts."""
        self.process.terminate()
        self.process.wait(60)
        super().__exit__(*raised)


def first_token(server: LlamaServer, messages: Messages) -> tuple[float, str]:
    """Seconds until the first token of an answer comes, and the answer."""
    body = {"messages": messages, "max_tokens": N_ANSWER, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    call = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began, seconds, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(call, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
            said = choices[0].get("delta", {}).get("content") or ""
            seconds = seconds or (time.perf_counter() - began if said else 0.0)
            text += said
    if not seconds:
        raise PeerError(f"no token has come: {text!r}")
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


def servers(path: Path, threads: int, folder: str, peer: str) -> list[LlamaServer]:
    """Ours and llama-server, not started."""
    ours = ["--model", str(path), "--threads", str(threads), "--n-ctx", str(N_CTX)]
    theirs = ["-m", str(path), "-t", str(threads), "-tb", str(threads), "-np", str(PLACES)]
    theirs += ["-c", str(PLACES * N_CTX), "--kv-unified", "--fit", "off"]
    return [
        Ours([*ours, "--n-sequences", str(PLACES), "--cache-dir", folder]),
        LlamaServer(peer, theirs),
    ]


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

    with ExitStack() as running:
        for server in both:
            running.enter_context(server)
        for server in both:  # the first request of a server builds its graphs
            first_token(server, chats.make(9_000_000 + repeat, N_OTHER, QUESTIONS[0]))
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
    with ExitStack() as running:
        for server in both:
            running.enter_context(server)
        for server in both:
            first_token(server, chats.make(9_500_000 + repeat, N_OTHER, QUESTIONS[0]))
        ask("restart", begun)
    return found


def render(result: dict[str, Any]) -> str:
    """The Markdown file."""
    rows = []
    for n, repeats in result["seconds"].items():
        for case in CASES:
            ours, theirs = (median(one[case][i] for one in repeats) for i in (0, 1))
            rows.append([f"{n}, {case}", f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.1f}"])
    head = ["tokens, prompt", "ours, s", "llama-server, s", "ratio"]
    about = (__doc__ or "").partition("\n\n")[2].partition("Both servers")[2].partition("Writes")[0]
    return "\n".join(
        [
            "# Time to the first token, beside llama-server",
            "",
            *results.header_lines(result),
            f"- Model: {result['model']}; {result['threads']} threads; medians of "
            f"{result['repeats']} repeats",
            "",
            *results.markdown_table(head, rows),
            "",
            f"Both servers{about}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time to the first token, beside llama-server.")
    parser.add_argument("--model", type=Path, metavar="FILE", help="default: a synthetic 0.8B")
    parser.add_argument("--sizes", type=int, nargs="+", default=[616, 4000], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-dir", metavar="DIR", help="of llama-server")
    parser.add_argument("--output", type=Path, default=results.RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    path = model.model_file(args.model)
    try:
        peer = find("llama-server", args.peer_dir)
        chats, seconds = Chats(path), dict[str, list[dict[str, list[float]]]]()
        for n in args.sizes:
            for repeat in range(args.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    both = servers(path, args.threads, folder, peer.command[0])
                    seconds.setdefault(str(n), []).append(measure(both, chats, n, repeat))
    except (PyllamaMtpError, OSError) as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 2
    result = {
        **results.header(native.locate("patched")[1]),
        "model": path.name,
        "threads": args.threads,
        "repeats": args.repeats,
        "seconds": seconds,
    }
    results.write(result, render(result), "ttft", args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
