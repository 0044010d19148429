"""The bundled demo model: a miniature Qwen3.5 with an MTP head (see MODEL_CARD.md)."""

from __future__ import annotations

import os
from pathlib import Path


def demo_path() -> Path:
    """Path of the shipped GGUF file (architecture qwen35, F16)."""
    return Path(__file__).with_name("demo.gguf")


def is_demo(path: str | os.PathLike[str]) -> bool:
    """Whether a model file is the bundled one."""
    try:
        return Path(path).samefile(demo_path())
    except OSError:
        return False
