"""Lend the devices of this machine, its GPUs or else its CPU, to models in other
processes, here or on other machines. Print the address, and serve until Ctrl-C
or SIGTERM.

There is no authentication and no encryption: whoever reaches the port can run
native code here. Loopback and trusted networks only.

examples:
  pyllama-mtp rpc-worker
  pyllama-mtp rpc-worker --host 192.168.0.7 --port 50052
On the machine that has the model file:
  pyllama-mtp generate --rpc 192.168.0.7:50052 --model FILE "Once upon a time"
  Model(path, rpc_servers=("192.168.0.7:50052",))     # in Python
The first line on stdout is "listening on HOST:PORT", with the numbers in use.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time

from pyllama_mtp.cli import FAILED, INTERRUPTED, PROGRAM, parsing

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds before a process that died is started again.
PAUSE_S = 0.2
_PR_SET_PDEATHSIG = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="name or IPv4 address to listen at")
    parsing.add_whole(
        parser, "--port", default=0, least=0, help="port to listen at; 0 is a free one (default: 0)"
    )
    parsing.add_whole(parser, "--threads", help="CPU threads (default: all cores)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes, in a child process.

    Garbage from a client, on which ggml aborts, or a fault in a driver ends the child. Its clients
    lose their models, but a new child serves at the same address.
    """
    port, address = args.port, ""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    while True:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with its parent
            os.close(reader)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _serve(args, port, writer, quiet=bool(address))
        os.close(writer)
        with os.fdopen(reader) as pipe:
            address = pipe.readline()  # "" if the process ends before it listens
        status = _ended(pid)
        if not address or os.WIFEXITED(status):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else FAILED
        name = signal.Signals(os.WTERMSIG(status)).name
        log.error("the worker at %s died of %s; it is started again", address, name)
        port = int(address.rpartition(":")[2])
        time.sleep(PAUSE_S)


def _ended(pid: int) -> int:
    """Pass signals on to the process until it ends; return its status."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        got = signal.sigwait({*STOP_SIGNALS, signal.SIGCHLD})
        if got in STOP_SIGNALS:
            os.kill(pid, got)


def _serve(args: argparse.Namespace, port: int, pipe: int, *, quiet: bool) -> None:
    """Serve until a signal comes, then end the process: see :class:`pyllama_mtp.llama.rpc.Worker`.
    `pipe` gets the address when the server listens; `quiet`: it is not printed."""
    from pyllama_mtp.llama import rpc
    from pyllama_mtp.settings import available_threads

    # ggml prints about each connection; stdout is for our one line.
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    worker = rpc.Worker(args.host, port, args.threads or available_threads())
    if not worker.loopback and not quiet:
        log.warning(
            "%s can be reached from other machines, and there is no authentication: whoever "
            "reaches it can run native code here",
            worker.address,
        )
    os.write(pipe, worker.address.encode())
    os.close(pipe)
    if not quiet:
        print(f"listening on {worker.address}", file=out, flush=True)
    code = 0
    if worker.wait() == signal.SIGINT:
        print(f"{PROGRAM}: interrupted", file=sys.stderr, flush=True)
        code = INTERRUPTED
    os._exit(code)
