#!/usr/bin/env python3
"""Many clients at once: this project's server beside llama-server, without MTP and with it.

    python bench/load.py -m FILE.gguf               # all cells that OUTPUT does not have yet
    python bench/load.py -m FILE.gguf --most 1      # the next of them, in about two minutes

Is memory flat?

    python bench/load.py -m FILE.gguf --clients 4 --sides ours --seconds 1800 --cache-ram 64

A cell is one server and one number of clients. Each client sends a request, waits for the answer,
and sends the next one after a pause that is drawn from an exponential distribution (Poisson
arrivals), one second on average. The seed decides pauses, prompts and lengths, so all servers get
the same requests. Half of the prompts begin with the same text, as long as half of the prompt. All
servers have as many places (`-np 4 --kv-unified`), the same threads, and their own defaults
otherwise.

When the time of a cell is over, answers are broken off. Their tokens count, by their characters; a
first token that has not come counts with the time that was waited for it. Time between tokens is
the mean of each whole answer; the longest gap is between two events of any stream. 0 clients stand
for another question: the longest gap of an answer during which a prompt of 4,000 tokens comes in,
and the time to that prompt's first token.

Keeps all samples in OUTPUT, and prints the table. Exit code 1: a request has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from benchkit import DRAFTS, anonymous, parser_of, results
from benchkit.servers import OurServer

from pyllama_mtp.measure.peers import LlamaServer, find
from pyllama_mtp.measure.prompts import docstrings
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.settings import available_threads

SIDES = ("ours", "llama-server with MTP", "llama-server", "ours without MTP")
PROMPT, ANSWER, LONG, N_CTX = (200, 2000), (64, 256), 4000, 4608  # tokens
N_CHARACTERS = 400_000  # of the text that prompts are cut from
HEAD = (
    "server", "clients", "answers", "failed", "tokens/s", "first token, s: median, 95 %",
    "between tokens, ms: median, 95 %", "longest gap, s", "memory, MiB: begin, end",
)  # fmt: skip


@dataclass
class Answer:
    """Times are seconds since the cell began; `n`: tokens, 0 until the answer has ended."""

    began: float
    first: float | None = None
    last: float = 0.0
    longest: float = 0.0
    n: int = 0
    text: str = ""
    error: str = ""


def requests(tokens: list[int], seed: int, client: int) -> Iterator[tuple[float, list[int], int]]:
    """What a client sends, without end: seconds of pause before, prompt, tokens of the answer."""
    draw = random.Random(f"{seed} {client}")
    while True:
        n, at = draw.randint(*PROMPT), draw.randrange(len(tokens) - PROMPT[1])
        n_shared = draw.choice((0, n // 2))
        prompt = [*tokens[:n_shared], *tokens[at : at + n - n_shared]]
        yield draw.expovariate(1.0), prompt, draw.randint(*ANSWER)


class Load:
    """Clients of one server; `answers` and `memory` (bytes, once a second) are what came of it."""

    def __init__(self, server: LlamaServer, http: httpx.AsyncClient) -> None:
        self.server, self.http, self.began = server, http, time.perf_counter()
        self.answers: list[Answer] = []
        self.memory: list[int] = []

    def now(self) -> float:
        return time.perf_counter() - self.began

    async def run(self, n_clients: int, seed: int, seconds: float) -> dict[str, Any]:
        body = {"content": "".join(docstrings())[:N_CHARACTERS]}
        told = await self.http.post(f"{self.server.url}/tokenize", json=body)
        tokens = told.raise_for_status().json()["tokens"]
        await self.ask(tokens[:16], 8)  # warms up
        self.answers, self.began = [], time.perf_counter()
        drawn = [requests(tokens, seed, client) for client in range(n_clients)]
        work = [self.client(one) for one in drawn] or [self.interrupted(tokens)]
        watch = asyncio.create_task(self.watch())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*work), seconds)
        watch.cancel()
        answers = [asdict(answer) for answer in self.answers]
        return {"answers": answers, "memory": self.memory, "seconds": self.now()}

    async def watch(self) -> None:
        """The memory of the server's processes, once a second."""
        while True:
            with suppress(psutil.Error):
                self.memory.append(sum(map(anonymous, processes(self.server.pid))))
            await asyncio.sleep(1.0)

    async def client(self, drawn: Iterator[tuple[float, list[int], int]]) -> None:
        for pause, prompt, n in drawn:
            await asyncio.sleep(pause)
            await self.ask(prompt, n)

    async def interrupted(self, tokens: list[int]) -> None:
        """An answer, during which a long prompt comes in."""
        running = asyncio.create_task(self.ask(tokens[: PROMPT[0]], 4 * ANSWER[1]))
        while not (self.answers and self.answers[0].first):
            await asyncio.sleep(0.01)
        self.answers[0].longest = 0.0
        await self.ask(tokens[-LONG:], 1)
        running.cancel()

    async def ask(self, prompt: list[int], n: int) -> Answer:
        """Send a request, and note what comes when."""
        answer = Answer(self.now())
        self.answers.append(answer)
        body = {"prompt": prompt, "max_tokens": n, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            url = f"{self.server.url}/v1/completions"
            async with self.http.stream("POST", url, json=body) as response:
                async for line in response.aiter_lines():
                    if "{" in line:
                        self.take(answer, json.loads(line.removeprefix("data: ")))
            if answer.n != n:
                answer.error = answer.error or f"{answer.n} of {n} tokens"
        except (httpx.HTTPError, ValueError) as error:
            answer.error = repr(error)
        return answer

    def take(self, answer: Answer, event: dict[str, Any]) -> None:
        """Note an event of an answer's stream."""
        if "choices" not in event:
            answer.error = json.dumps(event)[:300]
        for choice in event.get("choices", ()):
            now = self.now()
            answer.longest = max(answer.longest, now - answer.last if answer.first else 0.0)
            answer.first, answer.last = answer.first or now, now
            answer.text += choice["text"]
        answer.n = (event.get("usage") or {}).get("completion_tokens", answer.n)


def processes(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def server_of(side: str, args: argparse.Namespace) -> LlamaServer:
    """The server of a side, which is not started yet."""
    store = ["--cache-ram", str(args.cache_ram)]
    if side.startswith("ours"):
        words = ["--n-sequences", args.places, "--n-ctx", N_CTX, "--max-queue", "1000", *store]
        words += ["--draft-n-max", "0"] if "without" in side else []
        return OurServer(args.model, args.threads, *words)
    words = ["-m", str(args.model), "-t", str(args.threads), "-np", str(args.places)]
    words += ["-c", str(args.places * N_CTX), "--kv-unified", *store]
    words += ["--spec-type", "draft-mtp"] if "with MTP" in side else []
    return LlamaServer(*find("llama-server").command, words)


def clients() -> httpx.AsyncClient:
    """A client with a connection for each request, because servers close them at any time."""
    one_each = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=one_each)


async def measure(side: str, n_clients: int, args: argparse.Namespace) -> dict[str, Any]:
    """The samples of a cell. Raises PeerError: the server does not start."""
    with server_of(side, args) as server:
        async with clients() as http:
            return await Load(server, http).run(n_clients, args.seed, args.seconds)


def figures(cell: dict[str, Any]) -> dict[str, Any]:
    """Figures of a cell, in seconds; of times the median and 95 %."""
    answers, seconds = [Answer(**one) for one in cell["answers"]], cell["seconds"]
    ended = [one for one in answers if one.n and not one.error]
    per_character = sum(one.n for one in ended) / max(sum(len(one.text) for one in ended), 1)
    waits = [(one.first or seconds) - one.began for one in answers]
    between = [(one.last - (one.first or 0.0)) / (one.n - 1) for one in ended if one.n > 1]
    n_tokens = sum(one.n or len(one.text) * per_character for one in answers)
    if not cell["clients"]:  # the long prompt, and the answer that it holds up
        waits, answers, n_tokens = waits[1:], answers[:1], np.nan
    return {
        "ended": len(ended),
        "failed": sum(bool(one.error) for one in answers),
        "speed": n_tokens / seconds,
        "first": np.percentile(waits or [np.nan], (50, 95)),
        "between": np.percentile(between or [np.nan], (50, 95)),
        "longest": max((one.longest for one in answers), default=np.nan),
    }


def row(cell: dict[str, Any]) -> list[str]:
    """A cell's line of the table."""
    of, memory = figures(cell), [n / 2**20 for n in cell["memory"]]
    (first, late), (usual, slow) = of["first"], 1e3 * of["between"]
    words = [cell["side"], cell["clients"], of["ended"], of["failed"]]
    words += [f"{of['speed']:.1f}", f"{first:.2f}, {late:.2f}", f"{usual:.0f}, {slow:.0f}"]
    words += [f"{of['longest']:.2f}", f"{max(memory[:10]):.0f}, {memory[-1]:.0f}" if memory else ""]
    return [str(word) for word in words]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=demo_path(), help="default: the demo model")
    add("--clients", default="0,1,2,4,8,16", metavar="N,...", help="default: %(default)s")
    add("--sides", default=",".join(SIDES), help="default: %(default)s")
    add("--seconds", type=float, default=60, help="of a cell (default: %(default)s)")
    add("--most", type=int, metavar="N", help="measure at most so many cells now")
    add("--places", type=int, default=4, help="requests decoded together (default: %(default)s)")
    add("--threads", type=int, default=available_threads(), help="default: all cores")
    add("--cache-ram", type=int, default=8192, metavar="MIB", help="of prompts (%(default)s)")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--output", type=Path, default=DRAFTS / "load.jsonl", help="default: build/results")
    args = parser.parse_args(argv)
    numbers, sides = [int(n) for n in args.clients.split(",")], args.sides.split(",")
    if wrong := {*sides} - {*SIDES}:
        parser.error(f"--sides {', '.join(wrong)}: the sides are {', '.join(SIDES)}")
    names = ("seconds", "places", "threads", "seed", "cache_ram")
    same = {name: getattr(args, name) for name in names} | {"model": args.model.name}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    written = args.output.read_text().splitlines() if args.output.exists() else []
    cells = [cell for cell in map(json.loads, written) if cell["same"] == same]
    done = {(cell["clients"], cell["side"]) for cell in cells}
    for n, side in [at for at in product(numbers, sides) if at not in done][: args.most]:
        print(f"{n} clients, {side} ...", file=sys.stderr, flush=True)
        cell = asyncio.run(measure(side, n, args))
        cells.append({"same": same, "clients": n, "side": side, **cell})
        with args.output.open("a") as out:
            out.write(json.dumps(cells[-1]) + "\n")
    cells.sort(key=lambda cell: (cell["clients"], SIDES.index(cell["side"])))
    about = ", ".join(f"{name} {value}" for name, value in same.items())
    results.show([f"Cells: {about}"], HEAD, [row(cell) for cell in cells])
    return int(any(figures(cell)["failed"] for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
