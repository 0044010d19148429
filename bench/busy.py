"""Decode beside busy programs: the number of threads that the driver chooses, and fixed ones.

Each sample is a fresh session. Those of a repeat decode by turns, beside 0, 1, 2 loops that keep a
core each busy. Samples are appended to --output, so that a table can be measured in parts.

    python bench/busy.py --output busy.jsonl                         # the demo model
    python bench/busy.py --output busy.jsonl --model FILE --tokens 128
    python bench/busy.py --output busy.jsonl --read                  # the table
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.measure.intervals import typical_ratio
from pyllama_mtp.measure.text import to_markdown
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.settings import available_threads

#: Seconds for the system to spread loops over cores; turns in which a sample is measured.
SETTLE_S, TURNS = 0.5, 4


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many loops run beside the block."""
    with ExitStack() as stack:
        for _ in range(loops):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        time.sleep(SETTLE_S)
        yield


def measure(args: argparse.Namespace) -> None:
    """Append a sample of every number of threads, beside every number of loops, to the file."""
    numbers = ["auto", *range(1, available_threads() + 1)]
    with Model(args.model) as model, Path(args.output).open("a", encoding="utf-8") as file:
        for loops, number in itertools.product(args.loops, range(args.repeat)):
            first = number % len(numbers)
            order = [*numbers[first:], *numbers[:first]]
            with busy(loops):  # none always comes after the same one, whose threads still wait
                speeds = side_by_side(model, order[:: -1 if number % 2 else 1], args)
            at = {"model": Path(args.model).name, "depth": args.depth, "loops": loops}
            for n_threads, tps in speeds.items():
                file.write(json.dumps({**at, "threads": n_threads, "tps": tps}) + "\n")
            file.flush()


def side_by_side(
    model: Model, numbers: list[str | int], args: argparse.Namespace
) -> dict[str | int, float]:
    """Tokens per second with each of these numbers of threads."""
    prompt = [(7 * i * i + 5) % model.n_vocab for i in range(32)]
    with ExitStack() as stack:
        runs = {}
        for n in numbers:
            settings = Settings(n_ctx=args.tokens + 64, n_threads=n, draft_n_max=args.depth)
            session = stack.enter_context(Session(model, settings))
            runs[n] = session.generate(prompt, max_tokens=args.tokens, ignore_eos=True)
        pieces = {n: iter(run) for n, run in runs.items()}
        for turn in range(1, TURNS + 1):
            for n, run in runs.items():
                goal = args.tokens * turn // TURNS
                while run.telemetry.n_generated < goal and next(pieces[n], None) is not None:
                    pass
        return {n: run.telemetry.decode_tps for n, run in runs.items()}


def table(path: str) -> str:
    """Medians of tokens per second; `auto` as a multiple of the fixed number with the highest."""
    found: dict[tuple[str, int, int], dict[str | int, list[float]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        key = one["model"], one["depth"], one["loops"]
        found.setdefault(key, {}).setdefault(one["threads"], []).append(one["tps"])
    numbers = list(dict.fromkeys(number for of in found.values() for number in sorted(of, key=str)))
    rows = []
    for (model, depth, loops), of in sorted(found.items()):
        best = max((n for n in of if n != "auto"), key=lambda n: median(of[n]))
        ratio = typical_ratio([a / b for a, b in zip(of["auto"], of[best], strict=False)])
        interval = f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.low and ratio.high else ""
        speeds = [f"{median(of[n]):,.1f}" for n in numbers]
        rows.append([model, str(depth), str(loops), *speeds, f"{ratio.value:.2f}{interval}"])
    headings = ["model", "depth", "busy loops", *(f"{n} threads" for n in numbers)]
    return to_markdown([*headings, "auto to the best fixed, paired"], rows, [True])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(demo_path()), metavar="FILE")
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--read", action="store_true", help="measure nothing; print the table")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--depth", type=int, default=0, help="drafts per round")
    args = parser.parse_args()
    if not args.read:
        measure(args)
    print(table(args.output))


if __name__ == "__main__":
    main()
