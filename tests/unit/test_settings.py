"""Every value out of range or of a wrong type is a UsageError that says what is allowed."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Sampling, Settings
from pyllama_mtp.errors import SHOWN, UsageError
from pyllama_mtp.settings import DRAFT_LIMIT, RopeScaling, available_threads

BAD_SETTINGS = [
    ("n_ctx", -1, "0 (as much as is usual) to"),
    ("n_batch", 0, "from 1 to"),
    ("n_ubatch", -5, "from 1 to"),
    ("n_threads", 0, "from 1 to 512, or 'auto'"),
    ("n_threads", None, "from 1 to 512"),
    ("rope", {"rope_freq_base": 1e6}, "RopeScaling(...)"),
    ("n_threads", 513, "from 1 to 512"),
    ("cache_type_k", "f64", "f16, q8_0"),
    ("cache_type_v", "", "f16, q8_0"),
    ("flash_attn", "yes", "auto, on, off"),
    ("prompt_rows", "first", "last, all"),
    ("rollback", "undo", "auto, snapshot, replay"),
    ("draft_n_max", DRAFT_LIMIT + 1, f"0 (no MTP) to {DRAFT_LIMIT}"),
    ("p_min", -0.1, "0 to 1"),
    ("draft_window", -1, "0 (all) to"),
    ("prompt_sync", "none", "one of auto, kv, full"),
    ("hidden", "norm", "one of post-norm, pre-norm"),
    ("draft_vocab", 255, "a number of tokens from 256"),
    ("draft_vocab", True, "a number of tokens from 256"),
    ("draft_head_type", "q4_2", "one of file, f32"),
    ("checkpoints", 31, "from 0 (none) to 30"),
    ("cache_ram", -1, "0 MiB or more"),
    ("cache_dir", "", "the name of a folder"),
    ("cache_disk", -1, "0 MiB or more"),
    ("p_min", math.nan, "0 to 1"),
    ("draft_sampling", "on", "True or False"),
    ("draft_follow", "off", "True or False"),
    ("ngram", "off", "True or False"),
    ("synthetic_acceptance", (0.5, 0.6, 0.1), "do not increase"),
    ("synthetic_acceptance", (0.5, 0.5, -0.1), "0 to 1"),
    ("synthetic_acceptance", (), "one or more rates"),
]

BAD_SAMPLING = [
    ("logit_bias", {3: math.inf}, "finite numbers, or minus infinity"),
    ("grammar", "", "GBNF, or None"),
    ("temperature", math.nan, "0 (greedy) or above"),
    ("top_k", -1, "0 (off) or above"),
    ("top_p", 0.0, "above 0, at most 1"),
    ("min_p", 2.0, "from 0 to 1"),
    ("repeat_penalty", math.inf, "above 0"),
    ("repeat_last_n", -1, "from 0 (off) to 1048576"),
    ("reasoning_budget", -1, "0 tokens or more"),
    ("logits_processors", [5], "functions of (ids, logits)"),
    ("frequency_penalty", math.inf, "finite"),
    ("presence_penalty", math.nan, "finite"),
    ("top_n_sigma", -1.0, "0 (off) or above"),
    ("typical_p", 0.0, "above 0, at most 1"),
    ("xtc_probability", 1.1, "from 0 (off) to 1"),
    ("xtc_threshold", -0.1, "from 0 to 1"),
    ("dry_multiplier", -1.0, "0 (off) or above"),
    ("dry_base", 0.5, "1 or above"),
    ("dry_allowed_length", -1, "from 0 to 1048576"),
    ("dry_penalty_last_n", 2**21, "from 0 (off) to 1048576"),
    ("dry_sequence_breakers", ["a", ""], "none of them empty"),
    ("seed", 2**32 - 1, "0 to 2**32 - 2"),
]

WHOLE, REAL = "it must be a whole number, ", "it must be a number, "
RATES = "one or more rates from 0 to 1 that do not increase"
BIASES = "a mapping of token ids to finite numbers, or minus infinity"
VOCAB = "'auto', 'full', a number of tokens from 256, or a file"

WRONG_TYPES_OF_SETTINGS = [
    *(("n_ctx", value, WHOLE) for value in ("8", None, 2.5, True, np.True_, [8], np.array([8, 9]))),
    *((name, 8.0, WHOLE) for name in ("n_threads", "draft_n_max")),
    *(("p_min", value, REAL) for value in ("0.5", None, True, np.False_, [0.5], 1j)),
    ("p_min", 10**400, "0 to 1"),
    *(
        ("synthetic_acceptance", value, RATES)
        for value in (0.8, "0.8", b"abc", {0: 0.5}, ("0.8",), (True,), np.array(0.5), {0.5})
    ),
    *(("draft_vocab", value, VOCAB) for value in (1.5, None, b"a", ["a"])),
    *(("flash_attn", value, "one of ") for value in (1, None, ["on"])),
    ("ngram", 1, "True or False"),
]

WRONG_TYPES_OF_SAMPLING = [
    ("temperature", 10**400, "0 (greedy) or above"),
    ("reasoning_budget", 1.5, WHOLE),
    *(
        ("logit_bias", value, BIASES)
        for value in ([1], [(1, 1.0)], {"a": 1}, {1: "a"}, {1.5: 1}, {True: 1}, {1: None}, 5, 0)
    ),
    *(("grammar", value, "GBNF, or None") for value in (5, b"root", [], False)),
]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (Settings, BAD_SETTINGS + WRONG_TYPES_OF_SETTINGS),
        (Sampling, BAD_SAMPLING + WRONG_TYPES_OF_SAMPLING),
    ],
)
def test_bad_values(kind: Any, rows: list[tuple[str, object, str]]) -> None:
    for name, value, allowed in rows:
        with pytest.raises(UsageError) as caught:
            kind(**{name: value})
        message = str(caught.value)
        assert name in message and repr(value)[:SHOWN] in message and allowed in message


def kinds(kind: Any, **values: Any) -> dict[str, tuple[type, object]]:
    """Type and value of what is kept of these fields."""
    kept = kind(**values)
    return {name: (type(getattr(kept, name)), getattr(kept, name)) for name in values}


def test_numbers_of_numpy_become_pythons() -> None:
    names = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "checkpoints", "draft_n_max")
    for number in (np.int64(8), np.int32(8), np.uint8(8), np.array(8)):
        assert kinds(Settings, **dict.fromkeys(names, number)) == dict.fromkeys(names, (int, 8))
        names_of_sampling = ("top_k", "repeat_last_n", "seed")
        kept = kinds(Sampling, **dict.fromkeys(names_of_sampling, number))
        assert kept == dict.fromkeys(names_of_sampling, (int, 8))
    for half in (np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)):
        assert kinds(Settings, p_min=half) == {"p_min": (float, 0.5)}
        names = ("temperature", "top_p", "min_p", "repeat_penalty")
        kept = kinds(Sampling, **dict.fromkeys(names, half))
        assert kept == dict.fromkeys(names, (float, 0.5))
    assert kinds(Sampling, top_p=np.int64(1)) == {"top_p": (float, 1.0)}
    assert kinds(Settings, draft_vocab=np.int64(512)) == {"draft_vocab": (int, 512)}
    assert kinds(Settings, ngram=np.False_) == {"ngram": (bool, False)}


def test_rates_and_biases_of_numpy_become_pythons() -> None:
    for rates in (np.array([0.5, 0.25]), [np.float32(0.5), 0.25], (0.5, Fraction(1, 4))):
        kept = Settings(synthetic_acceptance=rates).synthetic_acceptance  # type: ignore[arg-type]
        assert kept == (0.5, 0.25) and {*map(type, kept)} == {float}
    biases = {np.int64(3): np.float32(0.5), 4: -math.inf, 5: np.int8(-1)}
    bias = Sampling(logit_bias=biases).logit_bias  # type: ignore[arg-type]
    assert bias == {3: 0.5, 4: -math.inf, 5: -1.0}
    assert {*map(type, bias)} == {int} and {*map(type, bias.values())} == {float}


def test_a_draft_vocabulary_may_be_named_by_a_path() -> None:
    assert Settings(draft_vocab=Path("a.json")).draft_vocab == "a.json"  # type: ignore[arg-type]


def test_a_value_that_cannot_be_shown_or_is_long() -> None:
    with pytest.raises(UsageError, match=r"top_k is a value of type int, it must be 0"):
        Sampling(top_k=-(10**5000))
    with pytest.raises(UsageError) as caught:
        Sampling(top_k="a" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_synthetic_acceptance_bounds_the_depth() -> None:
    with pytest.raises(UsageError, match="each of the 3 draft positions"):
        Settings(draft_n_max=3, synthetic_acceptance=(0.5, 0.4))
    assert Settings(synthetic_acceptance=(0.5, 0.4)).depth_limit == 2
    assert Settings(synthetic_acceptance=(0.5,) * 20).depth_limit == Settings().depth_limit


def test_published_acceptance_adds_up_to_its_tokens_per_round() -> None:
    named: Any = "golden:qwen3.5"
    rates = Settings(draft_n_max=8, synthetic_acceptance=named).synthetic_acceptance or ()
    lengths = [round(1 + sum(rates[:depth]), 2) for depth in range(1, 9)]
    assert lengths == [1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21]


def test_drawn_drafts_do_not_go_with_imposed_acceptance() -> None:
    with pytest.raises(UsageError, match="use one of them"):
        Settings(draft_sampling=True, synthetic_acceptance=(0.5, 0.5, 0.5))


def test_every_field_has_a_bad_value_here() -> None:
    fields = {f.name for kind in (Settings, Sampling) for f in dataclasses.fields(kind)}
    assert {name for name, _, _ in BAD_SETTINGS + BAD_SAMPLING} == fields


@pytest.mark.parametrize("kind", [Settings, Sampling, RopeScaling])
def test_every_field_is_described(kind: type) -> None:
    described = re.findall(r"^        (\w+(?:, \w+)*): \S", kind.__doc__ or "", re.MULTILINE)
    names = [name for words in described for name in words.split(", ")]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(kind))


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
