#!/usr/bin/env python3
"""Four honest clients of `pyllama-mtp serve`, first alone, then beside hostile ones.

    python bench/hostile.py                        # 5 minutes alone, 30 beside hostile clients
    python bench/hostile.py -m FILE.gguf --minutes 3 --seed 7

Before the server starts, each question is asked once of a session that has processed nothing else,
without MTP. The honest clients ask these questions, greedily, in an order that the seed decides.
Hostile clients, in another process, send bodies of a million elements and of the largest size,
strange values, schemas and grammars that compute without end, broken HTTP and strange hosts; they
leave in the middle of streams, send halves of requests, and hold 500 connections. What they send
follows from the seed; when they send it does not.

Prints the report. Exit code 1: a goal is missed. Each of these is one:

- Every honest answer is that of the session.
- The 95th percentile of the honest clients' time to the first token is at most 1.5 times that
  before the hostile clients came.
- The server's memory is flat in the last half of the time.
- /health answers within 0.2 s, at the 99th percentile.
- No status of 500 or above, and no answer for a strange host.
- SIGTERM ends the server and all its processes within 10 s, while hostile requests are running.

Needs httpx and psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from benchkit import growth, parser_of, results
from benchkit.servers import OurServer
from load import Answer, Load, clients, processes

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.measure.peers import HOST, LlamaServer
from pyllama_mtp.measure.prompts import docstrings
from pyllama_mtp.models.demo import demo_path

N_CTX, PROMPT, N_ANSWER, N_HONEST, N_HOSTILE = 1024, (100, 500), 32, 4, 4
LARGEST_BODY = 48 << 20
#: Seconds: between requests of an honest client, and of a hostile one; how long one waits for an
#: answer; between storms of connections, and how long these are held; for the end after SIGTERM.
PAUSE_S, HOSTILE_PAUSE_S, PATIENCE_S, STORM_EVERY_S, HOLD_S, END_S = 0.5, 1.0, 30.0, 60.0, 20.0, 10
N_STORM = 500
#: Goals: time to the first token with hostile clients to that without; seconds of /health; growth.
SLOWER, HEALTH_S, GROWTH_MIB = 1.5, 0.2, 16

# -- what is hostile ----------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = '{"max_tokens":2,"messages":[{"role":"user","content":"x"}],'
TEXT = '{"max_tokens":2,"prompt":"x",'
#: Bodies in which a list stands for @, by path.
PLACES = (
    (COMPLETIONS, '{"max_tokens":2,"prompt":@}'),
    (COMPLETIONS, TEXT + '"stop":@}'),
    (CHAT, '{"max_tokens":2,"messages":@}'),
    (CHAT, '{"max_tokens":2,"messages":[{"role":"user","content":@}]}'),
    (CHAT, '{"max_tokens":2,"messages":[{"role":"assistant","tool_calls":@}]}'),
    (CHAT, ASK + '"tools":@}'),
    ("/v1/responses", '{"max_output_tokens":2,"input":@}'),
    ("/v1/messages", '{"max_tokens":2,"messages":@}'),
    ("/v1/messages", '{"max_tokens":2,"messages":[{"role":"user","content":@}]}'),
    ("/tokenize", '{"messages":@}'),
    ("/detokenize", '{"tokens":@}'),
)
ITEMS = (
    *("null", "1", '""', "[]", "{}", '"x"', "[[[[]]]]", "1e999", r'"\ud800"', "NaN"),
    *('{"role":"user","content":"x"}', '{"type":"text","text":"x"}', r'"\u001b[2J"'),
    '{"type":"function","function":{"name":"f","parameters":{}}}',
)
VALUES = (
    *("-1", "0", "1e308", "9223372036854775808", "1" * 5000, "true", "{}", "[null]", "NaN"),
    *(r'"\ud800"', r'"\u001b[2J\u0000"', '"{{ 1/0 }}"', f'"{1_000_000 * "x"}"'),
    "{" + ",".join(f'"{token}":-100' for token in range(100_000)) + "}",
)
FIELDS = (
    *("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "model", "stop"),
    *("stream", "stream_options", "response_format", "reasoning_effort", "thinking_budget"),
    *("tool_choice", "user", "logit_bias", "chat_template_kwargs", "metadata"),
)
TWICE = {f"r{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/r{i + 1}"}]} for i in range(30)}
SCHEMAS: tuple[Any, ...] = (
    {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]},
    *({"type": "string", "pattern": word} for word in ("(a|b|ab)*c{900}", "(.{1,300}){1,300}")),
    {"allOf": [{"type": "string", "pattern": f".*{c}.{{200}}"} for c in "abcdef"]},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**6, "items": {"enum": [*range(1000)]}},
    {"$ref": "#/$defs/r0", "$defs": {**TWICE, "r30": {"type": "string"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(5000)}},
    json.loads(200 * '{"type":"array","items":' + "{}" + 200 * "}"),
)
GRAMMARS = (
    *('root ::= "a"{1,1000000}', 'root ::= root "a"', "root ::= (a | a a)*\na ::= [a-z]*"),
    *('root ::= "\\x00"', f"root ::= {400 * '('}[a]{400 * ')*'}", "root ::= " + 50_000 * '"a"|'),
    *('root ::= (("a"{1,999}){1,999}){1,999}', "root ::= [^\\x00-\\U0010FFFF]", "\x00", "root"),
)
BODIES = (
    *(b"", b"\xff\xfe{\x00}\x00", b'{"prompt":"\xff\xc0"}', b'{"prompt":', b"\x1f\x8b\x08", b"[]"),
    *(n * b'{"a":' + b"1" + n * b"}" for n in (900, 300_000)),
    *(n * b"[" for n in (1000, 1_000_000, LARGEST_BODY, LARGEST_BODY + 1)),
)
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HTTP = (
    *(5000 * b"\x00", b"GET /\r\n\r\n", b"\x16\x03\x01\x02", b"GET " + 70_000 * b"/"),
    b"GET /health HTTP/1.1\r\n" + 5000 * b"X: 1\r\n" + b"\r\n",
    POST + b"Content-Length: 4\r\n" + CHUNKED + b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    POST + CHUNKED + b"FFFFFFFFFFFFFFFF\r\nx",
    300 * b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
)


@dataclass(frozen=True)
class Attack:
    """What a hostile client sends, and then: "wait" for the answer, "leave" when it begins, "go" at
    once, or "hold" the connection."""

    kind: str
    data: bytes
    then: str = "wait"


def post(path: str, body: bytes | str, host: str = "127.0.0.1") -> bytes:
    """A request."""
    data = body if isinstance(body, bytes) else body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def many(draw: random.Random) -> Attack:
    (path, place), item = draw.choice(PLACES), draw.choice(ITEMS)
    most = (LARGEST_BODY - len(place)) // (len(item) + 1)
    n = min(draw.choice((2, 3000, 300_000, 1_000_000, most)), most)
    return Attack("list", post(path, place.replace("@", f"[{','.join([item] * n)}]")))


def value(draw: random.Random) -> Attack:
    path, begin = draw.choice(((COMPLETIONS, TEXT), (CHAT, ASK)))
    return Attack("value", post(path, f'{begin}"{draw.choice(FIELDS)}":{draw.choice(VALUES)}}}'))


def grammar(draw: random.Random) -> Attack:
    name, of = draw.choice((("json_schema", SCHEMAS), ("grammar", GRAMMARS)))
    body = f'{ASK}"{name}":{json.dumps(draw.choice(of))}}}'
    return Attack("grammar", post(CHAT, body), draw.choice(("wait", "leave")))


def stream(draw: random.Random) -> Attack:
    body = {"prompt": draw.randint(1, 200) * "x ", "max_tokens": 40, "stream": True}
    return Attack("stream", post(COMPLETIONS, json.dumps(body)), "leave")


def half(draw: random.Random) -> Attack:
    whole = post(COMPLETIONS, f'{TEXT}"seed":1}}')
    return Attack("half", whole[: draw.randrange(len(whole))], draw.choice(("hold", "go")))


KINDS: tuple[Callable[[random.Random], Attack], ...] = (
    *(many, many, value, grammar, grammar, stream, stream, half),
    lambda draw: Attack("body", post(draw.choice(PLACES)[0], draw.choice(BODIES))),
    lambda draw: Attack("http", draw.choice(HTTP)),
    lambda draw: Attack("strange host", post(COMPLETIONS, f'{TEXT}"seed":1}}', "evil.example")),
)


class Hostile:
    """Hostile clients of a server; `ends`: how their requests ended, `examples`: some that went
    wrong."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.seed = port, seed
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        self.examples: dict[str, str] = {}

    async def run(self, seconds: float) -> None:
        work = [self.client(random.Random(f"{self.seed} {i}")) for i in range(N_HOSTILE)]
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(self.storms(), *work), seconds)

    async def client(self, draw: random.Random) -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / HOSTILE_PAUSE_S))
            await self.send(draw.choice(KINDS)(draw))

    async def storms(self) -> None:
        storm = [Attack("storm", POST[: i % len(POST)], "hold") for i in range(N_STORM)]
        while True:
            await asyncio.sleep(STORM_EVERY_S)
            await asyncio.gather(*map(self.send, storm))

    async def send(self, attack: Attack) -> None:
        """Send it, and note how it ended: by a status, or otherwise."""
        hold = attack.then == "hold"
        try:
            end = await asyncio.wait_for(self.exchange(attack), HOLD_S if hold else PATIENCE_S)
        except asyncio.TimeoutError:
            end = "held" if hold else "no answer"
        except OSError as error:
            end = "refused" if isinstance(error, ConnectionRefusedError) else "closed"
        self.ends[attack.kind][end] += 1
        if end.startswith("5") or end == "no answer":
            self.examples.setdefault(f"{attack.kind}, {end}", repr(attack.data[:1000])[:500])

    async def exchange(self, attack: Attack) -> str:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(attack.data)
            await writer.drain()
            if attack.then == "go":
                return "left"
            first = await reader.read(300)
            if attack.then == "leave":
                return "left"
            while await reader.read(1 << 16):
                pass
            return first.split(b" ", 2)[1].decode("latin-1") if b" " in first else "closed"
        finally:
            writer.transport.abort()


def attack(port: int, seed: int, seconds: float) -> Hostile:
    """Be hostile for a time, in a process of its own, which takes no time from the server."""
    os.nice(19)
    hostile = Hostile(port, seed)
    asyncio.run(hostile.run(seconds))
    return hostile


# -- who is honest ------------------------------------------------------------------------------


#: A prompt, and the answer of a session that has processed nothing else.
Question = tuple[list[int], str]


def judge(answer: Answer, text: str) -> str:
    """Whether an answer is "right", "wrong", or "failed"."""
    return "failed" if answer.error else "right" if answer.text == text else "wrong"


def questions(path: Path, seed: int, n: int, threads: int) -> list[Question]:
    """Questions with their answers. The prompts are cut from the docstrings of Python's library."""
    draw = random.Random(seed)
    settings = Settings(n_ctx=N_CTX, n_threads=threads, n_batch=512, draft_n_max=0)
    asked = []
    with Model(path) as model, Session(model, settings) as session:
        tokens = model.tokenize("".join(docstrings())[:400_000])
        for _ in range(n):
            size, at = draw.randint(*PROMPT), draw.randrange(len(tokens) - PROMPT[1])
            prompt = tokens[at : at + size]
            session.reset()
            answer = session.generate(prompt, max_tokens=N_ANSWER, ignore_eos=True)
            asked.append((prompt, answer.run().text))
    return asked


class Honest(Load):
    """Honest clients, with `verdicts` on their answers; `health`: seconds that /health took."""

    def __init__(self, server: LlamaServer, http: httpx.AsyncClient, asked: list[Question]) -> None:
        super().__init__(server, http)
        self.asked, self.verdicts, self.health = asked, Counter[str](), list[float]()
        self.waits, self.examples = list[float](), list[str]()

    async def phase(self, seed: int, seconds: float) -> list[float]:
        """Ask for a time; returns how long each first token was waited for."""
        self.answers, self.memory, self.health = [], [], []
        work = [self.ask_on(random.Random(f"{seed} {i}")) for i in range(N_HONEST)]
        with suppress(asyncio.TimeoutError):
            all_work = asyncio.gather(self.watch(), self.probe(), *work)
            await asyncio.wait_for(all_work, seconds)
        now = self.now()
        self.waits = [(one.first or now) - one.began for one in self.answers]
        return self.waits

    async def ask_on(self, draw: random.Random) -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / PAUSE_S))
            prompt, text = draw.choice(self.asked)
            answer = await self.ask(prompt, N_ANSWER)
            verdict = judge(answer, text)
            self.verdicts[verdict] += 1
            if verdict != "right":
                self.examples.append(f"{answer.error or answer.text!r}, not {text!r}")

    async def probe(self) -> None:
        while True:
            began = time.perf_counter()
            with suppress(httpx.HTTPError):
                await self.http.get(f"{self.server.url}/health")
            self.health.append(time.perf_counter() - began)
            await asyncio.sleep(0.25)


# -- the run ------------------------------------------------------------------------------------


async def run(args: argparse.Namespace) -> tuple[list[float], Honest, Hostile, int, float]:
    """Run the server and all clients; returns the waits of the honest clients alone, all clients
    after it, how many processes SIGTERM has left, and the seconds that it took."""
    asked = questions(args.model, args.seed, args.questions, args.threads)
    sizes = ["--n-ctx", N_CTX, "--n-sequences", 2 * N_HONEST, "--cache-ram", "64"]
    seconds = 60 * args.minutes
    with (
        OurServer(args.model, args.threads, *sizes) as server,
        ProcessPoolExecutor(1, get_context("spawn")) as others,
    ):
        async with clients() as http:
            honest = Honest(server, http, asked)
            await honest.phase(args.seed, seconds / 30)  # warms up
            alone = await honest.phase(args.seed, seconds / 6)
            port = int(server.url.rpartition(":")[2])
            hostile = others.submit(attack, port, args.seed, seconds + END_S)
            await honest.phase(args.seed, seconds)
        there, began = processes(server.pid), time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        left = (await asyncio.to_thread(psutil.wait_procs, there, END_S))[1]
        ended_s = time.monotonic() - began
        return alone, honest, await asyncio.wrap_future(hostile), len(left), ended_s


def report(
    alone: list[float], honest: Honest, hostile: Hostile, n_left: int, ended_s: float
) -> bool:
    """Print what came of it. Returns whether all goals are met."""
    before, during = (np.percentile(waits, (50, 95)) for waits in (alone, honest.waits))
    first, last = (n / 2**20 for n in growth(honest.memory, 0.5))
    usual, slow, slowest = np.percentile(honest.health, (50, 99, 100))
    ends = sum(hostile.ends.values(), Counter[str]())
    n_faults = sum(n for end, n in ends.items() if end.startswith("5") and end != "503")
    n_strange = hostile.ends["strange host"]["200"]
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in honest.verdicts.items())
    goals = {
        f"honest answers: {verdicts}": not honest.verdicts["wrong"] + honest.verdicts["failed"],
        f"first token, s, median and 95 %: {before[0]:.3f} and {before[1]:.3f} of {len(alone)} "
        f"alone; {during[0]:.3f} and {during[1]:.3f} of {len(honest.waits)} beside hostile clients:"
        f" {during[1] / before[1]:.2f} times": during[1] <= SLOWER * before[1],
        f"memory, MiB: {first:.0f} at half of the time, {last:.0f} at its end, "
        f"{max(honest.memory) / 2**20:.0f} at "
        "most": last - first <= GROWTH_MIB,
        f"/health, s: {usual:.3f}, 99 % {slow:.3f}, longest {slowest:.3f}": slow <= HEALTH_S,
        f"statuses of 500 and above: {n_faults}": not n_faults,
        f"answers for a strange host: {n_strange}": not n_strange,
        f"processes that SIGTERM has left: {n_left} after {ended_s:.1f} s": not n_left,
    }
    rows = [
        [kind, str(of.total()), ", ".join(f"{n} {end}" for end, n in of.most_common())]
        for kind, of in sorted(hostile.ends.items())
    ]
    results.show([], ["hostile", "requests", "status"], rows)
    print()
    for words, met in goals.items():
        print(f"- {'' if met else 'MISSED: '}{words}")
    for example in [*honest.examples[:5], *(f"{k}: {v}" for k, v in hostile.examples.items())]:
        print(f"    {example}")
    return all(goals.values())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("-m", "--model", type=Path, default=demo_path(), help="default: the demo model")
    add("--minutes", type=float, default=30, metavar="M", help="of hostility (%(default)s)")
    add("--questions", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=1, metavar="N", help="of the server (%(default)s)")
    add("--seed", type=int, default=1, help="default: %(default)s")
    return int(not report(*asyncio.run(run(parser.parse_args(argv)))))


if __name__ == "__main__":
    raise SystemExit(main())
