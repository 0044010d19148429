"""Runs the application until a signal ends it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import native, rpc

from .generator import Generator

#: Seconds that connections may stay open after the answers have ended.
CONNECTIONS_S = 5


class Server(uvicorn.Server):
    """Ends in order at the first SIGINT or SIGTERM, and at once at the second signal.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self, config: uvicorn.Config, generator: Generator, grace_s: float = 0.0) -> None:
        super().__init__(config)
        self._generator, self._grace_s = generator, grace_s
        self.signal: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our own signal handlers: uvicorn's raise the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: take no more requests, and end the running ones. Second signal: exit."""
        if self.signal is not None:
            os._exit(128 + sig)
        self.signal = sig
        self.should_exit = True
        self._generator.end(self._grace_s)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is a free port. Raises UsageError: the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen at {host}:{port}: {why}; use another --host or --port"
        ) from None


def serve(
    app: FastAPI,
    generator: Generator,
    found: socket.socket,
    grace_s: float,
    ready: Callable[[], None] = lambda: None,
) -> int | None:
    """Serve on a socket until a signal comes, wait for the generator, and return the signal.

    Args:
        grace_s: seconds that running answers may go on after the signal.
        ready: called before the first request is taken.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=math.ceil(grace_s) + CONNECTIONS_S,
    )
    server = Server(config, generator, grace_s)
    generator.start()
    try:
        ready()
        server.run(sockets=[found])
    finally:
        generator.end(0.0)
        rpc.give_up_waiting(native.PATIENCE_S)
        generator.join()
        rpc.give_up_waiting(math.inf)
        sys.stdout.flush()
    return server.signal
