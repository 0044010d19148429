"""``pyllama-mtp rpc-worker``: lend this machine's devices to a model in another process."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from pyllama_mtp.cli import INTERRUPTED, PROGRAM, common

log = logging.getLogger(__name__)

_EPILOG = """\
There is no authentication and no encryption: whoever reaches the port can run
native code here. Loopback and trusted networks only.

examples:
  pyllama-mtp rpc-worker
  pyllama-mtp rpc-worker --host 192.168.0.7 --port 50052
In Python, on the machine that has the model file:
  Model(path, rpc_servers=("192.168.0.7:50052",))
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``rpc-worker`` command."""
    parser = subparsers.add_parser(
        "rpc-worker",
        help="lend this machine's devices to a model in another process, over TCP",
        description="Lend the devices of this machine, its GPUs or else its CPU, to a model in "
        "another process, here or on another machine. Says where it listens, and serves one "
        "process at a time until Ctrl-C or SIGTERM.",
        epilog=_EPILOG,
        formatter_class=common.HelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="name or IPv4 address to listen at")
    parser.add_argument(
        "--port",
        type=common.whole(0),
        default=0,
        metavar="N",
        help="port to listen at; 0 is a free one (default: 0)",
    )
    parser.add_argument(
        "--threads", type=common.whole(1), metavar="N", help="CPU threads (default: all cores)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Ends the process itself: see :class:`pyllama_mtp.rpc.Worker`."""
    from pyllama_mtp import rpc
    from pyllama_mtp.settings import available_threads

    # Our one line goes out; ggml's printing, about each connection, does not.
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        worker = rpc.Worker(args.host, args.port, args.threads or available_threads())
    except BaseException:
        os.dup2(out.fileno(), 1)
        out.close()
        raise
    if not worker.loopback:
        log.warning(
            "%s can be reached from other machines, and nobody is asked who they are: whoever "
            "reaches it can run native code here",
            worker.address,
        )
    print(f"listening on {worker.address}", file=out, flush=True)
    code = 0
    if worker.wait() == signal.SIGINT:
        print(f"{PROGRAM}: interrupted", file=sys.stderr, flush=True)
        code = INTERRUPTED
    os._exit(code)
