"""The settings of a measurement in the words of upstream's programs."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_mtp.settings import Settings

_ALL_LAYERS = 999


@dataclass(frozen=True)
class Options:
    """What all programs are given.

    Attributes:
        n_gpu_layers: -1: all.
        head: the file of the MTP head, if it is not `model`.
    """

    settings: Settings
    model: str
    n_gpu_layers: int
    head: str = ""

    def arguments(self) -> list[str]:
        """Arguments of llama-bench and llama-server."""
        given = self.settings
        return [
            *("-m", self.model),
            *("-b", str(given.n_batch)),
            *("-ub", str(given.n_ubatch)),
            *("-t", str(given.threads)),
            *("-fa", given.flash_attn),
            *("-ctk", given.cache_type_k),
            *("-ctv", given.cache_type_v),
            *("-ngl", str(self.n_gpu_layers if self.n_gpu_layers >= 0 else _ALL_LAYERS)),
        ]
