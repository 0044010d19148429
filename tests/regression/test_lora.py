"""With LoRA adapters the text is the adapted model's, with and without MTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.errors import ModelFileError

from ..adapters import RANK, trunk, write_adapter
from ..marks import usual
from ..trimmed import rewrite, tensors_of
from .support import answers, compare, draft_ids, greedy, last_logits, settings, written

N_TOKENS = 40
HEAD = "output.weight"


@pytest.fixture(scope="module")
def untied_file(demo_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with an LM head of its own: the same rows as its embedding."""
    tensors = tensors_of(demo_file)
    tensors[HEAD] = tensors["token_embd.weight"]
    return rewrite(demo_file, tmp_path_factory.mktemp("untied") / "untied.gguf", tensors)


def changed(model: Model, kind: str) -> list[str]:
    """Names of the matrices that an adapter of this kind changes."""
    block = f"blk.{model.info.n_layer}."
    names = [tensor.name for tensor in model.info.tensors]
    return {
        "trunk": trunk(model.info),
        "block": [*trunk(model.info), *(n for n in names if re.match(block + r".*(proj|attn_[qkv]|"
                                                                     r"output|ffn_[a-z]*)\.w", n))],
        "embedding": ["token_embd.weight"],
        "head": [HEAD, *trunk(model.info)],
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    usual(
        ("trunk", {"draft_vocab": 512}),
        ("block", {"rollback": "replay"}),
        ("head", {"prompt_sync": "full"}),
        ("embedding", {}),
        long=[(kind, {}) for kind in ("trunk", "block", "head")],
    ),
)
def test_the_text_with_mtp_is_that_without(
    demo: Model,
    untied_file: Path,
    text: list[int],
    tmp_path: Path,
    kind: str,
    options: dict[str, Any],
) -> None:
    with Model(untied_file) as plain:
        names, strength = changed(plain, kind), 20 if kind == "embedding" else 3
        adapter = write_adapter(tmp_path / "a.gguf", plain.info, names, strength=strength)
    prompts = [text[:60], text[200:300]]
    with Model(untied_file, lora=adapter) as model:
        for prompt in prompts:
            difference = last_logits(model, prompt) - last_logits(demo, prompt)
            assert np.abs(difference).max() > 1  # it does something
        got = answers(model, prompts, settings(3, **options), N_TOKENS)
        wanted = answers(model, prompts, settings(0), N_TOKENS)
        compare(model, prompts, got, wanted, exact=model.same_bits, least=0)
    assert sum(one.telemetry.n_accepted for one in got) or kind == "block"  # of some use with it


def test_experts_are_adapted_and_scales_count(
    moe: Model, moe_file: Path, text: list[int], tmp_path: Path
) -> None:
    prompt = [token % moe.n_vocab for token in text[:40]]
    adapter = str(write_adapter(tmp_path / "a.gguf", moe.info, trunk(moe.info)))
    found = []
    for lora in ((), [adapter], [(adapter, 0.5)], [(adapter, 0.5), (adapter, 0.5)], [(adapter, 0)]):
        with Model(moe_file, lora=lora) as model:
            found.append(last_logits(model, prompt))
            if lora == [adapter]:
                both = (answers(model, [prompt], settings(n), N_TOKENS) for n in (3, 0))
                compare(model, [prompt], *both, least=0)
    plain, whole, half, twice_half, nothing = found
    assert min(np.abs(whole - plain).max(), np.abs(half - plain).max()) > 1
    assert np.abs(half - whole).max() > 0.1
    np.testing.assert_allclose(twice_half, whole, atol=1e-2)
    np.testing.assert_array_equal(nothing, plain)


def test_a_change_of_the_lm_head_reaches_the_draft_head(
    untied_file: Path, text: list[int], tmp_path: Path
) -> None:
    """Drafts over all tokens but one, whose rows are copied, are those of the whole head."""
    with Model(untied_file) as plain:
        adapter = write_adapter(tmp_path / "a.gguf", plain.info, [HEAD], strength=3)
        without = drafted(plain, text[:60], "full")
    with Model(untied_file, lora=adapter) as model:
        whole = drafted(model, text[:60], "full")
        assert drafted(model, text[:60], model.n_vocab - 1) == whole != without
        with Session(model, settings(3, draft_vocab=512)) as session:
            assert len(draft_ids(session)) == 512


def drafted(model: Model, prompt: list[int], draft_vocab: int | str) -> list[int]:
    """What is drafted after a prompt, round by round."""
    got = written(model, prompt, N_TOKENS, 3, draft_vocab=draft_vocab)
    return [pair.drafted for pair in got.telemetry.pairs or ()]


def test_a_chain_has_room_for_what_an_adapter_adds(
    untied_file: Path, tmp_path: Path, text: list[int]
) -> None:
    with Model(untied_file) as plain:
        files = [
            str(write_adapter(tmp_path / f"{i}.gguf", plain.info, changed(plain, "block")))
            for i in range(6)
        ]
    with Model(untied_file, lora=[(file, 0.1) for file in files]) as model:
        wanted = answers(model, [text[:30]], settings(0), 20)
        for depth in (2, 14):  # few tokens per graph: few nodes
            chosen = settings(depth, n_batch=16, n_ubatch=16)
            got = answers(model, [text[:30]], chosen, 20)
            compare(model, [text[:30]], got, wanted, least=0)


Q = "blk.2.attn_q.weight"
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"change": {"general.type": "model"}}, "no LoRA adapter"),
    ("kind", {"change": {"adapter.type": "control_vector"}}, "no LoRA adapter"),
    ("architecture", {"change": {"general.architecture": "llama"}}, "for a model of llama"),
    ("alpha", {"change": {"adapter.lora.alpha": "4"}}, "must be a 32-bit float"),
    ("alora", {"change": {"adapter.alora.invocation_tokens": [1, 2]}}, "aLoRA"),
    ("half", {"tensors": {Q + ".lora_b": None}}, "only one of"),
    ("suffix", {"tensors": {Q + ".lora_c": np.zeros((2, 2), np.float32)}}, "neither"),
    ("type", {"tensors": {Q + ".lora_a": np.zeros((RANK, 192), np.int32)}}, "type I32"),
    ("wide", {"tensors": {Q + ".lora_a": np.zeros((RANK, 99), np.float32)}}, "another model's"),
    ("rank", {"tensors": {Q + ".lora_a": np.zeros((2, 192), np.float32)}}, "another model's"),
    ("deep", {"tensors": {Q + ".lora_a": np.zeros((2, RANK, 192), np.float32)}}, "another model's"),
    ("none", {"names": []}, "changes nothing"),
    ("block", {"names": ["blk.6.attn_q.weight"]}, "mtp=True"),
    (
        "norm",
        {"tensors": {f"output_norm.weight.lora_{x}": np.zeros((4, 4), np.float32) for x in "ab"}},
        "no matrix",
    ),
    ("tied", {"names": ["token_embd.weight"]}, "LM head as well"),
    (
        "unknown",
        {"tensors": {f"blk.9.x.weight.lora_{x}": np.zeros((4, 4), np.float32) for x in "ab"}},
        r"no tensor 'blk\.9\.x\.weight'",
    ),
]


@pytest.mark.parametrize(("how", "message"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_an_adapter_that_does_not_fit_is_refused(
    demo: Model, demo_file: Path, tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    how = dict(how)
    file = write_adapter(tmp_path / "a.gguf", demo.info, how.pop("names", [Q]), **how)
    with pytest.raises(ModelFileError, match=message):
        Model(demo_file, mtp=False, lora=file)


def test_the_draft_context_computes_with_the_adapter(
    untied_file: Path, tmp_path: Path, text: list[int]
) -> None:
    """The head follows an adapter of its block: without it, it would agree less."""
    with Model(untied_file) as plain:
        # The identity of a block: what it adds is taken away again only by the adapter's scale.
        names = [f"blk.{plain.info.n_layer}.nextn.eh_proj.weight"]
        adapter = str(write_adapter(tmp_path / "a.gguf", plain.info, names, strength=30))
    accepted = []
    for lora in ((), [adapter]):
        with Model(untied_file, lora=lora) as model, Session(model, settings(2)) as session:
            telemetry = greedy(session, text[:100], N_TOKENS).telemetry
            pairs = telemetry.pairs or []
            accepted.append(sum(pair.drafted == pair.actual for pair in pairs) / len(pairs))
    assert accepted[1] < 0.7 * accepted[0]  # such an adapter ruins the drafts, not the text
