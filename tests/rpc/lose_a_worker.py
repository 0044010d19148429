"""Run by test_lost_worker.py in a process of its own: lose a worker in a given way, go on.

Arguments: when, model file, addresses of two workers (the first is lost), its process id, and
"and then" to use the workers afterwards. Prints what happened as JSON lines; that it gets to the
last one is a part of the test.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import numpy as np
from steps import SETTINGS, attempt, generate, say, stop

from pyllama_mtp import Model, Session
from pyllama_mtp.llama.batch import Batch
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions

WHEN, FILE, FIRST, SECOND, PID = *sys.argv[1:5], int(sys.argv[5])
AND_THEN = len(sys.argv) > 6
TIMEOUT_S = 2 if "stalled" in WHEN else 60


def kill(after: float = 0.0) -> None:
    if after:
        threading.Timer(after, kill).start()
    else:
        os.killpg(PID, signal.SIGKILL)


def load() -> Model:
    # Nothing waits for the last one but who reads the outputs.
    workers = (SECOND, FIRST)
    return Model(FILE, rpc_servers=workers, tensor_split=(1, 1), rpc_timeout=TIMEOUT_S)


def at_decode(session: Session, act: Callable[[], object]) -> None:
    """Do something just before the decode that gives the first token."""
    target = session._engine.target
    original, done = target.decode_batch, []

    def decode_batch(batch: Batch) -> None:
        if batch.outputs.any() and not done:
            done.append(act())
        original(batch)

    target.decode_batch = decode_batch


def logits_of_nobody(model: Model) -> float:
    """The largest logit of a decode during which the worker dies."""
    options = ContextOptions(n_ctx=128, n_batch=32, n_ubatch=16, n_threads=1)
    with Context(model, options) as context:
        for start in (0, 2, 4):  # sizes of tensors are asked for once, which waits for answers
            if start == 4:
                stop(PID)
                kill(0.3)
            tokens = np.array([5, 6], dtype=np.int32)
            context.decode(tokens, start, np.array([0, 1], dtype=np.int8))
            largest = float(context.logits(1).max())
        return largest


def decode_without_asking(model: Model, session: Session) -> None:
    """Decode without asking for lost workers: llama.cpp's own error."""
    model.refuse_lost_worker = lambda: None
    try:
        target = session._engine.target
        target.clear()
        target.decode(np.array([5, 6], dtype=np.int32), 0, np.array([0, 1], dtype=np.int8))
    finally:
        del model.refuse_lost_worker


def elsewhere(*workers: str) -> list[int]:
    with Model(FILE, rpc_servers=workers) as model, Session(model, SETTINGS) as session:
        return generate(session)


def in_use() -> None:
    model = load()
    session = Session(model, SETTINGS)
    if WHEN == "prefill, computing":
        at_decode(session, lambda: kill(0.003))
    if WHEN == "prefill, computed by nobody":
        at_decode(session, lambda: (stop(PID), kill(0.3)))
    attempt("whole", lambda: generate(session) if "prefill" not in WHEN else None)
    if WHEN == "between":
        kill()
    acts = {
        "decode, computing": lambda: kill(0.003),
        "decode, computed by nobody": lambda: (stop(PID), kill(0.3)),
        "decode, stalled": lambda: stop(PID),
    }
    if WHEN == "decode of a context":
        attempt("lost", lambda: logits_of_nobody(model))
    else:
        attempt("lost", lambda: generate(session, acts.get(WHEN)))
    attempt("again", lambda: generate(session))
    attempt("new session", lambda: Session(model, SETTINGS).close())
    attempt("lost address", lambda: Model(FILE, rpc_servers=FIRST).close())
    attempt("unasked", lambda: decode_without_asking(model, session))
    attempt("beside", elsewhere)
    attempt("close", lambda: (session.close(), model.close(), model.close())[0])


in_use()
attempt("local", elsewhere)
if AND_THEN:
    attempt("other worker", lambda: elsewhere(SECOND))
    say(step="restart")
    sys.stdin.readline()
    attempt("same address", lambda: elsewhere(FIRST))
say(step="end")
