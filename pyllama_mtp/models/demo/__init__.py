"""The bundled demo models: a miniature Qwen3.5 with an MTP head, and one that sees (MODEL_CARD.md
and vision/MODEL_CARD.md)."""

from __future__ import annotations

import os
from pathlib import Path

#: Name of the one that sees, for `--model`.
VISION_DEMO = "vision-demo"


def demo_path() -> Path:
    """Path of the shipped GGUF file (architecture qwen35, F16)."""
    return Path(__file__).with_name("demo.gguf")


def vision_demo_path() -> Path:
    """Path of the one that describes pictures (Q8_0); its image encoder lies beside it."""
    return Path(__file__).parent / "vision" / f"{VISION_DEMO}.gguf"


def is_demo(path: str | os.PathLike[str]) -> bool:
    """Whether a model file is the bundled one."""
    try:
        return Path(path).samefile(demo_path())
    except OSError:
        return False
