"""Workers for the tests: processes on loopback, and a line to one that is listened in on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pyllama_mtp import Model, Session, Settings

from .processes import environment

#: For a short text of a model.
SMALL = Settings(n_ctx=128, n_batch=32, n_ubatch=16, n_threads=1, draft_n_max=2)
PROMPT = "def add(a, b):"
#: Prints that text: model file, address of a worker.
TEXT_OF = f"""
import sys
from pyllama_mtp import Model, Session, Settings
small = Settings(n_ctx=128, n_batch=32, n_ubatch=16, n_threads=1, draft_n_max=2)
with Model(sys.argv[1], rpc_servers=sys.argv[2]) as model, Session(model, small) as session:
    print(session.generate({PROMPT!r}, max_tokens=12).run().text, end="")
"""


def text_of(model: Model) -> str:
    """The text."""
    with Session(model, SMALL) as session:
        return session.generate(PROMPT, max_tokens=12).run().text


def start_worker(*options: str) -> subprocess.Popen[str]:
    """``rpc-worker`` with one thread, in a session of its own; it has not spoken yet. Signals to
    its process group reach the process that serves, too."""
    return subprocess.Popen(
        [sys.executable, "-m", "pyllama_mtp", "rpc-worker", "--threads", "1", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        cwd=tempfile.gettempdir(),
        start_new_session=True,
    )


def address_of(process: subprocess.Popen[str]) -> str:
    """Waits for its one line."""
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    return line.split()[-1]


@contextmanager
def running_worker(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker's process and its address. It ends with the block, even if it was stopped."""
    process = start_worker(*options)
    try:
        yield process, address_of(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def worker() -> Iterator[str]:
    """The address of a worker that ends with the block."""
    with running_worker() as (_, address):
        yield address


class Line:
    """A TCP line to a worker that keeps what passes: `up` to the worker, `down` from it."""

    def __init__(self, worker: str) -> None:
        host, port = worker.split(":")
        self._worker = (host, int(port))
        self.up, self.down = bytearray(), bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def clear(self) -> None:
        """Forget what has passed; nothing may be under way."""
        self.up.clear()
        self.down.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.create_connection(self._worker)
                for end in (here, there):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for way in ((here, there, self.up), (there, here, self.down)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                kept += data  # first: whoever has the answer finds it here
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def answers(self) -> list[int]:
        """Sizes of the answers in `down`: each comes after its size, 8 bytes."""
        sizes, at = [], 0
        while at < len(self.down):
            (size,) = struct.unpack_from("<Q", self.down, at)
            sizes.append(size)
            at += 8 + size
        assert at == len(self.down)
        return sizes
