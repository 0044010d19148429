"""One measurement of one side, in the same terms for llama-bench, llama-server and our driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """What one process measured. Rates are per second; None where it was not measured.

    Attributes:
        prefill_tps: prompt tokens per second.
        decode_tps: decoded tokens per second. The first token, which comes from the prompt's
            logits, counts neither as a token nor in the time.
        n_prompt: prompt tokens.
        n_decoded: tokens in `decode_tps`, that is without the first one.
        drafted, accepted: draft tokens.
        rounds: verification passes; 0 without drafting. Every one gains a token beside the accepted
            drafts, so it is ``n_decoded - accepted``.
    """

    prefill_tps: float | None
    decode_tps: float | None
    n_prompt: int
    n_decoded: int
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def tokens_per_round(self) -> float:
        """Tokens gained per verification pass; 1 without drafting."""
        return self.n_decoded / self.rounds if self.rounds else 1.0

    @property
    def rounds_per_second(self) -> float | None:
        """Verification passes per second, or decode steps without drafting."""
        return None if self.decode_tps is None else self.decode_tps / self.tokens_per_round

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, derived figures included."""
        derived = {
            "tokens_per_round": self.tokens_per_round,
            "rounds_per_second": self.rounds_per_second,
        }
        return {**asdict(self), **derived}
