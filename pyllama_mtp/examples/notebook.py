# %% [markdown]
"""A notebook: measure, look at the figures as a data frame, plot them.

    python -m pyllama_mtp.examples.notebook [--model FILE] [--output speed.png]

``# %%`` begins a cell, for editors and Jupyter (with jupytext). Needs pandas and matplotlib.
"""

from __future__ import annotations

import argparse

from matplotlib import pyplot

from pyllama_mtp import bench
from pyllama_mtp.models.demo import demo_path

parser = argparse.ArgumentParser(description="Measure, data frame, plot.")
parser.add_argument("--model", default=demo_path(), metavar="FILE")
parser.add_argument("--output", default="speed.png", metavar="PNG")
args, _ = parser.parse_known_args()  # a notebook has arguments of its own

# %% Measure: prompt sizes and draft depths, two samples each
results = bench.matrix(args.model, sizes=(64, 256), depths=(0, 3), max_tokens=16, repeat=2)

# %% The figures
frame = results.frame()
print(frame[["n_prompt", "n_max", "prefill_tps", "decode_tps", "decode_ratio"]].to_string())

# %% The plot
results.plot("decode")
pyplot.savefig(args.output)
print(f"wrote {args.output}")
