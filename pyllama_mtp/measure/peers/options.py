"""The settings of a measurement in the words of upstream's programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllama_mtp.settings import Settings

_ALL_LAYERS = 999


@dataclass(frozen=True)
class Options:
    """The settings that all programs share, with the names of `Settings`.

    Attributes:
        n_gpu_layers: -1: all; None: the program decides.
        head: the file of the MTP head, if it is not `model`.
    """

    model: str
    n_batch: int
    n_ubatch: int
    threads: int
    flash_attn: str
    cache_type_k: str
    cache_type_v: str
    n_gpu_layers: int | None = None
    head: str = ""

    @classmethod
    def of(cls, settings: Settings, model: str, n_gpu_layers: int, head: str = "") -> Options:
        """The options of a cell."""
        names = ("n_batch", "n_ubatch", "threads", "flash_attn", "cache_type_k", "cache_type_v")
        shared: dict[str, Any] = {name: getattr(settings, name) for name in names}
        return cls(model=model, n_gpu_layers=n_gpu_layers, head=head, **shared)

    def arguments(self) -> list[str]:
        """Arguments of llama-bench and llama-server."""
        layers = self.n_gpu_layers
        return [
            *("-m", self.model),
            *("-b", str(self.n_batch)),
            *("-ub", str(self.n_ubatch)),
            *("-t", str(self.threads)),
            *("-fa", self.flash_attn),
            *("-ctk", self.cache_type_k),
            *("-ctv", self.cache_type_v),
            *(() if layers is None else ("-ngl", str(layers if layers >= 0 else _ALL_LAYERS))),
        ]
