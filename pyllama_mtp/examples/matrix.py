"""The speed of a model on this machine, with MTP and without: a small matrix.

    python -m pyllama_mtp.examples.matrix [--model FILE] [--sizes 128,512] [--depths 0,2,3]

``pyllama-mtp matrix`` has more options, and can be interrupted and resumed.
"""

from __future__ import annotations

import argparse

from pyllama_mtp import bench
from pyllama_mtp.models.demo import demo_path


def numbers(text: str) -> list[int]:
    """The numbers of "0,2,3"."""
    return [int(word) for word in text.split(",")]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--sizes", type=numbers, default=[128, 256], metavar="N,...")
parser.add_argument("--depths", type=numbers, default=[0, 2, 3], metavar="K,...")
parser.add_argument("--max-tokens", type=int, default=24)
parser.add_argument("--repeat", type=int, default=2)
parser.add_argument("--output", metavar="FILE", help="keep every sample in this file")
args = parser.parse_args()

results = bench.matrix(
    args.model,
    sizes=args.sizes,
    depths=args.depths,
    max_tokens=args.max_tokens,
    repeat=args.repeat,
    output=args.output,
)
print(results.markdown())
