"""Every value out of range is a UsageError that says what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pyllama_mtp import Sampling, Settings
from pyllama_mtp.errors import UsageError
from pyllama_mtp.settings import DRAFT_LIMIT, available_threads

BAD_SETTINGS = [
    ("n_ctx", -1, "0 (the model's own length) to"),
    ("n_ctx", 2**31, "0 (the model's own length) to"),
    ("n_batch", 0, "from 1 to"),
    ("n_ubatch", -5, "from 1 to"),
    ("n_ubatch", 2**31, "from 1 to"),
    ("n_threads", 0, "from 1 to 512"),
    ("n_threads", 513, "from 1 to 512"),
    ("cache_type_k", "f64", "f16, q8_0"),
    ("cache_type_v", "", "f16, q8_0"),
    ("flash_attn", "yes", "auto, on, off"),
    ("prompt_rows", "first", "last, all"),
    ("rollback", "undo", "auto, snapshot, replay"),
    ("draft_n_max", -1, f"0 (no MTP) to {DRAFT_LIMIT}"),
    ("draft_n_max", DRAFT_LIMIT + 1, f"0 (no MTP) to {DRAFT_LIMIT}"),
    ("p_min", -0.1, "0 to 1"),
    ("prompt_sync", "none", "one of auto, kv, full"),
    ("hidden", "norm", "one of post-norm, pre-norm"),
    ("handoff", "gpu", "one of auto, device, host"),
    ("drafting", "tree", "one of auto, chain, stepwise"),
    ("draft_vocab", "", "'auto', 'full', a number of tokens from 256, or a file"),
    ("draft_vocab", 255, "a number of tokens from 256"),
    ("draft_vocab", True, "a number of tokens from 256"),
    ("checkpoints", -1, "from 0 (none) to 30"),
    ("checkpoints", 31, "from 0 (none) to 30"),
    ("p_min", 1.1, "0 to 1"),
    ("p_min", math.nan, "0 to 1"),
    ("draft_sampling", "on", "True or False"),
    ("ngram", "off", "True or False"),
    ("synthetic_acceptance", (0.5, 0.6, 0.1), "do not increase"),
    ("synthetic_acceptance", (1.5, 0.5, 0.5), "0 to 1"),
    ("synthetic_acceptance", (0.5, 0.5, -0.1), "0 to 1"),
    ("synthetic_acceptance", (), "one or more rates"),
]

BAD_SAMPLING = [
    ("logit_bias", {3: math.nan}, "finite numbers, or minus infinity"),
    ("logit_bias", {3: math.inf}, "finite numbers, or minus infinity"),
    ("grammar", "", "GBNF, or None"),
    ("temperature", -0.1, "0 (greedy) or above"),
    ("temperature", math.nan, "0 (greedy) or above"),
    ("temperature", math.inf, "0 (greedy) or above"),
    ("top_k", -1, "0 (off) or above"),
    ("top_p", 0.0, "above 0, at most 1"),
    ("top_p", 1.01, "above 0, at most 1"),
    ("top_p", math.nan, "above 0, at most 1"),
    ("min_p", -0.01, "from 0 to 1"),
    ("min_p", 2.0, "from 0 to 1"),
    ("repeat_penalty", 0.0, "above 0"),
    ("repeat_penalty", math.inf, "above 0"),
    ("repeat_last_n", -1, "from 0 (off) to 1048576"),
    ("seed", -1, "0 to 2**32 - 2"),
    ("seed", 2**32 - 1, "0 to 2**32 - 2"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_SETTINGS)
def test_bad_settings(name: str, value: object, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert name in message and repr(value) in message and allowed in message


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_SAMPLING)
def test_bad_sampling(name: str, value: object, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert name in message and repr(value) in message and allowed in message


def test_synthetic_acceptance_bounds_the_depth() -> None:
    with pytest.raises(UsageError, match="each of the 3 draft positions"):
        Settings(draft_n_max=3, synthetic_acceptance=(0.5, 0.4))
    assert Settings(synthetic_acceptance=(0.5, 0.4)).depth_limit == 2
    assert Settings(synthetic_acceptance=(0.5,) * 20).depth_limit == Settings().depth_limit


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"drafting": "chain"}, "needs drafting 'stepwise'"),
        ({"synthetic_acceptance": (0.5, 0.5, 0.5)}, "use one of them"),
    ],
)
def test_drawn_drafts_do_not_go_with(others: dict[str, Any], reason: str) -> None:
    assert Settings(draft_sampling=True).draft_sampling
    with pytest.raises(UsageError, match=reason):
        Settings(draft_sampling=True, **others)


def test_every_field_has_a_bad_value_here() -> None:
    fields = {f.name for kind in (Settings, Sampling) for f in dataclasses.fields(kind)}
    assert {name for name, _, _ in BAD_SETTINGS + BAD_SAMPLING} == fields


def test_a_quantized_v_cache_needs_flash_attention() -> None:
    for kind in ("q8_0", "q4_0"):
        with pytest.raises(UsageError, match="needs flash attention"):
            Settings(cache_type_v=kind, flash_attn="off")
        Settings(cache_type_v=kind, flash_attn="on")
        Settings(cache_type_k=kind, flash_attn="off")


def test_limits_themselves_are_allowed() -> None:
    Settings(n_ctx=0, n_batch=1, n_ubatch=1, n_threads=1, draft_n_max=0, p_min=0.0)
    Settings(draft_n_max=DRAFT_LIMIT, p_min=1.0)
    Settings(synthetic_acceptance=(1.0, 0.0, 0.0))
    Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_last_n=0, seed=0)
    Sampling(min_p=1.0, seed=2**32 - 2)


def test_threads() -> None:
    assert Settings(n_threads=3).threads == 3
    assert Settings().threads == available_threads() >= 1


def test_what_counts_as_plain_greedy() -> None:
    assert Sampling().plain_greedy
    assert Sampling(repeat_penalty=1.5, repeat_last_n=0).plain_greedy
    assert not Sampling(repeat_penalty=1.5).plain_greedy
    assert not Sampling(temperature=0.1).plain_greedy


def test_a_grammar_that_is_too_deep() -> None:
    Sampling(grammar="root ::= " + "(" * 500 + '"a"' + ")" * 500)
    with pytest.raises(UsageError, match="more than 500 parentheses"):
        Sampling(grammar="root ::= " + "(" * 501 + '"a"' + ")" * 501)
