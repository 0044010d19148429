"""Emit the C source of the cffi extension from the declarations in ``cdef/``.

Usage: ``build_ffi.py OUT.c``. API mode: the C compiler checks every declaration against upstream's
headers, so a change of upstream's shows up at build time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

#: By topic, in the order in which later files use the types of earlier ones.
CDEFS = ("ggml", "vocab", "model", "context", "sampling", "mtp", "shim", "callbacks")

PRELUDE = """
#include "ggml.h"
#include "ggml-backend.h"
#include "llama.h"
#include "llama-mtp.h"
#include "pyllama_shim.h"
"""


def make_ffi() -> FFI:
    """The FFI with all declarations, ready to emit."""
    ffi = FFI()
    folder = Path(__file__).parent / "cdef"
    for topic in CDEFS:
        ffi.cdef((folder / f"{topic}.h").read_text())
    ffi.set_source("pyllama_mtp._native", PRELUDE, py_limited_api=True)
    return ffi


if __name__ == "__main__":
    make_ffi().emit_c_code(sys.argv[1])
