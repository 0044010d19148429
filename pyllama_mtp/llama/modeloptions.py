"""How a model file is loaded: devices, tensors that stay on the CPU, adapters."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGUFValueType

from ..arguments import (
    FLAG,
    Kind,
    file_name,
    keep_checked,
    listed,
    number,
    numbers_of,
    option,
    require,
    wholes,
    words,
)
from ..errors import ModelFileError, UsageError, refusal
from ..models.ggufheader import NOT_WEIGHTS, Header, TensorEntry, read_header
from . import native, rpc

if TYPE_CHECKING:
    from ..models.modelinfo import GGUFInfo
    from .native import Library

SPLIT_MODES = ("none", "layer", "row")
NO_DEVICE = "none"
#: The tensors of experts; upstream's LLM_FFN_EXPS_REGEX (common/common.h).
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
CPU = "CPU"
_MOST = 2**31 - 1
_MOST_BYTES = 2**63 - 1


def _names(name: str, value: object) -> tuple[str, ...]:
    """Names of devices: one or several."""
    found = [value] if isinstance(value, str) else listed(value)
    ok = found and all(isinstance(one, str) and one for one in found)
    require(bool(ok), name, value, f"names of devices, {NO_DEVICE!r}, or None")
    names = tuple(str(one) for one in found or ())
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice:
        raise UsageError(f"device {twice!r} is named twice")
    return names


def _overrides(name: str, value: object) -> tuple[tuple[str, str], ...]:
    pairs = [*value.items()] if isinstance(value, Mapping) else listed(value)
    allowed = "PATTERN=DEVICE; in Python (pattern, device) pairs of text, or a mapping"
    if pairs is None:
        raise refusal(name, value, allowed)
    for pair in pairs:
        ok = isinstance(pair, list | tuple) and len(pair) == 2
        ok = ok and all(isinstance(text, str) and text and "\0" not in text for text in pair)
        require(bool(ok), name, value, allowed)
    return tuple((pattern, device) for pattern, device in pairs)


def _adapters(name: str, value: object) -> tuple[tuple[str, float], ...]:
    found = listed(value)
    pairs = []
    for item in [value] if found is None else found:
        file, scale = item if isinstance(item, list | tuple) and len(item) == 2 else (item, 1.0)
        path = file_name(name, file, "an adapter's .gguf file, or (file, scale) pairs of them")
        scale = number("the scale in lora", scale, math.isfinite, "a finite number")
        pairs.append((path, scale))
    return tuple(pairs)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Parameters of one model, in llama.cpp's terms. Raises UsageError for a value that cannot be.

    Attributes:
        n_gpu_layers: layers to put on GPUs or workers, counted from the last one; -1: all; 0: none.
            No effect without a GPU or worker.
        device: devices that may hold layers, in this order; "none": the CPU only (default: workers,
            then GPUs). ``pyllama-mtp doctor`` lists them.
        rpc_servers: spread the layers over these workers (``pyllama-mtp rpc-worker`` starts one),
            then over the GPUs of this machine; nothing is authenticated or encrypted: trusted
            networks only. "HOST:PORT" each; see :mod:`pyllama_mtp.llama.rpc`.
        rpc_timeout: give a silent worker up after so many seconds, which must suffice for a batch,
            and to send it a tensor; 0: never.
        split_mode: how several devices share the model: "layer": each has some layers; "row":
            matrices are split by rows, where a device can; "none": the main GPU has all.
        tensor_split: shares of the layers: of the workers in their order, then of this machine's
            GPUs (default: by free memory).
        main_gpu: index of the device for split mode "none", and for tensors that "row" does not
            split.
        n_cpu_moe: keep the experts of the first N layers on the CPU.
        cpu_moe: keep all experts on the CPU.
        moe_cache_size: memory on the GPUs for the experts used last, of layers whose experts all
            stay on the CPU; 0: none. In bytes, on the command line in MiB. Each context of the
            model has such a cache. Several GPUs share it as they share the layers.
        override_tensor: put the tensors whose names match this regular expression on this device,
            or on CPU; the first match counts. (pattern, device) pairs, or a mapping. They count
            more than `n_cpu_moe` and `cpu_moe`.
        use_mmap: map the model file into memory instead of reading it (default: if every device
            can).
        use_mlock: keep the weights from being swapped out, as far as the system's limits allow.
        no_alloc: load no weights, to estimate memory; see :mod:`pyllama_mtp.memory`.
        lora: apply these LoRA adapters (.gguf) to the model; drafts follow them. A file, or
            several, or (file, scale) pairs.
        head: a .gguf file with the MTP head; "none" takes only a head in the model's own file
            (default: the model's own head, else that of a file mtp-NAME*.gguf beside the model).
    """

    n_gpu_layers: int = option(
        -1, wholes(-1, _MOST, "-1 (all), 0 or above"), "-ngl --n-gpu-layers N", part="placement"
    )
    rpc_servers: Any = option(
        (),
        Kind(lambda _, value: rpc.check_addresses(value), several=True),
        "--rpc HOST:PORT,...",
        part="placement",
    )
    rpc_timeout: int = option(
        rpc.SILENCE_S,
        wholes(0, _MOST // 1000, "0 (no limit) or above, in seconds"),
        "SECONDS",
        part="placement",
    )
    tensor_split: Any = option(
        None,
        Kind(partial(numbers_of, allowed="numbers, one per device"), float, several=True).or_this(
            None
        ),
        "N,...",
        part="placement",
    )
    device: Any = option(
        None, Kind(_names, several=True).or_this(None), "NAME,...", part="placement"
    )
    split_mode: str = option("layer", words(*SPLIT_MODES), part="placement")
    main_gpu: int = option(
        0, wholes(0, _MOST, "index of a device, 0 or above"), "INDEX", part="placement"
    )
    n_cpu_moe: int = option(0, wholes(0, _MOST, "0 layers or more"), "N", part="big")
    cpu_moe: bool = option(False, FLAG, part="big")
    moe_cache_size: int = option(
        0,
        replace(
            wholes(0, _MOST_BYTES, "0 (no cache) or a number of bytes"),
            read=lambda mib: int(mib) << 20,
        ),
        "--moe-cache-mib N",
        part="big",
    )
    override_tensor: Any = option(
        (),
        Kind(_overrides, partial(str.rsplit, sep="=", maxsplit=1), several=True),
        "PATTERN=DEVICE,...",
        part="big",
    )
    use_mmap: bool | None = option(None, FLAG.or_this(None), "--mmap", part="big")
    use_mlock: bool = option(False, FLAG, "--mlock", part="big")
    no_alloc: bool = option(False, FLAG)
    lora: Any = option((), Kind(_adapters, several=True), "FILE,...", part="big")
    head: Any = option(
        None,
        Kind(partial(file_name, kind="a .gguf file, 'none', or None")).or_this(None),
        "FILE|none",
        part="head",
    )

    def __post_init__(self) -> None:
        keep_checked(self)

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not the default ones."""
        found = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in found if value != field.default}

    def devices(self, library: Library, workers: list[Any]) -> list[Any]:
        """The devices (ggml_backend_dev_t) that may hold layers.

        Args:
            workers: the workers' devices.

        Raises:
            UsageError: no device has this name.
        """
        local = library.handles("gpu") or library.handles("igpu")
        if self.device is None:
            return [*workers, *local]
        if self.device == (NO_DEVICE,):
            return []
        pool = [*workers, *(h for kind in ("gpu", "igpu", "accel") for h in library.handles(kind))]
        names = {library.device_name(handle): handle for handle in pool}
        for name in self.device:
            if name not in names:
                raise UsageError(
                    f"device {name!r} is not there; there is "
                    f"{', '.join([*names, NO_DEVICE])} ({NO_DEVICE}: the CPU)"
                )
        return [names[name] for name in self.device]

    def fill(
        self, library: Library, params: Any, info: GGUFInfo, devices: list[Any], workers: list[Any]
    ) -> list[Any]:
        """Write these values into a ``struct llama_model_params``.

        Args:
            devices: from :meth:`devices`.
            workers: the workers' devices.

        Returns:
            Objects that must be kept until the model is loaded.

        Raises:
            UsageError: an option that does not fit this file or these devices.
            ModelFileError: upstream's library cannot load the file.
        """
        _refuse_what_upstream_cannot(library, info)
        ffi, lib, p, alive = library.ffi, library.lib, params, []
        p.n_gpu_layers, p.main_gpu = self.n_gpu_layers, self.main_gpu
        p.no_alloc = self.no_alloc
        p.split_mode = getattr(lib, f"LLAMA_SPLIT_MODE_{self.split_mode.upper()}")
        p.load_mode = getattr(lib, f"LLAMA_LOAD_MODE_{self._load_mode}")
        if self.split_mode == "none" and devices and self.main_gpu >= len(devices):
            names = [library.device_name(device) for device in devices]
            raise UsageError(
                f"main_gpu is {self.main_gpu}; there is 0 to {len(devices) - 1}: {', '.join(names)}"
            )
        if self.rpc_servers or self.device is not None:
            p.devices = array = ffi.new("ggml_backend_dev_t[]", [*devices, ffi.NULL])
            alive.append(array)
        if self.tensor_split is not None:
            p.tensor_split = shares = self._shares(library)
            alive.append(shares)
        overrides = [*self._patterns(library, info, workers)]
        if overrides:
            patterns = [ffi.new("char[]", pattern.encode()) for pattern, _ in overrides]
            rows = [*zip(patterns, (buft for _, buft in overrides), strict=True)]
            table = ffi.new("struct llama_model_tensor_buft_override[]", [*rows, (ffi.NULL,) * 2])
            p.tensor_buft_overrides = table
            alive += [patterns, table]
        return alive

    @property
    def _load_mode(self) -> str:
        if self.no_alloc:
            return "NONE"
        if self.use_mlock:
            return "MLOCK" if self.use_mmap is False else "MMAP_MLOCK"
        return {None: "AUTO", True: "MMAP", False: "NONE"}[self.use_mmap]

    def _shares(self, library: Library) -> Any:
        shares, n_devices = self.tensor_split, int(library.lib.llama_max_devices())
        if len(shares) > n_devices or min(shares, default=-1) < 0 or not 0 < sum(shares) < math.inf:
            raise UsageError(
                f"tensor_split is {shares}; give 1 to {n_devices} shares, one per device, none "
                "negative and not all 0"
            )
        return library.ffi.new("float[]", [*shares, *[0.0] * (n_devices - len(shares))])

    def _patterns(
        self, library: Library, info: GGUFInfo, workers: list[Any]
    ) -> Iterator[tuple[str, Any]]:
        """(pattern, ggml_backend_buffer_type_t) pairs; the first match counts."""
        ffi, lib = library.ffi, library.lib
        bufts = {}
        for device in [*library.handles(), *workers]:
            buft = lib.ggml_backend_dev_buffer_type(device)
            bufts[library.device_name(device)] = buft
            bufts.setdefault(library.text(lib.ggml_backend_buft_name(buft)), buft)
        message = ffi.new("char[256]")
        for pattern, device in self.override_tensor:
            if device not in bufts:
                raise UsageError(
                    f"override_tensor {pattern}={device}: there is no device {device!r}; there is "
                    + ", ".join(bufts)
                )
            found = 0
            for tensor in info.tensors:
                given = pattern.encode(), tensor.name.encode()
                found = lib.pyllama_regex_search(*given, message, len(message))
                if found < 0:
                    raise UsageError(
                        f"override_tensor: {pattern!r} is not a regular expression: "
                        f"{library.text(message)}"
                    )
                if found:
                    break
            if not found:
                raise UsageError(
                    f"override_tensor: no tensor of {info.path} has a name with {pattern!r}; "
                    f"names are like {info.tensors[-1].name}"
                )
            yield pattern, bufts[device]
        if (self.n_cpu_moe or self.cpu_moe or self.moe_cache_size) and not info.n_expert:
            names = "n_cpu_moe, cpu_moe and moe_cache_size"
            raise UsageError(f"{info.path} has no experts; leave {names} out")
        for layer in range(min(self.n_cpu_moe, info.n_layer + info.n_mtp_layers)):
            yield rf"blk\.{layer}{EXPERTS}", bufts[CPU]
        if self.cpu_moe:
            yield EXPERTS, bufts[CPU]


def _refuse_what_upstream_cannot(library: Library, info: GGUFInfo) -> None:
    if library.has_tap:
        return
    trimmed, why = info.trimmed_head, ""
    if info.head:
        why = f"is in a file of its own, {info.head}, with which"
    elif trimmed:
        why = f"has {trimmed.n_rows} of {info.n_vocab} tokens (tensor d2t), so that"
    if why:
        raise ModelFileError(
            f"{info.path}: the MTP head {why} upstream's library cannot load it; use the patched "
            "variant",
            info.path,
        )


def head_arguments(ffi: Any, info: GGUFInfo) -> tuple[tuple[Any, ...], list[Any]]:
    """Arguments of ``pyllama_model_load()`` for a head in another file, and objects that must be
    kept until the model is loaded."""
    if not info.head:
        return (ffi.NULL, 0, ffi.NULL, 0), []
    kept: list[Any] = []

    def text(name: str | None) -> Any:
        kept.append(ffi.NULL if name is None else ffi.new("char[]", name.encode()))
        return kept[-1]

    rows = [(text(name), text(there)) for name, there in info.head_tensors]
    kept.append(ffi.new("struct llama_mtp_tensor[]", rows))
    return (os.fsencode(info.head), info.n_mtp_layers, kept[-1], len(rows)), kept


# -- lora adapters: their files are checked against the model before llama.cpp loads them ----------


EMBEDDING = "token_embd.weight"
_SUFFIXES = (".lora_a", ".lora_b")
#: Matrices that no graph adapts.
_FIXED = ("ssm_conv1d.weight",)


@dataclass(frozen=True)
class Adapter:
    """A checked adapter; `types` are ggml's names of the types of its matrices."""

    path: str
    scale: float
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
            raise header.error(f"tensor {tensor.name!r} is neither .lora_a nor .lora_b of a matrix")
        if tensor.type in NOT_WEIGHTS:
            raise header.error(f"tensor {tensor.name!r} has type {tensor.type}, no weight can")
        pairs.setdefault(name, {})[suffix] = tensor
    if not pairs:
        raise header.error("it changes nothing: there are no tensors")
    base = {tensor.name: tensor for tensor in info.tensors}
    for name, pair in pairs.items():
        if len(pair) < len(_SUFFIXES):
            raise header.error(f"of {name!r} there is only one of .lora_a and .lora_b")
        if name not in base:
            raise header.error(
                f"the model {info.path} has no tensor {name!r}: it is another model's"
            )
        if not mtp and name.startswith(f"blk.{info.n_layer}."):
            raise header.error(f"it changes {name!r} of the MTP head; load the model with mtp=True")
        _check_shape(header, base[name], pair[".lora_a"], pair[".lora_b"], info)
    types = frozenset(tensor.type for tensor in header.tensors)
    return Adapter(path, scale, types)


def _check_kind(header: Header, info: GGUFInfo) -> None:
    kinds = {key: header.metadata.get(key) for key in ("general.type", "adapter.type")}
    if kinds != {"general.type": "adapter", "adapter.type": "lora"}:
        raise header.error(f"it is no LoRA adapter: {kinds}")
    architecture = header.metadata.get("general.architecture")
    if architecture != info.architecture:
        raise header.error(f"it is for a model of {architecture}, and this is {info.architecture}")
    alpha = "adapter.lora.alpha"
    if header.types.get(alpha, GGUFValueType.FLOAT32) != GGUFValueType.FLOAT32:
        raise header.error(f"{alpha} must be a 32-bit float")
    if "adapter.alora.invocation_tokens" in header.metadata:
        raise header.error(
            "it takes effect after certain tokens only (aLoRA), which is not supported"
        )


def _check_shape(
    header: Header, base: TensorEntry, a: TensorEntry, b: TensorEntry, info: GGUFInfo
) -> None:
    """Check a pair for a matrix (n, m, ...): it is (n, rank, ...) and (rank, m, ...); for the
    embedding, whose rows are looked up, (rank, m) and (rank, n)."""
    if len(base.shape) < 2 or base.name.endswith(_FIXED):
        raise header.error(f"{base.name!r} is no matrix that an adapter can change")
    if base.name == EMBEDDING and info.tied_embeddings:
        raise header.error(
            f"{base.name!r} is the model's LM head as well, which llama.cpp can adapt only where "
            "the two are apart"
        )
    n, m, *more = base.shape
    if base.name == EMBEDDING:
        fits = a.shape[1:] == (m,) and b.shape[1:] == (n,) and a.shape[0] == b.shape[0]
    else:
        rank = b.shape[0]
        fits = a.shape == (n, rank, *more) and b.shape == (rank, m, *more)
    if not fits:
        raise header.error(
            f"{a.shape} and {b.shape} do not go with {base.name!r} {base.shape} of {info.path}: it "
            "is another model's"
        )


class Adapters:
    """The adapters of a loaded model, which frees them with itself."""

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self._adapters = [*adapters]
        self._handles: list[Any] = []

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
                said = native.reason(message)
                raise ModelFileError(
                    f"{adapter.path}: llama.cpp cannot load it: {said}", adapter.path
                )
            self._handles.append(handle)

    def apply(self, call: Callable[..., int]) -> None:
        """Have a context, by its :meth:`.Context.call`, compute with the adapters. Raises
        PyllamaMtpError: it cannot."""
        if not self._handles:
            return
        library = native.load()
        handles = library.ffi.new("struct llama_adapter_lora *[]", self._handles)
        scales = library.ffi.new("float[]", [adapter.scale for adapter in self._adapters])
        call(library.lib.pyllama_set_adapters_lora, handles, len(self._handles), scales)
