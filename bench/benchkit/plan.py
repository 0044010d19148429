"""What both sides measure: one object, so that no parameter can differ between them."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Acceptance imposed by default: the published figures for Qwen3.6 at depth 3.
RATES = (0.84, 0.76, 0.67)


@dataclass(frozen=True)
class Plan:
    """Sizes and settings of a comparison.

    Attributes:
        n_prefill: tokens of the prefill measurement.
        n_prompt: tokens in the cache when a decode measurement begins.
        n_decode: tokens of a decode measurement, without the first, which the prompt gives.
        rates: imposed acceptance per draft position, unconditional; its length is the depth.
    """

    model: Path
    n_prefill: int = 512
    n_prompt: int = 256
    n_decode: int = 192
    rates: tuple[float, ...] = RATES
    n_batch: int = 2048
    n_ubatch: int = 512
    threads: int = 1
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"

    @property
    def depth(self) -> int:
        """Drafts per round."""
        return len(self.rates)

    @staticmethod
    def n_ctx(n_tokens: int) -> int:
        """Context length for so many tokens, rounded up as llama.cpp would."""
        return (n_tokens + 255) // 256 * 256

    def driver_settings(self, n_tokens: int) -> dict[str, Any]:
        """Fields of pyllama_mtp.Settings, without those of drafting."""
        return {
            "n_ctx": self.n_ctx(n_tokens),
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_threads": self.threads,
            "flash_attn": self.flash_attn,
            "cache_type_k": self.cache_type_k,
            "cache_type_v": self.cache_type_v,
        }

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; of the model's path only the file name."""
        return {**asdict(self), "model": self.model.name, "depth": self.depth}


def random_prompt(n_tokens: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Random token ids, as llama-bench takes them; the same for the same arguments."""
    draw = random.Random(seed)
    return [draw.randrange(n_vocab) for _ in range(n_tokens)]
