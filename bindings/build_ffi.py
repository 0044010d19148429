"""Emit the C source of the cffi extension from the declarations in ``cdef/`` and of the shim.

Usage: ``build_ffi.py OUT.c``. API mode: the C compiler checks every declaration against upstream's
headers, so a change of upstream's shows up at build time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
#: By topic, in the order in which later files use the types of earlier ones.
CDEFS = ("ggml", "vocab", "model", "context", "sampling", "mtp", "callbacks")

PRELUDE = """
#include "ggml.h"
#include "ggml-backend.h"
#include "llama.h"
#include "llama-mtp.h"
#include "pyllama_shim.h"
#include "pyllama_vision.h"
"""


def shim_declarations(name: str) -> str:
    """What a header of the shim declares, as cffi reads it; values are left to the compiler."""
    header = (HERE / "shim" / name).read_text()
    text = header.partition('extern "C" {\n#endif\n')[2].rpartition("#ifdef __cplusplus")[0]
    return re.sub(r"(#define \w+).*", r"\1 ...", re.sub(r"//.*|PYLLAMA_API ", "", text))


def make_ffi() -> FFI:
    """The FFI with all declarations, ready to emit."""
    ffi = FFI()
    for topic in CDEFS:
        ffi.cdef((HERE / "cdef" / f"{topic}.h").read_text())
    for name in ("pyllama_shim.h", "pyllama_vision.h"):
        ffi.cdef(shim_declarations(name))
    ffi.set_source("pyllama_mtp._native", PRELUDE, py_limited_api=True)
    return ffi


if __name__ == "__main__":
    make_ffi().emit_c_code(sys.argv[1])
