"""How right logits are: their divergence from those of the same weights as F32.

    python bench/divergence.py MODEL.gguf...      # real weights; mean KL, printed

The mean of KL(p || q) over the positions of a text, in nats: p by the file with every matrix as
F32, computed by upstream's kernels in F32 caches; q by the file itself. With our kernels and with
upstream's, tokens one by one and at once, by type of the cache. Each value is a mean over the same
N_TOKENS positions, so small differences between rows can be told.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchkit import results

from pyllama_mtp import Model
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.models.quantize import quantize_model
from pyllama_mtp.settings import available_threads

SWITCHES = ("small_batch", "large_batch", "few_rows_attention")
TEXT = Path(__file__).parent / "README.md"
N_TOKENS = 512


def log_probabilities(model: Model, cache: str, ours: bool, n: int) -> npt.NDArray[np.float64]:
    """[N_TOKENS, n_vocab]: of the text, in batches of n tokens."""
    for switch in SWITCHES:
        native.load().set_cpu_switch(switch, ours)
    tokens = np.array(model.tokenize(TEXT.read_text())[:N_TOKENS], np.int32)
    options = ContextOptions(
        n_ctx=N_TOKENS,
        n_batch=n,
        n_ubatch=n,
        n_outputs_max=n,
        n_threads=available_threads(),
        type_k=cache,
        type_v=cache,
    )
    found = []
    with Context(model, options) as context:
        for at in range(0, N_TOKENS, n):
            context.decode(tokens[at : at + n], at, np.ones(n, np.int8))
            found += [context.logits(row).astype(np.float64) for row in range(n)]
    logits = np.stack(found)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def rows_of(path: Path, folder: Path) -> list[list[str]]:
    """Rows of the table for a file."""
    exact = quantize_model(path, folder / f"{path.stem}.f32.gguf", "f32", requantize=True)
    with Model(exact, mtp=False, n_gpu_layers=0) as model:
        wanted = log_probabilities(model, "f32", False, N_TOKENS)
    table = []
    with Model(path, mtp=False, n_gpu_layers=0) as model:
        for cache in ("f16", "q8_0"):
            for what, n in (("one by one", 1), ("at once", N_TOKENS)):
                row = [path.name, cache, what]
                for ours in (True, False):
                    found = log_probabilities(model, cache, ours, n)
                    kl = (np.exp(wanted) * (wanted - found)).sum(1).mean()
                    row.append(f"{1e3 * kl:.3f}")
                table.append(row)
    exact.unlink()
    return table


def main() -> None:
    """Print the table."""
    head = ["file", "K and V", f"{N_TOKENS} tokens", "ours, 1e-3", "upstream's, 1e-3"]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in sys.argv[1:] for row in rows_of(Path(name), Path(folder))]
    results.show([], head, rows)


if __name__ == "__main__":
    main()
