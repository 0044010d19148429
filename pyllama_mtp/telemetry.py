"""Figures of a generation: times by phase, drafts and acceptance per position."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("draft", "verify", "sync", "sampling")


class timed:  # noqa: N801 - used like a function
    """A block whose seconds are added to `name` of each of `times`, whatever ends it."""

    __slots__ = ("_began", "_name", "_times")

    def __init__(self, name: str, *times: dict[str, Any]) -> None:
        self._name, self._times = name, times

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        for times in self._times:
            times[self._name] = times.get(self._name, 0.0) + seconds


@dataclass(frozen=True)
class Pair:
    """One draft and what the target chose there. `position` counts from 1 within its round."""

    position: int
    drafted: int
    actual: int
    drafted_text: str
    actual_text: str


@dataclass(frozen=True)
class NearTie:
    """A token whose logit was within rounding of the second best: in another batch, the other token
    might have been chosen. `index` counts generated tokens from 0; `gap`: of the logits; `text` and
    `other_text`: what the two write."""

    index: int
    token: int
    other: int
    gap: float
    text: str
    other_text: str


@dataclass
class Telemetry:
    """Figures of one generation. Times are seconds of wall clock.

    Attributes:
        n_prompt: prompt tokens. `n_cached` of them were in the cache already; `n_left` of them are
            not processed, because the prompt was interrupted.
        n_image_tokens: of the prompt, rows of images; `encode_s`: seconds spent on images that were
            not known before, which no other time contains.
        n_generated: tokens emitted.
        prefill_s: from the start to the moment the first token is known.
        decode_s: from then to the end.
        drafted: drafts of the head offered to verification, per position 1..n.
        accepted: drafts accepted, per position; all drafts before them were accepted too.
        looked_up: drafts from earlier in the text or in past texts, behind drafts of the head or
            without: {"rounds": of `rounds` that have some, "drafted", "accepted"}.
        held: rounds with drafts of the head or from earlier in the text, by how many of them were
            accepted, from 0 on.
        forced: tokens that the grammar left no choice for, verified without a draft of the head.
        draft_vocab: of a draft vocabulary that follows the text: {"tokens": chosen in rounds,
            "outside": not in the vocabulary, "replaced": rows, "seconds": for replacing}.
        rounds: verification passes, those without a draft included.
        time_s: decode time by phase: draft, verify, sampling, sync (rolling back rejected drafts;
            in upstream's way also keeping the head in step). "prompt_sync" is the part of prefill_s
            that upstream's way spends on keeping the head in step; "image", if there are any, the
            part in which rows of images were processed.
        prompt_sync: how the MTP head was kept in step: "kv", "full", "" without MTP.
        output_bytes: bytes of logits and greedy tokens that decodes have copied to the host, those
            of drafts and of the prompt's last row included; 0 with upstream's library.
        synthetic_acceptance: the imposed rates, or None.
        pairs: every verified draft of the head with the target's choice, when asked for.
        near_ties: see :class:`NearTie`, when asked for.
        n_threads: CPU threads of the last round; 0: not known.
        waited_s: seconds that this process's threads, added up, waited for a core meanwhile.
        plain_s: seconds of a step without drafts, if adaptive depth has measured it; else None.
        why_fewer_drafts: why adaptive depth makes none, or fewer than for one sequence alone, for
            the most sequences that were decoded together; "": it makes as many.
        passes: rounds, by how many sequences were decoded together and by drafts of each:
            ``passes[4][2]`` is the number of rounds in which 4 sequences had 2 drafts each.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_left: int = 0
    n_image_tokens: int = 0
    encode_s: float = 0.0
    n_generated: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    looked_up: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("rounds", "drafted", "accepted"), 0)
    )
    held: list[int] = field(default_factory=list)
    forced: int = 0
    draft_vocab: dict[str, float] = field(
        default_factory=lambda: {"tokens": 0, "outside": 0, "replaced": 0, "seconds": 0.0}
    )
    rounds: int = 0
    time_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*PHASES, "prompt_sync"), 0.0)
    )
    prompt_sync: str = ""
    output_bytes: int = 0
    synthetic_acceptance: tuple[float, ...] | None = None
    pairs: list[Pair] | None = None
    near_ties: list[NearTie] | None = None
    n_threads: int = 0
    waited_s: float = 0.0
    plain_s: float | None = None
    why_fewer_drafts: str = ""
    passes: dict[int, dict[int, int]] = field(default_factory=dict)

    def count_pass(self, n_sequences: int, depth: int) -> None:
        """One round of so many sequences with so many drafts each."""
        depths = self.passes.setdefault(n_sequences, {})
        depths[depth] = depths.get(depth, 0) + 1

    def count_times(self, times: dict[str, float]) -> None:
        """Decode time: of phases, and of the whole "round"."""
        self.decode_s += times["round"]
        for phase in PHASES:
            self.time_s[phase] += times[phase]

    def count_round(
        self, n_drafted: int, n_accepted: int, looked_up: int = 0, forced: bool = False
    ) -> None:
        """One verification pass over `n_drafted` drafts, of which the first `n_accepted` held, and
        the last `looked_up` came from earlier in the text."""
        self.rounds += 1
        if forced:
            self.forced += n_accepted
            return
        if n_drafted:
            self.held.extend([0] * (n_drafted + 1 - len(self.held)))
            self.held[n_accepted] += 1
        if looked_up:
            n_head = n_drafted - looked_up
            held = max(0, n_accepted - n_head)
            for name, n in (("rounds", 1), ("drafted", looked_up), ("accepted", held)):
                self.looked_up[name] += n
            n_drafted, n_accepted = n_head, min(n_accepted, n_head)
        for counts, n in ((self.drafted, n_drafted), (self.accepted, n_accepted)):
            counts.extend([0] * (n_drafted - len(counts)))
            for position in range(n):
                counts[position] += 1

    @property
    def n_drafted(self) -> int:
        """Drafts verified: of the head, and from earlier in the text."""
        return sum(self.drafted) + self.looked_up["drafted"]

    @property
    def n_accepted(self) -> int:
        """Of these, accepted."""
        return sum(self.accepted) + self.looked_up["accepted"]

    @property
    def n_prefilled(self) -> int:
        """Prompt tokens processed; cached ones do not count."""
        return self.n_prompt - self.n_cached - self.n_left

    @property
    def prefill_tps(self) -> float:
        """Of these, per second. 0 when nothing was."""
        return self.n_prefilled / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first, which belongs to the prefill."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def speed_up(self) -> float | None:
        """Decode speed against no MTP, by `plain_s`; None where that is not known."""
        return self.decode_tps * self.plain_s if self.plain_s and self.decode_s > 0 else None

    @property
    def elapsed_s(self) -> float:
        """Prefill and decode together."""
        return self.prefill_s + self.decode_s

    @property
    def acceptance_per_position(self) -> list[float]:
        """accepted / drafted at each position; the probability that the draft there is used."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """Accepted drafts per round."""
        return (self.n_accepted + self.forced) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens gained per verification pass: accepted drafts and the target's own one."""
        return self.mean_accepted_length + 1.0 if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures, ready for JSON."""
        names = ("prefill_tps", "decode_tps", "elapsed_s", "acceptance_per_position")
        derived = {
            n: getattr(self, n) for n in (*names, "mean_accepted_length", "tokens_per_round")
        }
        return {**asdict(self), **derived}


@dataclass
class BatchTelemetry(Telemetry):
    """Figures of all sequences of a generation together: sums, and times of the whole.

    `prefill_s` and `decode_s` are wall clock: a round counts once, however many sequences it has.
    `rounds` are added up over the sequences.

    Attributes:
        n_started: sequences whose first token is known.
    """

    n_started: int = 0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first ones, which belong to the prefills."""
        return (self.n_generated - self.n_started) / self.decode_s if self.decode_s > 0 else 0.0
