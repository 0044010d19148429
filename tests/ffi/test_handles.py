"""Owned handles: closing twice, closing in any order, use after close, no close at all."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama_mtp import Model, Sampling, Session, Settings
from pyllama_mtp.errors import ContextClosedError, ModelFileError, UsageError
from pyllama_mtp.llama.batch import State
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.sampling.sampler import Sampler

from ..processes import RunPython

SMALL = ContextOptions(n_ctx=64, n_batch=8, n_ubatch=8, n_threads=1)
SETTINGS = Settings(n_ctx=64, n_threads=1, draft_n_max=2)
ONE, OUT = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int8)


def test_closing_contexts_in_either_order(demo: Model) -> None:
    """A draft context refers to its target; whichever goes first, the other can still be closed."""
    head = ContextOptions(**{**vars(SMALL), "mtp_head": True})
    for target_first in (True, False):
        target = Context(demo, SMALL)
        draft = Context(demo, head, target)
        for context in (target, draft) if target_first else (draft, target):
            context.close()


#: Uses of what is closed.
USES = (
    *("context.handle", "context.decode(ONE, 1, OUT)", "context.logits(0)", "context.argmax(0)"),
    *("context.hidden_rows()", "context.past()", "context.remove(0)", "context.clear()"),
    *("context.synchronize()", "context.save_state()", "context.load_state(b'')"),
    *("context.memory()", "model.handle", "model.description", "model.tokenize('a')"),
    *("model.piece(1)", "model.detokenize([1])", "model.is_end(1)"),
    *("model.apply_chat_template([])", "Context(model, SMALL)", "Session(model, SETTINGS)"),
    *("session.reset()", "session.memory()", "session.generate([1]).run()", "list(generation)"),
)


@pytest.mark.parametrize("use", USES)
def test_using_what_is_closed(closed: dict[str, object], use: str) -> None:
    with pytest.raises(ContextClosedError):
        eval(use, {**globals(), **closed})


@pytest.fixture(scope="module")
def closed(demo_file: Path) -> Iterator[dict[str, object]]:
    """A context, a session with a generation that has begun, and their model, which closes them."""
    model = Model(demo_file)
    context, session = Context(model, SMALL), Session(model, SETTINGS)
    context.decode(ONE, 0, OUT)
    generation = iter(session.generate([1, 2], max_tokens=9, ignore_eos=True))
    next(generation)
    model.close()
    yield {"context": context, "model": model, "session": session, "generation": generation}
    for one in (context, session, model, context):
        one.close()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(demo_file: Path, duplicate: Callable[[object], object]) -> None:
    """Two owners would free the memory twice."""
    with Model(demo_file) as model, Context(model, SMALL) as context:
        with Session(model, SETTINGS) as session:
            for one in (model, context, session, Sampler(model, Sampling(top_k=3))):
                with pytest.raises(TypeError, match="cannot be copied or pickled") as caught:
                    duplicate(one)
                assert isinstance(caught.value, UsageError)
        assert model.tokenize("a")


def test_a_model_file_that_is_truncated_while_it_is_used(demo_file: Path, tmp_path: Path) -> None:
    """An error, and not SIGBUS; a file that is replaced or removed is used as it was."""
    for harm in ("replace", "unlink", "truncate"):
        path = tmp_path / "model.gguf"
        path.write_bytes(demo_file.read_bytes())
        with Model(path) as model, Session(model, SETTINGS) as session:
            if harm == "replace":
                (tmp_path / "other").write_bytes(b"")
                (tmp_path / "other").replace(path)
            elif harm == "unlink":
                path.unlink()
            else:
                os.truncate(path, 4096)
                with pytest.raises(ModelFileError, match="has become shorter"):
                    session.generate("a b", max_tokens=4).run()
                continue
            assert session.generate("a b", max_tokens=4).run().tokens


def test_never_closed(run_python: RunPython, demo_file: Path) -> None:
    """Deleted, collected in a cycle, or alive when the interpreter ends: no crash, no message."""
    code = """
import gc, sys
from pyllama_mtp import Model, Session, Settings

def use():
    model = Model(sys.argv[1])
    session = Session(model, Settings(n_ctx=64, n_threads=1, draft_n_max=2, prompt_sync="full"))
    generation = session.generate("one two", max_tokens=4, ignore_eos=True)
    next(iter(generation))
    return model, session, generation

model, session, generation = use()
del model
gc.collect()
generation.run()
del session, generation
gc.collect()
model, session, generation = use()
model.cycle = [model, session, generation]
del model, session, generation
gc.collect()
kept = use()
print("end")
"""
    done = run_python(code, demo_file)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_context_of_a_vocabulary(run_python: RunPython, demo_file: Path) -> None:
    """llama-cpp-python makes one for `vocab_only`, of a model that has no device for its output."""
    code = """
import os, sys
from pyllama_mtp.llama import native
library = native.load()
ffi, lib = library.ffi, library.lib
params, message = lib.llama_model_default_params(), ffi.new("char[512]")
params.vocab_only = True
none = (ffi.NULL, 0, ffi.NULL, 0)
model = lib.pyllama_model_load(os.fsencode(sys.argv[1]), *none, params, message, 512)
context = lib.pyllama_context_init(model, lib.llama_context_default_params(), message, 512)
print(context != ffi.NULL)
lib.pyllama_context_free(context)
lib.llama_model_free(model)
"""
    done = run_python(code, demo_file)
    assert done.stdout == "True\n", done.stderr


def test_contexts_are_freed_before_their_model(run_python: RunPython, demo_file: Path) -> None:
    """Also where Python finalizes the model first, with weak references already emptied: in a
    cycle that it collects. llama.cpp reads the model while it frees a context."""
    code = """
import dataclasses, gc, sys
from pyllama_mtp import Model, Session, Settings
from pyllama_mtp.llama import native

class Recorder:
    calls = []
    def __init__(self, lib):
        self.lib = lib
    def __getattr__(self, name):
        function = getattr(self.lib, name)
        if name not in ("pyllama_context_free", "llama_model_free"):
            return function
        return lambda handle: (self.calls.append(name), function(handle))

library = native.load()
native._loaded = dataclasses.replace(library, lib=Recorder(library.lib))
gc.disable()
model = Model(sys.argv[1])
session = Session(model, Settings(n_ctx=64, n_threads=1, draft_n_max=2, prompt_sync="full"))
model.cycle = session
del model, session
gc.collect()
print(*Recorder.calls)
"""
    done = run_python(code, demo_file)
    assert done.stdout.split() == [
        "pyllama_context_free",
        "pyllama_context_free",
        "llama_model_free",
    ], done.stderr


def test_a_dropped_session_is_freed(demo: Model) -> None:
    before = set(demo.contexts)  # those of other tests, which may be freed only now
    session = Session(demo, SETTINGS)
    assert len(set(demo.contexts) - before) == 1
    del session
    gc.collect()
    assert not set(demo.contexts) - before


def test_memory_of_checkpoints_is_used_again(demo: Model) -> None:
    """Not before nobody refers to it; and a state may outlive its context."""

    def address(state: State) -> int:
        return int(np.frombuffer(state, dtype=np.uint8).ctypes.data)

    with Context(demo, SMALL) as context:
        context.decode(ONE, 0, OUT)
        kept, dropped = (context.save_state(recurrent_only=True) for _ in range(2))
        part = memoryview(dropped)[10:20]
        bits, there = bytes(kept), address(dropped)
        assert address(kept) != there
        context.decode(ONE, 1, OUT)
        del dropped
        other = context.save_state(recurrent_only=True)
        assert address(other) not in (there, address(kept))
        del part
        gc.collect()
        again = context.save_state(recurrent_only=True)
        assert address(again) == there
        assert bytes(again) == bytes(other) != bits == bytes(kept)
        context.load_state(kept, recurrent_only=True)
        assert bytes(context.save_state(recurrent_only=True)) == bits
    del context
    gc.collect()
    assert bytes(kept) == bits and bytes(again) == bytes(other)
