"""The command line: ``pyllama-mtp COMMAND``. One module per command, imported when it is used.

Exit codes: 0 done; 1 ``doctor`` found something wrong, or ``compare`` something slower; 2 bad input
or an expected failure, one message on stderr; 130 interrupted with Ctrl-C; 141 the reader of our
output went away.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pyllama_mtp.errors import PyllamaMtpError, UsageError

PROGRAM = "pyllama-mtp"
FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

#: Command -> what the list of commands says about it.
COMMANDS = {
    "generate": "continue a prompt, streaming the text as it comes",
    "matrix": "measure speed: prompt sizes x draft depths, with and without MTP",
    "accept": "measure how often drafts are accepted, by class of prompt and context length",
    "compare": "compare two measurements cell by cell; exit code 1 if something got slower",
    "report": "make a page with plots, and tables, of measurements",
    "tune": "measure what drafting costs here, and recommend a draft depth",
    "inspect": "show a model's architecture, layers, MTP head, tensor types and memory need",
    "synth": "write a model of a published shape with random weights, for measuring speed",
    "draft-vocab": "rank the tokens that the MTP head may draft, by your own text",
    "rpc-worker": "lend this machine's devices to models in other processes, over TCP",
    "libdir": "print the folder of the libraries, for llama-cpp-python and llama-server",
    "doctor": "check build, backend, CPU, GPU and demo model; say what is wrong",
}

_EPILOG = """\
examples:
  pyllama-mtp doctor             is everything in order?
  pyllama-mtp generate --chat "What does str.split() do?"
  pyllama-mtp matrix             with and without MTP, on the bundled demo model
  pyllama-mtp matrix --model Qwen3.5-4B-Q8_0.gguf --prompt-sizes 1024,8192

pyllama-mtp COMMAND --help explains a command.
"""


class Parser(argparse.ArgumentParser):
    """Reports a bad argument as UsageError, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}\nsee {self.prog} --help")


def build_parser(command: str | None) -> Parser:
    """The parser; only `command` is imported and gets its options, the others are only listed."""
    parser = Parser(
        prog=PROGRAM,
        description="Multi-token prediction (MTP) with llama.cpp: generate and measure.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log to stderr: -v llama.cpp's warnings, -vv all it says; goes before the command",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"pyllama_mtp.cli.{name.replace('-', '_')}").add_parser(
                subparsers
            )
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def version() -> str:
    """The installed package's version."""
    from importlib import metadata

    try:
        return metadata.version("pyllama-mtp")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; see the module for what each code means."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except (PyllamaMtpError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_is_gone()
        logging.getLogger(__name__).debug("traceback", exc_info=True)
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    command = next((word for word in arguments if not word.startswith("-")), None)
    parser = build_parser(command)
    args = parser.parse_args(arguments)
    _set_log_levels(args.verbose)
    if args.version:
        print(f"{PROGRAM} {version()}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    return int(args.run(args))


def _set_log_levels(verbose: int) -> None:
    """Ours from warnings up, llama.cpp's from errors up; -v: its warnings; -vv: all."""
    levels = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(levelname)s: %(message)s")
    logging.getLogger("pyllama_mtp").setLevel(levels[min(verbose + 1, 3)])
    native = logging.DEBUG if verbose > 1 else levels[verbose]
    logging.getLogger("pyllama_mtp.native").setLevel(native)


def _reader_is_gone() -> int:
    """Leave quietly: what is still buffered goes nowhere (see SIGPIPE in Python's manual)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
