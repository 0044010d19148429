"""What types of K and V caches cost on the devices that hold them."""

from __future__ import annotations

from . import native
from .model import Model


def cache_costs(model: Model, type_k: str, type_v: str) -> list[str]:
    """A sentence for each device on which caches of these types are slow, for messages.

    A device is asked whether it computes attention over them. CUDA reads quantized caches as they
    are for one or two rows only (ggml_cuda_get_best_fattn_kernel of upstream's fattn.cu).
    """
    library, info = native.load(), model.info
    kinds = [getattr(library.lib, f"GGML_TYPE_{kind.upper()}") for kind in (type_k, type_v)]
    sizes = info.head_dim_k, info.head_dim_v, info.n_head, info.n_head_kv
    shape = library.ffi.new("struct pyllama_attention *", sizes)[0]
    costs = []
    for device in model.used_devices:
        name = library.device_name(device)
        if not library.lib.pyllama_device_has_attention(device, shape, *kinds):
            costs.append(
                f"{name} has no attention over a {type_k} K and a {type_v} V cache: the CPU "
                "computes it, and reads the caches through the bus; use f16 for both, or q8_0"
            )
        elif name.startswith("CUDA") and {type_k, type_v} & {"q8_0", "q4_0"}:
            costs.append(
                f"{name} turns a whole {type_k} and {type_v} cache into F16 in each pass of more "
                "than 2 tokens (prompts, and rounds of 2 drafts or more), which is slow in long "
                "contexts; f16 caches are faster, if they fit"
            )
    return costs
