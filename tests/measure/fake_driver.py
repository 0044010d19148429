"""A driver without a library: the driver's own records, results computed from the inputs.

A "model" whose tokens are the bytes of the text. Speeds are exact: prefill takes 1 ms per token
(1 ms more where all rows are asked for, and with MTP 0.25 ms more where its whole block is
computed; the K and V cost a tenth of the first), a decode round 10 ms plus 1 ms per draft, so tests
can say what a table must hold. `log` lists what was done, in order; `script` lets a test raise at
the n-th generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyllama_mtp.errors import (
    DecodeAborted,
    FatalDecodeError,
    LibraryError,
    NoMtpHeadError,
)
from pyllama_mtp.llama.modeloptions import ModelOptions
from pyllama_mtp.settings import Sampling, Settings
from pyllama_mtp.telemetry import Pair, Telemetry

STAMP = {
    "variant": "patched",
    "upstream_commit": "0123456789abcdef",
    "series": "feedc0dedeadbeef",
    "cpu_features": "",
    "compiler": "fake 1.0",
    "cuda": False,
}

log: list[tuple[Any, ...]] = []
#: Number of the generation (from 0, warm-ups included) -> what happens instead of it.
script: dict[int, Callable[[Generation], None]] = {}
#: Depth of every round with draft_n_max="auto".
AUTO_CHOICE = 3
#: Like `script`, for opening a session; the key is (n_ctx, draft_n_max).
refuse_session: dict[tuple[int, int], Exception] = {}
state = {"generations": 0, "open_sessions": 0, "has_mtp": True, "partial": False}


def reset() -> None:
    """Forget what an earlier test did."""
    log.clear()
    script.clear()
    refuse_session.clear()
    state.update(generations=0, open_sessions=0, has_mtp=True, partial=False)


class Generation:
    """Emits 'abcabc...', one byte per token; accepts all but the last draft of each round."""

    def __init__(self, session: Session, prompt: Any, max_tokens: int, log_pairs: bool) -> None:
        self._session, self._max_tokens = session, max_tokens
        self._n_prompt = len(prompt)
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.telemetry = Telemetry(pairs=[] if log_pairs else None)

    def __iter__(self) -> Iterator[str]:
        number = state["generations"]
        state["generations"] += 1
        chosen = self._session.settings.draft_n_max
        depth = chosen if isinstance(chosen, int) else AUTO_CHOICE
        t = self.telemetry
        t.n_prompt, t.prefill_s = self._n_prompt, self._n_prompt / 1000
        self._cost_of_the_prompt()
        while len(self.tokens) < self._max_tokens:
            if number in script and self.tokens:
                script[number](self)
                if self.finish_reason:
                    return
            t.decode_s += 0.010 + 0.001 * depth
            t.count_round(depth, max(depth - 1, 0))
            if t.pairs is not None:
                t.pairs += [Pair(1, 97, 97, "ä", "ä"), Pair(2, 98, 99, "b", "c")]
            for _ in range(max(depth, 1)):
                if len(self.tokens) < self._max_tokens:
                    piece = "abc"[len(self.tokens) % 3]
                    self.tokens.append(ord(piece))
                    self.text += piece
                    t.n_generated = len(self.tokens)
                    yield piece
        self.finish_reason = "length"

    def _cost_of_the_prompt(self) -> None:
        settings, t = self._session.settings, self.telemetry
        t.prefill_s += t.n_prompt / 1000 if settings.prompt_rows == "all" else 0
        if not settings.draft_n_max:
            return
        t.prompt_sync = "full" if settings.prompt_sync == "full" else "kv"
        t.time_s["prompt_sync"] = t.n_prompt / 1000 / (4 if t.prompt_sync == "full" else 10)
        t.prefill_s += t.time_s["prompt_sync"] if t.prompt_sync == "full" else 0

    def run(self) -> Generation:
        for _ in self:
            pass
        return self


class Session:
    """As in the driver."""

    def __init__(self, model: Model, settings: Settings, *, room: int = 0) -> None:
        refused = refuse_session.get((settings.n_ctx, settings.draft_n_max))
        if refused is not None:
            raise refused
        self.settings, self.n_ctx = settings, settings.n_ctx or max(8192, room)
        state["open_sessions"] += 1
        log.append(("open", settings.draft_n_max, self.n_ctx, state["open_sessions"]))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        state["open_sessions"] -= 1
        log.append(("close", self.settings.draft_n_max))

    def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
        log_pairs: bool = False,
        log_ties: bool = False,
        on_progress: Any = None,
    ) -> Generation:
        state["log_ties"] = log_ties
        log.append(("generate", tuple(prompt), max_tokens, ignore_eos, stop, sampling))
        return Generation(self, prompt, max_tokens, log_pairs)

    def process(self, prompt: Any) -> Telemetry:
        log.append(("process", self.settings.draft_n_max, len(prompt)))
        return Telemetry(n_prompt=len(prompt), prefill_s=len(prompt) / 1000)

    def reset(self) -> None:
        log.append(("reset",))

    def memory(self) -> dict[str, int]:
        return {"weights": 1000, "draft_context": 10 * self.settings.depth_limit}


class Model:
    """One token per byte; no BOS unless `bos` is set."""

    n_ctx_train = 4096
    on_gpu = True  # nobody asks for the types of its tensors
    same_bits = True
    rpc_servers: tuple[str, ...] = ()
    options = ModelOptions()
    info = SimpleNamespace(head="", why_no_mtp="the model has no MTP head", most_drafts=None)

    def __init__(
        self,
        path: Any,
        *,
        n_gpu_layers: int = -1,
        mtp: bool | None = True,
        progress: Any = None,
        bos: int | None = None,
    ) -> None:
        self.path, self._bos = Path(path), bos
        self.has_mtp = mtp is not False and state["has_mtp"]
        if mtp is not False and not state["has_mtp"] and (mtp or state["partial"]):
            raise NoMtpHeadError(f"{path} has no MTP head", path, partial=state["partial"])
        if progress:
            progress(1.0)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        log.append(("model closed",))

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        log.append(("tokenize", text, add_special, parse_special))
        head = [self._bos] if add_special and self._bos is not None else []
        return head + list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **variables: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def interrupt(generation: Generation) -> None:
    """For `script`: Ctrl-C."""
    raise KeyboardInterrupt


def abort(generation: Generation) -> None:
    """For `script`: Ctrl-C that aborts a decode."""
    raise DecodeAborted("stopped", 2)


def stop(generation: Generation) -> None:
    """For `script`: an interruption that raises nothing."""
    generation.finish_reason = "interrupted"


def fail(generation: Generation) -> None:
    """For `script`: a decode that fails."""
    raise FatalDecodeError("llama_decode failed with -3", -3)


@dataclass(frozen=True)
class Device:
    """As in the driver."""

    name: str = "CPU"
    description: str = "a fake CPU"
    kind: str = "cpu"
    free: int = 0
    total: int = 0


class Library:
    """As in the driver."""

    variant = "patched"
    has_tap = True
    folder = Path("somewhere")

    def __init__(self, devices: tuple[Device, ...] = (Device(),), **stamp: Any) -> None:
        self.stamp = {**STAMP, **stamp}
        self._devices = list(devices)

    def devices(self) -> list[Device]:
        return self._devices

    def cpu_generation(self) -> str:
        return "haswell"

    def system_info(self) -> str:
        return "FAKE = 1"


class Native:
    """Stands in for the module `pyllama_mtp.llama.native`."""

    library: Library | None = Library()

    def load(self, library: Any = None) -> Library:
        log.append(("load", library))
        if self.library is None:
            raise LibraryError("no native library; tried: here and there")
        return self.library

    def find_libraries(self) -> list[tuple[str, Path, str]]:
        return [("patched", Path("somewhere"), "ok"), ("upstream", Path("there"), "not there")]
