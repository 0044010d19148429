"""What a model file says about its model: dimensions, tensors, and what kind of MTP head it has.

Nothing is judged here: what the native code cannot run is refused by :mod:`.ggufinfo`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyllama_mtp.models.architectures import ARCHITECTURES, Architecture, elsewhere
from pyllama_mtp.models.ggufheader import (
    ArraySummary,
    Header,
    TensorEntry,
    Value,
    join_parts,
    read_header,
)
from pyllama_mtp.models.shapes import KEYS, MAX_LAYERS, ModelShape, has_fused, model_tensors

#: Dimensions that have another name here than in :class:`ModelShape`.
_NAMES = {
    "head_dim": "head_dim_k",
    "n_mtp": "n_mtp_layers",
    "n_ctx_train": "context_length",
    "ssm_head_dim": "ssm_state_size",
}


#: The tensor that says which tokens the rows of a trimmed MTP head belong to.
D2T = "d2t"


@dataclass(frozen=True)
class GGUFInfo:
    """A model file's description. Counts are 0 and names empty where the file says nothing.

    ``n_layer`` counts the trunk's layers; ``attention_layers`` and ``recurrent_layers`` split their
    indices. The MTP blocks follow as layers ``n_layer`` to ``n_layer + n_mtp_layers - 1``. ``head``
    is the other file that holds the MTP blocks, if there is one; ``head_tensors`` are pairs of a
    tensor's name in the model and its name in that file, which is None for a tensor that is left
    out of the model.
    """

    path: str
    size: int
    version: int
    architecture: str
    name: str
    n_layer: int
    n_mtp_layers: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_rot: int
    n_ff: int
    n_vocab: int
    context_length: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shexp: int
    full_attention_interval: int
    attention_layers: tuple[int, ...]
    recurrent_layers: tuple[int, ...]
    ssm_conv_kernel: int
    ssm_inner_size: int
    ssm_state_size: int
    ssm_k_heads: int
    ssm_v_heads: int
    tokenizer_model: str
    tokenizer_pre: str
    has_chat_template: bool
    synthetic: bool
    tensors: tuple[TensorEntry, ...] = field(repr=False)
    metadata: dict[str, Value] = field(repr=False)
    head: str = ""
    head_tensors: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)

    @property
    def supported(self) -> bool:
        """Whether this package drives the architecture's MTP head."""
        return self.architecture in ARCHITECTURES

    @property
    def abilities(self) -> Architecture:
        """What this package can do with the architecture; nothing, if it is not supported."""
        return ARCHITECTURES.get(self.architecture, Architecture(""))

    @property
    def in_trunk(self) -> bool:
        """Whether the MTP head lives in the trunk's context; see :class:`.Architecture`."""
        return self.abilities.in_trunk

    @property
    def validated(self) -> bool:
        """Whether files of the architecture are checked in depth, so that none ends the process.

        Other files are loaded in a process of their own first (:mod:`pyllama_mtp.llama.trial`).
        """
        return self.abilities.validated

    @property
    def most_drafts(self) -> int | None:
        """Drafts that a round can have at most; None: any number."""
        several = self.abilities.several_heads and self.n_mtp_layers > 1
        return self.n_mtp_layers if several else None

    @property
    def fewer_drafts(self) -> str:
        """Why a round has at most :attr:`most_drafts` drafts, for people."""
        return (
            f"{Path(self.path).name} has {self.n_mtp_layers} MTP blocks, each of which drafts "
            f"one token: at most {self.most_drafts} a round"
        )

    @property
    def n_params(self) -> int:
        """Number of weights in all tensors."""
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, padding left out."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def tensor_types(self) -> dict[str, int]:
        """Bytes by tensor type, largest first."""
        totals: Counter[str] = Counter()
        for t in self.tensors:
            totals[t.type] += t.nbytes
        return dict(totals.most_common())

    @property
    def step_types(self) -> dict[str, int]:
        """Bytes by type, largest first, of the matrices that a plain decode step multiplies with.

        Of the experts, only those in use count; the token embedding counts if it is the LM head.
        """
        totals: Counter[str] = Counter()
        for t in self.tensors:
            looked_up = t.name == "token_embd.weight" and not self.tied_embeddings
            matrix = math.prod(t.shape[1:]) > 1 and not t.name.endswith("ssm_conv1d.weight")
            if matrix and not looked_up and not t.name.startswith(self._mtp_prefixes):
                routed = "_exps." in t.name and self.n_expert
                totals[t.type] += (
                    t.nbytes * self.n_expert_used // self.n_expert if routed else t.nbytes
                )
        return dict(totals.most_common())

    @property
    def _mtp_prefixes(self) -> tuple[str, ...]:
        return tuple(f"blk.{self.n_layer + i}." for i in range(self.n_mtp_layers))

    @property
    def tied_embeddings(self) -> bool:
        """True when the LM head is the token embedding."""
        return all(t.name != "output.weight" for t in self.tensors)

    @property
    def own_head(self) -> TensorEntry | None:
        """The MTP block's own LM head, if it has one."""
        return self.tensor(f"blk.{self.n_layer}.nextn.shared_head_head.weight")

    @property
    def n_lm_heads(self) -> int:
        """How many LM heads the MTP blocks have: those of their own, and the model's."""
        names = [f"{prefix}nextn.shared_head_head.weight" for prefix in self._mtp_prefixes]
        own = sum(self.tensor(name) is not None for name in names)
        return own + (own < len(names))

    @property
    def trimmed_head(self) -> TensorEntry | None:
        """The MTP block's own LM head, [n_embd, n_rows], if it is over a part of the vocabulary.

        The tensor ``d2t``, [n_rows] I64 or I32, has the token id of each row then. This is the
        convention of upstream's src/models/eagle3.cpp and dflash.cpp, which llama.cpp's pull
        request 29143 brings to Qwen3.5. Checkpoints that vLLM reads have a tensor of the same name
        with id minus row number; a converter has to add the row number.
        """
        return self.own_head if self.tensor(D2T) else None

    @property
    def has_mtp(self) -> bool:
        """True when the file announces an MTP head or holds part of one."""
        return self.n_mtp_layers > 0 or any(".nextn." in t.name for t in self.tensors)

    @property
    def mtp_missing(self) -> tuple[str, ...]:
        """What the MTP head lacks to be usable; () without a head, or with one not driven here."""
        if not (self.has_mtp and self.supported):
            return ()
        if self.n_mtp_layers < 1:
            return (f"metadata key {self.architecture}.nextn_predict_layers",)
        names = {t.name for t in self.tensors}
        if self.validated:
            specs = model_tensors(self.to_shape(), self.recurrent_layers)
            required = [spec.name for spec in specs if spec.required]
        else:
            parts = ("eh_proj", "enorm", "hnorm")
            required = [f"{p}nextn.{part}.weight" for p in self._mtp_prefixes for part in parts]
        wanted = [name for name in required if name.startswith(self._mtp_prefixes)]
        return tuple(n for n in wanted if n not in names and not has_fused(n, names))

    @property
    def mtp_complete(self) -> bool:
        """True when the file has an MTP head with all its tensors."""
        return self.has_mtp and self.supported and not self.mtp_missing

    @property
    def why_no_mtp(self) -> str:
        """Why a file without a usable head decodes without MTP, and what to do."""
        if self.has_mtp:
            return f"the MTP head is not driven here ({elsewhere(self.architecture)})"
        if self.supported:
            return "the model has no MTP head (give one in a file of its own: head=, --head)"
        return "the model has no MTP head"

    def to_shape(self) -> ModelShape:
        """The dimensions as a :class:`ModelShape`, from which the expected tensors follow."""
        dimensions: Any = {name: getattr(self, _NAMES.get(name, name)) for name in KEYS}
        return ModelShape(
            name=self.name or self.architecture,
            n_layer=self.n_layer,
            n_vocab=self.n_vocab,
            tied_embeddings=self.tied_embeddings,
            **dimensions,
        )

    def tensor(self, name: str) -> TensorEntry | None:
        """The tensor of this name, if there is one."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def describe(path: str | os.PathLike[str]) -> GGUFInfo:
    """Describe the model in a file, without looking for an MTP head in another file.

    Raises:
        ModelFileError: see :func:`.ggufheader.read_header`; also metadata of the wrong type, and
            parts of a split model that are missing or do not belong together.
    """
    header = read_header(path)
    join_parts(header)
    arch = _text(header, "general.architecture")
    if not arch:
        raise header.error("the key general.architecture is missing; this is no model file")

    def dim(key: str, default: int = 0) -> int:
        return _number(header, f"{arch}.{key}", default)

    n_mtp = dim(KEYS["n_mtp"])
    blocks = dim("block_count")
    if not 0 <= n_mtp <= blocks or blocks > MAX_LAYERS:
        raise header.error(f"{blocks} blocks with {n_mtp} MTP blocks cannot be right")
    n_layer = blocks - n_mtp
    recurrent = _recurrent(header, arch, n_layer)
    n_head = dim(KEYS["n_head"])
    head_dim = dim(KEYS["n_embd"]) // max(n_head, 1)
    interval = 4 if recurrent else 1
    usual = {"n_head_kv": n_head, "head_dim": head_dim, "full_attention_interval": interval}
    counts: Any = {
        _NAMES.get(name, name): dim(key, usual.get(name, 0)) for name, key in KEYS.items()
    }
    return GGUFInfo(
        path=header.path,
        size=header.size,
        version=header.version,
        architecture=arch,
        name=_text(header, "general.name"),
        n_layer=n_layer,
        head_dim_v=dim("attention.value_length", head_dim),
        n_rot=dim("rope.dimension_count"),
        n_vocab=_vocab_size(header, arch),
        attention_layers=tuple(i for i in range(n_layer) if i not in set(recurrent)),
        recurrent_layers=recurrent,
        ssm_inner_size=dim("ssm.inner_size"),
        tokenizer_model=_text(header, "tokenizer.ggml.model"),
        tokenizer_pre=_text(header, "tokenizer.ggml.pre"),
        has_chat_template=bool(_text(header, "tokenizer.chat_template")),
        synthetic=header.metadata.get("pyllama_mtp.synthetic") is True,
        tensors=tuple(header.tensors),
        metadata=header.metadata,
        **counts,
    )


# --- metadata -----------------------------------------------------------------------------------


def _text(header: Header, key: str) -> str:
    value = header.metadata.get(key, "")
    if not isinstance(value, str):
        raise header.error(f"{key} is {value!r}, expected text")
    return value


def _number(header: Header, key: str, default: int) -> int:
    """A whole number; of a per-layer array, the largest entry."""
    value = header.metadata.get(key, default)
    if isinstance(value, tuple) and value:
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise header.error(f"{key} is {value!r}, expected a whole number")
    if not 0 <= value < 1 << 40:
        raise header.error(f"{key} is {value}, which cannot be right")
    return value


def _recurrent(header: Header, arch: str, n_layer: int) -> tuple[int, ...]:
    """Recurrent trunk layers: by the per-layer flags if present, else by the interval."""
    flags = header.metadata.get(f"{arch}.attention.recurrent_layers")
    if isinstance(flags, tuple):
        if len(flags) < n_layer:
            raise header.error(f"{len(flags)} recurrent-layer flags for {n_layer} layers")
        return tuple(i for i in range(n_layer) if flags[i])
    if arch not in ARCHITECTURES or not ARCHITECTURES[arch].in_trunk:
        return ()
    interval = _number(header, f"{arch}.full_attention_interval", 4)
    return tuple(i for i in range(n_layer) if interval and (i + 1) % interval)


def _vocab_size(header: Header, arch: str) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArraySummary):
        return tokens.length
    return _number(header, f"{arch}.vocab_size", 0)
