"""Measure what drafting and verifying cost for a model on this machine; print the
acceptance from which each draft depth pays, and recommend a depth and an
n_ubatch.

The model itself is measured: after a prompt, rounds of every depth from 0 to
--limit take turns, and medians are kept. Which depth is the fastest depends on
how often drafts are accepted; see 'pyllama-mtp matrix'. Then a prompt of up to
2048 tokens, as many as --n-ctx allows and a minute is enough for, shows which
--n-ubatch is the fastest.

examples:
  pyllama-mtp tune
  pyllama-mtp tune --model Qwen3.5-4B-Q8_0.gguf --prompt-size 4096
  pyllama-mtp tune --model FILE --draft-vocab full --limit 4
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from pyllama_mtp.cli import options, parsing
from pyllama_mtp.errors import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parsing.add_whole(parser, "--limit", default=6, help="greatest depth to measure")
    parsing.add_whole(
        parser,
        "--prompt-size",
        default=512,
        metavar="TOKENS",
        help="tokens in the context when the measurement begins",
    )
    parsing.add_whole(parser, "--repeat", default=5, metavar="R", help="rounds per depth")
    parser.add_argument("--json", action="store_true", help="print the costs in seconds, as JSON")
    options.add_profile_option(parser)
    options.add_model_options(parser)
    options.add_settings_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from pyllama_mtp import Session
    from pyllama_mtp.llama import native
    from pyllama_mtp.measure.profile import EXPLANATION, profile_markdown, profile_prompt
    from pyllama_mtp.measure.prompts import Workload
    from pyllama_mtp.measure.tune import (
        UBATCH_PROMPT,
        heads_markdown,
        measure_costs,
        measure_ubatches,
        tokens_needed,
        tune_markdown,
        ubatch_markdown,
    )
    from pyllama_mtp.measure.verdict import slow_types_of

    settings = options.settings_from(args, args.limit)
    native.load(args.lib)
    with options.open_model(args, mtp=True, without="--draft-n-max 0 to generate") as model:
        args.limit = options.depth_for(model, args.limit)
        needed = args.prompt_size + tokens_needed(args.limit, args.repeat) + 1
        if needed > model.n_ctx_train and not settings.n_ctx:
            raise UsageError(
                f"--prompt-size {args.prompt_size} needs a context of {needed} tokens, and the "
                f"model was trained for {model.n_ctx_train}; --n-ctx {needed} does it all the same"
            )
        room = min(settings.n_ctx or model.n_ctx_train, UBATCH_PROMPT)
        settings = dataclasses.replace(settings, n_ctx=settings.n_ctx or needed)
        workload = Workload(model)
        prompt = workload.prompt(args.prompt_size)
        with Session(model, settings) as session:
            costs = measure_costs(session, prompt, args.repeat)
            heads = session._engine.head.heads
            choice = heads_markdown(heads.table(costs), heads.chosen) if heads else ""
        plain = dataclasses.replace(options.settings_from(args, 0), n_ctx=room)
        ubatches = measure_ubatches(model, plain, workload.prompt(room))
        slow = slow_types_of(model)
        profiles = {}
        for name, depth in (("no MTP", 0), ("MTP", args.limit)) if args.profile else ():
            chosen = dataclasses.replace(options.settings_from(args, depth), n_ctx=settings.n_ctx)
            profiles[name] = profile_prompt(model, chosen, prompt)
    if args.json:
        found = dataclasses.asdict(costs)
        found["n_ubatch"] = ubatches and {"best": ubatches.best, **dataclasses.asdict(ubatches)}
        if profiles:
            found["profile"] = {name: one.to_dict() for name, one in profiles.items()}
        print(json.dumps(found))
        return 0
    parts = [tune_markdown(costs, slow), ubatch_markdown(ubatches), choice]
    if profiles:
        parts += ["Where the time of a prompt goes:", profile_markdown(profiles), EXPLANATION]
    print("\n\n".join(filter(None, parts)))
    return 0
