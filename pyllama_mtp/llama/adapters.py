"""LoRA adapters: their files are checked against the model before llama.cpp loads them.

llama.cpp does not check an adapter's types, further dimensions, or tensors that no graph adapts. A
tensor that does not fit would end a computation, or be ignored in silence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGUFValueType

from ..errors import ModelFileError
from ..models.ggufheader import NOT_WEIGHTS, Header, TensorEntry, read_header
from . import native

if TYPE_CHECKING:
    from ..models.modelinfo import GGUFInfo
    from .context import Context

EMBEDDING = "token_embd.weight"
_SUFFIXES = (".lora_a", ".lora_b")
#: Matrices that no graph adapts.
_FIXED = ("ssm_conv1d.weight",)


@dataclass(frozen=True)
class Adapter:
    """A checked adapter: `targets` are names of the model's matrices that it changes, `types` are
    ggml's names of the types of its own matrices."""

    path: str
    scale: float
    targets: frozenset[str]
    types: frozenset[str]


def read_adapter(path: str, scale: float, info: GGUFInfo, mtp: bool = True) -> Adapter:
    """Check an adapter's file against the model.

    Args:
        mtp: whether the model's MTP head is loaded.

    Raises:
        ModelFileError: no GGUF file, no LoRA adapter, or an adapter for another model.
    """
    header = read_header(path)
    _check_kind(header, info)
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for tensor in header.tensors:
        name, suffix = tensor.name[:-7], tensor.name[-7:]
        if suffix not in _SUFFIXES:
            raise _bad(path, f"tensor {tensor.name!r} is neither .lora_a nor .lora_b of a matrix")
        if tensor.type in NOT_WEIGHTS:
            raise _bad(path, f"tensor {tensor.name!r} has type {tensor.type}, no weight can")
        pairs.setdefault(name, {})[suffix] = tensor
    if not pairs:
        raise _bad(path, "it changes nothing: there are no tensors")
    base = {tensor.name: tensor for tensor in info.tensors}
    for name, pair in pairs.items():
        if len(pair) < len(_SUFFIXES):
            raise _bad(path, f"of {name!r} there is only one of .lora_a and .lora_b")
        if name not in base:
            raise _bad(path, f"the model {info.path} has no tensor {name!r}: it is another model's")
        if not mtp and name.startswith(f"blk.{info.n_layer}."):
            raise _bad(path, f"it changes {name!r} of the MTP head; load the model with mtp=True")
        _check_shape(path, base[name], pair[".lora_a"], pair[".lora_b"], info)
    types = frozenset(tensor.type for tensor in header.tensors)
    return Adapter(path, scale, frozenset(pairs), types)


def _check_kind(header: Header, info: GGUFInfo) -> None:
    kinds = {key: header.metadata.get(key) for key in ("general.type", "adapter.type")}
    if kinds != {"general.type": "adapter", "adapter.type": "lora"}:
        raise _bad(header.path, f"it is no LoRA adapter: {kinds}")
    architecture = header.metadata.get("general.architecture")
    if architecture != info.architecture:
        raise _bad(
            header.path, f"it is for a model of {architecture}, and this is {info.architecture}"
        )
    alpha = "adapter.lora.alpha"
    if header.types.get(alpha, GGUFValueType.FLOAT32) != GGUFValueType.FLOAT32:
        raise _bad(header.path, f"{alpha} must be a 32-bit float")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise _bad(
            header.path, "it takes effect after certain tokens only (aLoRA), which is not supported"
        )


def _check_shape(
    path: str, base: TensorEntry, a: TensorEntry, b: TensorEntry, info: GGUFInfo
) -> None:
    """Check a pair for a matrix (n, m, ...): it is (n, rank, ...) and (rank, m, ...); for the
    embedding, whose rows are looked up, (rank, m) and (rank, n)."""
    if len(base.shape) < 2 or base.name.endswith(_FIXED):
        raise _bad(path, f"{base.name!r} is no matrix that an adapter can change")
    if base.name == EMBEDDING and info.tied_embeddings:
        raise _bad(path, f"{base.name!r} is the model's LM head as well, which llama.cpp can adapt "
                   "only where the two are apart")  # fmt: skip
    n, m, *more = base.shape
    if base.name == EMBEDDING:
        fits = a.shape[1:] == (m,) and b.shape[1:] == (n,) and a.shape[0] == b.shape[0]
    else:
        rank = b.shape[0]
        fits = a.shape == (n, rank, *more) and b.shape == (rank, m, *more)
    if not fits:
        raise _bad(
            path,
            f"{a.shape} and {b.shape} do not go with {base.name!r} {base.shape} of {info.path}: it "
            "is another model's",
        )


def _bad(path: str, message: str) -> ModelFileError:
    return ModelFileError(f"{path}: {message}", path)


class Adapters:
    """The adapters of a loaded model, which frees them with itself."""

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self._adapters = [*adapters]
        self._handles: list[Any] = []

    @property
    def changed(self) -> frozenset[str]:
        """Names of the model's matrices that the adapters change."""
        return frozenset().union(*(adapter.targets for adapter in self._adapters))

    @property
    def types(self) -> frozenset[str]:
        """Types of the adapters' own matrices."""
        return frozenset().union(*(adapter.types for adapter in self._adapters))

    @property
    def names(self) -> str:
        """The adapters' files and scales, for messages and comparisons."""
        return ",".join(f"{Path(one.path).name}:{one.scale:g}" for one in self._adapters)

    def load(self, model: Any) -> None:
        """Load the adapters into a native model. Raises ModelFileError: llama.cpp refuses an
        adapter; its reason is given."""
        library = native.load()
        message = library.ffi.new("char[256]")
        for adapter in self._adapters:
            native.take_recent_errors()
            arguments = model, os.fsencode(adapter.path), message, len(message)
            handle = library.lib.pyllama_adapter_lora_init(*arguments)
            if not handle:
                said = library.text(message) or native.take_recent_errors() or "no reason given"
                raise _bad(adapter.path, f"llama.cpp cannot load it: {said}")
            self._handles.append(handle)

    def apply(self, context: Context) -> None:
        """Have a context compute with the adapters. Raises PyllamaMtpError: it cannot."""
        if not self._handles:
            return
        library = native.load()
        handles = library.ffi.new("struct llama_adapter_lora *[]", self._handles)
        scales = library.ffi.new("float[]", [adapter.scale for adapter in self._adapters])
        context.call(library.lib.pyllama_set_adapters_lora, handles, len(self._handles), scales)
