"""The three comparisons: how each side is measured, and in what terms the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers import Peers

from benchkit import llama_bench, llama_server, ours
from benchkit.plan import Plan, random_prompt
from benchkit.sample import Sample
from benchkit.statistics import Ratio, Spread, expected_tokens_per_round


@dataclass
class Bench:
    """Everything that a measurement needs.

    Attributes:
        stamp, system_info: what our library says about its build, once it was measured.
    """

    plan: Plan
    peers: Peers
    lib: str
    n_vocab: int
    stamp: dict[str, Any] = field(default_factory=dict)
    system_info: str = ""

    def drive(self, n_prompt: int, n_decode: int, mtp: bool, warmup: int) -> Sample:
        """One measurement of our driver."""
        settings = self.plan.driver_settings(n_prompt + n_decode + (1 if n_decode else 0))
        settings["checkpoints"] = 0  # llama-server's are off, and llama-bench has none
        settings["draft_n_max"] = self.plan.depth if mtp else 0
        if mtp:
            settings["synthetic_acceptance"] = self.plan.rates
        answer = ours.measure(
            ours.Request(
                model=str(self.plan.model),
                lib=self.lib,
                mtp=mtp,
                settings=settings,
                prompt=random_prompt(n_prompt, self.n_vocab),
                max_tokens=n_decode + 1,
                warmup_prompt=warmup,
                warmup_tokens=min(8, n_decode + 1),
            )
        )
        self.stamp, self.system_info = answer.stamp, answer.system_info
        return answer.sample()

    def serve(self, round_number: int) -> Sample:
        """One measurement of llama-server."""
        prompt = random_prompt(self.plan.n_prompt, self.n_vocab)
        seed = round_number + 1
        return llama_server.measure(self.peers, self.plan, prompt, seed)


@dataclass(frozen=True)
class Measure:
    """One comparison.

    Attributes:
        value: the rate compared, from a sample; None: a run of that kind did not measure it.
    """

    name: str
    peer: str
    title: str
    theirs: Callable[[Bench, int], Sample]
    ours: Callable[[Bench, int], Sample]
    value: Callable[[Sample], float | None]


def _our_decode(bench: Bench, round_number: int) -> Sample:
    return bench.drive(bench.plan.n_prompt, bench.plan.n_decode, mtp=False, warmup=8)


def _our_mtp(bench: Bench, round_number: int) -> Sample:
    plan = bench.plan
    return bench.drive(plan.n_prompt, plan.n_decode, mtp=True, warmup=plan.n_prompt)


def _our_prefill(bench: Bench, round_number: int) -> Sample:
    n_prompt = bench.plan.n_prefill
    return bench.drive(n_prompt, 0, mtp=False, warmup=n_prompt)


MEASURES = (
    Measure(
        "prefill",
        "llama-bench",
        "plain prefill, tok/s",
        lambda bench, _: llama_bench.prefill(bench.peers, bench.plan),
        _our_prefill,
        lambda sample: sample.prefill_tps,
    ),
    Measure(
        "decode",
        "llama-bench",
        "plain decode, tok/s",
        lambda bench, _: llama_bench.decode(bench.peers, bench.plan),
        _our_decode,
        lambda sample: sample.decode_tps,
    ),
    Measure(
        "mtp",
        "llama-server",
        "draft-MTP decode, tok/s",
        lambda bench, number: bench.serve(number),
        _our_mtp,
        lambda sample: sample.decode_tps,
    ),
)


def summarize(measure: Measure, plan: Plan, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians, ratios and raw samples of one comparison; for MTP also at equal acceptance."""
    summary: dict[str, Any] = {
        "peer": measure.peer,
        "title": measure.title,
        "samples": {side: [s.to_dict() for s in given] for side, given in samples.items()},
        **compare_sides(samples, measure.value),
    }
    if measure.name != "mtp" or not all(samples.values()):
        return summary
    expected = expected_tokens_per_round(plan.rates)

    def at_equal_acceptance(sample: Sample) -> float | None:
        rate = sample.rounds_per_second
        return None if rate is None else rate * expected

    summary["expected_tokens_per_round"] = expected
    summary["tokens_per_round"] = {side: pooled(given) for side, given in samples.items()}
    summary["equal_acceptance"] = compare_sides(samples, at_equal_acceptance)
    summary["prefill"] = compare_sides(samples, lambda sample: sample.prefill_tps)
    return summary


def compare_sides(
    samples: dict[str, list[Sample]], value: Callable[[Sample], float | None]
) -> dict[str, Any]:
    """Spread of each side and, when both have samples, their ratio."""
    rates = {side: [v for s in given if (v := value(s))] for side, given in samples.items()}
    result: dict[str, Any] = {
        side: vars(Spread.of(given)) if given else None for side, given in rates.items()
    }
    if rates["ours"] and rates["theirs"]:
        result["ratio"] = Ratio.of(rates["ours"], rates["theirs"]).to_dict()
    return result


def pooled(samples: Sequence[Sample]) -> dict[str, float]:
    """Acceptance as it was achieved, over all samples: total tokens over total rounds."""
    drafted, accepted = sum(s.drafted for s in samples), sum(s.accepted for s in samples)
    rounds, decoded = sum(s.rounds for s in samples), sum(s.n_decoded for s in samples)
    return {
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_round": decoded / rounds if rounds else 1.0,
        "acceptance": accepted / drafted if drafted else 0.0,
    }
