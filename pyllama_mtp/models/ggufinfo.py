"""What a model file is, and whether this package can run it, before the native loader sees it.

``read_gguf`` describes any GGUF model; ``validate_model_file`` insists on what the native code
needs, because there a missing tensor or an odd number ends the process instead of raising.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pyllama_mtp.errors import ModelFileError, NoMtpHeadError, UnsupportedArchitectureError
from pyllama_mtp.models import sidecar
from pyllama_mtp.models.architectures import ARCHITECTURES, NOT_TEXT, Architecture, elsewhere
from pyllama_mtp.models.ggufheader import ArraySummary, Header, TensorEntry, Value, read_header
from pyllama_mtp.models.hyperparameters import hyperparameter_problems
from pyllama_mtp.models.layout import model_tensors
from pyllama_mtp.models.parts import join_parts
from pyllama_mtp.models.shapes import MAX_LAYERS, ModelShape
from pyllama_mtp.models.tensortable import has_fused, tensor_problems
from pyllama_mtp.models.tokenizertable import tokenizer_problems
from pyllama_mtp.models.trimmedhead import trimmed_head_problems


@dataclass(frozen=True)
class GGUFInfo:
    """A model file's description. Counts are 0 and names empty where the file says nothing.

    ``n_layer`` is the trunk; ``attention_layers`` and ``recurrent_layers`` split its indices.
    The MTP blocks follow as layers ``n_layer`` to ``n_layer + n_mtp_layers - 1``. ``head`` is the
    file that they are in where it is another one, and ``head_tensors`` says what comes of it: the
    name of a tensor in the model, and in that file, or None where the model is without it.
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
        """What can be done with the architecture, a supported one."""
        return ARCHITECTURES[self.architecture]

    @property
    def in_trunk(self) -> bool:
        """Whether the MTP head lives in the trunk's context; see :class:`.Architecture`."""
        return self.supported and self.abilities.in_trunk

    @property
    def validated(self) -> bool:
        """Whether files of the architecture are checked in depth, so that none ends the process;
        others are tried in a process of their own (:mod:`pyllama_mtp.llama.trial`)."""
        return self.supported and self.abilities.validated

    @property
    def most_drafts(self) -> int | None:
        """Drafts that a round can have at most; None: as many as anybody asks for."""
        several = self.supported and self.abilities.several_heads and self.n_mtp_layers > 1
        return self.n_mtp_layers if several else None

    @property
    def fewer_drafts(self) -> str:
        """Why a round has no more than :attr:`most_drafts`, for people."""
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

        Of experts those that are used; the token embedding only where it is the LM head as well.
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
    def has_mtp(self) -> bool:
        """True when the file announces an MTP head or holds part of one."""
        return self.n_mtp_layers > 0 or any(".nextn." in t.name for t in self.tensors)

    @property
    def mtp_missing(self) -> tuple[str, ...]:
        """What a usable MTP head needs and this file lacks; () without a head of a known kind."""
        if not (self.has_mtp and self.supported):
            return ()
        if self.n_mtp_layers < 1:
            return (f"metadata key {self.architecture}.nextn_predict_layers",)
        names = {t.name for t in self.tensors}
        if self.validated:
            specs = model_tensors(self.to_shape(), self.recurrent_layers)
            required = [s.name for s in specs if s.required]
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
        """Why a file without a head that can be used decodes without MTP, and what to do."""
        if self.has_mtp:
            return f"the MTP head is not driven here ({elsewhere(self.architecture)})"
        if self.supported:
            known = "one that is published for it can be given: head, --head"
            return f"the model has no MTP head ({known})"
        return "the model has no MTP head"

    def to_shape(self) -> ModelShape:
        """The dimensions as a :class:`ModelShape`, from which the expected tensors follow."""
        return ModelShape(
            name=self.name or self.architecture,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim_k,
            n_vocab=self.n_vocab,
            ssm_k_heads=self.ssm_k_heads,
            ssm_v_heads=self.ssm_v_heads,
            n_ff=self.n_ff,
            n_expert=self.n_expert,
            n_expert_used=self.n_expert_used,
            n_ff_exp=self.n_ff_exp,
            n_ff_shexp=self.n_ff_shexp,
            ssm_head_dim=self.ssm_state_size,
            ssm_conv_kernel=self.ssm_conv_kernel,
            full_attention_interval=self.full_attention_interval,
            n_mtp=self.n_mtp_layers,
            n_ctx_train=self.context_length,
            tied_embeddings=self.tied_embeddings,
        )


def read_gguf(path: str | os.PathLike[str], head: str | os.PathLike[str] | None = None) -> GGUFInfo:
    """Describe a GGUF model of any architecture.

    Args:
        path: the file; of a model that is split into several, the first: the others are read too.
        head: a file with its MTP head. None: where the model has none, the one that lies beside it,
            if there is one (see :func:`.sidecar.find_head`); "none": not even that one.

    Raises:
        ModelFileError: see :func:`pyllama_mtp.models.ggufheader.read_header`; also metadata of
            the wrong type, and parts of a split model that are missing or do not belong together.
        HeadMismatchError: the head is another model's.
    """
    info = _describe(path)
    if head == sidecar.NO_HEAD or (head is None and info.mtp_complete):
        return info
    if head is None:
        if not info.supported or sidecar.is_head(info):
            return info
        head = sidecar.find_head(path)
        if head is None:
            return info
    return sidecar.join_head(info, _describe(head))


def _describe(path: str | os.PathLike[str]) -> GGUFInfo:
    header = read_header(path)
    join_parts(header)
    arch = _text(header, "general.architecture")
    if not arch:
        raise _bad(header, "the key general.architecture is missing; this is no model file")

    def dim(key: str, default: int = 0) -> int:
        return _number(header, f"{arch}.{key}", default)

    n_mtp = dim("nextn_predict_layers")
    blocks = dim("block_count")
    if not 0 <= n_mtp <= blocks or blocks > MAX_LAYERS:
        raise _bad(header, f"{blocks} blocks with {n_mtp} MTP blocks cannot be right")
    n_layer = blocks - n_mtp
    head_dim = dim("embedding_length") // max(dim("attention.head_count"), 1)
    recurrent = _recurrent(header, arch, n_layer)
    return GGUFInfo(
        path=header.path,
        size=header.size,
        version=header.version,
        architecture=arch,
        name=_text(header, "general.name"),
        n_layer=n_layer,
        n_mtp_layers=n_mtp,
        n_embd=dim("embedding_length"),
        n_head=dim("attention.head_count"),
        n_head_kv=dim("attention.head_count_kv", dim("attention.head_count")),
        head_dim_k=dim("attention.key_length", head_dim),
        head_dim_v=dim("attention.value_length", head_dim),
        n_rot=dim("rope.dimension_count"),
        n_ff=dim("feed_forward_length"),
        n_vocab=_vocab_size(header, arch),
        context_length=dim("context_length"),
        n_expert=dim("expert_count"),
        n_expert_used=dim("expert_used_count"),
        n_ff_exp=dim("expert_feed_forward_length"),
        n_ff_shexp=dim("expert_shared_feed_forward_length"),
        full_attention_interval=dim("full_attention_interval", 4 if recurrent else 1),
        attention_layers=tuple(i for i in range(n_layer) if i not in set(recurrent)),
        recurrent_layers=recurrent,
        ssm_conv_kernel=dim("ssm.conv_kernel"),
        ssm_inner_size=dim("ssm.inner_size"),
        ssm_state_size=dim("ssm.state_size"),
        ssm_k_heads=dim("ssm.group_count"),
        ssm_v_heads=dim("ssm.time_step_rank"),
        tokenizer_model=_text(header, "tokenizer.ggml.model"),
        tokenizer_pre=_text(header, "tokenizer.ggml.pre"),
        has_chat_template=bool(_text(header, "tokenizer.chat_template")),
        synthetic=header.metadata.get("pyllama_mtp.synthetic") is True,
        tensors=tuple(header.tensors),
        metadata=header.metadata,
    )


def validate_model_file(
    path: str | os.PathLike[str],
    require_mtp: bool | None = True,
    head: str | os.PathLike[str] | None = None,
) -> GGUFInfo:
    """Check that the native code can load and run a file, and describe it; of an architecture that
    is not `validated`, what can be known beforehand.

    Args:
        path: the model file.
        require_mtp: True: also insist on a complete MTP head, of an architecture whose head this
            package drives; None: it may have none, or one that is not driven; False: no head
            matters, not even a part of one.
        head: of the model, in another file; see :func:`read_gguf`. With `require_mtp` False there
            is no other file.

    Raises:
        ModelFileError: as :func:`read_gguf`; also missing or impossible hyper-parameters, missing
            tensors, wrong tensor shapes, a vocabulary or trimmed MTP head that cannot be loaded.
        UnsupportedArchitectureError: no model that continues text, or one whose head is not driven,
            and `require_mtp` is True.
        NoMtpHeadError: no MTP head, and `require_mtp` is True; or part of one, unless it is False.
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
    problems = hyperparameter_problems(info) or tokenizer_problems(info)
    if not problems and _lacks_head(info, require_mtp):
        if info.has_mtp and not info.supported:
            raise UnsupportedArchitectureError(
                f"{path}: the MTP head of architecture {arch!r} is not driven here: "
                f"{elsewhere(arch)}; or load it without (mtp=False)",
                path,
            )
        raise NoMtpHeadError(f"{path}: {_mtp_complaint(info)}", path, partial=info.has_mtp)
    if info.validated and not problems:
        in_use = require_mtp is not False and info.has_mtp
        problems = tensor_problems(info, in_use)
    elif not problems and require_mtp is not False and info.supported:
        n = info.n_mtp_layers
        if n > 1 and not info.abilities.several_heads:
            problems = [f"{n} MTP blocks; {arch} has one in llama.cpp (mtp=False: none is used)"]
    if info.in_trunk and not problems:
        problems = trimmed_head_problems(info)
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelFileError(f"{path}: {shown}{more}", path)
    return info


# --- checks -------------------------------------------------------------------------------------


def _lacks_head(info: GGUFInfo, require_mtp: bool | None) -> bool:
    if require_mtp is None:
        return info.supported and info.has_mtp and not info.mtp_complete
    return require_mtp and not info.mtp_complete


def _mtp_complaint(info: GGUFInfo) -> str:
    if not info.supported:
        return "the model has no MTP head; load it without (mtp=False)"
    if not info.has_mtp:
        return (
            "the model has no MTP head; convert it with its MTP layer kept, give the file that it "
            "is published in (head), or load it without (mtp=False)"
        )
    missing = info.mtp_missing
    return f"the MTP head is incomplete, {len(missing)} missing: " + ", ".join(missing[:4])


# --- metadata -----------------------------------------------------------------------------------


def _bad(header: Header, message: str) -> ModelFileError:
    return ModelFileError(f"{header.path}: {message}", header.path)


def _text(header: Header, key: str) -> str:
    value = header.metadata.get(key, "")
    if not isinstance(value, str):
        raise _bad(header, f"{key} is {value!r}, expected text")
    return value


def _number(header: Header, key: str, default: int) -> int:
    """A whole number; of a per-layer array, the largest entry."""
    value = header.metadata.get(key, default)
    if isinstance(value, tuple) and value:
        value = max(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(header, f"{key} is {value!r}, expected a whole number")
    if not 0 <= value < 1 << 40:
        raise _bad(header, f"{key} is {value}, which cannot be right")
    return value


def _recurrent(header: Header, arch: str, n_layer: int) -> tuple[int, ...]:
    """Recurrent trunk layers: by the per-layer flags if present, else by the interval."""
    flags = header.metadata.get(f"{arch}.attention.recurrent_layers")
    if isinstance(flags, tuple):
        if len(flags) < n_layer:
            raise _bad(header, f"{len(flags)} recurrent-layer flags for {n_layer} layers")
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
