#!/usr/bin/env python3
"""What is measured where a GPU is at hand for some minutes: pieces in the order of their worth.

    PYLLAMA_MTP_PEERS=DIR python bench/gpu.py --output OUT --minutes 9
    python bench/gpu.py --output OUT --minutes 4 --only doctor texts memory
    python bench/gpu.py --output OUT --old INSTALL            # old and new beside each other, too
    python bench/gpu.py --quick                               # try it anywhere

The models (0.8B, 27B and 35B-A3B shapes, 37 GB) are written meanwhile, on all cores but four, which
the pieces have until then; the writer goes on when this command ends, for the next one. Of the
pieces whose model is there, the first that fits into the time is run; those that did not fit are
named. A piece that fails, or takes too long, does not stop the others. Each leaves its samples
in OUT at once, as sections of publish.py, and what it printed in OUT/log.txt.

Exit codes: 0 all pieces are measured, 1 one failed, 3 there was no time for one.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchkit import BENCH
from benchkit.model import SYNTHETIC, make_models

from pyllama_mtp.measure.peers import BUILD_FOLDER, VARIABLE

FAILED, UNFINISHED = 1, 3
#: In the order in which they are written; the experts take less time.
MODELS = SMALL, EXPERTS, DENSE = "0.8b-q4_k_m", "qwen3.6-35b-a3b", "qwen3.6-27b"
TINY = {SMALL: ("tiny", "q8_0"), DENSE: ("tiny", "q8_0"), EXPERTS: ("tiny-moe", "q8_0")}
#: Bytes of all models, and cores that the writer leaves to the pieces.
SIZE, OWN_CORES = 40 * 2**30, 4
#: A piece is ended after so many times its seconds; what it has measured until then is kept.
LONGEST = 1.5
PUBLISH = f"{BENCH}/publish.py --models {{models}} --results {{output}} {{more}} --only "
INSTALLS = f"{BENCH}/installs.py --old {{old}} --results {{output}} --model {{model}} --depths 0,3 "
INSTALLS += "--prompt 1024 --tokens 192 --restarts 2 --turns 3 --name installs-"


@dataclass(frozen=True)
class Piece:
    """A command.

    Attributes:
        seconds: that it takes on an H200, estimated from bench/results/speed.md.
        model: the file that it needs; "": none.
        words: of the command, after the interpreter; Run.measure() puts files in {braces}.
    """

    name: str
    seconds: int
    model: str
    words: str


PIECES = (
    Piece("doctor", 20, "", "-m pyllama_mtp doctor"),
    Piece("texts", 25, SMALL, f"{BENCH}/gpu.py --texts {{model}}"),
    Piece("installs-small", 45, SMALL, f"{INSTALLS}small"),
    Piece("golden-27b", 125, DENSE, f"{PUBLISH}gpu_golden --files {DENSE}"),
    Piece("golden-35b", 100, EXPERTS, f"{PUBLISH}gpu_golden --files {EXPERTS}"),
    Piece("installs-27b", 80, DENSE, f"{INSTALLS}27b"),
    Piece("32k-27b", 75, DENSE, f"{PUBLISH}gpu_32k --files {DENSE}"),
    Piece("32k-35b", 50, EXPERTS, f"{PUBLISH}gpu_32k --files {EXPERTS}"),
    Piece("drafts-27b", 50, DENSE, f"{PUBLISH}gpu --files {DENSE}"),
    Piece("drafts-35b", 40, EXPERTS, f"{PUBLISH}gpu --files {EXPERTS}"),
    Piece("memory", 30, DENSE, f"{BENCH}/gpu.py --memory {{model}}"),
    Piece("experts", 60, EXPERTS, f"{PUBLISH}gpu_experts"),
    Piece("half", 60, DENSE, f"{PUBLISH}gpu_half"),
)


def texts(path: Path) -> int:
    """Whether greedy texts with drafts are those without. A text that begins to differ at a near
    tie, where two tokens are equally good but for rounding, is right."""
    from pyllama_mtp import Model, Session, Settings

    plain = list[int]()
    with Model(path) as model:
        prompt = model.tokenize(Path(argparse.__file__).read_text(encoding="utf-8"))[:1000]
        for depth in (0, 1, 3, "auto"):
            with Session(model, Settings(n_ctx=2048, draft_n_max=depth, ngram=False)) as session:
                running = session.generate(prompt, max_tokens=256, ignore_eos=True, log_ties=True)
                answer = running.run()
            tokens, told = [*answer.tokens], answer.telemetry
            plain, end, tie = plain or tokens, "equal to no MTP", True
            if tokens != plain:
                at = [a == b for a, b in zip(plain, tokens, strict=True)].index(False)
                tie = any(one.index == at for one in told.near_ties or ())
                end = f"token {at} differs, {'a near tie' if tie else 'WRONG'}"
            rates = " ".join(f"{rate:.2f}" for rate in told.acceptance_per_position)
            print(f"texts: depth {depth}: {end}; accepted {rates or '-'}", flush=True)
            if not tie:
                return FAILED
    return 0


def memory(path: Path) -> int:
    """What contexts with 3 drafts take of the devices, as predicted and as it is."""
    from pyllama_mtp import Model, Session, Settings, native
    from pyllama_mtp.memory import resolve, simulate

    with Model(path) as model:
        for n, kind in itertools.product((2**15, 2**17), ("f16", "q8_0")):
            types = {"cache_type_k": kind, "cache_type_v": kind}
            chosen = Settings(n_ctx=min(n, model.n_ctx_train), draft_n_max=3, **types)
            for part in simulate(model, resolve(chosen, model)):
                print(f"memory: {n} {kind}: {part.describe()}", flush=True)
            with Session(model, chosen) as session:
                session.generate("a", max_tokens=64, ignore_eos=True).run()
                for one in native.load().devices():
                    used = f"{(one.total - one.free) / 1e9:.2f} GB in use"
                    print(f"memory: {n} {kind}: {one.name}: {used}", flush=True)
    return 0


class Run:
    """A run of the plan.

    Attributes:
        pieces: those that are left.
        codes: exit codes of the others.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.monotonic() + 60 * args.minutes
        self.pieces = [one for one in PIECES if one.name in args.only]
        self.pieces = [one for one in self.pieces if args.old or "{old}" not in one.words]
        self.codes = dict[str, int]()
        self.log = (args.output / "log.txt").open("ab")
        self.cores = sorted(os.sched_getaffinity(0))
        if not all(self.file(name).exists() for name in MODELS) and not self.writing():
            self.write()

    def file(self, model: str) -> Path:
        """The file of a model."""
        return Path(self.args.models, f"{model}.gguf")

    def lock(self) -> IO[bytes]:
        """A file that is locked while a process has it. Raises BlockingIOError: another has it."""
        file = (self.args.models / "lock").open("wb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def writing(self) -> bool:
        """Whether models are being written."""
        try:
            self.lock().close()
        except BlockingIOError:
            return True
        return False

    def write(self) -> None:
        """Write the models that are missing in a process that outlives this one."""
        own = OWN_CORES if len(self.cores) > 2 * OWN_CORES else 0
        words = [sys.executable, BENCH / "gpu.py", "--models", self.args.models, "--write"]
        words += ["--quick"] * self.args.quick
        os.sched_setaffinity(0, self.cores[own:])
        with self.lock() as file:
            subprocess.Popen(
                words,
                **{"stdout": self.log, "stderr": self.log},
                pass_fds=[file.fileno()],
                start_new_session=True,
            )
        os.sched_setaffinity(0, self.cores[:own] or self.cores)

    def next(self) -> Piece | None:
        """The first piece that fits and whose model is there, as soon as there is one."""
        while True:
            if not (writing := self.writing()):
                os.sched_setaffinity(0, self.cores)
            left = self.end - time.monotonic()
            fitting = [one for one in self.pieces if one.seconds <= left]
            ready = [one for one in fitting if not one.model or self.file(one.model).exists()]
            if ready or not fitting or not writing:
                return ready[0] if ready else None
            time.sleep(0.2)

    def measure(self, piece: Piece) -> None:
        """Run a piece, for LONGEST times its seconds at most."""
        args, began = self.args, time.monotonic()
        # Other programs get the same n_ubatch, which is no default of theirs.
        more = ["--n-ubatch 2048"] * piece.name.endswith("-35b")
        more += ["-p 64 -n 8 --repeat 1", *["--at 256"] * ("32k" in piece.name)] * args.quick
        words = piece.words.format(
            **{"model": self.file(piece.model), "models": args.models, "output": args.output},
            old=args.old,
            more=f"--minutes {piece.seconds / 60:.2f} --more '{' '.join(more)}'",
        )
        self.say(f"{piece.name}: {words}")
        process = subprocess.Popen(
            [sys.executable, *shlex.split(words)],
            **{"cwd": args.output, "stdout": self.log, "stderr": self.log},
            start_new_session=True,
        )
        try:
            code = process.wait(min(LONGEST * piece.seconds, self.end - began))
        except subprocess.TimeoutExpired:
            code = UNFINISHED
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, number)
                    process.wait(5)
        self.codes[piece.name] = code
        end = {0: "done", UNFINISHED: "UNFINISHED"}.get(code, "FAILED")
        self.say(f"{piece.name}: {end} after {time.monotonic() - began:.0f} s")

    def say(self, text: str) -> None:
        """Print a line, and log it."""
        print(f"gpu: {text}", flush=True)
        self.log.write(f"gpu: {text}\n".encode())
        self.log.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    room = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    usual = Path("/dev/shm" if room > SIZE else tempfile.gettempdir(), "gpu-models")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, [one.name for one in PIECES]
    add("--output", type=Path, default=Path("build/gpu"), metavar="DIR", help="%(default)s")
    add("--models", type=Path, default=usual, metavar="DIR", help="%(default)s")
    add("--minutes", type=float, default=9.0, metavar="M", help="%(default)s")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    add("--old", metavar="INSTALL", help="to compare with: see installs.py; without it none is")
    add("--quick", action="store_true", help="try it, with tiny models: figures mean nothing")
    for name, what in (("texts", texts), ("memory", memory)):
        add(f"--{name}", type=Path, metavar="FILE", help=what.__doc__)
    add("--write", action="store_true", help="only write the models")
    args = parser.parse_args(argv)
    if args.quick:
        SYNTHETIC.update(TINY)
    if args.texts or args.memory:
        return texts(args.texts) if args.texts else memory(args.memory)
    args.models, args.output = args.models.resolve(), args.output.resolve()
    args.models.mkdir(parents=True, exist_ok=True)
    if args.write:
        make_models(args.models, MODELS)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(VARIABLE, str(BUILD_FOLDER))  # publish.py builds none
    run = Run(args)
    while piece := run.next():
        run.pieces.remove(piece)
        run.measure(piece)
    for piece in run.pieces:
        run.say(f"{piece.name}: no time, or no model")
    codes = {*run.codes.values(), *[UNFINISHED] * len(run.pieces)} - {0}
    return FAILED if codes - {UNFINISHED} else max(codes, default=0)


if __name__ == "__main__":
    raise SystemExit(main())
