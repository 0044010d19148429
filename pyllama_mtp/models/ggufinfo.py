"""Whether this package can run a model file, before the native loader sees the file.

``read_gguf`` describes any GGUF model; ``validate_model_file`` insists on what the native code
needs, because a missing tensor or an odd number would end the process there instead of raising.

Each rule on a hyper-parameter stands for an assertion, a division or an allocation of upstream's
load_hparams (src/llama-model.cpp), of the files src/models/qwen35.cpp and qwen35moe.cpp, or of an
operation in their graphs; two are about text that would be wrong (causal attention, 31 bits of
positions). What the loader itself answers with an error is left to it: a key of another type, an
unknown pre-tokenizer.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from pyllama_mtp.errors import ModelFileError, NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.models import sidecar
from pyllama_mtp.models.architectures import NOT_TEXT, elsewhere
from pyllama_mtp.models.ggufheader import NOT_WEIGHTS, STRING, ArraySummary, TensorEntry, Value
from pyllama_mtp.models.modelinfo import D2T, GGUFInfo, describe
from pyllama_mtp.models.shapes import MAX_EXPERTS, has_fused, model_tensors, shape_problems

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
        tensor = have.get(spec.name)
        if tensor is None:
            in_mtp = spec.name.startswith(f"blk.{info.n_layer}.")  # see _check_head
            if spec.required and not in_mtp and not has_fused(spec.name, have):
                problems.append(f"tensor {spec.name} is missing")
        elif _squeezed(tensor.shape) != _squeezed(spec.shape):
            problems.append(f"tensor {spec.name} is {tensor.shape}, expected {spec.shape}")
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


# -- hyper-parameters ------------------------------------------------------------------------------

_NEEDED = (
    *("block_count", "context_length", "embedding_length", "attention.head_count"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_sections", "ssm.conv_kernel"),
    *("ssm.inner_size", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
)
#: Read per layer, while graphs and tensor shapes take one number for all layers.
_UNIFORM = (
    *("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
    *("expert_feed_forward_length", "expert_used_count"),
)
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
_MOST_POOLING = 4  # enum llama_pooling_type; unspecified is -1
_UNSPECIFIED = (1 << 32) - 1


def hyperparameter_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the hyper-parameters; [] where nothing is, or where only the native code
    knows what they must be."""
    arch = info.architecture
    if not info.validated:
        return _general_problems(info) + _switch_problems(info)
    missing = [f"{arch}.{key}" for key in _NEEDED if f"{arch}.{key}" not in info.metadata]
    if missing:
        return ["missing hyper-parameters: " + ", ".join(missing)]
    return (
        shape_problems(info.to_shape())
        + _dimension_problems(info)
        + _layer_problems(info)
        + _expert_problems(info)
        + _rope_problems(info)
        + _switch_problems(info)
    )


def _general_problems(info: GGUFInfo) -> list[str]:
    """Of any architecture; the loader asserts these (llama_model_base::load_hparams)."""
    rules = (
        (info.n_layer > 0, f"no layers of architecture {info.architecture!r} (block_count)"),
        (info.n_embd > 0, "embedding_length is missing"),
        (info.context_length < 1 << 31, f"context_length is {info.context_length}"),
        (info.n_expert <= MAX_EXPERTS, f"n_expert is {info.n_expert}, at most {MAX_EXPERTS}"),
        (
            info.n_expert_used <= info.n_expert,
            f"{info.n_expert_used} of {info.n_expert} experts are used",
        ),
    )
    return [text for good, text in rules if not good]


def _get(info: GGUFInfo, key: str) -> Value | None:
    return info.metadata.get(f"{info.architecture}.{key}")


def _dimension_problems(info: GGUFInfo) -> list[str]:
    inner = info.ssm_state_size * info.ssm_v_heads
    epsilon = _get(info, "attention.layer_norm_rms_epsilon")
    width = _get(info, "embedding_length_out")
    rules = (
        (
            info.context_length < 1 << 31,
            f"context_length is {info.context_length}; positions have 31 bits",
        ),
        (info.head_dim_k == info.head_dim_v, "key and value heads differ in size"),
        (
            info.ssm_inner_size == inner,
            f"ssm.inner_size {info.ssm_inner_size} is not state_size x time_step_rank",
        ),
        (
            isinstance(epsilon, float) and 0 <= epsilon < math.inf,
            f"attention.layer_norm_rms_epsilon is {epsilon!r}, it must be a number from 0",
        ),
        (
            width in (None, info.n_embd),
            f"embedding_length_out is {width!r}, these models have embedding_length {info.n_embd}",
        ),
    )
    return [text for good, text in rules if not good]


def _layer_problems(info: GGUFInfo) -> list[str]:
    """Per-layer values; a kind of layer that is missing leaves a cache without a buffer."""
    problems = []
    for key in _UNIFORM:
        value = _get(info, key)
        if isinstance(value, ArraySummary) or (isinstance(value, tuple) and len({*value}) != 1):
            problems.append(f"{key} differs from layer to layer, which these models cannot have")
    flags = _get(info, "attention.recurrent_layers")
    if flags is not None and not isinstance(flags, tuple):
        problems.append("attention.recurrent_layers is no list of flags, one per block")
    if not info.attention_layers or not info.recurrent_layers:
        kind = "recurrent" if info.attention_layers else "full-attention"
        problems.append(f"of {info.n_layer} layers none is a {kind} layer; at least one must be")
    return problems


def _expert_problems(info: GGUFInfo) -> list[str]:
    moe = info.architecture == "qwen35moe"
    if moe != (info.n_expert > 0):
        return [f"{info.architecture} with {info.n_expert} experts"]
    groups = _whole(info, "expert_group_count")
    used = _whole(info, "expert_group_used_count")
    if not moe:
        extra = info.n_expert_used or groups
        return ["expert_used_count or expert_group_count without experts"] if extra else []
    if groups <= 1:
        return []
    per_group = info.n_expert // groups
    # A group is chosen by its two best experts (build_moe_ffn of upstream's src/llama-graph.cpp).
    fits = info.n_expert % groups == 0 and per_group >= 2 and 0 < used < groups
    if fits and info.n_expert_used <= per_group * used:
        return []
    return [
        f"{info.n_expert_used} of {info.n_expert} experts in {used} of {groups} groups: "
        "expert_count must be a multiple of expert_group_count, and the groups in use must hold "
        "enough experts"
    ]


def _whole(info: GGUFInfo, key: str) -> int:
    """A whole number, or 0 where there is none: the loader refuses another type."""
    value = _get(info, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _rope_problems(info: GGUFInfo) -> list[str]:
    problems = []
    if not 0 < info.n_rot <= info.head_dim_k or info.n_rot % 2:
        problems.append(f"n_rot is {info.n_rot}, it must be even, 2 to {info.head_dim_k}")
    sections = _get(info, "rope.dimension_sections")
    # The operation divides by their sum, and asserts that it fits a head.
    whole = isinstance(sections, tuple) and all(type(n) is int and n >= 0 for n in sections)
    if not (isinstance(sections, tuple) and whole and len(sections) == 4):
        problems.append(f"rope.dimension_sections is {sections!r}, it must be four whole numbers")
    elif not 0 < sum(sections[:3]) <= sum(sections) <= info.head_dim_k:
        problems.append(f"rope.dimension_sections {sections} do not fit heads of {info.head_dim_k}")
    scaling = _get(info, "rope.scaling.type")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALING:
        known = ", ".join(_ROPE_SCALING)
        problems.append(f"rope.scaling.type is {scaling[:40]!r}; known are {known}")
    base = _get(info, "rope.freq_base")
    if isinstance(base, float) and not 0 < base < math.inf:
        problems.append(f"rope.freq_base is {base!r}, it must be a positive number")
    return problems


def _switch_problems(info: GGUFInfo) -> list[str]:
    problems = []
    if _get(info, "attention.causal") is False:
        problems.append("attention.causal is false; text is generated with causal attention only")
    pooling = _get(info, "pooling_type")
    if type(pooling) is int and pooling > _MOST_POOLING and pooling != _UNSPECIFIED:
        problems.append(f"pooling_type is {pooling}, there is no such one")
    return problems


# -- trimmed MTP heads -----------------------------------------------------------------------------

_DTYPES = {"I32": "<i4", "I64": "<i8"}


def trimmed_head_problems(info: GGUFInfo) -> list[str]:
    """What is wrong with the MTP block's own LM head and with ``d2t``; [] where neither exists."""
    head, d2t = info.own_head, info.tensor(D2T)
    if d2t and not head:
        return [
            f"there is a tensor {D2T}, which says what tokens the rows of an MTP block's LM head "
            f"belong to, but no such head (blk.{info.n_layer}.nextn.shared_head_head.weight)"
        ]
    if not head:
        return []
    rows = head.n_rows
    flat = len(head.shape) > 1 and math.prod(head.shape[2:]) == 1
    if not flat or head.shape[0] != info.n_embd or rows > info.n_vocab:
        return [f"tensor {head.name} is {head.shape}, expected {(info.n_embd, info.n_vocab)}"]
    if head.type in NOT_WEIGHTS:
        return [f"tensor {head.name} has type {head.type}, which no kernel takes there"]
    if d2t:
        return _d2t_problems(d2t, head, rows) or _id_problems(_ids(d2t), info.n_vocab)
    if rows < info.n_vocab:
        return [
            f"tensor {head.name} has {rows} rows for a vocabulary of {info.n_vocab} tokens, and "
            f"there is no tensor {D2T} that says which ones they belong to"
        ]
    return []


def _d2t_problems(d2t: TensorEntry, head: TensorEntry, rows: int) -> list[str]:
    if d2t.type not in _DTYPES:
        return [f"tensor {D2T} has type {d2t.type}; token ids are I32 or I64"]
    if math.prod(d2t.shape) != d2t.shape[0]:
        return [f"tensor {D2T} is {d2t.shape}, expected one dimension"]
    if d2t.shape[0] != rows:
        return [f"tensor {D2T} has {d2t.shape[0]} entries for the {rows} rows of {head.name}"]
    return []


def _id_problems(ids: npt.NDArray[np.int64], n_vocab: int) -> list[str]:
    problem = _faulty_id(ids, n_vocab)
    if not problem:
        return []
    if not _faulty_id(ids + np.arange(len(ids)), n_vocab):
        problem += (
            "; it seems to hold offsets (id minus row number, as EAGLE-3 checkpoints do): convert "
            "the model again, to ids"
        )
    return [f"tensor {D2T}: {problem}"]


def _faulty_id(ids: npt.NDArray[np.int64], n_vocab: int) -> str:
    """What is wrong with the first faulty id; "" if every id is a token and none comes twice."""
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        row = int(outside[0])
        return f"row {row} is token {ids[row]}, the vocabulary is 0 to {n_vocab - 1}"
    tokens, counts = np.unique(ids, return_counts=True)
    twice = np.flatnonzero(counts > 1)
    return f"token {tokens[twice[0]]} has {counts[twice[0]]} rows" if twice.size else ""


def _ids(d2t: TensorEntry) -> npt.NDArray[np.int64]:
    return np.frombuffer(d2t.read(), _DTYPES[d2t.type]).astype(np.int64)
