"""Run by test_cut_line.py in a process of its own: break the line to a worker at any message.

Arguments: model file, addresses of two workers, how many messages to break the line to the first
one at. Prints a JSON line for each: what was sent when the line broke, how it broke, and what came
of it.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from contextlib import suppress

import numpy as np

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.errors import (
    FatalDecodeError,
    InsufficientMemoryError,
    PyllamaMtpError,
    WorkerLostError,
)

FILE, WORKER, OTHER, N = *sys.argv[1:4], int(sys.argv[4])
SETTINGS = Settings(n_ctx=128, n_batch=32, n_ubatch=16, n_threads=1, draft_n_max=2)
PROMPT = "def add(a, b):\n    return a + b\n\n" * 2


class Breaker:
    """A line to the worker that breaks before message number `at`, counted over all connections.

    Attributes:
        how: "cut"; "garbled": the answer to the message has the wrong size; "mute": nothing passes
            any more.
        seen: command of every message.
    """

    def __init__(self, at: int | None, how: str) -> None:
        self.at, self.how = at, how
        self.seen: list[int] = []
        self.broken = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        host, port = WORKER.split(":")
        with suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.create_connection((host, int(port)))
                for end in (here, there):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._up, args=(here, there), daemon=True).start()
                threading.Thread(target=self._down, args=(here, there), daemon=True).start()

    def _up(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError, struct.error), here.makefile("rb") as file:
            while not self.broken.is_set():
                head = file.read(9)
                command, size = struct.unpack("<BQ", head)
                data = file.read(size)
                if command != 14:  # greetings: this program's own are not ggml's
                    self.seen.append(command)
                    if len(self.seen) - 1 == self.at:
                        self.broken.set()
                        if self.how != "garbled":
                            break
                there.sendall(head + data)
        if not (self.broken.is_set() and self.how in ("garbled", "mute")):
            for end in (here, there):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _down(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := there.recv(2**16):
                if self.broken.is_set():
                    if self.how == "garbled":
                        here.sendall(struct.pack("<Q", 3) + b"abc" + bytes(64))
                    continue
                here.sendall(data)
        with suppress(OSError):
            here.shutdown(socket.SHUT_RDWR)


def use(address: str, how: str = "") -> str:
    with (
        Model(FILE, rpc_servers=address, rpc_timeout=1 if how == "mute" else 2) as model,
        Session(model, SETTINGS) as session,
    ):
        try:
            return session.generate(PROMPT, max_tokens=8, ignore_eos=True).run().text
        except WorkerLostError:
            refuse_all(model, session, address)
            raise


def refuse_all(model: Model, session: Session, address: str) -> None:
    """Whatever needs a lost worker is refused until its model is closed; and llama.cpp says by
    itself that a decode has failed. Other workers go on."""
    for call in (
        lambda: session.generate(PROMPT, max_tokens=8).run(),
        lambda: Session(model, SETTINGS).close(),
        lambda: Model(FILE, rpc_servers=address).close(),
    ):
        try:
            call()
        except WorkerLostError as error:
            assert error.address == address
        else:
            raise AssertionError("a lost worker was used")
    model.refuse_lost_worker = lambda: None  # type: ignore[method-assign]
    target = session._engine.target
    try:
        target.clear()
        target.decode(np.array([5, 6], dtype=np.int32), 0, np.array([0, 1], dtype=np.int8))
    except (FatalDecodeError, InsufficientMemoryError):
        pass
    else:
        raise AssertionError("a decode without its worker has an outcome")
    finally:
        del model.refuse_lost_worker
    with Model(FILE, rpc_servers=OTHER) as beside, Session(beside, SETTINGS) as other:
        assert other.generate(PROMPT, max_tokens=8, ignore_eos=True).run().text == local


def attempt(at: int | None, how: str = "cut", line: Breaker | None = None) -> Breaker:
    line = line or Breaker(at, how)
    found: dict[str, object]
    try:
        found = {"text": use(line.address, how)}
    except PyllamaMtpError as error:
        kind, named = type(error).__name__, line.address in str(error)
        found = {"error": kind, "named": named, "message": str(error)[:300]}
    command = line.seen[at] if at is not None and at < len(line.seen) else None
    print(json.dumps({"at": at, "how": how, "command": command, **found}), flush=True)
    return line


def mended(line: Breaker) -> list[int]:
    """Use the broken line once more, whole; returns the commands of its messages."""
    before = len(line.seen)
    line.at = None
    line.broken.clear()
    attempt(None, line=line)
    return line.seen[before:]


local = use(())
attempt(None)  # sizes that are asked for once are known from here on, but not at another address
whole = attempt(None).seen
answered = {3, 8}  # GET_BASE, GET_TENSOR: they have answers that can be garbled
for command in sorted(set(whole)):
    at = whole.index(command)
    for _ in range(5):  # messages of two connections may change places
        if attempt(at).seen[at : at + 1] == [command]:
            break
for i in range(N):
    attempt(len(whole) * i // N)
for command in answered:
    attempt(whole.index(command), "garbled")
    attempt(len(whole) - 1 - whole[::-1].index(command), "garbled")
for command in (6, 10):  # SET_TENSOR, while the model is loaded; GRAPH_COMPUTE
    attempt(whole.index(command), "mute")
GET_ALLOC_SIZE = 13
again = mended(attempt(whole.index(GET_ALLOC_SIZE)))
# ggml keeps the sizes that it was told for an address, but not one that it was not told.
print(json.dumps({"sizes": [seen.count(GET_ALLOC_SIZE) for seen in (whole, again)]}))
print(json.dumps({"local": [local, use(())]}))
