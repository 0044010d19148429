"""Faults of a file's tensors, given its hyper-parameters: missing, of a wrong shape or type.

The loader itself refuses tensors that are missing, of another shape or unknown. It does not check
types, with which kernels may end the process, nor tensors that only the graph needs.
"""

from __future__ import annotations

from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, TensorEntry
from pyllama_mtp.models.layout import has_fused, model_tensors
from pyllama_mtp.models.modelinfo import GGUFInfo
from pyllama_mtp.models.trimmedhead import D2T


def tensor_problems(info: GGUFInfo, require_mtp: bool) -> list[str]:
    """Missing tensors, wrong shapes and types; the table of tensors is the writer's."""
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


def _type_fits(tensor: TensorEntry) -> bool:
    """Kernels expect vectors and the convolution in F32, as llama.cpp's converter writes them."""
    if tensor.name == D2T:  # token ids, checked with their head
        return True
    if tensor.name.endswith("ffn_gate_inp_shexp.weight"):  # a vector, multiplied as a matrix
        return tensor.type not in NOT_WEIGHTS
    if len(_trimmed(tensor.shape)) == 1 or tensor.name.endswith("ssm_conv1d.weight"):
        return tensor.type == "F32"
    return tensor.type not in NOT_WEIGHTS


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing dimensions of 1."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
