"""Runs llama-cpp-python's server without libmtmd, which it loads at import and needs for images
only: ``python without_mtmd.py server.py ARGUMENTS``, in the environment that has llama-cpp-python.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any

import llama_cpp


class Absent(ModuleType):
    """Names of it may be mentioned; a text model calls none of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


if __name__ == "__main__":
    sys.modules["llama_cpp.mtmd_cpp"] = llama_cpp.mtmd_cpp = Absent("llama_cpp.mtmd_cpp")
    del sys.argv[0], sys.path[0]  # this folder's statistics.py is not the standard library's
    runpy.run_path(sys.argv[0], run_name="__main__")
