"""Whether this package can run a model file, before the native loader sees the file.

``read_gguf`` describes any GGUF model; ``validate_model_file`` insists on what the native code
needs, because a missing tensor or an odd number would end the process there instead of raising.
"""

from __future__ import annotations

import os

from pyllama_mtp.errors import ModelFileError, NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.models import sidecar
from pyllama_mtp.models.architectures import NOT_TEXT, elsewhere
from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, STRING, ArraySummary, TensorEntry
from pyllama_mtp.models.hyperparameters import hyperparameter_problems
from pyllama_mtp.models.layout import has_fused, model_tensors
from pyllama_mtp.models.modelinfo import GGUFInfo, describe
from pyllama_mtp.models.trimmedhead import D2T, trimmed_head_problems

_SHOWN = 4  # problems, or missing tensors, that a message lists


def read_gguf(path: str | os.PathLike[str], head: str | os.PathLike[str] | None = None) -> GGUFInfo:
    """Describe a GGUF model of any architecture.

    Args:
        path: the file; of a model that is split into several, the first: the others are read too.
        head: a file with the model's MTP head. None: if the model has none, the head beside it, if
            there is one (see :func:`.sidecar.find_head`); "none": not even that one.

    Raises:
        ModelFileError: see :func:`.ggufheader.read_header`; also metadata of the wrong type, and
            parts of a split model that are missing or do not belong together.
        HeadMismatchError: the head is another model's.
    """
    info = describe(path)
    if head is None and info.supported and not (info.mtp_complete or sidecar.is_head(info)):
        head = sidecar.find_head(path)
    if head is None or head == sidecar.NO_HEAD:
        return info
    return sidecar.join_head(info, describe(head))


def validate_model_file(
    path: str | os.PathLike[str],
    require_mtp: bool | None = True,
    head: str | os.PathLike[str] | None = None,
) -> GGUFInfo:
    """Check that the native code can load and run a file, and describe it.

    Files of an architecture that is not `validated` are checked as far as possible beforehand.

    Args:
        path: the model file.
        require_mtp: True: a complete MTP head of an architecture that this package drives is
            needed, too. None: the file may have no head, or one that is not driven. False: the head
            does not matter, even if it is incomplete.
        head: the model's MTP head in another file; see :func:`read_gguf`. Ignored if `require_mtp`
            is False.

    Raises:
        ModelFileError: as :func:`read_gguf`; also missing or impossible hyper-parameters, missing
            tensors, wrong tensor shapes, a vocabulary or trimmed MTP head that cannot be loaded.
        UnsupportedArchitectureError: the model does not continue text; or `require_mtp` is True,
            and its head is not driven.
        NoMtpHeadError: `require_mtp` is True, and there is no MTP head; or `require_mtp` is not
            False, and the head is incomplete.
    """
    info = read_gguf(path, sidecar.NO_HEAD if require_mtp is False else head)
    if sidecar.is_head(info):
        raise ModelFileError(
            f"{path} is an MTP head alone; give the file of the model, and this one as its head",
            path,
        )
    arch = info.architecture
    if arch in NOT_TEXT:
        raise UnsupportedArchitectureError(
            f"{path}: architecture {arch!r} is {NOT_TEXT[arch]}, which does not continue text"
            + (f"; {elsewhere(arch)}" if arch == "gemma4-assistant" else ""),
            path,
        )
    problems = hyperparameter_problems(info) or _tokenizer_problems(info)
    if not problems and require_mtp is not False:
        _check_head(info, path, required=require_mtp is True)
    if info.validated and not problems:
        problems = _tensor_problems(info)
    elif not problems and require_mtp is not False and info.supported:
        n = info.n_mtp_layers
        if n > 1 and not info.abilities.several_heads:
            problems = [f"{n} MTP blocks; {arch} has one in llama.cpp (mtp=False: none is used)"]
    if info.in_trunk and not problems:
        problems = trimmed_head_problems(info)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ModelFileError(f"{path}: {'; '.join(problems[:_SHOWN])}{more}", path)
    return info


def _check_head(info: GGUFInfo, path: str | os.PathLike[str], required: bool) -> None:
    """Raise where the MTP head is missing but required, incomplete, or required and not driven."""
    if info.mtp_complete or not (required or (info.supported and info.has_mtp)):
        return
    if info.has_mtp and not info.supported:
        raise UnsupportedArchitectureError(
            f"{path}: the MTP head of architecture {info.architecture!r} is not driven here: "
            f"{elsewhere(info.architecture)}; or load it without (mtp=False)",
            path,
        )
    if not info.supported:
        why = "the model has no MTP head; load it without (mtp=False)"
    elif not info.has_mtp:
        why = (
            "the model has no MTP head; convert it with its MTP layer kept, give the file that it "
            "is published in (head), or load it without (mtp=False)"
        )
    else:
        missing = info.mtp_missing
        why = f"the MTP head is incomplete, {len(missing)} missing: {', '.join(missing[:_SHOWN])}"
    raise NoMtpHeadError(f"{path}: {why}", path, partial=info.has_mtp)


# --- the tokenizer and the tensors ---------------------------------------------------------------


def _tokenizer_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the tokenizer; [] if nothing is known to be wrong.

    The native code itself handles tables that are too short, missing or of another type, and
    special tokens that do not exist: it raises an error, or does without them.
    """
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, ArraySummary) and tokens.type == STRING else None
    if not info.tokenizer_model or texts is None or not texts.length:
        return ["the file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)"]
    if texts.n_distinct not in (None, texts.length):
        n = texts.length - (texts.n_distinct or 0)
        return [f"tokenizer.ggml.tokens: the vocabulary has {n} duplicate tokens"]
    if not info.validated:
        return []
    if info.tokenizer_model != "gpt2":
        return [
            f"tokenizer {info.tokenizer_model[:40]!r}; these architectures have byte-level BPE "
            "(gpt2)"
        ]
    if info.tokenizer_pre == "whitespace":  # the search for merges ends the process on two spaces
        return [
            f"tokenizer.ggml.pre is {info.tokenizer_pre!r}, which leaves spaces in words; these "
            "architectures have byte-level BPE"
        ]
    if "tokenizer.ggml.merges" not in info.metadata:
        return ["the tokenizer has no merges (tokenizer.ggml.merges)"]
    return []


def _tensor_problems(info: GGUFInfo) -> list[str]:
    """Missing tensors of the trunk, wrong shapes and types; the table of tensors is the writer's.

    The loader itself refuses tensors that are missing, of another shape or unknown. It does not
    check types, with which kernels may end the process, nor tensors that only the graph needs.
    """
    have = {t.name: t for t in info.tensors}
    problems = []
    for spec in model_tensors(info.to_shape(), info.recurrent_layers):
        found = have.get(spec.name)
        if found is None:
            in_mtp = spec.name.startswith(f"blk.{info.n_layer}.")  # see _check_head
            if spec.required and not in_mtp and not has_fused(spec.name, have):
                problems.append(f"tensor {spec.name} is missing")
        elif _squeezed(found.shape) != _squeezed(spec.shape):
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
    if len(_squeezed(tensor.shape)) == 1 or tensor.name.endswith("ssm_conv1d.weight"):
        return tensor.type == "F32"
    return tensor.type not in NOT_WEIGHTS


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing dimensions of 1."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
