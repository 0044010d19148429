"""What a call of the runbook works with: folders, sizes, and how its commands are run."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchkit.paths import BENCH, ROOT

from gpukit.machine import Gpu
from gpukit.state import RunbookError, Work

SHAPES = ("qwen3.6-27b", "qwen3.6-35b-a3b")
DENSE = "qwen3.6-27b"
SIZES = (1024, 8192, 32768, 65536, 131072, 196608)
DEPTHS = (0, 2, 3, 4)
CONTEXTS = (1024, 32768, 131072)
HANDOFF_CONTEXTS = (8192, 32768)
ACCEPTANCE = (0.8, 0.5, 0.1)
#: That of the published table, and the smaller of the types that `synth` writes.
TENSOR_TYPE = "iq4_nl"
#: From here on a prompt takes so long that it is measured once.
LONG = 65536


@dataclass(frozen=True)
class Config:
    """See the options of bench/gpu_runbook.py.

    Attributes:
        gpu: None in a dry run, and where there is none.
        acceptance: imposed probability that a draft is accepted if those before it were.
    """

    work: Work
    models: Path
    bundle: Path
    gpu: Gpu | None
    tensor_type: str
    shapes: tuple[str, ...]
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    contexts: tuple[int, ...]
    handoff_contexts: tuple[int, ...]
    acceptance: tuple[float, ...]
    n_gpu_layers: int
    tolerance_scale: float
    jobs: int
    defines: tuple[str, ...]
    commit: str | None
    n_decode: int
    draft_vocab: int

    @property
    def dry_run(self) -> bool:
        """Whether figures mean nothing."""
        return self.work.dry_run

    @property
    def site(self) -> Path:
        """Where the step `build` installs the package."""
        return self.work.folder / "site"

    @property
    def packages(self) -> Path:
        """Where it installs the wheels of the bundle."""
        return self.work.folder / "packages"

    def model(self, shape: str) -> Path:
        """The model file of a shape."""
        return self.models / f"synth-{shape}-{self.tensor_type}.gguf"

    def environment(self) -> dict[str, str]:
        """For commands: the package that was built here (in a dry run: the one at hand) first."""
        paths = [str(self.packages)]
        if not self.dry_run:
            paths.insert(0, str(self.site))
        elif importlib.util.find_spec("pyllama_mtp") is None:
            paths.insert(0, str(ROOT))
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        programs = f"{self.packages / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PYTHONPATH": os.pathsep.join(paths), "PATH": programs, "PYTHONUNBUFFERED": "1"}

    def driver(self, *words: object) -> list[str]:
        """A command of the package's command line."""
        return [sys.executable, "-m", "pyllama_mtp", *map(str, words)]

    def script(self, name: str, *words: object) -> list[str]:
        """A script below bench/."""
        return [sys.executable, str(BENCH / name), *map(str, words)]

    @property
    def threads(self) -> tuple[str, ...]:
        """Options of the scripts below bench/: a dry run of tiny models wants one thread."""
        return ("--threads", "1") if self.dry_run else ()

    def repeats(self, size: int) -> int:
        """Samples at a prompt size."""
        return 1 if self.dry_run or size >= LONG else 3

    def need_build(self) -> None:
        """Raises RunbookError before the step `build` is done."""
        if not self.dry_run and not self.work.is_done("build patched"):
            raise RunbookError("the package is not built yet: run the step `build` first")

    def need_models(self) -> None:
        """Raises RunbookError before the step `shapes` is done."""
        self.need_build()
        absent = [shape for shape in self.shapes if not self.model(shape).exists()]
        if absent:
            raise RunbookError(f"no model of {', '.join(absent)}: run the step `shapes` first")


def rates(acceptance: float, depth: int) -> str:
    """Unconditional acceptance of each position, as --synthetic-acceptance takes it."""
    return ",".join(f"{acceptance**position:.6g}" for position in range(1, depth + 1))
