#!/usr/bin/env python3
"""Two installs of this package side by side: what a change of ours, or of the pin, made faster.

    python bench/installs.py --model FILE.gguf --old OLD/bin/python --new NEW/bin/python

Each install has a process of its own, which keeps a session at every depth. In a turn, both sides
decode --tokens tokens after the same prompt, one after the other. Every turn has another prompt,
because the acceptance of one text is luck, and another side is first. Ratios are taken within a
turn. Texts that differ are reported. Writes results/NAME.json and .md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchkit import results
from benchkit.model import model_file

from pyllama_mtp.measure.figures import typical_ratio
from pyllama_mtp.settings import available_threads

SIDES = ("old", "new")

#: What either install runs: only the public API, so that it may be another version than this one.
WORKER = """
import json, sys
from pyllama_mtp import Model, Session, Settings, native
plan = json.loads(sys.stdin.readline())
model = Model(plan["model"])
settings = {"n_ctx": plan["prompt"] + plan["tokens"] + 64, "n_threads": plan["threads"]}
settings["ngram"] = False
sessions = {d: Session(model, Settings(draft_n_max=d, **settings)) for d in plan["depths"]}
tokens, n = model.tokenize(plan["text"]), plan["prompt"]
print(json.dumps({"stamp": native.load().stamp, "n_prompt": min(n, len(tokens))}), flush=True)
for line in sys.stdin:
    depth, number = json.loads(line)
    start = number * n % max(1, len(tokens) - n)
    prompt = tokens[start : start + n]
    answer = sessions[depth].generate(prompt, max_tokens=plan["tokens"], ignore_eos=True).run()
    t = answer.telemetry
    found = {"decode_tps": t.decode_tps, "passes": (t.rounds or t.n_generated - 1) / t.decode_s}
    found["prefill_tps"] = t.prefill_tps
    print(json.dumps({**found, "tokens": answer.tokens}), flush=True)
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two installs of this package side by side.")
    add = parser.add_argument
    add("--old", required=True, type=Path, metavar="PYTHON", help="the interpreter of one install")
    add("--new", default=sys.executable, type=Path, metavar="PYTHON", help="default: this one")
    add("--model", type=Path, metavar="FILE", help="GGUF with an MTP head (default: synthetic)")
    add("--depths", default="0,1,3,auto", metavar="K,K,...", help="default: %(default)s")
    add("--prompt", type=int, default=128, metavar="N", help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=64, metavar="N", help="a turn (default: %(default)s)")
    add("--turns", type=int, default=12, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=available_threads(), metavar="N")
    add("--name", default="installs", help="of the result files")
    args = parser.parse_args(argv)
    try:
        args.depths = [d if d == "auto" else int(d) for d in args.depths.split(",")]
    except ValueError:
        parser.error("--depths: whole numbers and auto, separated by commas")
    if min(args.prompt, args.tokens, args.turns, args.threads) < 1:
        parser.error("prompt, tokens, turns and threads must be at least 1")
    return args


def start(python: Path) -> subprocess.Popen[str]:
    """The process of an install; it sees no sources in its folder that it could import instead."""
    pipe = subprocess.PIPE
    return subprocess.Popen([python, "-c", WORKER], stdin=pipe, stdout=pipe, text=True, cwd="/")


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
    sides: dict[str, subprocess.Popen[str]], depth: int | str, number: int
) -> dict[str, float]:
    """Tokens per second of both sides, passes of the model per second, tokens of the prompt."""
    order = SIDES if number % 2 else SIDES[::-1]
    answers = {name: ask(sides[name], [depth, number]) for name in order}
    if answers["old"]["tokens"] != answers["new"]["tokens"]:
        print(f"depth {depth}: the texts differ", file=sys.stderr)
    found = {name: answers[name]["decode_tps"] for name in SIDES}
    for kind in ("passes", "prefill_tps"):
        found |= {f"{name}_{kind}": answers[name][kind] for name in SIDES}
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    plan = result["plan"]
    lines = ["# Two installs side by side", "", *results.header_lines(result)]
    lines += [
        f"- Old: patch series {plan['old'][:12]}",
        f"- Model: {plan['model']}; {plan['n_prompt']} tokens of prompt, {plan['tokens']} decoded "
        f"a turn, {plan['turns']} turns with a prompt each, {plan['threads']} threads",
        "",
    ]
    rows = []
    for depth, samples in result["samples"].items():
        ratio = typical_ratio([one["new"] / one["old"] for one in samples])
        passes = typical_ratio([one["new_passes"] / one["old_passes"] for one in samples])
        prompts = [one["new_prefill_tps"] / one["old_prefill_tps"] for one in samples]
        speed = [f"{median(one[name] for one in samples):.1f}" for name in SIDES]
        between = f"{ratio.low:.3f} to {ratio.high:.3f}"
        ratios = [f"{passes.value:.3f}", f"{typical_ratio(prompts).value:.3f}"]
        rows.append([depth, *speed, f"{ratio.value:.3f}", between, *ratios])
    head = ["drafts", "old tok/s", "new tok/s", "new / old", "interval"]
    head += ["passes, new / old", "prompt, new / old"]
    lines += results.markdown_table(head, rows)
    lines += [
        "",
        "Ratios are Hodges-Lehmann estimates of those within a turn. Texts may differ by rounding;",
        "other drafts are accepted then, and passes per second tell the cost of a pass.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_arguments(argv)
    path = model_file(args.model)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    names = ("depths", "prompt", "tokens", "turns", "threads")
    plan = {name: getattr(args, name) for name in names}
    samples: dict[str, list[dict[str, float]]] = {str(depth): [] for depth in args.depths}
    sides = {name: start(getattr(args, name)) for name in SIDES}
    try:
        request = {**plan, "model": str(path.resolve()), "text": text}
        old, new = (ask(process, request) for process in sides.values())
        for number in range(-1, args.turns):  # the first turn is a warm-up
            for depth in args.depths:
                found = turn(sides, depth, number)
                if number >= 0:
                    samples[str(depth)].append(found)
    finally:
        for process in sides.values():
            process.kill()
            process.communicate()
    plan |= {"model": path.name, "old": old["stamp"]["series"], "n_prompt": new["n_prompt"]}
    result = {**results.header(new["stamp"]), "plan": plan, "samples": samples}
    results.write(result, markdown(result), args.name)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
