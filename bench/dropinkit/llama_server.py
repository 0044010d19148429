"""Upstream's llama-server, unchanged, on its own libllama and on the patched one, by turns.

    python bench/peers.py                             # builds llama-server from the pinned tree
    python bench/dropin.py llama-server               # 0.8B shape, Q8_0, synthetic weights
    python bench/dropin.py llama-server --model FILE.gguf --pairs 5

The program is the same file every time; LD_LIBRARY_PATH alone decides which libllama it loads, and
the loader is asked which one that is. ggml and its backends stay the program's own, so what is
compared is libllama. Every sample is of a fresh server: a short warm-up, then one completion.
Writes bench/results/NAME.json and .md.

Exit codes: 0 measured, and the texts are equal; 1 a text differs; 2 something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peers as peers_build
from benchkit import results
from benchkit.llama_bench import options
from benchkit.model import dimensions, model_file
from benchkit.plan import RATES, Plan, random_prompt
from benchkit.sample import Sample
from benchkit.statistics import Ratio, Spread

from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.measure.machine import describe_machine
from pyllama_mtp.measure.peers import PeerError, llama_server
from pyllama_mtp.models.demo import demo_path

OWN, OURS = "its own libllama", "the patched libllama"
VARIABLE = "LD_LIBRARY_PATH"
WHOLE = "CPU time of it all"
FIGURES = (("prefill", "prefill_tps"), ("decode", "decode_tps"), (WHOLE, "per_cpu_s"))
#: Prompts whose greedy texts are compared, with the demo model.
PROMPTS = ("def main", "import os\n\n", "The capital of", "class Reader:\n")


@contextlib.contextmanager
def libraries(folder: Path | None) -> Iterator[None]:
    """Programs started meanwhile look in `folder` first; None: where they always look."""
    before = os.environ.pop(VARIABLE, None)
    if folder is not None:
        os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def loaded(program: Path) -> Path:
    """The libllama that the program would load now, as the loader says (ld.so(8)).

    Raises:
        PeerError: it does not say.
    """
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    found = re.search(r"^\s*libllama\.so\S* => (\S+)", done.stdout, re.MULTILINE)
    if not found:
        raise PeerError(f"{program.name} is not linked against a shared libllama")
    return Path(found[1])


def check_sides(program: Path, folders: dict[str, Path | None]) -> None:
    """Raise PeerError unless each side gets its library."""
    for side, folder in folders.items():
        with libraries(folder):
            found = loaded(program).parent
        if (found.resolve() == native.locate("patched")[0].resolve()) != (side == OURS):
            raise PeerError(f"{program.name} would run on {found}, which is not {side}")


def cpu_seconds() -> float:
    """CPU time of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sample(program: Path, plan: Plan, depth: int, prompt: Sequence[int], seed: int) -> Sample:
    """One completion by a fresh server."""
    n_ctx = plan.n_ctx(len(prompt) + plan.n_decode + 1)
    rates = plan.rates[:depth] or None
    given = llama_server.server_options(options(plan), n_ctx, depth, rates=rates)
    return llama_server.measure(
        *(str(program), given, prompt, plan.n_decode + 1), warm_up=(64, 8), seed=seed
    )


def texts(program: Path, threads: int) -> list[str]:
    """Greedy texts of the demo model with MTP at depth 3, real acceptance."""
    plan = Plan(demo_path(), threads=threads)
    given = llama_server.server_options(options(plan), 512, 3)
    with llama_server.Server(str(program), given) as server:
        return [
            str(server.complete({"prompt": text, "n_predict": 48, "temperature": 0})["content"])
            for text in PROMPTS
        ]


def measure(
    program: Path, plan: Plan, depths: Sequence[int], pairs: int, folders: dict[str, Path | None]
) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Samples by side and depth; within a pair the order changes from one to the next."""
    vocabulary = dimensions(plan.model).n_vocab
    found: dict[str, dict[int, list[dict[str, Any]]]] = {
        side: {depth: [] for depth in depths} for side in folders
    }
    for number in range(pairs):
        prompt = random_prompt(plan.n_prompt, vocabulary, seed=number)
        order = list(folders.items())
        for depth in depths:
            for side, folder in order if number % 2 == 0 else reversed(order):
                before = cpu_seconds()
                with libraries(folder):
                    figures = sample(program, plan, depth, prompt, number)
                cpu_s = cpu_seconds() - before
                found[side][depth].append({**figures.to_dict(), "per_cpu_s": 1 / cpu_s})
                print(
                    f"pair {number}, depth {depth}, {side}: prefill {figures.prefill_tps:.1f}, "
                    f"decode {figures.decode_tps or 0:.1f} tok/s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def table(found: dict[str, dict[int, list[dict[str, Any]]]], plan: Plan) -> list[str]:
    """A line for each depth and figure."""
    rows = []
    for depth in found[OWN]:
        for words, key in FIGURES:
            own = [one[key] for one in found[OWN][depth]]
            ours = [one[key] for one in found[OURS][depth]]
            ratio = Ratio.of(ours, own)
            what, unit = f"{words}, {plan.n_prompt} tokens", "{:.1f} tok/s"
            if key == "decode_tps":
                what = f"{words}, {plan.n_decode} tokens"
            elif key == "per_cpu_s":
                what, unit = words, "{:.4f} per s"
            rows.append(
                [
                    f"{what}, draft-mtp, depth {depth}" if depth else f"{what}, no MTP",
                    unit.format(Spread.of(own).median),
                    unit.format(Spread.of(ours).median),
                    f"{ratio.paired.median:.3f}",
                    f"{ratio.paired.low:.3f} to {ratio.paired.high:.3f}",
                ]
            )
    head = ["", OWN, OURS, "ratio, median of the pairs", "range"]
    return results.markdown_table(head, rows)


def render(result: dict[str, Any], plan: Plan) -> str:
    """The Markdown file."""
    imposed = " / ".join(f"{rate:g}" for rate in plan.rates)
    same = sum(a == b for a, b in zip(*result["texts"].values(), strict=True))
    return "\n".join(
        [
            "# llama-server, unchanged, on the patched library",
            "",
            *results.header_lines(result),
            f"- Model: {plan.model.name}; threads: {plan.threads}; pairs: {result['pairs']}; "
            f"acceptance imposed at {imposed} (`--spec-synth-rates`)",
            f"- Load average of the machine: {result['load'][0]:.1f} before, "
            f"{result['load'][1]:.1f} after; its cores should have nothing else to do",
            "",
            *table(result["samples"], plan),
            "",
            f"Greedy text of the demo model with draft-mtp, depth 3, real acceptance: {same} of "
            f"{len(PROMPTS)} prompts give the same text on both.",
            "",
            f"{WHOLE}: a server's start, warm-up, prompt and decode, as samples per CPU second; on",
            "a machine that other programs keep busy it scatters less than the program's times.",
            "",
            "One program file; LD_LIBRARY_PATH is empty or `pyllama-mtp libdir`. ggml and its CPU",
            "backend are the program's own on both sides. Of the patches it gets those that are on",
            "without being asked for: rows that nobody reads are not computed (4), and the MTP",
            "block's cache is filled without the rest of the block (5). Snapshots left out of",
            "prompts (7), the draft vocabulary (9), drafts in one graph (10) need calls that",
            "llama-server does not make; fast products of few columns (12) and states written in",
            "place (18) are in the CPU backend.",
        ]
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    from pyllama_mtp.settings import available_threads

    parser = argparse.ArgumentParser(
        "dropin.py llama-server", description="llama-server on its own and on our libllama."
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help="with an MTP head (default: synthetic)")
    add("--n-prompt", type=int, default=2048, metavar="N", help="default: %(default)s")
    add("--n-decode", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--pairs", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--depths", default="0,3", metavar="K,...", help="drafts; 0: no MTP (default: 0,3)")
    add("--threads", type=int, default=available_threads(), metavar="N", help="default: all CPUs")
    add("--peer-dir", type=Path, default=peers_build.DEFAULT_FOLDER, metavar="DIR")
    add("--name", default="dropin-server", help="of the result files (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        program = peers_build.find(args.peer_dir).program("llama-server")
        ours, stamp = native.locate("patched")
        folders = {OWN: None, OURS: ours}
        check_sides(program, folders)
        model = model_file(args.model)
        plan = Plan(model, n_prompt=args.n_prompt, n_decode=args.n_decode, threads=args.threads)
        depths = [int(depth) for depth in args.depths.split(",")]
        before, written = os.getloadavg()[:1], {}
        for side, folder in folders.items():
            with libraries(folder):
                written[side] = texts(program, args.threads)
        samples = measure(program, plan, depths, args.pairs, folders)
    except (PyllamaMtpError, ValueError) as error:
        print(f"dropin: {error}", file=sys.stderr)
        return 2
    result = {
        **results.header(describe_machine(), stamp),
        "plan": plan.to_dict(),
        "pairs": args.pairs,
        "rates": list(RATES),
        "load": [*before, *os.getloadavg()[:1]],
        "samples": samples,
        "texts": written,
    }
    for path in results.write(result, render(result, plan), args.name):
        print(f"wrote {path.name}")
    return 0 if written[OWN] == written[OURS] else 1
