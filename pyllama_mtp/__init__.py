"""Models with a multi-token-prediction (MTP) head: full prefill speed, speculative decode speed.

Stream text, with MTP on::

    from pyllama_mtp import stream

    for text in stream("Qwen3.5-0.8B-Q8_0.gguf", "Once upon a time", max_tokens=200):
        print(text, end="", flush=True)
"""

from __future__ import annotations

from importlib import metadata

from . import errors, native
from .batchsession import BatchGeneration, BatchSession
from .errors import PyllamaMtpError
from .model import Model
from .session import Answer, Generation, Session, stream
from .settings import Sampling, Settings
from .telemetry import Pair, Telemetry

try:
    __version__ = metadata.version("pyllama-mtp")
except metadata.PackageNotFoundError:
    __version__ = "0+source"

__all__ = [
    "Answer",
    "BatchGeneration",
    "BatchSession",
    "Generation",
    "Model",
    "Pair",
    "PyllamaMtpError",
    "Sampling",
    "Session",
    "Settings",
    "Telemetry",
    "errors",
    "native",
    "stream",
]
