"""How many tokens to draft per round on this machine: costs and advice.

    python -m pyllama_mtp.examples.choose_depth [--model FILE] [--limit 4]

Then it compares the recommended depth with no MTP, and with "auto", which decides as it goes.
"""

from __future__ import annotations

import argparse

from pyllama_mtp import Model, Session, Settings, bench
from pyllama_mtp.drafting.depth import best_depth
from pyllama_mtp.measure.worth import TYPICAL_ACCEPTANCE, costs_of, tune_markdown
from pyllama_mtp.models.demo import demo_path

REPEAT = 3

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--prompt", default="import os\n\n\ndef main")
parser.add_argument("--limit", type=int, default=4, help="greatest depth")
args = parser.parse_args()

with Model(args.model) as model:
    prompt = model.tokenize(args.prompt)
    depths = range(args.limit + 1)
    cells = bench.matrix(model, sizes=64, depths=depths, max_tokens=32, repeat=REPEAT).cells
    costs = costs_of(cells)
    assert costs is not None, "every depth was measured"
    print(tune_markdown(costs))
    depth = best_depth(costs, [TYPICAL_ACCEPTANCE] * args.limit)

    print("\non this prompt:")
    for draft_n_max in (0, depth, "auto"):
        settings = Settings(n_ctx=512, draft_n_max=draft_n_max)
        with Session(model, settings) as session:
            t = session.generate(prompt, max_tokens=96).run().telemetry
            print(f"  draft_n_max={draft_n_max!r}: decode {t.decode_tps:.0f} tok/s")
