"""Text as it comes, with MTP, and how many drafts were accepted.

python -m pyllama_mtp.examples.stream_text [--model FILE] [--prompt TEXT] [--max-tokens N]
"""

from __future__ import annotations

import argparse

from pyllama_mtp import Model, Session, Settings, stream
from pyllama_mtp.models.demo import demo_path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--prompt", default="def main")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

print(args.prompt, end="")
for text in stream(args.model, args.prompt, max_tokens=args.max_tokens):
    print(text, end="", flush=True)
print("\n")

with Model(args.model) as model, Session(model, Settings(n_ctx=512, draft_n_max=3)) as session:
    answer = session.generate(args.prompt, max_tokens=args.max_tokens).run()
    t = answer.telemetry
    print(f"prefill {t.prefill_tps:.0f} tok/s, decode {t.decode_tps:.0f} tok/s")
    print(f"{t.n_generated} tokens in {t.rounds} rounds, {sum(t.accepted)} of them drafted")
    rates = ", ".join(f"{rate:.0%}" for rate in t.acceptance_per_position)
    print(f"drafts accepted by position: {rates}")
