"""A batch of prompts, several at a time; each gets the same text as alone.

    python -m pyllama_mtp.examples.batch [--model FILE] [--places 2] [--max-tokens N] [PROMPT ...]

As many prompts as there are places are decoded together; the others wait.
"""

from __future__ import annotations

import argparse

from pyllama_mtp import BatchSession, Model, Settings
from pyllama_mtp.models.demo import demo_path

PROMPTS = ("def main", "import os\n\n\ndef", "class Reader:\n", "def read(path", "for line in")

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("prompts", nargs="*", metavar="PROMPT", default=PROMPTS)
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--places", type=int, default=2, help="sequences at a time")
parser.add_argument("--max-tokens", type=int, default=24)
args = parser.parse_args()

settings = Settings(n_ctx=256)  # of each sequence
with (
    Model(args.model) as model,
    BatchSession(model, settings, n_sequences=args.places) as session,
):
    batch = session.generate(list(args.prompts), max_tokens=args.max_tokens).run()
    for prompt, answer in zip(args.prompts, batch.results, strict=True):
        t = answer.telemetry
        print(f"{prompt!r}: {t.n_generated} tokens ({answer.finish_reason}): {answer.text!r}")
    together = batch.telemetry
    passes = sum(sum(of_depth.values()) for of_depth in together.passes.values())
    print(f"{len(batch.results)} prompts, {passes} rounds, {together.decode_tps:.0f} tok/s")
