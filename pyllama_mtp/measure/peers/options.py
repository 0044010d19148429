"""The settings of a measurement in the words of upstream's programs."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_mtp.settings import Settings

_ALL_LAYERS = 999


@dataclass(frozen=True)
class Options:
    """What all programs are given alike; fields as those of `Settings`.

    Attributes:
        n_gpu_layers: None: not given, the program decides; -1: all.
        head: the file of the MTP head, where it is another one than `model`.
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
        """Those of a cell."""
        return cls(
            model=model,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            threads=settings.threads,
            flash_attn=settings.flash_attn,
            cache_type_k=settings.cache_type_k,
            cache_type_v=settings.cache_type_v,
            n_gpu_layers=n_gpu_layers,
            head=head,
        )

    def arguments(self) -> list[str]:
        """As llama-bench and llama-server spell them, alike."""
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
