"""The record of a measurement in memory: one `Cell` per prompt size, class and variant.

Timings are medians of the raw samples, which are kept beside them. Counts (drafted, accepted,
rounds) are summed over the samples, and every rate is a total over a total.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyllama_mtp import Telemetry

#: Raised when the meaning of a field changes; see recordtypes.py.
SCHEMA = 2
NO_MTP = "no-mtp"
DRAFT_MTP = "draft-mtp"
#: The `program` of this project's own measurements.
OURS = "pyllama-mtp"


@dataclass
class Sample:
    """One generation as it was measured: seconds, tokens per second, tokens.

    An empty field is not known.

    Attributes:
        drafted, accepted: one count per draft position 1..n_max, without n-gram drafts.
        time_s: seconds of each phase, "prompt_sync" among them.
        prompt_sync: how the prompt was synced: "kv" or "full".
        waited_s: seconds that all threads together waited for a core, in "prefill" and "decode".
        cpu_s: CPU seconds of the thread that drives the model, in "prefill" and "decode"; with one
            thread on a CPU there is no other.
        looked_up: counts of n-gram drafts.
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
    tokens_per_round: float
    time_s: dict[str, float] = field(default_factory=dict)
    prompt_sync: str = ""
    waited_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    looked_up: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_telemetry(cls, telemetry: Telemetry) -> Sample:
        """The driver's telemetry, as far as a sample keeps it."""
        taken = {
            field.name: copy(getattr(telemetry, field.name))
            for field in dataclasses.fields(cls)
            if field.name not in ("waited_s", "cpu_s")
        }
        return cls(**taken)


@dataclass
class Cell:
    """One cell of a matrix; the fields are the keys of its JSON object.

    Rates and times are None where nothing was measured.

    Attributes:
        model: file name without its folder.
        series: hash of the patch series.
        n_max: drafts per round, of adaptive depth the most; 0 is no MTP.
        adaptive: the depth was chosen while generating, from 0 to `n_max`.
        repeat: samples that were planned; an interrupted cell has fewer.
        repeats: the number of each sample's repeat; samples of the same repeat are paired.
        prompt_sync_share: part of the prefill's time that the MTP block took; None without MTP.
        memory: bytes by use.
        skipped: why nothing was measured.
        prompt_class: kind of text of the prompts.
        program: the program that measured.
        run: id of the run.
        slow_types: tensor types without a fast path for a few rows on the CPU, and their shares of
            what a plain step reads; empty: not looked at.
        profile: see :meth:`.Profile.to_dict`; empty: not measured.
        axes: the cell's values of the settings that the plan varies, by name.
    """

    model: str
    variant: str
    upstream_commit: str
    series: str
    backend: str
    mode: str
    n_max: int
    n_prompt: int
    max_tokens: int
    repeat: int
    prefill_tps: float | None = None
    decode_tps: float | None = None
    elapsed_s: float | None = None
    prompt_sync_share: float | None = None
    samples: list[Sample] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0
    acceptance_per_position: list[float | None] = field(default_factory=list)
    mean_accepted_length: float | None = None
    tokens_per_round: float | None = None
    synthetic_acceptance: list[float] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    time: str = ""
    skipped: str | None = None
    prompt_class: str = "text"
    program: str = OURS
    repeats: list[int] = field(default_factory=list)
    run: str = ""
    adaptive: bool = False
    slow_types: dict[str, float] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def summarize(self) -> None:
        """Set medians, sums and rates from `samples`."""
        if not self.samples:
            return
        self.prefill_tps = median(sample.prefill_tps for sample in self.samples)
        self.decode_tps = median(sample.decode_tps for sample in self.samples)
        self.elapsed_s = median(sample.elapsed_s for sample in self.samples)
        self.drafted = sum_positions(sample.drafted for sample in self.samples)
        self.accepted = sum_positions(sample.accepted for sample in self.samples)
        self.rounds = sum(sample.rounds for sample in self.samples)
        self.acceptance_per_position = pooled_rates(self.accepted, self.drafted)
        prefill_s = sum(sample.prefill_s for sample in self.samples)
        if self.n_max and prefill_s > 0 and self.program == OURS:
            synced = sum(sample.time_s.get("prompt_sync", 0.0) for sample in self.samples)
            self.prompt_sync_share = synced / prefill_s
        if self.rounds:
            emitted = sum(sample.tokens_per_round * sample.rounds for sample in self.samples)
            self.tokens_per_round = emitted / self.rounds
            self.mean_accepted_length = self.tokens_per_round - 1

    def to_json(self) -> str:
        """The cell as one line of JSON, without the newline."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)


def sum_positions(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sum counts position by position; shorter sequences count as 0 beyond their end."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def pooled_rates(accepted: Sequence[int], drafted: Sequence[int]) -> list[float | None]:
    """accepted[i] / drafted[i]; None where nothing was drafted."""
    return [hits / tries if tries else None for hits, tries in zip(accepted, drafted, strict=True)]
