"""The child process that tries a model file out; see :mod:`pyllama_mtp.llama.trial`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from typing import Any

from .errors import PyllamaMtpError
from .llama import native, trial
from .llama.model import Model
from .session import Session
from .settings import Settings

#: Tokens of the prompt, in graphs of 16. Only one row of the last graph is wanted, which graphs of
#: cogvlm ignore.
N_TOKENS = 40
_PR_SET_PDEATHSIG = 1


def serve(request: dict[str, Any]) -> None:
    """Try the file of the request; write a JSON object, with the error if any, to stdout."""
    trial.is_child = True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = {}
    try:
        native.load(request["library"])
        _use(request["path"], request["arguments"])
    except PyllamaMtpError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    json.dump(found, answer)
    answer.close()


def _use(path: str, arguments: dict[str, Any]) -> None:
    """Load the model, read its vocabulary, and decode tokens from all over it, as a session."""
    with Model(path, device="none", **arguments) as model:
        settings = Settings(n_ctx=256, n_batch=16, n_ubatch=16, draft_n_max=int(model.has_mtp))
        with Session(model, settings) as session:
            if arguments["no_alloc"]:
                return
            model.tokenize("Ein Text, 12 words:\n\tfoo(\u00e9, \U0001f600)", parse_special=True)
            read, piece = model._lib.llama_token_to_piece, model._ffi.new("char[64]")
            for token in range(model.n_vocab):
                read(model._vocab, token, piece, len(piece), 0, True)
            last = model.n_vocab - 1
            prompt = [i * last // (N_TOKENS - 1) for i in range(N_TOKENS)]
            session.generate(prompt, max_tokens=3, ignore_eos=True).run()
