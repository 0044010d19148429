"""``pyllama-mtp rpc-worker``: lend this machine's devices to models in other processes.

A process of its own serves. What ends it (a client's rubbish that ggml aborts on, a fault in a
driver) costs its clients their models, but the command starts it again, at the same address.
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
#: Pause before a process that has died is started again.
PAUSE_S = 0.2
_PR_SET_PDEATHSIG = 1

_EPILOG = """\
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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``rpc-worker`` command."""
    parser = subparsers.add_parser(
        "rpc-worker",
        help="lend this machine's devices to models in other processes, over TCP",
        description="Lend the devices of this machine, its GPUs or else its CPU, to models in "
        "other processes, here or on other machines. Says where it listens, and serves until "
        "Ctrl-C or SIGTERM.",
        epilog=_EPILOG,
        formatter_class=parsing.HelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="name or IPv4 address to listen at")
    parser.add_argument(
        "--port",
        type=parsing.whole(0),
        default=0,
        metavar="N",
        help="port to listen at; 0 is a free one (default: 0)",
    )
    parser.add_argument(
        "--threads", type=parsing.whole(1), metavar="N", help="CPU threads (default: all cores)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes: in a process of its own, again and again if it has to be."""
    port, address = args.port, ""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    while True:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never without us
            os.close(reader)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _serve(args, port, writer, quiet=bool(address))
        os.close(writer)
        with os.fdopen(reader) as pipe:
            address = pipe.readline()  # nothing if it ends before it listens
        status = _ended(pid)
        if not address or os.WIFEXITED(status):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else FAILED
        name = signal.Signals(os.WTERMSIG(status)).name
        log.error("the worker at %s died of %s; it is started again", address, name)
        port = int(address.rpartition(":")[2])
        time.sleep(PAUSE_S)


def _ended(pid: int) -> int:
    """Wait for the end of the process, and pass signals on to it; its status."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        got = signal.sigwait({*STOP_SIGNALS, signal.SIGCHLD})
        if got in STOP_SIGNALS:
            os.kill(pid, got)


def _serve(args: argparse.Namespace, port: int, pipe: int, *, quiet: bool) -> None:
    """Serve until a signal comes, then end the process: see :class:`pyllama_mtp.llama.rpc.Worker`.

    Args:
        pipe: gets the address when it listens.
        quiet: it has been said where it listens.
    """
    from pyllama_mtp.llama import rpc
    from pyllama_mtp.settings import available_threads

    # Our one line goes out; ggml's printing, about each connection, does not.
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        worker = rpc.Worker(args.host, port, args.threads or available_threads())
    except BaseException:
        os.dup2(out.fileno(), 1)
        out.close()
        raise
    if not worker.loopback and not quiet:
        log.warning(
            "%s can be reached from other machines, and nobody is asked who they are: whoever "
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
