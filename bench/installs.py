#!/usr/bin/env python3
"""Two installs of this package side by side: what a change of ours, or of the pin, made faster.

    python bench/installs.py --model FILE.gguf --old OLD/bin/python --new NEW/bin/python
    python bench/installs.py ... --prompt 512,8192,32768 --cache-type q8_0  # as the context fills
    python bench/installs.py ... --sequences 4                              # decoded together

Each install has a process of its own, which keeps a session at every depth. In a turn, both sides
decode --tokens tokens after the same prompt, one after the other. Every turn has another prompt,
because the acceptance of one text is luck, and another side is first. Of several lengths, a prompt
is the beginning of the next one, which goes on from it, and is the same for all turns of a start.
Texts that differ are reported. Where a process has its weights in memory makes it faster or slower
for as long as it runs, so both are started --restarts times, and an interval tells what that does.
Prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import results
from benchkit.model import model_file

from pyllama_mtp.measure.intervals import typical_ratio
from pyllama_mtp.settings import available_threads

SIDES = ("old", "new")
Turns = list[dict[str, float]]  #: rates of both sides, by names like "old_tps"

#: What either install runs: only the public API, so that it may be another version than this one.
WORKER = """
import json, sys
from pyllama_mtp import BatchSession, Model, Session, Settings, native
plan = json.loads(sys.stdin.readline())
model = Model(plan["model"])
settings = {"n_ctx": plan["prompt"][-1] + plan["tokens"] + 64, "n_threads": plan["threads"]}
settings["ngram"] = False
settings["cache_type_k"] = settings["cache_type_v"] = plan["cache_type"]
n_seq = plan["sequences"]
more = () if n_seq == 1 else (n_seq,)
kind = Session if n_seq == 1 else BatchSession
sessions = {d: kind(model, Settings(draft_n_max=d, **settings), *more) for d in plan["depths"]}
tokens, most = model.tokenize(plan["text"]), plan["prompt"][-1]
tokens *= 2 + n_seq * most // len(tokens)
print(json.dumps(native.load().stamp), flush=True)
for line in sys.stdin:
    depth, number, n = json.loads(line)
    starts = [(number * n_seq + i) * most % (len(tokens) - most) for i in range(n_seq)]
    prompts = [tokens[start : start + n] for start in starts]
    running = sessions[depth].generate(
        prompts if more else prompts[0], max_tokens=plan["tokens"], ignore_eos=True
    )
    done = running.run()
    answers, t = (running.results, running.telemetry) if more else ([done], done.telemetry)
    passes = plan["tokens"] - 1 if depth == 0 or not t.rounds else t.rounds
    found = {"tps": t.decode_tps, "passes": passes / t.decode_s, "prefill_tps": t.prefill_tps}
    print(json.dumps({**found, "tokens": [answer.tokens for answer in answers]}), flush=True)
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two installs of this package side by side.")
    add = parser.add_argument
    what = "an install: its interpreter or folder"
    add("--old", required=True, type=Path, metavar="PYTHON", help=what)
    add("--new", default=sys.executable, type=Path, metavar="PYTHON", help="default: this one")
    what = "GGUF files with an MTP head (default: synthetic)"
    add("--model", type=Path, metavar="FILE", nargs="+", default=[None], help=what)
    add("--depths", default="0,1,3,auto", metavar="K,K,...", help="default: %(default)s")
    add("--prompt", default="128", metavar="N,N,...", help="tokens (default: %(default)s)")
    add("--cache-type", default="f16", metavar="TYPE", help="of K and V (default: %(default)s)")
    add("--tokens", type=int, default=64, metavar="N", help="a turn (default: %(default)s)")
    add("--restarts", type=int, default=6, metavar="N", help="default: %(default)s")
    add("--turns", type=int, default=3, metavar="N", help="of each start (default: %(default)s)")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--sequences", type=int, default=1, metavar="N", help="together (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.depths = [d if d == "auto" else int(d) for d in args.depths.split(",")]
        args.prompt = sorted(map(int, args.prompt.split(",")))
    except ValueError:
        parser.error("--depths, --prompt: whole numbers (or auto), separated by commas")
    counts = (args.tokens, args.restarts, args.turns, args.threads, args.sequences)
    if min(args.prompt[0], *counts) < 1:
        parser.error("prompt, tokens, restarts, turns, threads and sequences must be at least 1")
    return args


def start(install: Path) -> subprocess.Popen[str]:
    """The process of an install: an interpreter, or a folder of `pip install --target`, which goes
    before PYTHONPATH. It sees no sources in its folder that it could import instead."""
    python, env = install, dict(os.environ)
    if install.is_dir():
        python = Path(sys.executable)
        env["PYTHONPATH"] = f"{install.resolve()}{os.pathsep}{env.get('PYTHONPATH', '')}"
    words, pipe = [python, "-c", WORKER], subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd="/", env=env)


def ask(process: subprocess.Popen[str], what: Any) -> Any:
    """The answer to a line."""
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit("an install has ended; its message is above")
    return json.loads(answer)


def turn(
    sides: dict[str, subprocess.Popen[str]], depth: int | str, n: int, number: int, first: int
) -> dict[str, float]:
    """Of both sides, per second: tokens, passes of the model, tokens of the prompt.

    Args:
        n: tokens of the prompt.
        number: of the prompt.
        first: which side begins, 0 or 1.
    """
    order = SIDES if first else SIDES[::-1]
    answers = {name: ask(sides[name], [depth, number, n]) for name in order}
    if answers["old"]["tokens"] != answers["new"]["tokens"]:
        print(f"depth {depth}: the texts differ", file=sys.stderr)
    kinds = ("tps", "passes", "prefill_tps")
    return {f"{side}_{kind}": answers[side][kind] for side in SIDES for kind in kinds}


def measure(args: argparse.Namespace, model: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """One model: what the installs are, and the turns of each start, by length of the prompt and
    depth."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    pairs = [(depth, n) for depth in args.depths for n in args.prompt]
    grows = len(args.prompt) > 1
    samples: dict[str, list[Turns]] = {f"{n} {depth}": [] for depth, n in pairs}
    for restart in range(args.restarts):
        sides = {name: start(getattr(args, name)) for name in SIDES}
        try:
            request = {**plan, "model": str(model.resolve()), "text": text}
            old, new = (ask(process, request) for process in sides.values())
            for depth, n in pairs:
                at = restart * args.turns
                numbers = [restart if grows else at + i for i in range(-1, args.turns)]
                filled, *turns = [
                    turn(sides, depth, n, number, (at + i) % 2) for i, number in enumerate(numbers)
                ]  # the first one is a warm-up
                if grows:  # the others find the prompt there
                    kept = {name: rate for name, rate in filled.items() if "prefill" in name}
                    turns = [one | kept for one in turns]
                samples[f"{n} {depth}"].append(turns)
        finally:
            for process in sides.values():
                process.kill()
                process.communicate()
    return {"old": old, "new": new, "samples": samples}


def ratio(starts: list[Turns], kind: str) -> str:
    """New to old: the typical ratio of the medians of each start's turns, and its interval."""
    pairs = [[median(one[f"{side}_{kind}"] for one in turns) for side in SIDES] for turns in starts]
    found = typical_ratio([new / old for old, new in pairs])
    interval = f" ({found.low:.3f} to {found.high:.3f})" if found.low and found.high else ""
    return f"{found.value:.3f}{interval}"


def row(model: str, name: str, starts: list[Turns]) -> list[str]:
    """The line of a model, length of the prompt and depth."""
    every = [one for turns in starts for one in turns]
    speeds = [f"{median(one[f'{side}_tps'] for one in every):.1f}" for side in SIDES]
    speeds += [f"{1e3 / median(one[f'{s}_passes'] for one in every):.2f}" for s in SIDES]
    ratios = [ratio(starts, kind) for kind in ("tps", "passes", "prefill_tps")]
    return [model, *name.split(), *speeds, *ratios]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse_arguments(argv)
    names = ("depths", "prompt", "tokens", "restarts", "turns", "threads")
    plan = {name: getattr(args, name) for name in (*names, "cache_type", "sequences")}
    rows = []
    for path in [model_file(model) for model in args.model]:
        found = measure(args, path, plan)
        rows += [row(path.stem, *samples) for samples in found["samples"].items()]
    old = found["old"]
    about = (
        f"Old: llama.cpp {old['upstream_commit'][:9]}, patch series {old['series'][:12]}",
        f"{args.tokens} tokens decoded a turn; {args.restarts} starts of both, {args.turns} turns "
        f"each; {args.threads} threads; K and V in {args.cache_type}; {args.sequences} sequences",
        "Ratios are of medians over all turns, intervals are bootstraps over the starts. Texts "
        "may differ by rounding; other drafts are accepted then. Passes tell what drafts cost",
    )
    head = ("model", "prompt", "drafts", "old tok/s", "new tok/s", "old ms/pass", "new ms/pass")
    print(results.heading(*about, stamp=found["new"]), end="\n\n")
    print("\n".join(results.markdown_table([*head, "new / old", "of passes", "of prompts"], rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
