"""One run in an address space of limited size; the process that ``memory.py`` starts, and judges.

Usage: memory_child.py MODEL SCENARIO THREADS HEADROOM

What a scenario needs is prepared without a limit; then the address space may grow by HEADROOM
bytes only (-1: without a limit), and the scenario is played. Whatever comes of it, the limit is
lifted and the scenario is played once more (after a failure from its preparation on, in the same
process), which must give the reference text. One line of JSON
on stdout says how it went.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyllama_mtp import BatchSession, Model, Sampling, Session, Settings
from pyllama_mtp.errors import PyllamaMtpError
from pyllama_mtp.llama import native
from pyllama_mtp.models.ggufinfo import read_gguf

PROMPT = "def read_lines(path):\n" * 30
SHORT = "class Reader:\n"
State = dict[str, Any]


def settings(state: State, **more: Any) -> Settings:
    return Settings(n_ctx=1024, n_threads=state["threads"], **{"draft_n_max": 3, **more})


def text_of(session: Session, prompt: str = PROMPT, **more: Any) -> str:
    return session.generate(prompt, max_tokens=12, ignore_eos=True, **more).run().text


def close(state: State, *names: str) -> None:
    for name in names:
        if name in state:
            state.pop(name).close()


def make_model(state: State) -> None:
    close(state, "model")
    state["model"] = Model(state["path"])


def make_session(state: State) -> None:
    make_model(state)
    state["session"] = Session(state["model"], settings(state))


def started_session(state: State) -> None:
    """With threads and first buffers in place."""
    make_session(state)
    text_of(state["session"], SHORT)


def play_load(state: State) -> str:
    make_model(state)
    return str(state["model"].n_params)


def play_context(state: State) -> str:
    close(state, "session")
    state["session"] = Session(state["model"], settings(state))
    return str(state["session"].n_ctx)


def play_generate(state: State) -> str:
    return text_of(state["session"])


def play_sampled(state: State) -> str:
    """Rows of all logits, checkpoints, and a rollback by replay."""
    sampling = Sampling(temperature=0.8, top_k=0, seed=7)
    return text_of(state["session"], sampling=sampling)


def play_save(state: State) -> str:
    session, file = state["session"], Path(state["folder"]) / "saved.prompt"
    session.process(PROMPT)
    session.save(file)
    session.reset()
    session.restore(file)
    return text_of(session)


def play_batch(state: State) -> str:
    close(state, "batch")
    state["batch"] = BatchSession(state["model"], settings(state, draft_n_max=2), n_sequences=3)
    prompts = [PROMPT[: 40 * n] for n in range(1, 6)]
    batch = state["batch"].generate(prompts, max_tokens=8, ignore_eos=True).run()
    return "\0".join(answer.text for answer in batch.results)


def play_everything(state: State) -> str:
    close(state, "session")
    play_load(state)
    play_context(state)
    return play_generate(state)


#: What is prepared, and what is played under the limit.
SCENARIOS: dict[str, tuple[Callable[[State], None], Callable[[State], str]]] = {
    "load": (lambda state: None, play_load),
    "context": (make_model, play_context),
    "first generation": (make_session, play_generate),
    "later generation": (started_session, play_generate),
    "sampled generation": (started_session, play_sampled),
    "save and restore": (started_session, play_save),
    "batch": (make_model, play_batch),
    "everything": (lambda state: None, play_everything),
}


def mapped(key: str = "VmSize") -> int:
    """Bytes of address space in use (VmPeak: at most)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def limit(headroom: int) -> None:
    most = resource.RLIM_INFINITY if headroom < 0 else mapped() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def main() -> None:
    path, scenario, threads, headroom = sys.argv[1:]
    prepare, play = SCENARIOS[scenario]
    native.load()
    read_gguf(path)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        state: State = {"path": path, "threads": int(threads), "folder": folder}
        prepare(state)
        found["before"] = mapped()
        limit(int(headroom))
        try:
            found["text"] = play(state)
        except (PyllamaMtpError, MemoryError) as error:
            found["error"], found["message"] = type(error).__name__, str(error)
        except BaseException as error:
            found["unclean"], found["message"] = type(error).__name__, str(error)
        limit(-1)
        found["peak"] = mapped("VmPeak")
        if "text" not in found:
            close(state, "session", "batch")
            prepare(state)
        found["again"] = play(state)
        close(state, "session", "batch", "model")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
