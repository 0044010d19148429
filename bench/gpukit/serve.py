"""Upstream's llama-server with draft-mtp at one context, depth and acceptance, for `peers`.

Run as a program; writes its samples to --output after every round.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import peers as peers_module
from benchkit import llama_server
from benchkit.paths import ensure_driver
from benchkit.plan import Plan, random_prompt

from gpukit.config import rates


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description="llama-server at imposed acceptance.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="build folder of bench/peers.py")
    add("--model", type=Path, required=True)
    add("--n-prompt", type=int, required=True)
    add("--n-decode", type=int, required=True)
    add("--depth", type=int, required=True)
    add("--acceptance", type=float, required=True)
    add("--rounds", type=int, required=True)
    add("--output", type=Path, required=True)
    add("--dry-run", action="store_true", help="only print how the server would be started")
    args = parser.parse_args(argv)
    ensure_driver()
    from pyllama_mtp.settings import available_threads

    imposed = tuple(float(rate) for rate in rates(args.acceptance, args.depth).split(","))
    plan = Plan(
        args.model.resolve(),
        n_prompt=args.n_prompt,
        n_decode=args.n_decode,
        rates=imposed,
        threads=available_threads(),
    )
    if args.dry_run:
        print("llama-server", *llama_server.server_options(plan))
        return 0
    built = peers_module.find(args.folder)
    prompt = random_prompt(args.n_prompt, 10_000)
    samples = []
    for number in range(args.rounds):
        try:
            samples.append(llama_server.measure(built, plan, prompt, number).to_dict())
        except peers_module.PeerError as error:
            print(f"serve: {error}", file=sys.stderr)
            return 1
        document = {"plan": plan.to_dict(), "peers": built.info, "samples": samples}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
