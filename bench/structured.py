"""What tokens that a grammar forces gain: tokens per pass of the model, on JSON with long keys.

    python bench/structured.py [MODEL.gguf]       # a part of bench/results/kinds.md

The same answers with forced tokens appended to a pass, and without; at depth 0, 3 and "auto";
greedy and drawn. Passes are counted; with "auto", their number depends on the speed of the machine.
The demo model is the default.
"""

from __future__ import annotations

import itertools
import sys
from unittest import mock

from benchkit import results

from pyllama_mtp import Grammar, Model, Sampling, Session, Settings
from pyllama_mtp.models.demo import demo_path
from pyllama_mtp.sampling.sampler import Sampler

KEYS = [
    f"{what}_of_the_{of}" for of in ("customer", "order", "shipment") for what in ("name", "id")
]
SCHEMA = {
    "type": "object",
    "properties": {
        **{key: {"type": "string", "maxLength": 12} for key in KEYS},
        "total_amount_in_cents_including_taxes": {
            "type": "integer",
            "minimum": 0,
            "maximum": 99999,
        },
        "has_been_paid_in_advance": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = [*SCHEMA["properties"]]
PROMPT = 'order = json.loads("""'
N_ANSWERS = 20


def answers(model: Model, depth: int | str, temperature: float) -> tuple[int, int, int]:
    """Tokens after the first, passes, and forced tokens of N_ANSWERS answers."""
    tokens = passes = forced = 0
    with Session(model, Settings(draft_n_max=depth, n_ctx=1024)) as session:
        for seed in range(N_ANSWERS if temperature else 1):
            sampling = Sampling(
                temperature=temperature, seed=seed, grammar=Grammar.json_schema(SCHEMA)
            )
            run = session.generate(PROMPT, max_tokens=600, sampling=sampling).run()
            tokens += len(run.tokens) - 1
            passes += run.telemetry.rounds
            forced += run.telemetry.forced
    return tokens, passes, forced


def main() -> None:
    """Print the table."""
    rows = []
    with Model(sys.argv[1] if len(sys.argv) > 1 else demo_path()) as model:
        for temperature, depth in itertools.product((0.0, 1.0), (0, 3, "auto")):
            with mock.patch.object(Sampler, "forced", lambda sampler, most: []):
                n_plain, plain, _ = answers(model, depth, temperature)
            n, passes, forced = answers(model, depth, temperature)
            saved = 1 - (passes / n) / (plain / n_plain)
            row = [f"{temperature:g}", str(depth), f"{n_plain / plain:.2f}", f"{n / passes:.2f}"]
            rows.append([*row, f"{100 * saved:.0f} %", f"{100 * forced / n:.0f}"])
    about = "Tokens per pass of the model. One greedy answer, or twenty at temperature 1. Forced: %"
    head = ["temperature", "depth", "without", "with forced tokens", "passes saved", "forced"]
    results.show([about], head, rows)


if __name__ == "__main__":
    main()
