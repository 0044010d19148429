"""What is wrong with a file's tensors, given its hyper-parameters: missing, misshapen, of no use.

The loader itself refuses tensors that are missing, of another shape or not known to it. What it
does not look at are types, on which kernels end the process, and what the graph needs although the
loader takes files without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, TensorEntry
from pyllama_mtp.models.layout import model_tensors
from pyllama_mtp.models.trimmedhead import D2T

if TYPE_CHECKING:
    from pyllama_mtp.models.ggufinfo import GGUFInfo


def tensor_problems(info: GGUFInfo, require_mtp: bool) -> list[str]:
    """Missing tensors, wrong shapes (by the table the writer uses too), types that fit nowhere."""
    have = {t.name: t for t in info.tensors}
    problems = []
    for spec in model_tensors(info.to_shape(), info.recurrent_layers):
        found = have.get(spec.name)
        in_mtp = spec.name.startswith(f"blk.{info.n_layer}.")
        if found is None:
            optional = not spec.required or (in_mtp and not require_mtp)
            if not optional and not has_fused(spec.name, have):
                problems.append(f"tensor {spec.name} is missing")
        elif _trimmed(found.shape) != _trimmed(spec.shape):
            problems.append(f"tensor {spec.name} is {found.shape}, expected {spec.shape}")
    problems += [
        f"tensor {t.name} has type {t.type}, which no kernel takes there"
        for t in info.tensors
        if not _type_fits(t)
    ]
    return problems


def has_fused(name: str, names: dict[str, TensorEntry] | set[str]) -> bool:
    """Whether a file has ``name`` as part of a fused tensor that the loader accepts instead."""
    for part, fused in (
        *((f"attn_{x}.weight", "attn_qkv.weight") for x in "qkv"),
        *((f"ffn_{x}_exps.weight", "ffn_gate_up_exps.weight") for x in ("gate", "up")),
    ):
        if name.endswith("." + part):
            return name[: -len(part)] + fused in names
    return False


def _type_fits(tensor: TensorEntry) -> bool:
    """llama.cpp's converter keeps vectors and the convolution in F32; its kernels rely on it."""
    if tensor.name == D2T:  # token ids; looked at with the head that they are for
        return True
    if tensor.name.endswith("ffn_gate_inp_shexp.weight"):  # a vector, but multiplied as a matrix
        return tensor.type not in NOT_WEIGHTS
    if len(_trimmed(tensor.shape)) == 1 or tensor.name.endswith("ssm_conv1d.weight"):
        return tensor.type == "F32"
    return tensor.type not in NOT_WEIGHTS


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing dimensions of 1 say nothing."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
