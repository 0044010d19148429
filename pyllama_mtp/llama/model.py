"""A model file in memory: weights, vocabulary, metadata."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import file_name, flag, instance, token_ids, utf8
from ..errors import (
    ContextClosedError,
    InsufficientMemoryError,
    ModelFileError,
    UnsupportedArchitectureError,
    UsageError,
)
from ..machine import available_memory
from ..models import hub
from ..models.architectures import SAME_BITS
from ..models.ggufheader import FLOATS, NOT_WEIGHTS, TENSOR_TYPES
from ..models.ggufinfo import validate_model_file
from ..models.modelinfo import GGUFInfo
from ..settings import Sampling
from . import chat, native, rpc, trial
from .modeloptions import Adapters, ModelOptions, head_arguments, read_adapter
from .native import OfThisProcess, Owned

Tokens = npt.NDArray[np.int32]
log = logging.getLogger("pyllama_mtp")


class Weights:
    """The native model, freed by the last of its users: the `Model`, and each context.

    A context reads the model while it is freed. When Python collects both in one cycle, or ends, it
    may finalize the model first, and the model's weak references to contexts are empty by then.
    """

    def __init__(self, handle: Any, free: Callable[[Any], None]) -> None:
        self._handle, self._free = handle, free
        # An entry for each user but one; a list, because threads may come and go at once.
        self._others: list[None] = []

    def hold(self) -> Weights:
        """One user more."""
        self._others.append(None)
        return self

    def release(self) -> None:
        """One user less; each calls it once."""
        try:
            self._others.pop()
        except IndexError:
            self._free(self._handle)


class Model(Owned, OfThisProcess):
    """Weights and vocabulary of a GGUF file. A context manager; closing it closes its contexts.

    Several threads may use one model, each with sessions of its own. A forked child may not use it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mtp: bool | None = None,
        progress: Callable[[float], None] | None = None,
        **options: Any,
    ) -> None:
        """Validate the file, then load it.

        Args:
            path: a GGUF file; of a model that is split into several, the first.
            mtp: load the MTP head. True: it must have one; False: no, which saves memory; None: if
                there is one that can be used, else the log says why not.
            progress: called with the share loaded, 0 to 1; an exception from it stops loading.
            options: attributes of :class:`.ModelOptions`, by name: devices, how the file is read,
                LoRA adapters.

        Raises:
            ModelFileError: no such file, not a GGUF, truncated, malformed; NoMtpHeadError and
                UnsupportedArchitectureError are subclasses. A file that cannot be checked in depth
                is loaded in a child process first; see :mod:`.trial`.
            InsufficientMemoryError: the weights do not fit into memory.
            LibraryError: the native library cannot be used.
            WorkerLostError: a worker died while loading, or does not answer.
            UsageError: a worker or device that cannot be used, or another bad argument.
        """
        self._handle: Any = None
        self._forked = False
        self._connected = False
        self.path = Path(file_name("path", path, "a .gguf file"))
        if mtp is not None:
            mtp = flag("mtp", mtp)
        self.options = ModelOptions(**options)
        #: Addresses of the workers in use.
        self.rpc_servers: tuple[str, ...] = self.options.rpc_servers
        self.info: GGUFInfo = validate_model_file(path, mtp, self.options.head)
        if self.info.head and self.options.head is None:
            self.options = replace(self.options, head=self.info.head)
            log.info("the MTP head of %s is in %s", self.path, self.info.head)
        if mtp is None:
            mtp = self.info.mtp_complete
            if not mtp:
                log.info("%s: %s", self.path, self.info.why_no_mtp)
        self._library = native.load()
        self._ffi, self._lib = self._library.ffi, self._library.lib
        self.adapters = Adapters(
            read_adapter(file, scale, self.info, mtp) for file, scale in self.options.lora
        )
        #: Closed with the model. Contexts add themselves; they also hold `weights`.
        self.contexts: weakref.WeakSet[Owned] = weakref.WeakSet()
        try:
            workers = self._connect()
            #: Devices that may hold layers (ggml_backend_dev_t).
            self.devices = self.options.devices(self._library, workers)
            #: Whether layers are on devices with memory of their own: GPUs, workers.
            self.on_gpu = self.options.n_gpu_layers != 0 and bool(self.devices)
            self._check_memory()
            if not self.info.validated:
                trial.try_out(self.info, mtp, self.options.no_alloc)
            self._mapped = self._mapped_files()
            self._handle = self._load(mtp, workers, progress)
        except BaseException:
            self._disconnect()
            raise
        self.claim()
        self.weights = Weights(self._handle, self._lib.llama_model_free)
        self.has_mtp = mtp and self._lib.llama_model_n_layer_nextn(self._handle) > 0
        self._vocab = self._lib.llama_model_get_vocab(self._handle)
        #: Number of tokens.
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self._vocab))
        #: Id of the end-of-text token; -1: there is none.
        self.eos = int(self._lib.llama_vocab_eos(self._vocab))
        self.n_embd = int(self._lib.llama_model_n_embd_out(self._handle))
        self.n_ctx_train = int(self._lib.llama_model_n_ctx_train(self._handle))
        self.n_params = int(self._lib.llama_model_n_params(self._handle))
        self.is_recurrent = bool(
            self._lib.llama_model_is_hybrid(self._handle)
            or self._lib.llama_model_is_recurrent(self._handle)
        )
        #: Tokens that a layer with a sliding window attends to; 0: there is none.
        self.n_swa = int(self._lib.llama_model_n_swa(self._handle))
        self.name = self.info.name or self.path.stem
        self.architecture = self.info.architecture

    @classmethod
    def from_pretrained(
        cls, repository: str, *, quant: str | None = None, **arguments: Any
    ) -> Model:
        """Download a model of a Hugging Face hub into the hub's cache, and open it.

        Args:
            repository, quant: "OWNER/REPO" and such as "Q8_0"; see :func:`.hub.fetch`.
            arguments: of :class:`Model`, by name.

        Raises:
            HubError: the download failed; subclasses say why. For the rest see :class:`Model`.
        """
        return cls(hub.fetch(repository, quant), **arguments)

    @contextmanager
    def without_memory(self) -> Iterator[Model]:
        """The same model without weights; see `no_alloc` of :class:`.ModelOptions`."""
        options = {**self.options.given, "no_alloc": True}
        with Model(self.path, mtp=self.has_mtp, **options) as twin:
            yield twin

    @cached_property
    def sampling(self) -> Sampling:
        """The default sampling of chats and of the server: as the file says."""
        return chat.usual_sampling(self.info.metadata)

    @property
    def n_embd_inp(self) -> int:
        """Width of the embeddings that the model takes in place of tokens."""
        return int(self._lib.llama_model_n_embd_inp(self.handle))

    @property
    def used_devices(self) -> list[Any]:
        """Devices with memory of their own that hold layers (ggml_backend_dev_t)."""
        return self.devices if self.on_gpu else []

    def _check_memory(self) -> None:
        if (
            not (self.on_gpu or self.options.no_alloc)
            and self.info.weight_bytes > available_memory()
        ):
            raise InsufficientMemoryError(
                f"{self.path}: the weights take {self.info.weight_bytes / 1e9:.1f} GB, "
                f"and {available_memory() / 1e9:.1f} GB are available; "
                "use a smaller or more quantized model"
            )

    @property
    def same_bits(self) -> bool:
        """Whether the bits of a token's logits depend on its text alone: not on drafts, other
        sequences, threads, nor on how its prompt was cut, or continued from a cache or a file. So
        with flash attention and the patched library on an x86 CPU, for the architectures
        :data:`.SAME_BITS`."""
        weights = {one.type for one in self.info.tensors} - {*FLOATS, *NOT_WEIGHTS}
        names = {"Q8_0", *weights, *self.adapters.types}
        numbers = [number for number, (name, *_) in TENSOR_TYPES.items() if name in names]
        ours = all(map(self._library.few_columns, numbers))  # on no other CPU than x86
        sizes = self.info.head_dim_k, self.info.head_dim_v
        heads = not any(size % 16 for size in sizes)  # else attention is upstream's
        return ours and heads and self.architecture in SAME_BITS and not self.on_gpu

    def _mapped_files(self) -> list[tuple[Path, os.stat_result]]:
        """Files whose weights are used where they lie."""
        if self.options.use_mmap is False or self.on_gpu:
            return []
        paths = map(Path, dict.fromkeys(tensor.file for tensor in self.info.tensors))
        return [(path, path.stat()) for path in paths]

    def refuse_truncated_file(self) -> None:
        """To be called before weights are used: the system ends a process that reads beyond the end
        of a mapped file (SIGBUS). Raises ModelFileError: a file has become shorter."""
        for path, before in self._mapped:
            try:
                now = path.stat()
            except OSError:  # it is gone, or hidden; its data stay as long as they are mapped
                continue
            if os.path.samestat(now, before) and now.st_size < before.st_size:
                raise ModelFileError(
                    f"{path} has become shorter while it was in use: load it again; other "
                    "programs may replace a model file, but must not write into it",
                    str(path),
                )

    def _connect(self) -> list[Any]:
        """Connect to the workers: their devices."""
        if not self.rpc_servers:
            return []
        workers = rpc.connect(self.rpc_servers, self.options.rpc_timeout)
        self._connected = True
        return workers

    def refuse_lost_worker(self) -> None:
        """Raises WorkerLostError if a worker of this model is lost; to be called when a native call
        has failed, and before the results of a computation are used."""
        if self._connected:
            rpc.refuse_lost(self.rpc_servers)

    def _disconnect(self) -> None:
        if self._connected:
            self._connected = False
            rpc.release(self.rpc_servers)

    def _load(
        self,
        mtp: bool,
        workers: list[Any],
        progress: Callable[[float], None] | None,
    ) -> Any:
        ffi, lib = self._ffi, self._lib
        params = lib.llama_model_default_params()
        alive = self.options.fill(self._library, params, self.info, self.devices, workers)
        params.load_mtp = mtp
        keep_alive = ffi.new_handle(progress) if progress else ffi.NULL
        params.progress_callback = lib.pyllama_on_load_progress
        params.progress_callback_user_data = keep_alive
        message = ffi.new("char[512]")
        native.take_recent_errors()
        head, kept = head_arguments(ffi, self.info)
        path = os.fsencode(self.path)
        handle = lib.pyllama_model_load(path, *head, params, message, len(message))
        del alive, kept
        try:
            native.raise_pending()
            rpc.wait_for(workers if handle else ())  # weights are on their way until then
            self.refuse_lost_worker()
            if handle:
                self.adapters.load(handle)
        except BaseException:
            if handle:
                lib.llama_model_free(handle)
            raise
        if not handle:
            reason = native.reason(message)
            if native.short_of_memory(reason):
                raise InsufficientMemoryError(
                    f"{self.path}: no memory to load it ({reason}); use a smaller or more "
                    "quantized model, or raise the limit (ulimit -v) if there is one"
                )
            if "unknown model architecture" in reason:
                raise UnsupportedArchitectureError(
                    f"{self.path}: the llama.cpp that is built in here does not know architecture "
                    f"{self.info.architecture!r}",
                    self.path,
                )
            if "split buffers" in reason:
                raise UsageError(f"split_mode 'row' is not possible here ({reason}); use 'layer'")
            raise ModelFileError(f"{self.path}: llama.cpp cannot load it: {reason}", self.path)
        return handle

    # -- life ----------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The native handle. Raises ContextClosedError after :meth:`close`."""
        if not self._handle:
            what = "is closed"
            if self._forked:
                what = (
                    "belongs to the process that this one was forked from; load it here, or start "
                    "processes with spawn"
                )
            raise ContextClosedError(f"the model {self.path} {what}")
        return self._handle

    def disown(self) -> None:
        """In a forked child: forget the weights, which are the parent's."""
        self._handle, self._connected, self._forked = None, False, True

    def close(self) -> None:
        """Free contexts, then weights. May be called again."""
        handle, self._handle = self._handle, None
        with ExitStack() as stack:  # every step, whatever the others raise
            stack.callback(native.raise_pending)  # of a log handler
            stack.callback(self._disconnect)
            if handle:
                stack.callback(self.weights.release)
                for context in list(self.contexts):
                    stack.callback(context.close)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    @property
    def description(self) -> str:
        """llama.cpp's one-line description, e.g. "qwen35 0.8B Q8_0"."""
        buffer = self._ffi.new("char[256]")
        self._lib.llama_model_desc(self.handle, buffer, len(buffer))
        return self._library.text(buffer)

    # -- vocabulary -----------------------------------------------------------------------------

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add BOS if the model wants one.
            parse_special: read ``<|im_start|>`` and the like as control tokens, not as text.
        """
        self.handle  # noqa: B018 - raises when closed
        instance("text", text, str, "text (str)")
        data = utf8("the text", text)
        message = self._ffi.new("char[256]")
        capacity = len(data) + 8
        while True:
            out = self._ffi.new("llama_token[]", capacity)
            flags = (add_special, parse_special)
            n = self._lib.pyllama_tokenize(
                self._vocab, data, len(data), out, capacity, *flags, message, len(message)
            )
            if n >= 0:
                return list(out[0:n])
            if -n <= capacity or n == -(2**31):
                why = self._library.text(message) or "too long"
                if native.short_of_memory(why):
                    raise InsufficientMemoryError(f"no memory to tokenize {len(data)} bytes: {why}")
                raise UsageError(f"a text of {len(data)} bytes cannot be tokenized: {why}")
            capacity = -n

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`."""
        self.check_tokens([token])
        capacity = 32
        while True:
            out = self._ffi.new("char[]", capacity)
            n = self._lib.llama_token_to_piece(self._vocab, token, out, capacity, 0, special)
            if n >= 0:
                return bytes(self._ffi.buffer(out, n))
            capacity = -n

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        ids = token_ids("tokens", tokens)
        return b"".join(self.piece(token, special) for token in ids).decode("utf-8", "replace")

    def attributes(self, token: int) -> int:
        """The vocabulary's flags of a token: LLAMA_TOKEN_ATTR_*."""
        self.check_tokens([token])
        return int(self._lib.llama_vocab_get_attr(self._vocab, token))

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, end of turn)."""
        self.handle  # noqa: B018 - raises when closed
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def check_tokens(self, tokens: Sequence[int] | Tokens) -> None:
        """Raises UsageError when an id is not in the vocabulary."""
        self.handle  # noqa: B018 - raises when closed
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        if len(ids) and (min(ids) < 0 or max(ids) >= self.n_vocab):
            bad = next(int(token) for token in ids if not 0 <= token < self.n_vocab)
            raise UsageError(f"token id {bad} is not in the vocabulary (0 to {self.n_vocab - 1})")

    # -- chats ---------------------------------------------------------------------------------

    @cached_property
    def chat_template(self) -> str:
        """The file's template, in Jinja; "": none. Set it to use another one."""
        return self._library.text(self._lib.llama_model_chat_template(self.handle, self._ffi.NULL))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a conversation, by the template in the file. Raises UsageError: the
        file has no template, or the template refuses the messages."""
        template = self.chat_template
        if not template:
            raise UsageError(
                f"{Path(self.path).name} has no chat template: give the prompt as plain text, or a "
                "template with --chat-template (in Python: model.chat_template = ...)"
            )
        return chat.render(template, messages, **{**self.template_tokens, **variables})

    @cached_property
    def template_tokens(self) -> dict[str, str]:
        """Texts of the tokens that begin and end texts, as templates name them; "": none."""
        bos = self._lib.llama_vocab_bos(self._vocab)
        return {
            "bos_token": self.detokenize([bos], special=True) if bos >= 0 else "",
            "eos_token": self.detokenize([self.eos], special=True) if self.eos >= 0 else "",
        }
