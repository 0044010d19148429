"""Runs llama-cpp-python's server without libmtmd: ``python without_mtmd.py server.py ARGUMENTS``.

The server loads libmtmd at import, but needs it for images only. Runs in the environment that has
llama-cpp-python.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any

import llama_cpp


class Absent(ModuleType):
    """A module with any name in it; a text model calls none of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


if __name__ == "__main__":
    sys.modules["llama_cpp.mtmd_cpp"] = llama_cpp.mtmd_cpp = Absent("llama_cpp.mtmd_cpp")
    del sys.argv[0], sys.path[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
