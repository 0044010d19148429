"""An instrumented build, and a package around it that Python can import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("llama-patched", "shim-patched", "_native", "ggml", "ggml-cpu", "ggml-rpc")


LOGS = "PYLLAMA_SANITIZER_LOGS"
#: Each runtime has a setter of this name, and the loader binds both to the first one, so that the
#: option log_path reaches one of them only. Every interpreter therefore calls each by its library.
SITE = f"""
import ctypes, os
logs = os.environ.get("{LOGS}")
for name in os.environ.get("LD_PRELOAD", "").split() if logs else ():
    for runtime in ("asan", "ubsan"):
        if f"lib{{runtime}}." in name:
            ctypes.CDLL(name).__sanitizer_set_report_path(f"{{logs}}/{{runtime}}".encode())
"""


class SanitizeError(Exception):
    """A problem the user can mend; the message says how."""


def build(folder: Path, sanitizers: str, jobs: int) -> None:
    """Configure and compile the patched variant with sanitizers in `folder`."""
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "bindings"), "-B", str(folder)]
    configure += [f"-DPYLLAMA_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["ninja", "-C", str(folder), f"-j{jobs}", *TARGETS]):
        if subprocess.run(command).returncode != 0:
            raise SanitizeError(f"the instrumented build failed: {' '.join(command)}")


def assemble(folder: Path) -> Path:
    """Put the sources and the instrumented libraries together; returns the folder to import from.

    The upstream variant, which the tests compare with, is the ordinary build's: it shares ggml with
    the patched variant, and nothing in it is ours to check.
    """
    reference = ROOT / "pyllama_mtp" / "lib" / "upstream"
    if not reference.is_dir():
        reference = _installed() / "lib" / "upstream"
    package = folder / "package" / "pyllama_mtp"
    shutil.rmtree(package, ignore_errors=True)
    native = ("lib", "licenses", "*.so", "build_info.json", "__pycache__")
    shutil.copytree(ROOT / "pyllama_mtp", package, ignore=shutil.ignore_patterns(*native))
    library = package / "lib"
    (library / "patched").mkdir(parents=True)
    shutil.copytree(reference, library / "upstream")
    shutil.copy(_one(folder, "_native*.so"), package)
    shutil.copy(folder / "generated" / "build_info.json", package)
    for pattern in ("libggml.so.*", "libggml-base.so.*", "libggml-cpu.so", "libggml-rpc.so"):
        shutil.copy(_one(folder, pattern), library)
    for pattern in ("libllama.so.*", "libpyllama-mtp.so"):
        shutil.copy(_one(folder / "lib" / "patched", pattern), library / "patched")
    (package.parent / "sitecustomize.py").write_text(SITE)
    return package.parent


def _installed() -> Path:
    """The folder of the installed package, looked for outside the sources."""
    code = "import pyllama_mtp; print(pyllama_mtp.__path__[0])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        raise SanitizeError("the upstream variant to compare with is missing: run pip install .")
    return Path(done.stdout.strip())


def _one(folder: Path, pattern: str) -> Path:
    """The one file of that name, not a link, in `folder` or below its CMake output folders."""
    places = (folder, folder / "backends", folder / "ggml" / "src")
    for place in places:
        found = [path for path in sorted(place.glob(pattern)) if not path.is_symlink()]
        if found:
            return found[0]
    raise SanitizeError(f"{pattern} was not built in {folder}; build without --no-build")


def environment(package: Path, logs: Path) -> dict[str, str]:
    """The variables of a run: the runtimes loaded before the interpreter, logs into a folder."""
    compiler = os.environ.get("CXX", "g++")
    preload = []
    # libstdc++ too: the interpreter does not load it, and ASan must find __cxa_throw at the start.
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            raise SanitizeError(f"{compiler} has no {name}: install its sanitizer runtimes")
        preload.append(os.path.realpath(path))
    logs.mkdir(parents=True, exist_ok=True)
    # A request that cannot be met is an error for the caller, as without ASan, and not a finding.
    address = "detect_leaks=0:allocator_may_return_null=1"
    undefined = "print_stacktrace=1:halt_on_error=0"
    return {
        **os.environ,
        "PYTHONPATH": str(package),
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": address,
        "UBSAN_OPTIONS": undefined,
        LOGS: str(logs),
        "PYLLAMA_TEST_TIME_LIMIT": "900",  # of an interpreter that a test starts: all is slow here
        "OMP_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",  # so that what Python keeps of ours has redzones as well
    }
