"""The child process in which the library quantizes; see :mod:`.models.quantize`.

It imports what it needs and no more, as it is started twice for each file.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from .child import REFUSED
from .llama import native

BUFFERS = 512 << 20  # bytes of rows that the library holds at once


def serve(request: dict[str, Any]) -> int:
    """Call the library in the new process; returns the exit code."""
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s\t%(message)s")
    native.log.setLevel(logging.DEBUG)
    library = native.load()
    ffi, lib = library.ffi, library.lib
    kept = [
        (ffi.new("char[]", pattern.encode()), kind) for pattern, kind in request.get("head", ())
    ]
    params = ffi.new(
        "struct llama_model_quantize_params *", lib.llama_model_quantize_default_params()
    )
    params.ftype = request["ftype"]
    params.nthread = request.get("n_threads", 0)
    params.dry_run = request.get("dry_run", False)
    params.allow_requantize = request.get("requantize", True)
    params.max_buf_size = BUFFERS
    overrides = ffi.new("struct llama_model_tensor_override[]", [*kept, (ffi.NULL, 0)])
    params.tt_overrides = overrides
    code = lib.llama_model_quantize(
        os.fsencode(request["source"]), os.fsencode(request["target"]), params
    )
    return REFUSED if code else 0
