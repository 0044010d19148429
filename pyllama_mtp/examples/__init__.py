"""Recipes: short programs to read and copy. Each shows one thing, by default on the demo model.

``python -m pyllama_mtp.examples`` lists them; ``python -m pyllama_mtp.examples.NAME --help`` shows
the options of one.
"""

from __future__ import annotations

import ast
from pathlib import Path


def recipes() -> dict[str, str]:
    """The first line of each example's docstring, by name. Nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith("_"):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.stem] = said.partition("\n")[0]
    return found
