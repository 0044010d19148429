"""The wheels for every x86-64 CPU, every ARM CPU and Vulkan: built as docs/building.md says, and
used where no compiler is.

    pytest -m wheel_build tests/wheel        # 30 minutes of two cores

The build folders stay in build/wheel-ARCH, so what was cut goes on. -rP shows what auditwheel and
doctor say, for bench/results/builds.md.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What must run on this machine if it has what each needs; the last one is any x86-64 CPU's.
CHOSEN = {"zen4": "avx512_bf16", "skylakex": "avx512bw", "haswell": "avx2", "x64": "sse2"}
LAVAPIPE = {f"GGML_VK_{name}": "1" for name in ("DISABLE_F16", "DISABLE_COOPMAT")}
LAVAPIPE["GGML_VK_VISIBLE_DEVICES"] = "0"
#: With MTP and without the same text; which of our kernels are there.
PROGRAM = """
import json
from pyllama_mtp import Model, Session, Settings, native
from pyllama_mtp.models.demo import demo_path
library = native.load()
said = {"generation": library.cpu_generation(), "few_columns": library.few_columns(12)}
switches = ("small_batch", "large_batch", "few_rows_attention")
said["switches"] = [library.set_cpu_switch(name, True) for name in switches]
with Model(demo_path()) as model:
    said["text"] = []
    for depth in (0, 3):
        with Session(model, Settings(n_ctx=1024, draft_n_max=depth)) as session:
            answer = session.generate("def read(path):\\n" * 40, max_tokens=60).run()
            said["text"].append(answer.text)
    said["accepted"] = sum(answer.telemetry.accepted)
print(json.dumps(said))
"""


def said(*command: object, folder: Path, **environment: str) -> str:
    """The output of a command that succeeds."""
    words = [str(word) for word in command]
    env = environment or {**os.environ}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, f"{words[:6]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def built(arch: str, folder: Path, *words: str) -> tuple[Path, str]:
    """A wheel, and what auditwheel says of it; it runs with glibc 2.28."""
    page = (ROOT / "docs" / "building.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python (bindings/wheel.py)$", page, re.M)
    said(sys.executable, command, "--arch", arch, "-w", folder / "dist", *words, folder=ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    shown = " ".join(said("auditwheel", "show", wheel, folder=folder).split())
    tag = re.search(rf"manylinux_2_(\d+)_{arch}", wheel.name)
    assert tag and int(tag[1]) <= 28, wheel.name
    # A backend needs libraries that are not in its wheel.
    assert words or f'following platform tag: "{tag[0]}"' in shown, shown
    return wheel, shown


@pytest.mark.wheel_build
@pytest.mark.skipif(shutil.which("auditwheel") is None, reason="auditwheel is not here")
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no compiler for ARM")
def test_the_wheel_for_arm(tmp_path: Path) -> None:
    """It has all libraries and generations; tests/arm runs such libraries."""
    wheel, _ = built("aarch64", tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    generations = [name for name in names if "/libggml-cpu-armv" in name]
    assert len(generations) >= 6
    for name in ("_native.abi3.so", "lib/libgomp.so.1", "lib/patched/libllama.so.0"):
        assert f"pyllama_mtp/{name}" in names


@dataclass
class Installed:
    """The x86-64 wheel in an environment without a compiler; `shown`: auditwheel's words, `clean`:
    that environment's variables."""

    wheel: Path
    shown: str
    python: Path
    clean: dict[str, str]

    def run(self, *words: object, **variables: str) -> str:
        """The output of the environment's Python."""
        folder = self.python.parents[2]
        return said(self.python, "-m", *words, folder=folder, **self.clean, **variables)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("x86-64")
    wheel, shown = built("x86_64", folder)
    said(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    clean = {"PATH": str(folder / "venv" / "bin"), "HOME": str(folder)}
    assert not [name for name in ("cc", "gcc", "cmake") if shutil.which(name, path=clean["PATH"])]
    here = Installed(wheel, shown, folder / "venv" / "bin" / "python", clean)
    here.run("pip", "install", wheel)
    return here


of_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("auditwheel") is None,
    reason="the wheel is for x86-64, and auditwheel makes it",
)


@pytest.mark.wheel_build
@of_x86
def test_one_wheel_for_all(installed: Installed) -> None:
    """auditwheel repairs it; without a compiler it installs, and each generation runs."""
    doctor = installed.run("pyllama_mtp", "doctor")
    assert "everything is in order" in doctor
    features = Path("/proc/cpuinfo").read_text().split()
    (package,) = installed.python.parents[1].glob("lib/python*/site-packages/pyllama_mtp")
    print(installed.wheel.name, installed.wheel.stat().st_size, installed.shown, doctor, sep="\n")
    for name, feature in CHOSEN.items():
        if feature in features:
            only(name, package, installed.python, installed.clean)


@pytest.mark.wheel_build
@of_x86
@pytest.mark.skipif(shutil.which("glslc") is None, reason="glslc, which Vulkan needs, is not here")
def test_vulkan_beside_it(installed: Installed, tmp_path: Path) -> None:
    """It computes, on lavapipe."""
    wheel, _ = built("x86_64", tmp_path, "--backend", "vulkan")
    both = f"pyllama-mtp[vulkan] @ {installed.wheel.as_uri()}"
    installed.run("pip", "install", "--no-index", "--find-links", wheel.parent, both)
    doctor = installed.run("pyllama_mtp", "doctor", **LAVAPIPE)
    assert "Vulkan0 computes" in doctor and "everything is in order" in doctor


def only(name: str, package: Path, python: Path, clean: dict[str, str]) -> None:
    """Run with the backend of one generation, whatever else the wheel has."""
    folder = package.parents[3] / name
    shutil.copytree(package, folder / package.name, symlinks=True)
    for library in folder.glob("pyllama_mtp/lib/libggml-cpu-*.so"):
        if library.name != f"libggml-cpu-{name}.so":
            library.unlink()
    environment = {**clean, "PYTHONPATH": str(folder)}
    found = json.loads(said(python, "-c", PROGRAM, folder=folder, **environment))
    ours = name != "x64"
    assert found["generation"] == name and found["few_columns"] is ours
    assert found["text"][0] == found["text"][1] and found["accepted"] > 0
    assert all(found["switches"])
    doctor = said(python, "-m", "pyllama_mtp", "doctor", folder=folder, **environment)
    assert f"loaded here: {name}" in doctor
