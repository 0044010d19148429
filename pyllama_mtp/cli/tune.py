"""Measure what drafting and verifying cost for a model on this machine; print the
acceptance from which each draft depth pays, and recommend a depth and an
n_ubatch.

This is a matrix of the depths 0 to --limit after one prompt, and one of the
sizes of --n-ubatch. Which depth is the fastest depends on how often drafts are
accepted: see 'pyllama-mtp accept'.

examples:
  pyllama-mtp tune
  pyllama-mtp tune --model Qwen3.5-4B-Q8_0.gguf --prompt-size 4096
  pyllama-mtp tune --model FILE --draft-vocab full --limit 4
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from pyllama_mtp.cli import PROGRAM, matrix, options, parsing
from pyllama_mtp.errors import UsageError
from pyllama_mtp.measure.plan import Plan, switches_of

if TYPE_CHECKING:
    from pyllama_mtp import Model, Settings
    from pyllama_mtp.drafting.depth import Costs
    from pyllama_mtp.measure.run import MatrixRequest

#: Tokens generated per sample.
TOKENS = 48
#: Sizes of n_ubatch that are compared with the size that is set.
UBATCHES = (256, 512, 1024)
#: Tokens of the prompt that they are compared on, at most, and most seconds for all sizes once.
UBATCH_PROMPT, UBATCH_S, UBATCH_REPEAT = 2048, 20.0, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "%(prog)s [options]"
    parsing.add_whole(parser, "--limit", default=6, help="greatest depth to measure")
    parsing.add_whole(
        parser,
        "--prompt-size",
        default=512,
        metavar="TOKENS",
        help="tokens in the context when the measurement begins",
    )
    parsing.add_whole(parser, "--repeat", default=5, metavar="R", help="samples per depth")
    parser.add_argument("--json", action="store_true", help="print the costs in seconds, as JSON")
    options.add_profile_option(parser)
    options.add_model_options(parser)
    options.add_settings_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.profile import cell_profiles
    from pyllama_mtp.measure.records import Records
    from pyllama_mtp.measure.table import waiting_note
    from pyllama_mtp.measure.verdict import slow_types_of
    from pyllama_mtp.measure.worth import costs_of, doubt, tune_markdown, ubatch_advice

    settings = options.settings_from(args, args.limit)
    native.load(args.lib)
    by_depth, by_ubatch = Records(), Records()
    with options.open_model(args, mtp=True, without="--draft-n-max 0 to generate") as model:
        limit = options.depth_for(model, args.limit)
        depths = Plan(
            (args.prompt_size,), (*range(limit + 1),), TOKENS, args.repeat, switches_of(settings)
        )
        matrix.measure_on(model, _request(args, depths, settings), by_depth)
        costs = costs_of(by_depth.cells)
        if costs is None:
            raise UsageError(
                "; ".join(str(cell.skipped) for cell in by_depth.cells if cell.skipped)
            )
        heads = _heads(model, dataclasses.replace(settings, draft_n_max=limit), costs)
        sizes = _ubatches(model, settings, by_depth.cells[0].prefill_tps or 0.0)
        if sizes is not None:
            plain = dataclasses.replace(settings, synthetic_acceptance=None)
            matrix.measure_on(model, _request(args, sizes, plain, profile=False), by_ubatch)
        slow = slow_types_of(model)
    advice, best = ubatch_advice(by_ubatch.cells, min(settings.n_ubatch, settings.n_batch))
    for note in waiting_note([*by_depth.cells, *by_ubatch.cells]):
        matrix.say(note)
    if args.json:
        seconds = {cell.axes["n_ubatch"]: cell.prefill_s for cell in by_ubatch.cells}
        found = {**dataclasses.asdict(costs), "n_ubatch": {"best": best, "seconds": seconds}}
        found["contradiction"] = doubt(costs)
        if args.profile:
            found["profile"] = {c.n_max: c.profile.to_dict() for c in by_depth.cells if c.profile}
        print(json.dumps(found))
        return 0
    parts = [tune_markdown(costs, slow), advice, heads, cell_profiles(by_depth.cells)]
    print("\n\n".join(filter(None, parts)))
    return 0


def _request(
    args: argparse.Namespace, plan: Plan, settings: Settings, profile: bool | None = None
) -> MatrixRequest:
    from pyllama_mtp import Sampling
    from pyllama_mtp.measure.run import MatrixRequest

    return MatrixRequest(
        plan,
        settings,
        Sampling(),
        [PROGRAM, *sys.argv[1:]],
        ("" if args.lib is None else args.lib,),
        options.placement(args),
        profile=args.profile if profile is None else profile,
    )


def _ubatches(model: Model, settings: Settings, prefill_tps: float) -> Plan | None:
    """The plan that compares sizes of n_ubatch on a prompt that a slow machine has time for; None:
    there are no two sizes to compare."""
    room = (settings.n_ctx or model.n_ctx_train) - 1
    size = min(room, UBATCH_PROMPT, int(prefill_tps * UBATCH_S / len(UBATCHES)))
    usual = min(settings.n_ubatch, settings.n_batch)
    sizes = sorted(n for n in {*UBATCHES, usual} if n <= min(size, settings.n_batch))
    if usual not in sizes or len(sizes) < 2:
        return None
    return Plan((size,), (0,), 1, UBATCH_REPEAT, {"n_ubatch": tuple(sizes)})


def _heads(model: Model, settings: Settings, costs: Costs) -> str:
    """The table of draft heads to choose from; "" where there is no choice."""
    from pyllama_mtp import Session
    from pyllama_mtp.measure.prompts import Workload
    from pyllama_mtp.measure.worth import heads_markdown

    with Session(model, dataclasses.replace(settings, n_ctx=settings.n_ctx or 1024)) as session:
        heads = session._engine.head.heads
        if not heads:
            return ""
        session.generate(Workload(model).prompt(min(128, session.n_ctx // 2)), max_tokens=8).run()
        return heads_markdown(heads.table(costs), heads.chosen)
