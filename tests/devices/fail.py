"""A device fails while a session uses it; what is left of it is closed, and another model used."""

from __future__ import annotations

import ctypes
import sys

from pyllama_mtp import Model, PyllamaMtpError, Session, Settings

settings = Settings(draft_n_max=3, n_ctx=256, n_batch=16, n_ubatch=16)
failing = ctypes.c_int.in_dll(ctypes.CDLL(None), "failing")
with Model(sys.argv[1]) as model, Session(model, settings) as session:
    answer = iter(session.generate("def main():", max_tokens=9))
    next(answer)
    failing.value = 1
    try:
        list(answer)
    except PyllamaMtpError as error:
        print(type(error).__name__)
failing.value = 0  # the contexts of models on the CPU have the device as well
with Model(sys.argv[1], n_gpu_layers=0) as model, Session(model, settings) as session:
    print(session.generate("def main():", max_tokens=3).run().telemetry.n_generated)
