"""What the machine has for a CUDA build and the measurements, and what is missing.

Every check stands alone and reports in one line; nothing here changes anything.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit.paths import ROOT

CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
#: Modules by what they are for; all of them are in the bundle unless it was told otherwise.
BUILD_MODULES = ("scikit_build_core", "cffi", "cmake", "ninja", "pip")
RUN_MODULES = ("numpy", "gguf", "rich", "jinja2")
TEST_MODULES = ("pytest", "jsonschema")
#: Free disk: two builds with CUDA (3 GB each) and some results; models come on top.
BUILD_BYTES = 8e9


@dataclass(frozen=True)
class Finding:
    """One line of the report: `todo` says what to do if it is not ok."""

    name: str
    ok: bool
    detail: str
    todo: str = ""
    gpu: bool = False  # only needed to build for a GPU and to use it, which a dry run does not

    def line(self, dry_run: bool) -> str:
        """For the screen."""
        if self.ok:
            return f"ok       {self.name:13} {self.detail}"
        state = "not here" if self.gpu and dry_run else "MISSING "
        return f"{state} {self.name:13} {self.detail}; {self.todo}"


@dataclass(frozen=True)
class Gpu:
    """The first GPU of nvidia-smi. `memory_bytes` is all it has, `capability` such as "9.0"."""

    name: str
    driver: str
    capability: str
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """For CMAKE_CUDA_ARCHITECTURES: machine code of this GPU alone, which compiles fastest."""
        number = self.capability.replace(".", "")
        return f"{number}{'a' if int(number) >= 120 else ''}-real"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def find_gpu() -> Gpu | None:
    """The GPU, or None."""
    fields = "name,driver_version,compute_cap,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpu(done.stdout) if done.returncode == 0 else None


def parse_gpu(text: str) -> Gpu | None:
    """The first line of nvidia-smi's answer; None when it is not understood."""
    parts = [part.strip() for part in text.strip().splitlines()[0].split(",")] if text else []
    if len(parts) != 4 or not re.fullmatch(r"\d+\.\d+", parts[2]) or not parts[3].isdigit():
        return None
    return Gpu(parts[0], parts[1], parts[2], int(parts[3]) * 2**20)


def find_nvcc() -> str | None:
    """The path of nvcc."""
    extra = [os.environ[name] + "/bin" for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ]
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *extra, *CUDA_FOLDERS]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvcc_version(nvcc: str) -> str:
    """Such as "13.0"; "" when it does not say."""
    found = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    return found[1] if found else ""


def driver_cuda() -> str:
    """The newest CUDA that the driver can run, such as "13.0"; "" without a driver."""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", _output("nvidia-smi"))
    return found[1] if found else ""


def check_gpu(gpu: Gpu | None) -> Iterator[Finding]:
    """Driver and GPU."""
    if gpu is None:
        todo = "install the NVIDIA driver, or use a machine with a GPU (nvidia-smi must list one)"
        yield Finding("GPU", False, "nvidia-smi names none", todo, gpu=True)
        return
    memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
    detail = f"{gpu.name}, {memory}, compute capability {gpu.capability}, driver {gpu.driver}"
    yield Finding("GPU", True, detail)


def check_toolkit() -> Iterator[Finding]:
    """nvcc, that the driver can run what it makes, cuBLAS, a host compiler."""
    nvcc = find_nvcc()
    version = nvcc_version(nvcc) if nvcc else ""
    todo = "install the CUDA toolkit, or set CUDA_HOME to its folder"
    yield Finding("nvcc", bool(nvcc), f"release {version}" if nvcc else "not found", todo, gpu=True)
    driver = driver_cuda()
    if version and driver and int(version.split(".")[0]) > int(driver.split(".")[0]):
        todo = f"install a toolkit of CUDA {driver}, or a newer driver"
        yield Finding("driver", False, f"runs CUDA {driver}, nvcc is {version}", todo, gpu=True)
    yield cublas(nvcc, version)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield Finding("compiler", bool(compiler), Path(compiler or "no c++").name, "install g++")


def cublas(nvcc: str | None, version: str) -> Finding:
    """cuBLAS of the toolkit, or of the nvidia-cublas package as bindings/cmake finds it."""
    sys.path.insert(0, str(ROOT / "bindings" / "cmake"))
    try:
        from find_cublas import package_root
    finally:
        sys.path.pop(0)
    toolkit = Path(nvcc).resolve().parent.parent if nvcc else None
    folders = [toolkit, *(Path(folder).parent for folder in CUDA_FOLDERS)]
    for folder in filter(None, folders):
        headers = [
            *folder.glob("include/cublas_v2.h"),
            *folder.glob("targets/*/include/cublas_v2.h"),
        ]
        libraries = [*folder.glob("lib*/libcublas.so"), *folder.glob("targets/*/lib/libcublas.so")]
        if headers and libraries:
            return Finding("cuBLAS", True, "of the toolkit")
    root = package_root()
    if root:
        return Finding("cuBLAS", True, "of the nvidia-cublas package")
    wanted = version or "13.0"
    todo = f"`pip install 'nvidia-cublas=={wanted}.*'` (some 400 MB, not in the bundle)"
    return Finding("cuBLAS", False, "headers or library not found", todo, gpu=True)


def lacking(modules: Sequence[str]) -> list[str]:
    """Those that cannot be imported. cmake and ninja may be programs instead."""
    programs = ("cmake", "ninja")
    return [
        name
        for name in modules
        if importlib.util.find_spec(name) is None and not (name in programs and shutil.which(name))
    ]


def check_python(wheels: Path | None) -> Iterator[Finding]:
    """Python and its packages; what lies in the bundle is not missing."""
    new_enough = sys.version_info >= (3, 10)
    yield Finding("Python", new_enough, platform.python_version(), "use Python 3.10 or newer")
    have = {
        path.name.split("-")[0].lower().replace("-", "_")
        for path in (wheels.glob("*.whl") if wheels else ())
    }
    for name, modules in (
        ("to build", BUILD_MODULES),
        ("to run", RUN_MODULES),
        ("to test", TEST_MODULES),
    ):
        absent = [module for module in lacking(modules) if module not in have]
        detail = f"lacks {', '.join(absent)}" if absent else ", ".join(modules)
        todo = f"`pip install {' '.join(absent)}`, or bring them with the step `bundle`"
        yield Finding(name, not absent, detail, todo, gpu=modules is BUILD_MODULES)


def check_space(folder: Path, needed: float, name: str) -> Finding:
    """Free disk in a folder that may not exist yet."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    detail = f"{free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB needed"
    todo = "free some space, or give another folder (--work, --models)"
    return Finding(name, free >= needed, detail, todo)
