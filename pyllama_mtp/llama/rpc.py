"""Devices of other processes: workers, on this machine or another, over TCP (ggml's RPC backend).

A worker lends the devices of its machine to several processes, and to several models of each, if
they fit. There is no authentication and no encryption: whoever reaches a worker's port can run
native code there, and whoever reaches the line can read along. Loopback and trusted networks only.

A worker that dies, or stops answering, while a model uses it raises
:class:`.errors.WorkerLostError` from the call that finds out, and from every later call of that
model. The worker's memory is lost, so the model has to be closed; then the worker, or another one
at its address, can be used again. Other models go on. ggml returns zeros in place of a lost
worker's results, so :func:`refuse_lost` is called before a result is used.

Ctrl-C is heard while a worker is waited for. A worker that answers within some seconds,
and before the next Ctrl-C, stays; another one is given up, and is lost.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..errors import LibraryError, UsageError, WorkerLostError
from . import native

#: Version of ggml's protocol (ggml-rpc.h): the first number must be the worker's, the second must
#: not be below the worker's.
PROTOCOL = (8, 0)
#: The first message, the same in all versions: command 14, the size of the rest, and 24 bytes for
#: capabilities of the connection, of which we have none.
HELLO = struct.pack("<BQ24x", 14, 24)
#: The answer: the size of the rest, version, 24 bytes of capabilities.
ANSWER = struct.Struct("<Q3Bx24x")
#: Seconds in which a worker must answer the first message.
TIMEOUT_S = 5.0
#: Seconds for which a worker may leave a message unanswered, or unread, while somebody waits for
#: it. It computes everything it was given before, perhaps a whole batch of a prompt, before it
#: answers.
SILENCE_S = 600
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

#: Workers that models of this process use now; ggml has one connection to each.
_in_use: Counter[str] = Counter()
#: Workers that the parent of this forked child was connected to. The child has the connections, but
#: not the threads that serve them.
_of_parent: set[str] = set()


def _forget_connections() -> None:
    _of_parent.update(worker for worker, users in _in_use.items() if users > 0)


os.register_at_fork(after_in_child=_forget_connections)


# -- using workers ---------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT". Raises UsageError: `text` is something else."""
    parts = re.fullmatch(r"([^\s:/,]+):(\d{1,5})", text)
    if not parts or not 0 < int(parts[2]) < 2**16:
        raise UsageError(
            f"{text!r} is not the address of a worker; give HOST:PORT, as in 127.0.0.1:50052 "
            "(a name or an IPv4 address, and a port from 1 to 65535)"
        )
    return parts[1], int(parts[2])


def check(address: str, timeout: float = TIMEOUT_S) -> None:
    """Greet the worker at `address`, "HOST:PORT", as ggml would, and hang up. Raises UsageError:
    nothing listens there, or something else; a worker that is busy, or of another version."""
    host, port = parse_address(address)
    start = f"start one there with `pyllama-mtp rpc-worker --host {host} --port {port}`"
    try:
        address_v4 = socket.gethostbyname(host)  # as ggml does: IPv4
        connection = socket.create_connection((address_v4, port), timeout)
    except OSError as reason:
        raise UsageError(f"no worker can be reached at {address} ({reason}); {start}") from None
    with connection:
        try:
            connection.settimeout(timeout)
            connection.sendall(HELLO)
            answer = connection.makefile("rb").read(ANSWER.size)
        except TimeoutError:
            raise UsageError(
                f"the worker at {address} did not answer in {timeout:g} s: it is stopped, or it is "
                "an rpc-server of llama.cpp, which serves one process at a time; start another"
            ) from None
        except OSError:
            answer = b""
    size, major, minor, _ = ANSWER.unpack(answer) if len(answer) == ANSWER.size else (0, 0, 0, 0)
    if not answer:
        raise UsageError(
            f"what listens at {address} hangs up: it is not a worker, or it serves as many "
            f"connections as it can; {start}, at another port"
        )
    if size != ANSWER.size - 8:
        raise UsageError(f"what listens at {address} is not a worker; {start}, at another port")
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise UsageError(
            f"the worker at {address} speaks version {major}.{minor} of ggml's RPC protocol, and "
            f"this package {PROTOCOL[0]}.{PROTOCOL[1]}; install the same version in both places"
        )


def check_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses. Raises UsageError for one that is malformed or named twice; sends nothing."""
    workers = (addresses,) if isinstance(addresses, str) else tuple(addresses)
    for address in workers:
        parse_address(address)
        if workers.count(address) > 1:
            raise UsageError(f"the worker {address} is named twice")
    return workers


def lost(address: str) -> str | None:
    """Why the worker at `address` is lost; None: it is not known to be lost.

    It stays lost until there is a new connection, after every model that used it was closed.
    """
    ffi = native.load().ffi
    reason = ffi.new("char[256]")
    ask = ffi.cast("bool (*)(const char *, char *, size_t)", _function("ggml_backend_rpc_lost"))
    return native.load().text(reason) if ask(address.encode(), reason, len(reason)) else None


def refuse_lost(addresses: Sequence[str]) -> None:
    """Raises WorkerLostError if one of these workers is lost."""
    for address in addresses:
        reason = lost(address)
        if reason is not None:
            raise WorkerLostError(
                f"the worker at {address} is lost ({reason}), and with it its part of the "
                "model; close the model, and load it again with workers that run. If the worker "
                "was only slow, give it longer (rpc_timeout, --rpc-timeout)",
                address,
            )


def connect(addresses: Sequence[str], timeout: int = SILENCE_S) -> list[Any]:
    """The devices (ggml_backend_dev_t) of workers, in order; call :func:`release` when done.

    They are not registered with ggml, so models that do not name them do not use them.

    Args:
        timeout: seconds of silence after which one of these workers is lost; 0: never. For all
            models that use them.

    Raises:
        UsageError: a worker cannot be used; see :func:`check`.
        WorkerLostError: a worker was lost just now.
        LibraryError: the library was built without RPC.
    """
    for worker in addresses:
        if worker in _of_parent:
            raise UsageError(
                f"the process that this one was forked from uses the worker at {worker}; start "
                "processes with spawn"
            )
    library = native.load()
    ffi, lib = library.ffi, library.lib
    _hear_signals()
    address = _function("ggml_backend_rpc_add_server")
    add_server = ffi.cast("ggml_backend_reg_t (*)(const char *)", address)
    for worker in addresses:
        lib.pyllama_limit_silence(worker.encode(), timeout)
        if not _in_use[worker]:
            check(worker)
    devices = []
    for worker in addresses:
        registry = add_server(worker.encode())
        if not registry:
            refuse_lost([worker])
            raise UsageError(f"the worker at {worker} has no devices")
        for index in range(lib.ggml_backend_reg_dev_count(registry)):
            devices.append(lib.ggml_backend_reg_dev_get(registry, index))
        if not _in_use[worker]:
            # ggml knows the devices from an earlier connection, and makes a new one when asked.
            wait_for([devices[-1]])
            refuse_lost([worker])
    _in_use.update(addresses)
    return devices


def wait_for(devices: Sequence[Any]) -> None:
    """Wait until the workers of these devices have finished their work, or are lost."""
    library = native.load()
    for device in devices:
        library.device_memory(device)  # which it answers after all else; a loss is found later
        native.raise_pending()


@lru_cache(maxsize=1)
def _hear_signals() -> None:
    """Run Python's signal handlers while a worker is waited for; an exception of theirs gives the
    worker up in the end (see `native.PATIENCE_S`), as silence beyond its limit does."""
    library = native.load()
    ffi, lib = library.ffi, library.lib
    signature = "void (*)(const char * (*)(const char *, int64_t, void *), void *)"
    set_callback = ffi.cast(signature, _function("ggml_backend_rpc_set_abort_callback"))
    set_callback(lib.pyllama_wait_poll, ffi.cast("void *", lib.pyllama_on_wait))
    # While the interpreter goes down, there are limits on silence only.
    atexit.register(set_callback, lib.pyllama_wait_poll, ffi.NULL)


def give_up_waiting(after_s: float) -> None:
    """After `after_s` seconds, give up any worker that is waited for, on any thread; infinity: no
    more. For a program that must end soon: models that use such a worker are lost."""
    native.load().lib.pyllama_give_up_waiting(after_s)


def release(addresses: Sequence[str]) -> None:
    """A model that used these workers is closed; ggml hangs up after a worker's last model."""
    _in_use.subtract(addresses)


def _function(name: str) -> Any:
    """Address of a function of the RPC backend."""
    library = native.load()
    registry = library.lib.ggml_backend_reg_by_name(b"RPC")
    address = registry and library.lib.ggml_backend_reg_get_proc_address(registry, name.encode())
    if not address:
        raise LibraryError(
            f"the library in {library.folder} was built without workers (no libggml-rpc.so there "
            "or one level up). Build it again with `pip install --force-reinstall .`, and without "
            "GGML_RPC=OFF if that was given."
        )
    return address


# -- being a worker --------------------------------------------------------------------------------


class Worker:
    """Lends this machine's devices: its GPUs, or its CPU if there are none.

    ggml's loop has no end, and outlives an orderly exit of the interpreter: end the process with
    :func:`os._exit`. SIGINT and SIGTERM are blocked in the process.

    Attributes:
        address: "HOST:PORT" with the numbers in use.
        loopback: whether other machines cannot reach it.
    """

    def __init__(self, host: str, port: int, threads: int) -> None:
        """Begin to serve; the worker answers requests from the return on.

        Args:
            host: name or IPv4 address of an interface of this machine.
            port: 0 is any free one.
            threads: of the CPU.

        Raises:
            UsageError: the worker cannot listen at that address.
            LibraryError: the library was built without RPC.
        """
        library = native.load()
        ffi, handles = library.ffi, library.handles
        kind = "void (*)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *)"
        start = ffi.cast(kind, _function("ggml_backend_rpc_start_server"))
        lent = handles("gpu") or handles("igpu") or handles("cpu")[:1]  # as upstream's rpc-server
        devices = ffi.new("ggml_backend_dev_t[]", lent)
        self.address = _free_address(host, port)
        self.loopback = is_loopback(self.address)
        arguments = (self.address.encode(), ffi.NULL, threads, len(devices), devices)
        # The loop's thread inherits the mask: a signal would break off one of its calls.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._thread = threading.Thread(target=start, args=arguments, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return check(self.address)
            except UsageError:
                self._thread.join(0.02)
                if not self._thread.is_alive() or time.monotonic() > deadline:
                    raise UsageError(f"ggml cannot listen at {self.address}") from None

    def wait(self) -> int:
        """Serve until SIGINT or SIGTERM comes; returns which. Raises UsageError: ggml gave up
        listening."""
        while self._thread.is_alive():
            got = signal.sigtimedwait(STOP_SIGNALS, 1.0)
            # After a stop and a continue, Python returns an empty record.
            if got and got.si_signo in STOP_SIGNALS:
                return got.si_signo
        raise UsageError(f"ggml no longer listens at {self.address}")


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address, with or without port, is one that other machines cannot reach."""
    return address.startswith("127.")


def _free_address(host: str, port: int) -> str:
    """The IPv4 address and port for ggml to bind. Tried here, because ggml gives no reason."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((socket.gethostbyname(host), port))
            own_address, chosen = probe.getsockname()
    except (OSError, OverflowError) as reason:
        raise UsageError(
            f"cannot listen at {host}:{port} ({reason}); the host is a name or an IPv4 address of "
            "this machine, and port 0 takes a free one"
        ) from None
    return f"{own_address}:{chosen}"
