"""A build with CUDA for one architecture: 40 minutes of one core, so only when it is asked for.

    pytest -m cuda_build tests/cuda          # where nvcc is; no GPU is needed

PYLLAMA_TEST_CUDA_ARCHITECTURE names another one than 90. The build folder stays in build/cuda, so
what was cut goes on. -rP shows what doctor says, for bench/results/builds.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = os.environ.get("PYLLAMA_TEST_CUDA_ARCHITECTURE", "90")
NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")


def said(*command: object, folder: Path, **environment: str) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command[:6]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.cuda_build
@pytest.mark.skipif(NVCC is None, reason="nvcc is not here")
def test_one_architecture(tmp_path: Path) -> None:
    """Compiles with flash attention, links, loads without a GPU, and says what it is."""
    begun, site, native = time.monotonic(), tmp_path / "site", ROOT / "build" / "cuda"
    command = [sys.executable, "-m", "pip", "install", ROOT, "-v", "--no-deps", "--target", site]
    command += ["-C", f"build-dir={native}", "-C", "cmake.define.GGML_CUDA=ON"]
    command += ["-C", f"cmake.define.CMAKE_CUDA_ARCHITECTURES={ARCHITECTURE}"]
    said(*command, folder=tmp_path)
    minutes = (time.monotonic() - begun) / 60
    objects = [*native.glob("ggml/src/ggml-cuda/**/*.cu.o")]
    assert sum("fattn" in path.name for path in objects) > 20, "no flash attention"
    assert f"compute_{ARCHITECTURE}" in (native / "build.ninja").read_text()
    backend = site / "pyllama_mtp" / "lib" / "libggml-cuda.so"
    package = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    if package.exists():  # where it would lie beside an installed pyllama_mtp
        (site / "nvidia").symlink_to(package.resolve())
    known = {"PYTHONPATH": str(site), "LD_LIBRARY_PATH": str(Path(str(NVCC)).parents[1] / "lib64")}
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    said(sys.executable, "-c", load, backend, folder=tmp_path, **known)
    doctor = said(sys.executable, "-m", "pyllama_mtp", "doctor", folder=tmp_path, **known)
    assert f"CUDA {ARCHITECTURE}" in doctor and "everything is in order" in doctor
    print(f"{len(objects)} objects, {minutes:.0f} minutes, {backend.stat().st_size} bytes")
    print(doctor)
