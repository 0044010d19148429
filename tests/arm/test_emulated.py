"""The build for 64-bit ARM, cross-compiled, passes tests that an emulator runs on two CPUs.

    pytest -m arm_build tests/arm      # 6 minutes of two cores; the second time 2

Needs Debian's g++-aarch64-linux-gnu, qemu-user and apt-get, which fetches a Python for ARM.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm"
TOOLCHAIN = ROOT / "bindings" / "cmake" / "aarch64-linux-gnu.cmake"
#: The generation that ggml takes for a CPU. The first has i8mm and SVE of 128 bits (Neoverse V2);
#: the other has neither.
CPUS = {"max,sve-max-vq=1": "armv8.6_1", "neoverse-n1": "armv8.2_2"}
VARIANTS = ("upstream", "patched")
#: Upstream's bits with all patches off; going back after rejected drafts.
CHOSEN = (
    "tests/ffi/test_declarations.py",
    "tests/ffi/test_products.py::test_a_column_has_the_bits_that_it_has_alone[Q4_K-5]",
    "tests/regression/test_going_back.py::test_each_goes_back_as_far_as_it_likes[demo-order0]",
    "tests/regression/test_going_back.py::test_by_a_checkpoint_of_its_own[demo]",
    "tests/regression/test_variants.py::test_same_logits[demo_file]",
)
#: The text without drafts, in the smallest batches: on the CPU that is emulated faster.
MORE = {
    "neoverse-n1": ("tests/regression/test_same_text.py::test_drafts_change_no_text[batches of 5]",)
}
MISSING = [
    name
    for name in ("cmake", "ninja", "aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg")
    if shutil.which(name) is None
]
pytestmark = [
    pytest.mark.arm_build,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
]


def run(*words: object, **variables: str) -> str:
    """What a command says, which succeeds."""
    command, environment = [str(word) for word in words], {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=FOLDER)
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python() -> Path:
    """The folder of a Python for ARM, with what the package and its tests import."""
    root, apt = FOLDER / "root", FOLDER / "apt"
    if not root.exists():
        for part in ("state/lists/partial", "cache/archives/partial"):
            (apt / part).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        options = {"Dir::State": f"{apt}/state", "Dir::State::status": f"{apt}/status"}
        options |= {"Dir::Cache": f"{apt}/cache", "APT::Sandbox::User": ""}
        options |= {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
        lines = (f'{name} "{value}";\n' for name, value in options.items())
        (apt / "apt.conf").write_text("".join(lines))
        here = {"APT_CONFIG": str(apt / "apt.conf")}
        run("apt-get", "-qq", "update", **here)
        install = ("apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "install")
        run(*install, "python3", "libgomp1", "libstdc++6", **here)
        for package in (apt / "cache" / "archives").glob("*.deb"):
            run("dpkg", "-x", package, FOLDER / "unpacked")
        (program,) = (FOLDER / "unpacked" / "usr" / "bin").glob("python3.*[0-9]")
        needed = [r for r in metadata.requires("pyllama-mtp") or () if "extra ==" not in r]
        platforms = [f"--platform=manylinux_2_{n}_aarch64" for n in (17, 28)]
        target = FOLDER / "unpacked" / "usr" / "lib" / "python3" / "dist-packages"
        install = (sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", *platforms)
        version = program.name.removeprefix("python")
        run(*install, f"--python-version={version}", "--target", target, "pytest", *needed)
        (FOLDER / "unpacked").rename(root)
    return root


@pytest.fixture(scope="module")
def package(python: Path) -> Path:
    """The package for ARM, where that Python finds it."""
    build = FOLDER / "build"
    defines = {
        "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN,
        "PYLLAMA_CPU_GENERATIONS": ";".join(CPUS.values()),
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
    }
    run("cmake", "-G", "Ninja", "-S", ROOT / "bindings", "-B", build, *(
        f"-D{name}={value}" for name, value in defines.items()
    ))  # fmt: skip
    libraries = [f"{kind}-{variant}" for kind in ("llama", "shim") for variant in VARIANTS]
    backends = [f"ggml-cpu-{name}" for name in CPUS.values()]
    run("ninja", "-C", build, "_native", *libraries, *backends)
    package = python / "usr" / "lib" / "python3" / "dist-packages" / "pyllama_mtp"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "pyllama_mtp", package)
    for name in ("_native.abi3.so", "generated/build_info.json"):
        shutil.copy(build / name, package)
    for variant in VARIANTS:
        shutil.copytree(build / "lib" / variant, package / "lib" / variant)
    for path in build.rglob("libggml*.so*"):
        shutil.copy(path, package / "lib")
    return package


@pytest.fixture(scope="module")
def said(python: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is printed on each CPU, all at once: the generation of the backend, the tests' output.

    Processes that tests start are emulated, too, as the name of Python is that of a script.
    """
    (program,) = (python / "usr" / "bin").glob("python3.*[0-9]")
    code = "from pyllama_mtp.llama import native; print(native.load().cpu_generation())"
    here = {"PYTHONHOME": str(python / "usr"), "PYTHONDONTWRITEBYTECODE": "1"}

    folders = {cpu: tmp_path_factory.mktemp(CPUS[cpu]) for cpu in CPUS}  # pytest's: one thread only

    def on(cpu: str) -> str:
        folder = folders[cpu]
        script = folder / "python"
        emulator = f"exec qemu-aarch64 -cpu {cpu} -L {python} -0 {script} {program}"
        script.write_text(f'#!/bin/sh\n{emulator} "$@"\n')
        script.chmod(0o755)
        shutil.copytree(ROOT / "tests", folder / "tests")
        options = ("-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", folder)
        tests = (folder / name for name in (*CHOSEN, *MORE.get(cpu, ())))
        return run(script, "-c", code, **here) + run(
            script, "-m", "pytest", "--durations=20", *options, *tests, **here
        )

    with ThreadPoolExecutor() as pool:
        return dict(zip(CPUS, pool.map(on, CPUS), strict=True))


@pytest.mark.parametrize("cpu", CPUS)
def test_on(said: dict[str, str], cpu: str) -> None:
    generation, _, tests = said[cpu].partition("\n")
    print(tests)
    assert generation == CPUS[cpu]
    assert " passed" in tests and "skipped" not in tests
