"""Models with a multi-token-prediction (MTP) head: full prefill speed, speculative decode speed.

Stream text, with MTP on::

    from pyllama_mtp import stream

    for text in stream("Qwen3.5-0.8B-Q8_0.gguf", "Once upon a time", max_tokens=200):
        print(text, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import bench  # noqa: F401 - lazy, not for import *
    from . import errors as errors
    from .answer import Answer as Answer
    from .chats.options import ChatOptions as ChatOptions
    from .chats.toolcalls import CallPiece as CallPiece
    from .chats.toolcalls import ToolCall as ToolCall
    from .errors import PyllamaMtpError as PyllamaMtpError
    from .grammar import Grammar as Grammar
    from .highlevel import Llama as Llama
    from .highlevel import LlamaGrammar as LlamaGrammar
    from .llama import native as native
    from .llama.model import Model as Model
    from .llama.vision import IMAGE_MARKER as IMAGE_MARKER
    from .llama.vision import Vision as Vision
    from .session import BatchGeneration as BatchGeneration
    from .session import BatchSession as BatchSession
    from .session import Generation as Generation
    from .session import Session as Session
    from .session import stream as stream
    from .settings import RopeScaling as RopeScaling
    from .settings import Sampling as Sampling
    from .settings import Settings as Settings
    from .telemetry import Pair as Pair
    from .telemetry import Telemetry as Telemetry

    __version__: str

# Imported when it is used: the command line answers Ctrl-C and `--help` before numpy is there.
_MODULES = {
    "answer": ("Answer",),
    "chats.options": ("ChatOptions",),
    "chats.toolcalls": ("CallPiece", "ToolCall"),
    "errors": ("PyllamaMtpError",),
    "grammar": ("Grammar",),
    "highlevel": ("Llama", "LlamaGrammar"),
    "llama.model": ("Model",),
    "llama.vision": ("IMAGE_MARKER", "Vision"),
    "session": ("BatchGeneration", "BatchSession", "Generation", "Session", "stream"),
    "settings": ("RopeScaling", "Sampling", "Settings"),
    "telemetry": ("Pair", "Telemetry"),
}
_ROOMS = {"bench": ".bench", "errors": ".errors", "native": ".llama.native"}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted([*_WHERE, "errors", "native"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _ROOMS:
        value = importlib.import_module(_ROOMS[name], __name__)
    elif name in _WHERE:
        value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "bench", "__version__"})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("pyllama-mtp")
    except metadata.PackageNotFoundError:
        return "0+source"
