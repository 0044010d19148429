"""What is measured once: a generation."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from pyllama_mtp.telemetry import Telemetry


class Sample(Struct, omit_defaults=True):
    """One generation as it was measured: seconds, tokens per second, tokens.

    An empty field is not known.

    Attributes:
        drafted, accepted: one count per draft position 1..n_max, without n-gram drafts.
        mean_acceptance_length: 1 + accepted drafts per verification pass, n-gram drafts among
            them; older files have it as `tokens_per_round`.
        time_s: seconds of each phase, "prompt_sync" among them; "image" is the part of the prefill
            in which the rows of images were processed.
        prompt_sync: how the prompt was synced: "kv" or "full".
        waited_s: seconds that all threads together waited for a core, in "prefill" and "decode".
        looked_up: counts of n-gram drafts.
        n_image_tokens: of the prompt, rows of images; encode_s: seconds in which these were
            encoded, which `prefill_s` does not contain, but `elapsed_s` does. Other programs count
            them into `prefill_s`.
    """

    n_prompt: int
    n_generated: int
    prefill_s: float
    decode_s: float
    elapsed_s: float
    prefill_tps: float
    decode_tps: float
    drafted: list[int]
    accepted: list[int]
    rounds: int
    mean_acceptance_length: float = 0.0
    time_s: dict[str, float] = {}
    prompt_sync: str = ""
    waited_s: dict[str, float] = {}
    looked_up: dict[str, int] = {}
    n_image_tokens: int = 0
    encode_s: float = 0.0
    tokens_per_round: float = 0.0

    def __post_init__(self) -> None:
        """Take the mean acceptance length by its older name."""
        self.mean_acceptance_length = self.mean_acceptance_length or self.tokens_per_round
        self.tokens_per_round = 0.0

    @property
    def prompt_tps(self) -> float:
        """Tokens of the prompt per second of prefill and encoding together."""
        whole = self.prefill_s + self.encode_s
        return self.prefill_tps * self.prefill_s / whole if whole > 0 else 0.0

    @classmethod
    def from_telemetry(cls, telemetry: Telemetry) -> Sample:
        """The driver's telemetry, as far as a sample keeps it."""
        apart = ("waited_s", "mean_acceptance_length")
        names = [name for name in cls.__struct_fields__ if name not in apart]
        return cls(**{name: copy(getattr(telemetry, name)) for name in names})
