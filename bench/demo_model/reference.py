"""The outside check: logits and hidden rows of transformers' Qwen3.5, on the file's weights.

Trunk and head are computed by transformers (net.py). The results go into a small committed file, so
that ordinary tests can compare llama.cpp with them without PyTorch:

    tokens         int32   (S, T)        held-out token ids
    positions      int32   (P,)          the rows that are stored
    trunk_logits   float32 (S, P, V)     row p: about token p + 1, having read tokens 0..p
    head_logits    float32 (S, P, V)     draft step 1 at row p: embed(x_p), trunk row h_{p-1}
    second_logits  float32 (S, P, V)     draft step 2 at row p: embed(x_p), the head's own state of
                                         row p - 1; its cache holds rows 0..p-1 from the trunk
    hidden         float32 (S, P, E)     trunk rows after the final norm
    head_hidden    float32 (S, P, E)     head rows after the head norm, draft step 1
    sha256         str                   of the GGUF file all this was computed from

At row 0 the hidden input is a zero vector. Every row of head_logits assumes a cache filled from
the trunk for all earlier rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from .export import load

POSITIONS = (0, 1, 2, 31, 63, 64, 65, 80, 94, 95)
N_TOKENS = 96


@torch.no_grad()
def write(gguf_file: Path, heldout: np.ndarray, path: Path) -> None:
    """Write the reference file."""
    starts = [len(heldout) * i // 7 for i in (1, 3, 5)]
    tokens = np.stack([heldout[s : s + N_TOKENS] for s in starts])
    model = load(gguf_file)
    hidden, (first, second) = model(torch.from_numpy(tokens.astype(np.int64)))
    rows = {"hidden": hidden, "head_hidden": first}
    for name, states in (("trunk", hidden), ("head", first), ("second", second)):
        rows[f"{name}_logits"] = model.logits(states)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        tokens=tokens.astype(np.int32),
        positions=np.array(POSITIONS, dtype=np.int32),
        sha256=np.array(hashlib.sha256(gguf_file.read_bytes()).hexdigest()),
        **{name: value[:, list(POSITIONS)].numpy() for name, value in rows.items()},
    )
