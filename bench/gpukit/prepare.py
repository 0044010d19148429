"""The steps up to the measurements: `toolchain`, `build`, `shapes`, `correctness`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchkit.paths import ROOT

from gpukit import bundle
from gpukit.config import Config
from gpukit.machine import find_gpu
from gpukit.state import RunbookError
from gpukit.units import Unit

#: Compiled by the step `toolchain`: the smallest file of the CUDA backend.
OBJECT = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/acc.cu.o"
VERIFY = Path(__file__).with_name("verify.py")
#: Without --n-gpu-layers tests choose nothing; a dry run takes the one that is quick.
DRY_TESTS = ("test_snapshots.py",)


def defines(config: Config) -> list[str]:
    """CMake definitions of a CUDA build for one GPU.

    Without NCCL, which only several GPUs use. Flash attention is compiled for the cache types that
    ggml chooses by itself (GGML_CUDA_FA_ALL_QUANTS is off).
    """
    gpu = config.gpu or find_gpu()
    architecture = gpu.architecture if gpu else "90-real"
    usual = {
        "GGML_CUDA": "ON",
        "CMAKE_CUDA_ARCHITECTURES": architecture,
        "GGML_CUDA_NCCL": "OFF",
    }
    given = dict(define.split("=", 1) for define in config.defines)
    return [f"{name}={value}" for name, value in {**usual, **given}.items()]


def install_command(config: Config) -> list[str]:
    """pip builds and installs both variants; the build folder stays, so a cut build goes on."""
    command = [sys.executable, "-m", "pip", "install", str(ROOT), "-v", "--upgrade"]
    command += ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command += ["--target", str(config.site), "-C", f"build-dir={config.work.folder / 'native'}"]
    for define in defines(config):
        command += ["-C", f"cmake.define.{define}"]
    return command


def build(config: Config) -> list[Unit]:
    """Both variants with CUDA, the checks that they use the GPU, and that they work without one."""
    environment = config.environment()
    if not config.dry_run and not bundle.unpack_tree(config.bundle):
        print(
            f"runbook: no {bundle.TREE} in {config.bundle}: the build fetches the pinned archive "
            "itself, which needs the network unless it is cached",
            file=sys.stderr,
        )

    def verify(name: str, variant: str, wanted: str, **extra: str) -> Unit:
        command = [sys.executable, str(VERIFY), variant, wanted]
        cwd, wide = config.work.folder, {**environment, **extra}
        least_s = 5 if config.dry_run else 20
        return Unit(name, command, least_s, environment=wide, cwd=cwd)

    if config.dry_run:
        text = " ".join(install_command(config))
        shown = [sys.executable, "-c", "import sys; print(*sys.argv[1:])", text]
        units = [Unit("build command", shown)]
    else:
        units = [
            *_packages(config),
            Unit(
                "build package",
                install_command(config),
                60,
                resumes=True,
                environment={**environment, "CMAKE_BUILD_PARALLEL_LEVEL": str(config.jobs)},
            ),
        ]
    wanted = "any" if config.dry_run else "gpu"
    units += [verify(f"build {variant}", variant, wanted) for variant in ("upstream", "patched")]
    without = verify("build without a GPU", "patched", "cpu", CUDA_VISIBLE_DEVICES="")
    return [*units, without]


def _packages(config: Config) -> list[Unit]:
    """The wheels of the bundle, as they are: what is there already is not in the bundle."""
    wheels = sorted(map(str, (config.bundle / "wheels").glob("*.whl")))
    if not wheels:
        return []
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--upgrade"]
    return [Unit("build packages", [*command, "--target", str(config.packages), *wheels], 30)]


def toolchain(config: Config) -> list[Unit]:
    """Configure with CUDA and compile one file of it: shows, without a GPU, that nvcc and cuBLAS
    are found and fit together. Not part of `all`."""
    folder = config.work.folder / "toolchain"
    configure = ["cmake", "-S", str(ROOT / "bindings"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-D{define}" for define in defines(config)]
    compile_one = ["cmake", "--build", str(folder), "--parallel", "1", "--target", OBJECT]
    environment = config.environment()
    return [
        Unit("toolchain configure", configure, 30, environment=environment),
        Unit("toolchain compile", compile_one, 30, environment=environment, resumes=True),
    ]


def shapes(config: Config) -> list[Unit]:
    """A model with random weights for each shape; one that is there already is taken as it is."""
    config.need_build()
    config.models.mkdir(parents=True, exist_ok=True)
    units = []
    for shape in config.shapes:
        path = config.model(shape)
        chosen = ("--shape", shape, "--type", config.tensor_type, "--pure")
        command = config.driver("synth", *chosen, path)
        units.append(
            Unit(
                f"shapes {path.stem}",
                command if not path.exists() else [sys.executable, "-c", "pass"],
                5 if config.dry_run else 60,
                missing=_there(path),
                environment=config.environment(),
                cwd=config.work.folder,
            )
        )
    return units


def _there(path: Path) -> Callable[[], str]:
    """`Unit.missing` for a file that appears when it is complete."""
    return lambda: "" if path.exists() else f"{path.name} is not there"


def test_files(config: Config) -> list[Path]:
    """The regression suite, a unit for each file."""
    folder = ROOT / "tests" / "regression"
    files = sorted(folder.glob("test_*.py"))
    if not files:
        raise RunbookError("tests/regression is not here; the runbook needs a whole checkout")
    return [folder / name for name in DRY_TESTS] if config.dry_run else files


def correctness(config: Config, files: Sequence[Path] | None = None) -> list[Unit]:
    """The regression suite on the GPU, demo model and mixture of experts.

    Run from the work folder: in the checkout, Python would import the sources in place of what was
    installed.
    """
    config.need_build()
    units = []
    for file in files or test_files(config):
        report = config.work.folder / "junit" / f"{file.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        command += ["--n-gpu-layers", str(config.n_gpu_layers)]
        command += ["--tolerance-scale", f"{config.tolerance_scale:g}"]
        command += ["--junitxml", str(report), str(file)]
        units.append(
            Unit(
                f"correctness {file.stem}",
                command,
                5 if config.dry_run else 20,
                environment=config.environment(),
                cwd=config.work.folder,
                accepted=(0, 5),
            )
        )
    return units
