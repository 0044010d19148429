"""Recipes: short programs, each of which shows one thing, on the demo model unless told otherwise.

``python -m pyllama_mtp.examples`` lists them; ``python -m pyllama_mtp.examples.NAME --help`` says
what one takes. They are meant to be read and copied.
"""

from __future__ import annotations

import ast
from pathlib import Path


def recipes() -> dict[str, str]:
    """Name of each example, and the first line of its docstring. Nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith("_"):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.stem] = said.partition("\n")[0]
    return found
