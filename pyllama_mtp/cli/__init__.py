"""The command line: ``pyllama-mtp COMMAND``. A command's module is imported when it is used.

A command is a module, or a class of one, with its help as docstring, ``add_options`` and ``run``.

Exit codes: 0 done; 1 ``doctor`` found something wrong, or ``compare`` something slower; 2 bad input
or an expected failure, one message on stderr; 130 interrupted with Ctrl-C; 143 and 129 ended by
SIGTERM and SIGHUP, which clean up as Ctrl-C does; 141 the reader of our output went away. The
commands that serve until they are ended (``rpc-worker``, ``serve``) answer SIGTERM with 0.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from inspect import cleandoc
from types import FrameType
from typing import Any, NoReturn

import pyllama_mtp
from pyllama_mtp.arguments import nearest
from pyllama_mtp.cli.parsing import HelpFormatter
from pyllama_mtp.errors import PyllamaMtpError, UsageError
from pyllama_mtp.files import FULL

PROGRAM = "pyllama-mtp"
FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
#: Most characters of a usage that fits into a line of the help, with the command's name.
ONE_LINE = 60
#: Signals that end a command, and the word for it.
SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

#: Commands, and their lines in `pyllama-mtp --help`.
COMMANDS = {
    "generate": "continue a prompt, streaming the text as it comes",
    "chat": "talk with a model: questions and answers, in the terminal",
    "serve": "serve a model over HTTP, as the OpenAI API does",
    "matrix": "measure speed: prompt sizes x draft depths, with and without MTP",
    "accept": "measure how often drafts are accepted, by class of prompt and context length",
    "compare": "compare two measurements cell by cell; exit code 1 if something got slower",
    "report": "make a page with plots, and tables, of measurements",
    "tune": "measure what drafting costs here, and recommend a draft depth",
    "inspect": "show a model's architecture, layers, MTP head, tensor types and memory need",
    "synth": "write a model of a published shape with random weights, for measuring speed",
    "head": "take the MTP head out of a model file, put it into another, or leave it out",
    "quantize": "make a smaller model file of an F16 one, as llama-quantize does",
    "draft-vocab": "rank the tokens that the MTP head may draft, by your own text",
    "rpc-worker": "lend this machine's devices to models in other processes, over TCP",
    "libdir": "print the folder of the libraries, for llama-cpp-python and llama-server",
    "doctor": "check build, backend, CPU, GPU and demo model; say what is wrong",
}

#: Commands that are classes, by "module.class"; each other one is the module of its name.
CLASSES = {
    "accept": "worth.Accept",
    "tune": "worth.Tune",
    "compare": "results.Compare",
    "report": "results.Report",
    "serve": "servers.Serve",
    "rpc-worker": "servers.RpcWorker",
    "synth": "modelfiles.Synth",
    "head": "modelfiles.Head",
    "quantize": "modelfiles.Quantize",
    "draft-vocab": "modelfiles.DraftVocab",
    "libdir": "installation.Libdir",
    "doctor": "installation.Doctor",
}

#: What --help shows, by dest; --help-all shows the rest. Commands that are not here show all.
_LOADED = "model n_gpu_layers n_ctx n_threads cache_type_k cache_type_v"
_USUAL = {
    "generate": "prompt prompt_file chat chat_template system image max_tokens stop draft_n_max "
    f"stats json json_schema temperature top_p seed {_LOADED}",
    "chat": "system max_tokens draft_n_max stats reasoning reasoning_budget chat_template mmproj "
    f"temperature top_p seed {_LOADED}",
    "serve": "host port api_key name n_sequences draft_n_max reasoning chat_template cache_dir "
    f"mmproj {_LOADED}",
    "matrix": "prompt_sizes at depths max_tokens repeat budget variants peers report output resume "
    f"image {_LOADED}",
    "accept": f"prompts classes context_lengths max_tokens temperature output {_LOADED}",
    "tune": f"limit prompt_size repeat json {_LOADED}",
}

#: Options of llama.cpp's programs that have another name here; with a colon, in another form.
OTHER_NAMES = {
    "--ctx-size": "--n-ctx",
    **dict.fromkeys(("--predict", "--n-predict"), "--max-tokens"),
    "--gpu-layers": "--n-gpu-layers",
    "--hf-repo": "--model: -m hf:OWNER/REPO:QUANT",
    **dict.fromkeys(("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max"), "--draft-n-max"),
    "--spec-type": "--draft-n-max: the model's own MTP head drafts",
    "--draft-p-min": "--p-min",
    **dict.fromkeys(("-b", "--batch-size"), "--n-batch"),
    **dict.fromkeys(("-ub", "--ubatch-size"), "--n-ubatch"),
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    **dict.fromkeys(("-f", "--file"), "--prompt-file"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-np", "--parallel"), "--n-sequences"),
    **dict.fromkeys(("-a", "--alias"), "--name"),
    "-s": "--seed",
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), "--head"),
    "-dev": "--device",
    "-sm": "--split-mode",
    "-ts": "--tensor-split",
    "-mg": "--main-gpu",
    "-ot": "--override-tensor",
    "-cmoe": "--cpu-moe",
    "-ncmoe": "--n-cpu-moe",
}

_EPILOG = """\
examples:
  pyllama-mtp doctor             is everything in order?
  pyllama-mtp generate --chat "What does str.split() do?"
  pyllama-mtp matrix --report page     a first look: what MTP gains here
  pyllama-mtp matrix --model Qwen3.5-4B-Q8_0.gguf --prompt-sizes 1024,8192

pyllama-mtp COMMAND --help explains a command.
"""


class Parser(argparse.ArgumentParser):
    """Reports a bad argument as UsageError, like every other bad input."""

    #: The parser of the command, if it is one.
    chosen: Parser | None = None

    #: The dests of options that --help shows; empty: all.
    usual: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(f"{message}\nsee {self.prog} --help")

    def format_help(self, everything: bool = False) -> str:
        """The help: of the usual options, or of all."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            actions = group._group_actions
            if self.usual and not everything:
                actions = [action for action in actions if action.dest in self.usual]
            if actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def finish(self, command: str) -> None:
        """Add llama.cpp's names of options, a usage of one line, and --help-all."""
        known = self._option_string_actions
        for alias, name in OTHER_NAMES.items():
            if name in known and alias not in known:
                known[alias] = known[name]
                if not alias.startswith("--"):  # the help shows short names
                    known[name].option_strings = [alias, *known[name].option_strings]
        if self.usage is None:
            words = ["%(prog)s [options]"]
            for action in self._actions:
                if action.required or not action.option_strings:
                    metavar = str(action.metavar or action.dest)
                    text = self._get_formatter()._format_args(action, metavar)
                    words.append(" ".join([*action.option_strings[-1:], text]))
            if len(" ".join(words)) < ONE_LINE:
                self.usage = " ".join(words)
        if usual := _USUAL.get(command):
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, help="show all options and exit"
            )
            self.usual = ("help", "help_all", *usual.split())


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(everything=True), end="")
        parser.exit()


def build_parser(command: str | None) -> Parser:
    """The parser; only `command` is imported and gets its options, the others are only listed."""
    parser = Parser(
        prog=PROGRAM,
        description="Multi-token prediction (MTP) with llama.cpp: generate and measure.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log to stderr: -v llama.cpp's warnings, -vv everything; goes before the command",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    for name, summary in COMMANDS.items():
        if name != command:
            subparsers.add_parser(name, help=summary)
            continue
        module, _, kind = CLASSES.get(name, name).partition(".")
        implementation: Any = importlib.import_module(f"pyllama_mtp.cli.{module}")
        implementation = getattr(implementation, kind) if kind else implementation
        description, _, epilog = cleandoc(implementation.__doc__ or "").partition("\n\n")
        parser.chosen = subparsers.add_parser(
            name,
            help=summary,
            description=" ".join(description.split()),
            epilog=epilog,
            formatter_class=HelpFormatter,
        )
        parser.chosen.set_defaults(run=implementation.run)
        implementation.add_options(parser.chosen)
        parser.chosen.finish(name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; see the module for what each code means."""
    note_signal(None)
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # --help leaves by SystemExit
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and not stopped():
            return _reader_is_gone()
        if isinstance(error, _EXPECTED) or stopped():
            return ended_by(error)
        raise


_EXPECTED = PyllamaMtpError, OSError, MemoryError, KeyboardInterrupt
#: The signal that is stopping the command, if one came.
_stopped_by: int | None = None


class Stopped(KeyboardInterrupt):
    """A signal came. Of a plain KeyboardInterrupt that has passed through some C libraries, Python
    makes an end by SIGINT, even after it was caught."""


def entry() -> int:
    """Run :func:`main` as the program: SIGTERM and SIGHUP end it as Ctrl-C does."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(number, on_signal)
    try:
        return main()
    except KeyboardInterrupt:  # at the end of main
        return interrupted()
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
        try:
            sys.stdout.flush()
        except OSError:  # main has said why; Python would try again, and change the exit code
            _drop_output()


def on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal as Ctrl-C is handled; the exit code will say which signal it was."""
    note_signal(number)
    raise Stopped


def stopped() -> bool:
    """Whether a signal is stopping the command; failures are then its consequences."""
    return _stopped_by is not None


def go_on() -> bool:
    """Forget a Ctrl-C that ended only a part of the command. False: another signal ends it all."""
    if _stopped_by not in (None, signal.SIGINT):
        return False
    note_signal(None)
    return True


def note_signal(number: int | None) -> None:
    """Remember the signal that is stopping the command."""
    global _stopped_by
    _stopped_by = number


def interrupted() -> int:
    """Say on stderr what stopped the command, and return its exit code."""
    number = signal.SIGINT if _stopped_by is None else signal.Signals(_stopped_by)
    print(f"{PROGRAM}: {SIGNALS[number]}", file=sys.stderr, flush=True)
    return 128 + number


def ended_by(error: BaseException) -> int:
    """Say on stderr what ended the command, a signal or else `error`; return the exit code."""
    if stopped() or isinstance(error, KeyboardInterrupt):
        return interrupted()  # the signal made something fail
    logging.getLogger(__name__).debug("traceback", exc_info=True)
    said = str(error) or "out of memory"
    if isinstance(error, OSError) and error.errno in FULL:  # an error of a file names the file
        said = f"cannot write the output: {error.strerror}; free some space or send it elsewhere"
    print(f"{PROGRAM}: error: {said}", file=sys.stderr)
    return FAILED


def _run(arguments: list[str]) -> int:
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        near = _did_you_mean("; ", nearest(command, COMMANDS))
        raise UsageError(f"there is no command {command!r}{near}\nsee {PROGRAM} --help")
    parser = build_parser(command)
    try:
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            (parser.chosen or parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    except UsageError as error:
        raise UsageError(f"{error}{_hint(parser.chosen, arguments, str(error))}") from None
    _set_log_levels(args.verbose)
    if args.version:
        print(f"{PROGRAM} {pyllama_mtp.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    return int(args.run(args))


def _did_you_mean(mark: str, near: str | None) -> str:
    return f"{mark}did you mean {near}?" if near else ""


def _hint(chosen: Parser | None, arguments: list[str], message: str) -> str:
    """A guess of what was meant, for the end of an error message; "": no guess."""
    known = chosen._option_string_actions if chosen else {}
    for word in (argument.partition("=")[0] for argument in arguments):
        name = OTHER_NAMES.get(word, "")
        if name.partition(":")[0] in known and word not in known:
            return f"\n{word} of llama.cpp is here {name}"
    _, found, rest = message.partition("\n")[0].partition("unrecognized arguments: ")
    if found and rest.startswith("-"):
        return _did_you_mean("\n", nearest(rest.split(" ")[0].partition("=")[0], known))
    if chosen and chosen.prog == f"{PROGRAM} generate" and found:
        at = arguments.index(rest.split(" ")[0])
        text = " ".join(arguments[at - 1 : at + len(rest.split(" "))])
        return f'\na prompt of several words needs quotes: {PROGRAM} generate "{text}"'
    return ""


def _set_log_levels(verbose: int) -> None:
    """Log our warnings and llama.cpp's errors; -v: its warnings, too; -vv: everything."""
    levels = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(levelname)s: %(message)s")
    logging.getLogger("pyllama_mtp").setLevel(levels[min(verbose + 1, 3)])
    native = logging.DEBUG if verbose > 1 else levels[verbose]
    logging.getLogger("pyllama_mtp.llama.native").setLevel(native)


def _reader_is_gone() -> int:
    """Leave quietly."""
    _drop_output()
    return BROKEN_PIPE


def _drop_output() -> None:
    """Send buffered output to /dev/null (see SIGPIPE in Python's manual)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
