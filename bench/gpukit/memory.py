"""Whether a measurement fits into the GPU's memory: an estimate, so that none begins in vain."""

from __future__ import annotations

import sys

from benchkit.paths import ensure_driver

from gpukit.config import Config

#: Graph buffers of a session: an estimate, generous for the shapes of the runbook.
COMPUTE_BYTES = 1.5e9
#: Bytes of an entry of the K and V caches (f16), and of the recurrent state (f32).
F16, F32 = 2, 4


def needed(shape_name: str, tensor_type: str, n_tokens: int, sessions: int, depth: int) -> float:
    """Bytes of weights, and of so many sessions of `n_tokens` that are open at once.

    Of a session: K and V of the full-attention layers and of the MTP block, and ``depth + 1`` sets
    of recurrent states.
    """
    ensure_driver()
    from pyllama_mtp.models.shapes import get_shape
    from pyllama_mtp.models.synth import synthetic_size

    shape = get_shape(shape_name)
    attention = shape.n_layer - len(shape.recurrent_layers) + shape.n_mtp
    caches = 2 * F16 * attention * shape.n_head_kv * shape.head_dim * n_tokens
    state = shape.ssm_v_heads * shape.ssm_head_dim**2
    state += (shape.ssm_conv_kernel - 1) * shape.ssm_conv_dim
    states = F32 * len(shape.recurrent_layers) * state * (depth + 1)
    session = caches + states + COMPUTE_BYTES
    return synthetic_size(shape, tensor_type) + sessions * session


def fits(config: Config, shape: str, n_tokens: int, sessions: int, depth: int) -> bool:
    """Whether it does; what does not is left out, and said. Without a GPU everything does."""
    if config.gpu is None:
        return True
    wanted = needed(shape, config.tensor_type, n_tokens, sessions, depth)
    if wanted <= config.gpu.memory_bytes:
        return True
    print(
        f"runbook: left out: {shape} at {n_tokens:,} tokens, {sessions} sessions: about "
        f"{wanted / 1e9:.0f} GB, the GPU has {config.gpu.memory_bytes / 1e9:.0f}",
        file=sys.stderr,
    )
    return False
