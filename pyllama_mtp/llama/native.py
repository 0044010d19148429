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
import importlib.util
import json
import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import child
from ..errors import (
    CopyError,
    DecodeAborted,
    FatalDecodeError,
    InsufficientMemoryError,
    InvalidBatchError,
    LibraryError,
    NoKVSlotError,
    PyllamaMtpError,
    UsageError,
)

T = TypeVar("T", bound="Owned")

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


#: Switches for patches of the CPU backend.
CPU_SWITCHES = {
    "small_batch": "products of few columns, and of experts of few rows, read each weight once; "
    "weights of a model that is loaded while this is off are repacked, as upstream does",
    "large_batch": "a prompt's products go through one kernel for all types (not where small_batch "
    "is off), its delta nets and convolutions are computed in tiles; results differ by rounding",
    "few_rows_attention": "flash attention of 1 to 8 rows reads K and V once for all rows and "
    "heads; results differ by rounding",
}


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
        switches: those that were set, see :meth:`set_cpu_switch`.
    """

    variant: str
    folder: Path
    stamp: dict[str, Any]
    ffi: Any
    lib: Any
    switches: dict[str, bool] = field(default_factory=dict)

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

    def set_cpu_switch(self, name: str, on: bool) -> bool:
        """Turn patches of the CPU backend on or off, for the whole process, while nothing computes.

        All are on in the patched variant, and off in upstream's. False: no loaded CPU backend has
        the switch.

        Args:
            name: a key of :data:`CPU_SWITCHES`, which says what each does.
        """
        self.switches[name] = on
        return bool(self.lib.pyllama_set_cpu_switch(name.encode(), on))

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
            if found := re.search(r"/libggml-cpu-([\w.]+)\.so$", maps, re.MULTILINE):
                return found[1]
        return ""

    def system_info(self) -> str:
        """One line of llama.cpp about the backends and their features."""
        return self.text(self.lib.llama_print_system_info())

    def text(self, pointer: Any) -> str:
        """A C string as str; the empty string for NULL."""
        return self.ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


_loaded: Library | None = None
_loading = threading.RLock()


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
    with _loading:
        if _loaded is not None:
            if library and resolve(library) != _loaded.folder:
                raise LibraryError(
                    f"this process has loaded {_loaded.folder} and cannot load {library!r} as "
                    "well: both carry the same library names. Use a second process."
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
        child.variables[ENVIRONMENT_VARIABLE] = str(folder)
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
    for folder in (library.folder, library.folder.parent):
        lib.ggml_backend_load_all_from_path(str(folder).encode())
        if any(device.kind == "cpu" for device in library.devices()):
            # Where no backend is loaded, it takes those of the current folder.
            lib.llama_backend_init()
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
#: What is wrong where logits are no numbers.
NAN = "the model's logits are NaN: damaged weights, or a kernel bug"
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
#: What llama.cpp and ggml say when they get no memory; ggml's assertions name the pointer.
_NO_MEMORY = re.compile(r"alloc|memory|mem_buffer|!= NULL|address space")


def pyllama_on_log(level: int, text: Any, user_data: Any) -> None:
    """libllama's log lines go to the logger "pyllama_mtp.llama.native" (its INFO is our DEBUG)."""
    assert _loaded is not None
    number = _LEVELS.get(level, logging.DEBUG)
    if not log.isEnabledFor(number) and number < logging.ERROR:
        return  # hundreds of lines for each context
    line = _loaded.text(text).rstrip("\n")
    if number >= logging.ERROR and line:
        pending.errors.append(line)
        del pending.errors[:-4]
    if pending.exception is not None:
        number = logging.DEBUG  # that it was told to stop is no error
    if "find_slot: non-consecutive token position" in line:
        number = logging.DEBUG  # positions of images are
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


def decode_error(code: int, message: str) -> PyllamaMtpError:
    """The exception for a return code of ``llama_decode`` or of our shim (there is no other place).

    Args:
        code: non-zero; see ``llama_decode`` in llama.h and PYLLAMA_* in pyllama_shim.h.
        message: the native side's reason, may be empty.
    """
    lib = load().lib
    why = f": {message}" if message else ""
    if code == 1:
        return NoKVSlotError(
            f"no room in the KV cache{why}. Use a longer n_ctx (--n-ctx) or a shorter prompt.", code
        )
    if code == 2:
        return DecodeAborted("the computation was interrupted", code)
    if code in (-1, lib.PYLLAMA_BATCH_REFUSED):
        return InvalidBatchError(f"llama.cpp refused the batch{why}", code)
    if code == lib.PYLLAMA_FORKED:
        return UsageError(
            f"{message}: use n_threads=1, a thread of its own, or start processes with spawn"
        )
    ran_out = code in (-2, lib.PYLLAMA_OUT_OF_MEMORY, lib.PYLLAMA_NO_ROOM)
    if ran_out or (code < -2 and short_of_memory(message)):
        return InsufficientMemoryError(
            f"out of memory{why}: use a smaller n_ctx, n_batch, n_ubatch or fewer threads"
        )
    return FatalDecodeError(f"decode failed with code {code}{why}", code)


# -- owners of native memory: `with`, one process, one thread at a time ----------------------------


class Owned:
    """A context manager that calls :meth:`close`, which may be called more than once."""

    def close(self) -> None:
        """Free the native memory."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> str:
        """For copies and pickles, which would free the memory twice. Raises CopyError."""
        name = type(self).__name__
        raise CopyError(f"a {name} cannot be copied or pickled: it owns native memory")

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C, or the program ends
            be_patient_no_longer()
        self.close()


class HostMemory:
    """Host memory that is used again: writing to fresh pages takes several times as long.

    Args:
        on_gpu: page-locked memory, to which a GPU copies several times as fast.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._unused: dict[int, list[Any]] = {}  # by size
        self._message = load().ffi.new("char[256]")

    def take(self, size: int) -> memoryview:
        """[size] bytes of any contents, which come back here when nobody refers to them any more.

        Raises:
            InsufficientMemoryError: there is no room.
        """
        ffi, lib = load().ffi, load().lib
        unused = self._unused.setdefault(size, [])
        try:
            memory = unused.pop()
        except IndexError:
            message = self._message
            memory = lib.pyllama_host_memory(size, self._on_gpu, message, len(message))
            if not memory:
                raise InsufficientMemoryError(f"no memory for a state of {size} bytes") from None
            memory = ffi.gc(memory, partial(_free_here, lib.ggml_backend_buffer_free, os.getpid()))
        start = ffi.cast("uint8_t *", lib.ggml_backend_buffer_get_base(memory))
        return memoryview(ffi.buffer(ffi.gc(start, lambda _: unused.append(memory)), size))


def _free_here(free: Callable[[Any], None], process: int, memory: Any) -> None:
    if os.getpid() == process:  # not in a forked child: the memory is a device's, too
        free(memory)


class OfThisProcess:
    """An object that a forked child must not use: the child has its memory, but not its threads.

    Subclasses call :meth:`claim` once, when they are made.
    """

    def claim(self) -> None:
        """Have :meth:`disown` called in every child that is forked from now on."""
        _claimed.add(self)

    def disown(self) -> None:
        """In a child: forget the native memory, without freeing it."""
        raise NotImplementedError


_claimed: weakref.WeakSet[OfThisProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for one in list(_claimed):
        one.disown()


os.register_at_fork(after_in_child=_disown_all)


class Exclusive(OfThisProcess):
    """A lock for ``with`` that refuses a second thread at once, and the same thread within it.

    Ctrl-C may raise between any two lines of Python, and at the beginning of any function. So a
    call of C takes the lock and notes it, and another one releases it.
    """

    def __init__(self, what: str) -> None:
        self._what, self._lock = what, threading.Lock()
        self.claim()

    def disown(self) -> None:
        """The thread that held the lock is not in this process."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        taken = list[bool]()
        try:
            taken.extend(map(self._lock.acquire, [False]))
            if not taken[0]:
                raise self._refusal()
        except BaseException:
            if any(taken):
                self._lock.release()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:
        """Releases the lock; ``with`` looks it up before it enters."""
        return self._lock.__exit__

    def _refusal(self) -> UsageError:
        return UsageError(
            f"{self._what} is used by two threads at once, or from within its own callback; "
            "give each thread its own (several may share a model)"
        )


# -- where a variant's libraries lie, and whether they belong to this package ----------------------


#: Names a folder with a variant's libraries, or a variant; the default is "patched".
ENVIRONMENT_VARIABLE = "PYLLAMA_MTP_LIB"
VARIANTS = ("patched", "upstream")
#: Of shared libraries. Backends are modules, whose suffix is .so on macOS, too.
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
SHIM = f"libpyllama-mtp{SUFFIX}"
STAMP = re.compile(rb'\{"pyllama_stamp": 1[^{}]*\}')


def _package_folders() -> list[Path]:
    """Folders that may hold ``lib/`` and ``build_info.json``: the extension's, the package's."""
    spec = importlib.util.find_spec("pyllama_mtp._native")
    beside = [Path(spec.origin).parent] if spec and spec.origin else []
    return list(dict.fromkeys([*beside, Path(__file__).resolve().parents[1]]))


def _candidates(choice: str | os.PathLike[str]) -> list[Path]:
    if choice in VARIANTS:
        return [folder / "lib" / choice for folder in _package_folders()]
    return [Path(choice).expanduser().resolve()]


def find_libraries() -> list[tuple[str, Path, str]]:
    """The variants' folders that would be tried: (label, folder, "ok" or the missing file)."""
    rows = []
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    for label in [*VARIANTS, *([chosen] if chosen and chosen not in VARIANTS else [])]:
        for folder in _candidates(label):
            status = "ok" if (folder / SHIM).is_file() else f"no {SHIM} there"
            rows.append((label, folder, status))
    return rows


def expected_stamp() -> dict[str, Any]:
    """The build of this package: upstream_commit, and the hash of each variant's patch series."""
    for folder in _package_folders():
        path = folder / "build_info.json"
        if path.is_file():
            return dict(json.loads(path.read_text()))
    raise LibraryError(
        "this copy of pyllama_mtp was never built: no build_info.json in "
        + ", ".join(str(folder) for folder in _package_folders())
        + ". Run `pip install .` in the project folder; if that is done, run from another folder, "
        "so that the installed package is imported and not the sources."
    )


def read_stamp(folder: Path) -> dict[str, Any]:
    """The stamp in the folder's libllama, read from the file's bytes. Raises LibraryError: no
    libllama there, or one without a stamp (not built by this package)."""
    # libllama.so.0 carries the stamp; libllama.so beside it stands in for a link (shim/dropin.cpp).
    libraries = sorted(folder.glob("libllama.*"), reverse=True)
    if not libraries:
        raise LibraryError(f"{folder} holds {SHIM} but no libllama{SUFFIX}: an incomplete build.")
    stamp = next(filter(None, (STAMP.search(path.read_bytes()) for path in libraries)), None)
    if not stamp:
        raise LibraryError(
            f"{libraries[0]} carries no stamp: it was not built by this package. Build one with "
            f"`pip install --force-reinstall .`, or unset {ENVIRONMENT_VARIABLE}."
        )
    return dict(json.loads(stamp[0]))


def check_stamp(stamp: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Refuse libraries built from another upstream commit or another patch series. Raises
    LibraryError: says which of the two differs, and what to do."""
    variant = stamp.get("variant")
    pairs = [
        ("upstream commit", stamp.get("upstream_commit"), expected["upstream_commit"]),
        ("patch series", stamp.get("series"), expected["series"].get(variant)),
    ]
    for what, built, wanted in pairs:
        if built != wanted:
            raise LibraryError(
                f"the libraries in {folder} (variant {variant!r}) do not belong to this package: "
                f"{what} {built}, but the bindings were built for {wanted}. Build both together: "
                f"`pip install --force-reinstall .`, and unset {ENVIRONMENT_VARIABLE} if it points "
                "to an older build."
            )


def check_backends(expected: dict[str, Any], folder: Path) -> None:
    """Refuse a backend from a wheel of its own, such as pyllama-mtp-vulkan, if it was built with
    another pyllama-mtp. Raises LibraryError."""
    for note in folder.glob("libggml-*.json"):
        if json.loads(note.read_text()) != expected:
            name = f"pyllama-mtp-{note.stem.removeprefix('libggml-')}"
            raise LibraryError(
                f"{note.with_suffix('.so')} was built with another pyllama-mtp than this one. "
                f"Install both from one release: `pip install --upgrade pyllama-mtp {name}`, or "
                f"remove the backend: `pip uninstall {name}`."
            )


def cpu_flags() -> frozenset[str] | None:
    """The CPU's feature flags (/proc/cpuinfo), or None where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return None
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(line[1].split()) if line else None


def resolve(choice: str | os.PathLike[str]) -> Path:
    """The folder of a variant, by the variant's name or the folder's. Raises LibraryError."""
    tried = _candidates(choice)
    for folder in tried:
        if (folder / SHIM).is_file():
            return folder
    lines = "\n".join(f"  {folder / SHIM}" for folder in tried)
    raise LibraryError(
        f"no native library for {choice!r}. Tried:\n{lines}\n"
        "Build the package with `pip install .`, or point "
        f"{ENVIRONMENT_VARIABLE} (or --lib) to a folder that holds {SHIM} and libllama."
    )


def locate(library: str | os.PathLike[str] | None = None) -> tuple[Path, dict[str, Any]]:
    """The folder of a variant, and its stamp. The argument is that of :func:`.native.load`. Raises
    LibraryError: nothing found (all paths tried are listed), stamp mismatch (a backend's, too), or
    CPU features that this machine lacks."""
    expected = expected_stamp()
    folder = resolve(library or os.environ.get(ENVIRONMENT_VARIABLE) or "patched")
    stamp = read_stamp(folder)
    check_stamp(stamp, expected, folder)
    check_backends(expected, folder.parent)
    needed, flags = set(str(stamp.get("cpu_features", "")).split()), cpu_flags()
    if flags is not None and (missing := sorted(needed - flags)):
        raise LibraryError(
            f"the libraries in {folder} were built for CPU features that this machine lacks: "
            f"{', '.join(missing)}. Build them here (`pip install --force-reinstall .`), or build "
            "for every generation with `-C cmake.define.PYLLAMA_CPU_ALL=ON`."
        )
    return folder, stamp


# -- how long OpenMP's threads spin at a barrier before they sleep ---------------------------------
#
# GCC's libgomp spins 300,000 rounds by default, which takes milliseconds: longer than a time slice
# of the system. When other programs want the cores too, a thread that has its core burns it waiting
# for a thread that has none, at every barrier of every layer. With far fewer rounds an idle machine
# loses nothing on models of real size, and a busy one keeps most of its speed (bench/README.md has
# the command).
#
# Every Python thread that decodes has a team of OpenMP threads of its own, which stays. When all
# teams together have more threads than there are cores, libgomp spins 100 rounds only, and each
# barrier becomes a sleep: a model loaded in one thread and used in another, as in a server, was
# half as fast. Under the policy "active" that number is 1,000.
#
# The user's environment variables win. libgomp reads them once, when it is loaded: a program that
# loads libgomp before us (some builds of PyTorch do) decides for itself.


#: Rounds of spinning, some 60 to 200 microseconds: more than barriers take where all threads run.
ROUNDS = 3000
#: Either is the user's word on it (libgomp's manual, "Environment Variables").
VARIABLE = "GOMP_SPINCOUNT"
USER_VARIABLES = (VARIABLE, "OMP_WAIT_POLICY")


@contextmanager
def little_spinning() -> Iterator[None]:
    """Libraries that are loaded in this block spin little; programs started later do not."""
    if any(name in os.environ for name in USER_VARIABLES):
        yield
        return
    given = {VARIABLE: str(ROUNDS), "OMP_WAIT_POLICY": "active"}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
