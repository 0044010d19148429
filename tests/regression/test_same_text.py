"""The text with drafts is that without, whatever drafts, judges and takes back: a row a way.

Other files have what is theirs: adapters (test_lora.py), heads in files of their own
(test_head_files.py), other architectures (test_architectures.py), other prompts
(test_greedy_parity.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Answer, Model, RopeScaling, Sampling

from ..marks import usual
from .support import MOST, N_CTX, PLACES, answers, same_text, settings

YARN = {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 4096}
SCALINGS: list[dict[str, Any]] = [
    {"rope_freq_scale": 0.5},
    {"rope_freq_base": 5e5},
    YARN,
    {**YARN, "yarn_ext_factor": 0.5, "yarn_attn_factor": 1.2},
    {**YARN, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
]


@dataclass(frozen=True)
class Way:
    """How answers are drafted for.

    Attributes:
        options: settings with drafts.
        both: settings with drafts and without.
        sampling: with drafts; without them it is greedy.
        n_sequences: so many at once; 0: a session of one.
    """

    depth: int | str = 3
    options: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling | None = None
    n_sequences: int = 0


def several(depth: int | str = 3, both: dict[str, Any] = {}, **options: Any) -> Way:  # noqa: B006
    """More prompts than places."""
    return Way(depth, options, both, None, PLACES)


def cold(sampling: Sampling) -> Way:
    """So cold that it is greedy, but goes the way of drawn drafts."""
    chosen = replace(sampling, temperature=0.001, seed=3)
    return Way(options={"draft_sampling": True}, sampling=chosen)


def no_repeats(ids: Any, logits: Any) -> Any:
    """No token of the last eight."""
    logits[ids[-8:]] = -np.inf
    return logits


GRAMMAR = Sampling(grammar='root ::= "f(" [a-z]+ ("," " "? [a-z]+)* ")"')
BIAS = Sampling(logit_bias={**dict.fromkeys(range(0, 2048, 3), -math.inf), 4: -3.0})
PENALTY = Sampling(repeat_penalty=1.3, repeat_last_n=32)
PROCESSOR = Sampling(logits_processors=[no_repeats])

WAYS = {
    "a short window": Way(options={"draft_window": 1}),
    "a window that hides nothing": Way(options={"draft_window": N_CTX}),
    "pre-norm": Way(options={"hidden": "pre-norm"}),
    "quantized caches": Way(both={"cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
    "batches larger than prompts": Way(both={"n_batch": 2048, "n_ubatch": 512}),
    # The smallest ones that each depth admits.
    **{f"batches of {n + 2}": Way(n, {"n_batch": n + 2, "n_ubatch": n + 2}) for n in (1, 3, 6)},
    **{f"rope {i}": Way(both={"rope": RopeScaling(**one)}) for i, one in enumerate(SCALINGS[:4])},
    "grammar": Way(sampling=GRAMMAR),
    "grammar, drawn": cold(GRAMMAR),
    "bias, drawn": cold(BIAS),
    "penalty, upstream's way": Way(options={"prompt_sync": "full"}, sampling=PENALTY),
    "penalty, drawn": cold(PENALTY),
    "processor": Way(sampling=PROCESSOR),
    "processor, drawn": cold(PROCESSOR),
    "a part of the vocabulary": Way(options={"draft_vocab": 300}),
    "a part of it, replay": Way(options={"draft_vocab": 300, "rollback": "replay"}),
    "a part of it, least probability": Way(options={"draft_vocab": 1024, "p_min": 0.4}),
    "rows of q4_0": Way(options={"draft_vocab": 512, "draft_head_type": "q4_0"}),
    "all rows of q8_0": Way(options={"draft_vocab": "full", "draft_head_type": "q8_0"}),
    "several": several(),
    "several, replay": several(rollback="replay"),
    "several, part of the vocabulary": several(draft_vocab=1024),
    "several, upstream's way": several(prompt_sync="full"),
    "several, auto": several("auto"),
    "several, one draft": several(1),
    "several, deep": several(6),
    "several, without flash attention": several(both={"flash_attn": "off"}),
    "several, least probability": several(p_min=0.6),
}
#: What another way shows, too.
LONG = {"a window that hides nothing", "batches of 3", "batches of 8", "rope 1", "rope 2"}
LONG |= {"penalty, drawn", "a part of it, replay", "all rows of q8_0", "several, one draft"}
LONG |= {"several, deep", "several, without flash attention", "several, least probability"}

Plain = dict[str, list[Answer]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Answers without drafts, by what they depend on."""
    return {}


@pytest.mark.parametrize(
    "name", usual(*(one for one in WAYS if one not in LONG), long=sorted(LONG))
)
def test_drafts_change_no_text(
    demo: Model, ragged: list[list[int]], plain: Plain, name: str
) -> None:
    way = WAYS[name]
    n = 8 if way.n_sequences else 4
    greedy = way.sampling and replace(way.sampling, temperature=0.0, seed=None)

    def without_drafts(both: dict[str, Any], sampling: Sampling | None) -> list[Answer]:
        key = repr((both, sampling, n))
        if key not in plain:
            chosen = settings(0, **{"n_ubatch": 32, **both})
            plain[key] = answers(demo, ragged[:n], chosen, MOST[:n], sampling=sampling)
        return plain[key]

    wanted, usual_texts = without_drafts(way.both, greedy), without_drafts({}, None)
    if greedy or "rope" in way.both:
        other = [a.tokens for a in wanted] != [a.tokens for a in usual_texts]
        assert other, "it has no effect: it was not tested"
    chosen = settings(way.depth, **{"n_ubatch": 32, **way.both, **way.options})
    asked = {"sampling": way.sampling} if way.sampling else {}
    got = same_text(demo, ragged[:n], chosen, MOST[:n], way.n_sequences, wanted=wanted, **asked)
    if isinstance(way.depth, int):
        told = [a.telemetry for a in got if len(a.telemetry.drafted) == way.depth]
        assert sum(one.accepted[-1] for one in told), "no round with all drafts accepted"
        assert sum(one.drafted[0] - one.accepted[0] for one in told), "none with the first rejected"
