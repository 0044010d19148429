#!/usr/bin/env python3
"""Decode and prefill by type of file: without MTP, at each depth, with adaptive depth, and peers.

    python bench/peers.py                                    # once: llama-server and llama-bench
    python bench/filetypes.py                                # all types, everything
    python bench/filetypes.py --types dense-q4_k_m,dense-q8_0 --contexts 512 --budget-minutes 15
    python bench/filetypes.py --ik BUILD_FOLDER --resume     # more rounds, ik_llama.cpp among them

The files are synthetic models whose MTP head drafts (`synth --head-noise`): FOLDER/NAME.gguf, NAME
one of --types (dense-TYPE: 0.8B shape, moe-TYPE: the small mixture of experts), written if it is
not there; a file of your own has any name. A job is a file after a context, with a type of cache,
and has --rounds. Jobs with the first context and cache type measure, in turn and the other way
round in every second round: prefill of ours without and with MTP, decode of ours (sessions side by
side), llama-bench, llama-server and ik_llama.cpp (with and without -rtr) at their depths, and
--long tokens at "auto" beside the best fixed depths. The other jobs measure decode of ours.

Writes results/NAME.json and .md after every round. With --budget-minutes every job has an equal
share of what is left of the time, and at least one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peers as peers_module
from benchkit import llama_bench, lockstep, results, rivals
from benchkit.filetable import BENCH, OURS, Job, Records, claims, claims_table, speeds_table
from benchkit.model import FOLDER, HEAD_NOISE, synthetic
from benchkit.paths import ensure_driver
from benchkit.plan import Plan, random_prompt
from benchkit.rivals import IK, UPSTREAM
from benchkit.sample import Sample

from pyllama_mtp.measure.peers import PeerError
from pyllama_mtp.measure.peers.find import PROGRAMS

TYPES = (
    "dense-q4_k_m,dense-q4_0,dense-q5_k_m,dense-q6_k,dense-iq4_xs,dense-q8_0,moe-q8_0,moe-q4_k_m"
)
SHAPES = {"dense": "qwen3.5-0.8b", "moe": "qwen3.6-moe-small"}
#: Tokens after the context that differ from round to round, and with them the text that follows.
TAIL = 8
#: Servers this far behind their best after a round, and depths in the long run, are left out.
BEHIND, LONG_BEHIND = 0.85, 0.95
DRY_RUN = {"rounds": 1, "contexts": (32, 64), "n_decode": 8, "long": 16}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    ensure_driver()
    from pyllama_mtp.settings import CACHE_TYPES, available_threads

    parser = argparse.ArgumentParser(description="Decode and prefill by type of file.")
    add = parser.add_argument
    add("--types", type=words(), default=TYPES, metavar="NAME,...", help="default: %(default)s")
    add("--folder", type=Path, default=FOLDER, help="of the model files")
    add("--contexts", type=words(int), default="512,6000,16000", metavar="N,...")
    add("--cache-types", type=words(), default="f16,q8_0", metavar="TYPE,...")
    add("--long-types", type=words(), default="dense-q8_0,dense-q4_k_m", metavar="NAME,...",
        help="files measured at other contexts and cache types than the first")  # fmt: skip
    add("--depths", type=words(int), default="1,2,3,4", metavar="K,...")
    add("--n-decode", type=int, default=96, metavar="N", help="tokens (default: %(default)s)")
    add("--long", type=int, default=448, metavar="N", help='tokens of "auto"; 0: not measured')
    add("--peers", type=Path, default=peers_module.DEFAULT_FOLDER, help="upstream's programs")
    add("--ik", type=Path, metavar="FOLDER", help="ik_llama.cpp's programs")
    add("--peer-depths", type=words(int), default="0,1,2,3", metavar="K,...", help='"": no peers')
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--budget-minutes", type=float, metavar="M")
    add("--resume", action="store_true", help="go on with results/NAME.json")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="filetypes", help="of the result files")
    add("--dry-run", action="store_true", help="a few tokens, one round, nothing is written")
    args = parser.parse_args(argv)
    if args.dry_run:
        vars(args).update(DRY_RUN)
    sizes = (*args.contexts, *args.depths, args.rounds, args.n_decode, args.threads)
    if not (args.contexts and args.depths and args.cache_types) or min(sizes) < 1:
        parser.error("contexts, depths, rounds, n-decode and threads must be at least 1")
    check_types(parser, args)
    if bad := [name for name in args.cache_types if name not in CACHE_TYPES]:
        parser.error(f"--cache-types: {bad[0]!r} is none of {', '.join(CACHE_TYPES)}")
    return args


def check_types(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a name of which there is no file, and of which none can be written."""
    for name in args.types:
        if name.partition("-")[0] not in SHAPES and not file_of(args, name).exists():
            place, written = file_of(args, name), "dense-TYPE or moe-TYPE, as in dense-q4_k_m"
            parser.error(f"--types: {name!r} is not {written}, and there is no {place}")


def words(kind: Callable[[str], Any] = str) -> Callable[[str], tuple[Any, ...]]:
    """An argparse type: words, or numbers, separated by commas; "" is none."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(",") if part)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: numbers separated by commas") from None

    return parse


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every file at the first context and cache type, then what else there is of --long-types."""
    first = args.contexts[0], args.cache_types[0]
    units = [(n, cache) for cache in args.cache_types for n in args.contexts]
    more = [name for name in args.types if name in args.long_types]
    return [
        *(Job(name, *first) for name in args.types),
        *(Job(name, *unit) for name in more for unit in units if unit != first),
    ]


def file_of(args: argparse.Namespace, name: str) -> Path:
    """Where it should be."""
    folder: Path = args.folder
    return folder / f"{name}.gguf"


def model_path(args: argparse.Namespace, name: str) -> Path:
    """The file, written if it is missing."""
    shape, _, tensor_type = name.partition("-")
    path = file_of(args, name)
    return path if path.exists() else synthetic(SHAPES[shape], HEAD_NOISE, tensor_type, path)


@dataclass
class Peers:
    """Programs by side and name, what they are, and what is left out."""

    programs: dict[tuple[str, str], str] = field(default_factory=dict)
    builds: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str, why: object = "") -> None:
        """Keep `text`; why it is so goes to the screen."""
        if text not in self.notes:
            self.notes.append(text)
        print(f"note: {text} {why}", file=sys.stderr)


def find_peers(args: argparse.Namespace, library: Any) -> Peers:
    """Upstream's and ik_llama.cpp's programs; what is missing, or built otherwise, is noted."""
    found, folders = Peers(), [(UPSTREAM, args.peers)]
    folders += [(IK, args.ik)] if args.ik else []
    for side, folder in folders if args.peer_depths else []:
        try:
            server = rivals.installed(folder)
        except PeerError as error:
            found.note(f"{side} is left out", error)
            continue
        version = {"version": server.version, "upstream_commit": server.upstream_commit}
        found.builds[side] = {**version, **peers_module.find(folder).info}
        for name in PROGRAMS:
            found.programs[side, name] = str(Path(server.command[0]).with_name(name))
    built = peers_module.find(args.peers)
    if UPSTREAM in found.builds and built.info:  # by bench/peers.py
        for text in peers_module.differences(built, library.stamp, library.system_info()):
            found.note(text)
    return found


#: A side, a part, and what measures it: samples by case.
Step = tuple[str, str, Callable[[], dict[str, Sample]]]


class Measurement:
    """The rounds of one job.

    Args:
        records: takes the samples of every finished round.
        peers: None: decode of ours is measured, and nothing else.
    """

    def __init__(
        self, args: argparse.Namespace, job: Job, records: Records, peers: Peers | None
    ) -> None:
        from pyllama_mtp import Settings

        self._args, self._job, self._records, self._peers = args, job, records, peers
        path, cache = model_path(args, job.file), job.cache
        n_tokens = job.context + TAIL + max(args.n_decode, args.long) + 16
        self._plan = Plan(
            path, job.context, job.context + TAIL, args.n_decode, threads=args.threads,
            cache_type_k=cache, cache_type_v=cache,
        )  # fmt: skip
        usual = {**self._plan.driver_settings(n_tokens), "checkpoints": 0}
        self._n_ctx, depths = usual["n_ctx"], [0, *args.depths, *(["auto"] if peers else [])]
        # The text repeats itself after some 200 tokens, which no text of a real model does.
        usual["ngram"] = False
        self._settings = {str(k): Settings(**usual, draft_n_max=k) for k in depths}

    def rounds(self) -> Iterator[int]:
        """Measure what is not done yet; yields the number of every round that is."""
        from pyllama_mtp import Model

        args, job = self._args, self._job
        with contextlib.ExitStack() as stack:
            state = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "state"
            model = stack.enter_context(Model(self._plan.model))
            self._n_vocab = model.n_vocab
            # All contexts end alike, so that nearly the same text follows.
            self._context = random_prompt(max(args.contexts), model.n_vocab)[-job.context :]
            sessions = lockstep.SideBySide(model, self._settings, self._context, state)
            self._ours = stack.enter_context(sessions)
            self._servers = stack.enter_context(rivals.Servers())
            self._rivals = [*self._make_rivals()]
            self._prefill(0)
            self._ours.decode(self._settings, self._tail(0), min(16, args.n_decode))  # warm-up
            for number in range(self._records.rounds(job), args.rounds):
                self._found, steps = Records(), [*self._steps(number)]
                for side, part, measure in steps if number % 2 == 0 else steps[::-1]:
                    try:
                        self._found.add(job, number, side, part, measure())
                    except PeerError as error:
                        assert self._peers
                        self._peers.note(f"{job.file}: {side}, {part} is incomplete", error)
                self._records.rows += self._found.rows
                yield number

    def _make_rivals(self) -> Iterator[rivals.Rival]:
        for side, make in rivals.MAKERS.items():
            program = self._peers.programs.get((side, "llama-server")) if self._peers else None
            if program:
                yield from make(program, self._plan, self._n_ctx, self._args.peer_depths)

    def _steps(self, number: int) -> Iterator[Step]:
        """What a round measures; like stands next to like."""
        plan, tail, n_decode = self._plan, self._tail(number), self._args.n_decode
        decode = partial(self._ours.decode, tail=tail, n_decode=n_decode)
        if not self._peers:
            yield OURS, "decode", partial(decode, self._settings)
            return
        for rival in self._in_the_race():
            yield rival.side, "decode", partial(self._serve, rival, tail)
        upstream, ik = (self._peers.programs.get((side, BENCH)) for side in (UPSTREAM, IK))
        if ik:
            yield IK, "prefill", partial(rivals.ik_prefill, ik, plan)
        if upstream:
            yield BENCH, "prefill", lambda: {"0": llama_bench.prefill(upstream, plan)}
        yield OURS, "prefill", lambda: self._prefill(number)
        yield OURS, "decode", partial(decode, self._settings)
        yield OURS, "alone", partial(decode, ["0"])
        if upstream:
            yield BENCH, "decode", lambda: {"0": llama_bench.decode(upstream, plan)}
        if self._args.long:
            yield OURS, "long", lambda: self._long(tail)

    def _tail(self, number: int) -> list[int]:
        return random_prompt(TAIL, self._n_vocab, seed=number + 1)

    def _prefill(self, number: int) -> dict[str, Sample]:
        """Of ours, without MTP and with; the first of them changes with every round."""
        order = [*(["0"] if self._peers else []), str(max(self._args.depths))]
        return {case: self._ours.prefill(case) for case in order[:: -1 if number % 2 else 1]}

    def _long(self, tail: list[int]) -> dict[str, Sample]:
        """Adaptive depth, and the depths that have been near the best so far."""
        so_far = Records([*self._records.rows, *self._found.rows])
        near = so_far.near_best(self._job, OURS, LONG_BEHIND)
        return self._ours.decode([*near, "auto"], tail, self._args.long)

    def _in_the_race(self) -> Iterator[rivals.Rival]:
        """Servers that may be their side's best; the others end."""
        for rival in self._rivals:
            seen = self._records.speeds(self._job, rival.side)
            if not seen or rival.case in self._records.near_best(self._job, rival.side, BEHIND):
                yield rival
            else:
                self._servers.stop(rival)

    def _serve(self, rival: rivals.Rival, tail: list[int]) -> dict[str, Sample]:
        return {rival.case: self._servers.decode(rival, [*self._context, *tail], self._plan)}


# -- all of it -------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Job after job; the exit code."""
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.machine import describe_machine

    library = native.load()
    peers = find_peers(args, library)
    plan = {name: getattr(args, name) for name in ("n_decode", "long", "threads")}
    header = results.header(describe_machine(), library.stamp)
    result = {**header, "plan": plan, "peers": peers.builds, "notes": peers.notes}
    records = Records(resumed(args, result) if args.resume else [])
    jobs, began = jobs_of(args), time.monotonic()
    end = began + 60 * args.budget_minutes if args.budget_minutes else float("inf")
    for i, job in enumerate(jobs):
        now = time.monotonic()
        if now >= end or records.rounds(job) >= args.rounds:
            if not records.rounds(job):
                peers.note(f"not measured, the time was over: {job}")
            continue
        share = now + (end - now) / (len(jobs) - i)
        beside = peers if (job.context, job.cache) == first_unit(args) else None
        for number in Measurement(args, job, records, beside).rounds():
            now, before = time.monotonic(), now
            print(f"[{now - began:.0f} s] {job}: round {number + 1}", file=sys.stderr, flush=True)
            result["samples"] = records.rows
            if not args.dry_run:
                results.write(result, render(result, records, jobs), args.name)
            if now + (now - before) > share:
                break
    print("\n".join(tables(records, jobs)))
    return 0


def resumed(args: argparse.Namespace, new: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of results/NAME.json. Raises UsageError where they are not of the same kind."""
    from pyllama_mtp.errors import UsageError

    path = results.RESULTS / f"{args.name}.json"
    try:
        old = json.loads(path.read_text())
        differ = [name for name in ("plan", "build", "machine") if old[name] != new[name]]
        rows: list[dict[str, Any]] = old["samples"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--resume: {path.name} cannot be read ({error})") from None
    if differ:
        raise UsageError(
            f"--resume: {path.name} was measured with another {differ[0]}; choose another --name"
        )
    return rows


def first_unit(args: argparse.Namespace) -> tuple[int, str]:
    """The context and cache type at which everything is measured."""
    return args.contexts[0], args.cache_types[0]


def tables(records: Records, jobs: list[Job]) -> list[str]:
    """Markdown lines: what is asked for, then speeds."""
    done = [job for job in jobs if records.rounds(job)]
    return [
        *claims_table([*claims(records, done)]),
        "",
        "Tokens per second, medians; in brackets tokens per verification:",
        "",
        *speeds_table(records, done),
    ]


def render(result: dict[str, Any], records: Records, jobs: list[Job]) -> str:
    """The Markdown page."""
    plan = result["plan"]
    lines = ["# Decode and prefill by type of file", "", *results.header_lines(result)]
    for side, build in result["peers"].items():
        compiler = f", compiled by {build['compiler']}" if "compiler" in build else ""
        lines.append(f"- {side}: {build['version']} {build['upstream_commit'][:12]}{compiler}")
    lines += [
        f"- {plan['threads']} threads, {plan['n_decode']} tokens decoded, in the long run "
        f"{plan['long']}; synthetic models with head noise {HEAD_NOISE}, real acceptance",
        *(f"- Note: {note}" for note in result["notes"]),
        "",
        *tables(records, jobs),
        "",
        "A ratio is the Hodges-Lehmann estimate of those within a round. Prefill is that of the",
        "context; decode begins with the second token. Sessions of ours decode side by side; the",
        'plain one beside llama-bench decodes alone. "auto" begins every text without experience,',
        "and takes no drafts from the text, which is synthetic and repeats itself.",
        "Peers are processes of their own with the same tokens, greedy. Servers that were slower",
        f"than {BEHIND} of their side's best are left out after a round.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    from pyllama_mtp import PyllamaMtpError

    try:
        return run(args)
    except PyllamaMtpError as error:
        print(f"filetypes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished rounds are kept, --resume goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
