"""The only importer of the cffi extension: loads a variant's libraries, and takes C's callbacks.

One process holds one variant. Both variants have the same SONAMEs, and the extension binds to the
one that is loaded first. So the libraries are loaded here, by path, before the extension is
imported.

C calls four Python functions (``cdef/callbacks.h``). None may raise into C: cffi catches every
exception for them. An exception that must reach the caller (a ``KeyboardInterrupt``) is parked in
`pending`, and :func:`raise_pending` raises it after the native call has returned.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LibraryError
from .spinning import little_spinning
from .variants import ENVIRONMENT_VARIABLE as ENVIRONMENT_VARIABLE
from .variants import SHIM, resolve
from .variants import VARIANTS as VARIANTS
from .variants import cpu_flags as cpu_flags
from .variants import find_libraries as find_libraries
from .variants import locate as locate

log = logging.getLogger("pyllama_mtp.llama.native")
# A library says nothing unless the program asks: configure logging to see llama.cpp's messages.
logging.getLogger("pyllama_mtp").addHandler(logging.NullHandler())


class Pending(threading.local):
    """Exceptions and errors that callbacks leave for the thread that made the native call.

    Attributes:
        exception: a callback has parked it.
        interrupted: when signal handlers raised, in seconds of :func:`time.monotonic`.
        errors: libllama's last error lines, for the message of the exception that follows.
    """

    exception: BaseException | None = None
    interrupted: tuple[float, ...] = ()

    def __init__(self) -> None:
        self.errors: list[str] = []


pending = Pending()


@dataclass(frozen=True)
class Device:
    """A ggml device. `kind` is "cpu", "gpu", "igpu" or "accel"; `free` and `total` are bytes."""

    name: str
    description: str
    kind: str
    free: int
    total: int


@dataclass(frozen=True)
class Library:
    """The loaded variant.

    Attributes:
        variant: "upstream" or "patched", as the stamp says.
        folder: of its libllama; the ggml libraries lie there too, or one level up.
        stamp: variant, upstream_commit, series (sha256 of its patches), cpu_features, compiler,
            cuda.
    """

    variant: str
    folder: Path
    stamp: dict[str, Any]
    ffi: Any
    lib: Any

    def devices(self) -> list[Device]:
        """All devices of all loaded backends, in ggml's order."""
        found = []
        for device in self.handles():
            free, total = self.device_memory(device)
            description = self.text(self.lib.ggml_backend_dev_description(device))
            name, kind = self.device_name(device), self._kind(device)
            found.append(Device(name, description, kind, free, total))
        return found

    def handles(self, kind: str | None = None) -> list[Any]:
        """The devices of a kind (None: all), as ggml_backend_dev_t."""
        every = map(self.lib.ggml_backend_dev_get, range(self.lib.ggml_backend_dev_count()))
        return [device for device in every if kind in (None, self._kind(device))]

    def _kind(self, device: Any) -> str:
        kinds = {
            self.lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
            self.lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
            self.lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
        }
        return kinds.get(self.lib.ggml_backend_dev_type(device), "accel")

    def device_memory(self, device: Any) -> tuple[int, int]:
        """Free and total bytes of a ggml_backend_dev_t; 0 and 0: the device does not say,
        or has failed."""
        free, total = self.ffi.new("size_t *"), self.ffi.new("size_t *")
        self.lib.pyllama_device_memory(device, free, total)
        return int(free[0]), int(total[0])

    def device_name(self, device: Any) -> str:
        """The name of a ggml_backend_dev_t."""
        return self.text(self.lib.ggml_backend_dev_name(device))

    @property
    def has_tap(self) -> bool:
        """Whether the library has the functions of our patches; upstream's variant has not."""
        return self.variant != "upstream"

    # Switches of the process for patches of the CPU backend: on in the patched variant, off in
    # upstream's. Not while anything computes. Each says whether a loaded CPU backend has it.

    def set_small_batch(self, value: bool) -> bool:
        """Products of few columns, and of experts of few rows, read each weight once. Weights
        of a model that is loaded while this is off are repacked, as upstream does."""
        return self._set_switch(b"small_batch", value)

    def set_few_rows_attention(self, value: bool) -> bool:
        """Flash attention of 1 to 8 rows reads K and V once for all rows and heads.
        The results differ by rounding."""
        return self._set_switch(b"few_rows_attention", value)

    def set_direct_states(self, value: bool) -> bool:
        """Recurrent layers write their new states where they are kept. Same results."""
        return self._set_switch(b"direct_states", value)

    def set_large_batch(self, value: bool) -> bool:
        """A prompt's products go through one kernel for all types (not where small_batch
        is off), its delta nets and convolutions are computed in tiles. The results differ by
        rounding."""
        return self._set_switch(b"large_batch", value)

    def _set_switch(self, name: bytes, value: bool) -> bool:
        return bool(self.lib.pyllama_set_cpu_switch(name, value))

    def few_columns(self, ggml_type: int) -> bool:
        """Whether products of a matrix of this type (its number in ggml) with a few columns read
        each weight once on this CPU; False in upstream's variant."""
        return self.has_tap and bool(self.lib.pyllama_few_columns(ggml_type))

    def backend(self) -> str:
        """Names of all devices, e.g. "CPU" or "CUDA0+CPU"."""
        return "+".join(device.name for device in self.devices()) or "none"

    def cpu_generation(self) -> str:
        """The CPU generation of the loaded CPU backend, e.g. "haswell", in a build that has a
        backend for each; "" in other builds, or if the system does not say."""
        with contextlib.suppress(OSError):
            maps = Path("/proc/self/maps").read_text(errors="replace")
            if found := re.search(r"/libggml-cpu-(\w+)\.so$", maps, re.MULTILINE):
                return found[1]
        return ""

    @property
    def has_amx(self) -> bool:
        """Whether both the loaded CPU backend and the CPU have AMX."""
        return "AMX_INT8 = 1" in self.system_info()

    def system_info(self) -> str:
        """One line of llama.cpp about the backends and their features."""
        return self.text(self.lib.llama_print_system_info())

    def text(self, pointer: Any) -> str:
        """A C string as str; the empty string for NULL."""
        return self.ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


_loaded: Library | None = None


def load(library: str | os.PathLike[str] | None = None) -> Library:
    """Load a variant, once per process.

    Args:
        library: "patched", "upstream", or a folder; default: the variable PYLLAMA_MTP_LIB, else
            "patched".

    Raises:
        LibraryError: nothing found (all paths tried are listed), stamp mismatch, CPU features that
            this machine lacks, or another variant is loaded already.
    """
    global _loaded
    if _loaded is not None:
        if library and resolve(library) != _loaded.folder:
            raise LibraryError(
                f"this process has loaded {_loaded.folder} and cannot load {library!r} as well: "
                "both carry the same library names. Use a second process."
            )
        return _loaded
    folder, stamp = locate(library)
    with little_spinning():
        _load_shim(folder)
        try:
            from .. import _native
        except ImportError as reason:
            raise LibraryError(f"the extension cannot be imported: {reason}") from None
        _loaded = Library(str(stamp["variant"]), folder, stamp, _native.ffi, _native.lib)
        try:
            _start(_loaded)
        except BaseException:
            _loaded = None
            raise
    return _loaded


def _load_shim(folder: Path) -> None:
    """Load the variant by path; the extension finds the same SONAMEs in memory afterwards."""
    try:
        ctypes.CDLL(str(folder / SHIM))
    except OSError as reason:
        raise LibraryError(
            f"the libraries in {folder} cannot be loaded: {reason}. "
            "Build them again with `pip install --force-reinstall .` on this machine."
        ) from None


def _start(library: Library) -> None:
    """Route logs, load the backends beside the library, and make sure of a CPU backend."""
    ffi, lib = library.ffi, library.lib
    ffi.def_extern(onerror=on_callback_error)(pyllama_on_log)
    ffi.def_extern(onerror=on_callback_error, error=False)(pyllama_on_load_progress)
    ffi.def_extern(onerror=on_signal_handler_error, error=1)(pyllama_on_poll)
    ffi.def_extern(onerror=on_signal_handler_error)(pyllama_on_wait)
    lib.llama_log_set(lib.pyllama_on_log, ffi.NULL)
    # Logging must not reach Python while the interpreter goes down.
    atexit.register(lib.llama_log_set, lib.pyllama_log_discard, ffi.NULL)
    lib.pyllama_catch_aborts()
    lib.llama_backend_init()
    for folder in (library.folder, library.folder.parent):
        lib.ggml_backend_load_all_from_path(str(folder).encode())
        if any(device.kind == "cpu" for device in library.devices()):
            # Both variants share one ggml; in upstream's variant, our changes to it are off.
            lib.pyllama_set_cpu_changes(library.has_tap)
            return
    raise LibraryError(
        f"no CPU backend (libggml-cpu*.so) in {library.folder} or {library.folder.parent} that "
        "runs on this machine. Build the package again with `pip install --force-reinstall .`."
    )


# -- callbacks: C -> Python ------------------------------------------------------------------------

#: How long a worker may stay silent after Ctrl-C: it may be about to answer. The next Ctrl-C gives
#: it up at once.
PATIENCE_S = 10.0
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
#: What llama.cpp and ggml say when they get no memory; ggml's assertions name the pointer.
_NO_MEMORY = re.compile(r"alloc|memory|mem_buffer|!= NULL|address space")


def pyllama_on_log(level: int, text: Any, user_data: Any) -> None:
    """libllama's log lines go to the logger "pyllama_mtp.llama.native" (its INFO is our DEBUG)."""
    assert _loaded is not None
    line = _loaded.text(text).rstrip("\n")
    number = _LEVELS.get(level, logging.DEBUG)
    if number >= logging.ERROR and line:
        pending.errors.append(line)
        del pending.errors[:-4]
    if pending.exception is not None:
        number = logging.DEBUG  # that it was told to stop is no error
    if line:
        log.log(number, "%s", line)


def pyllama_on_load_progress(progress: float, user_data: Any) -> bool:
    """Called while weights are read; False stops loading."""
    assert _loaded is not None
    if user_data:
        _loaded.ffi.from_handle(user_data)(float(progress))
    return pending.exception is None


def pyllama_on_poll(data: Any) -> int:
    """Called now and then during a long computation: entering Python runs signal handlers."""
    return 0 if pending.exception is None else 1


def pyllama_on_wait(data: Any) -> int:
    """Called now and then while a worker is waited for, as above. 1: give the worker up."""
    began, *again = pending.interrupted or (math.inf,)
    return int(bool(again) or time.monotonic() - began > PATIENCE_S)


def on_signal_handler_error(kind: Any, value: BaseException, traceback: Any) -> None:
    """Park an exception of a signal handler, and note the time."""
    pending.interrupted += (time.monotonic(),)
    on_callback_error(kind, value, traceback)


def be_patient_no_longer() -> None:
    """Before this thread frees something because of a Ctrl-C that came while nothing waited: give a
    silent worker PATIENCE_S from now on."""
    pending.interrupted = pending.interrupted or (time.monotonic(),)


def on_callback_error(kind: Any, value: BaseException, traceback: Any) -> None:
    """Park an exception of a callback, Ctrl-C among them; the callback tells C to stop."""
    pending.exception = pending.exception or value


def raise_pending() -> None:
    """Raise what a callback parked, if anything; to be called after any long native call."""
    exception, pending.exception, pending.interrupted = pending.exception, None, ()
    if exception is not None:
        raise exception


def take_recent_errors() -> str:
    """libllama's last error lines on this thread, joined; forgets them."""
    text = "; ".join(pending.errors)
    pending.errors.clear()
    return text


def reason(message: Any, otherwise: str = "no reason given") -> str:
    """Why a native call has failed: the shim's message and libllama's last error lines."""
    assert _loaded is not None
    return "; ".join(filter(None, (_loaded.text(message), take_recent_errors()))) or otherwise


def short_of_memory(reason: str) -> bool:
    """Whether a message of libllama's or of our shim's is about memory."""
    return bool(_NO_MEMORY.search(reason))
