"""Metrics for Prometheus, read from the generator at each request."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .generator import Generator

PREFIX = "pyllama_mtp_"


class GeneratorCollector(Collector):
    """All metrics of a generator."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        generator, total = self._generator, self._generator.total
        prefill_tps, decode_tps = generator.speeds()
        gauges = {
            "requests_running": ("Requests that are being processed.", generator.n_running),
            "requests_waiting": ("Requests in the queue.", generator.n_waiting),
            "prefill_tokens_per_second": ("Speed of prefill, lately.", prefill_tps),
            "decode_tokens_per_second": (
                "Speed of decode, lately, of all sequences together.",
                decode_tps,
            ),
            "mean_accepted_length": ("Drafts accepted per round.", total.mean_accepted_length),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value)
        counters = {
            "prompt_tokens": ("Tokens of prompts.", total.n_prompt),
            "prompt_tokens_cached": ("Of these, not processed again.", total.n_cached),
            "generated_tokens": ("Tokens generated.", total.n_generated),
            "prefill_seconds": ("Time spent on prompts.", total.prefill_s),
            "decode_seconds": ("Time spent on rounds.", total.decode_s),
            "rounds": ("Verification passes, added up over the sequences.", total.rounds),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(PREFIX + name, text, value)
        yield from self._drafts()
        ended = CounterMetricFamily(
            PREFIX + "requests", "Answers that have ended, by how.", labels=["outcome"]
        )
        for outcome, n in sorted(generator.outcomes.items()):
            ended.add_metric([outcome], n)
        yield ended

    def _drafts(self) -> Iterable[Metric]:
        """By position in the round, 1 being the first draft."""
        total, labels = self._generator.total, ["position"]
        texts = ("Drafts verified, by position.", "Drafts accepted, by position.")
        drafted = CounterMetricFamily(PREFIX + "drafted_tokens", texts[0], labels=labels)
        accepted = CounterMetricFamily(PREFIX + "accepted_tokens", texts[1], labels=labels)
        share = "Share of the drafts that were accepted, by position."
        rate = GaugeMetricFamily(PREFIX + "acceptance", share, labels=labels)
        counts = zip(total.drafted, total.accepted, strict=False)
        for position, (n_drafted, n_accepted) in enumerate(counts, start=1):
            drafted.add_metric([str(position)], n_drafted)
            accepted.add_metric([str(position)], n_accepted)
            rate.add_metric([str(position)], n_accepted / n_drafted if n_drafted else 0.0)
        yield from (drafted, accepted, rate)


def registry(generator: Generator) -> CollectorRegistry:
    """A registry with the metrics of this generator only."""
    found = CollectorRegistry()
    found.register(GeneratorCollector(generator))
    return found
