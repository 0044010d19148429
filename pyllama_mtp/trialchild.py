"""The child process in which a file is tried; see :mod:`.llama.trial`."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from .errors import PyllamaMtpError
from .llama import native, trial
from .llama.model import Model
from .llama.vision import IMAGE_MARKER, Vision
from .session import Session
from .settings import Settings

#: Tokens of the prompt, in graphs of 16. Only one row of the last graph is wanted, which graphs of
#: cogvlm ignore.
N_TOKENS = 40
#: Height and width of the pictures. They are few, as a large encoder needs seconds for one.
PICTURES = (64, 64), (300, 200)


def serve(request: dict[str, Any]) -> None:
    """Try the file of the request; write a JSON object, with the error if any, to stdout."""
    trial.is_child = True
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    failure = {}
    try:
        native.load(request["library"])
        if "encoder" in request:
            _see(request["path"], request["arguments"], request["encoder"])
        else:
            _use(request["path"], request["arguments"])
    except PyllamaMtpError as error:
        failure = {"error": type(error).__name__, "message": str(error)}
    json.dump(failure, answer)
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


def _see(path: str, arguments: dict[str, Any], encoder: str) -> None:
    """Encode pictures of several sizes for the model, which has no weights."""
    with (
        Model(path, device="none", **arguments) as model,
        Vision(model, encoder) as vision,
    ):
        for height, width in PICTURES:
            pixels = np.resize(np.arange(251, dtype=np.uint8), (height, width, 3))
            vision.prompt(f"a{IMAGE_MARKER}b", [pixels])
