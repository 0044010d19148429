"""A device writes what the CPU writes, by whatever way the tokens are drafted and verified.

Where two tokens are as good as equal the two may part; the prompts are such that they do not come
near (conftest.py), so that texts are equal or something is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp import BatchSession, Generation, Model, Sampling, Session
from pyllama_mtp.llama import native
from pyllama_mtp.llama.cachetypes import cache_costs
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import ContextOptions
from pyllama_mtp.prefixcache import TRIAL

from ..adapters import trunk, write_adapter
from ..regression.support import (
    assert_same_tokens,
    decode,
    engine_of,
    greedy,
    settings,
)
from ..regression.traced import Traced
from ..workers import worker
from .conftest import N_TOKENS, Pair, plain_text

DEPTH = 3
#: Tokens that may be drafted: fewer than there are.
FEW = 300


def written(
    model: Model, prompt: list[int], depth: int | str = DEPTH, **options: object
) -> Generation:
    """Greedy text after a prompt, whose log has drafts and what was chosen in their place."""
    with Session(model, settings(depth, checkpoints=0, ngram=False, **options)) as session:
        return greedy(session, prompt, N_TOKENS)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0},
        {"depth": 1},
        {},
        {"draft_vocab": FEW},
        {"draft_vocab": FEW, "draft_head_type": "q4_0"},
        {"p_min": 0.3},
        {"rollback": "replay"},
        {"prompt_sync": "full"},
        {"flash_attn": "off"},
        {"depth": "auto", "draft_vocab": FEW},
    ],
    ids=str,
)
def test_as_on_the_cpu(demo_pair: Pair, options: dict[str, object]) -> None:
    got = written(demo_pair.there, demo_pair.prompts[0], **options)
    assert got.tokens == demo_pair.texts[0]
    if options.get("depth", DEPTH) in (1, DEPTH):
        assert sum(got.telemetry.accepted) > 2


def test_a_chain_drafts_what_its_steps_draft(demo_pair: Pair) -> None:
    drafts = []
    for sync in ("kv", "full"):
        got = written(demo_pair.there, demo_pair.prompts[1], prompt_sync=sync)
        assert got.tokens == demo_pair.texts[1]
        assert got.telemetry.pairs
        drafts.append([(pair.position, pair.drafted) for pair in got.telemetry.pairs])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantized_caches(demo_pair: Pair, kind: str) -> None:
    prompt, types = demo_pair.prompts[0], {"cache_type_k": kind, "cache_type_v": kind}
    expected = plain_text(demo_pair.here, prompt, **types)
    got = written(demo_pair.there, prompt, **types)
    gap = demo_pair.gap * (10 if kind == "q4_0" else 2)  # what is stored is rounded, too
    assert_same_tokens(demo_pair.here, prompt, got.tokens, expected, gap)
    assert sum(got.telemetry.accepted) > 2


def test_caches_without_attention_are_named(demo_pair: Pair, device: native.Device) -> None:
    """Vulkan does not mix BF16 with other types."""
    if not device.name.startswith("Vulkan"):
        pytest.skip("other devices have other types")
    for kind in ("f16", "q8_0", "bf16"):
        assert not cache_costs(demo_pair.there, kind, kind)
    (cost,) = cache_costs(demo_pair.there, "bf16", "f16")
    assert cost.startswith(f"{device.name} has no attention over a bf16 K and a f16 V cache")


@pytest.mark.parametrize("options", [{"depth": 0}, {}, {"draft_vocab": FEW}], ids=str)
def test_experts(moe_pair: Pair, options: dict[str, object]) -> None:
    got = written(moe_pair.there, moe_pair.prompts[0], **options)
    assert got.tokens == moe_pair.texts[0]
    if options.get("depth", DEPTH):
        assert sum(got.telemetry.accepted) > 0


def test_going_back_and_on(demo_pair: Pair) -> None:
    """The second prompt parts from the first one, the third goes on with the second."""
    first, other = demo_pair.prompts[0], demo_pair.prompts[1]
    prompts = [first, [*first[:20], *other[:10]], [*first[:20], *other[:20]]]
    with (
        Session(demo_pair.there, settings(DEPTH, checkpoints=4)) as there,
        Session(demo_pair.here, settings(DEPTH, checkpoints=4)) as here,
    ):
        for prompt in prompts:
            got, expected = (s.generate(prompt, max_tokens=N_TOKENS).run() for s in (there, here))
            assert_same_tokens(demo_pair.here, prompt, got.tokens, expected.tokens, demo_pair.gap)
            assert got.telemetry.n_cached == expected.telemetry.n_cached


@pytest.mark.parametrize("with_mtp", [False, True])
def test_a_prompt_without_drafts_is_cut_before_the_last_ffn(
    demo_pair: Pair, with_mtp: bool
) -> None:
    prompt = demo_pair.prompts[0]
    with Traced(demo_pair.there, ContextOptions(512, 512, 512, 1, with_mtp=with_mtp)) as context:
        decode(context, prompt)
        assert [n.rows for n in context.nodes() if n.name == "norm"] == [
            len(prompt) if with_mtp else 1
        ]


@pytest.mark.parametrize("depth", [0, DEPTH])
def test_the_newest_checkpoints_stay_on_the_device(
    demo_pair: Pair, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, on the host, they are what was saved at once."""
    prompt = [token for prompt in demo_pair.prompts[:2] for token in prompt] * 3
    kept = []
    for on_device in (2, 0):
        monkeypatch.setenv(TRIAL, "1")
        with Session(demo_pair.there, settings(depth, n_batch=32, n_ubatch=16)) as session:
            engine = engine_of(session)
            assert engine.target.states
            if not on_device:
                engine.target.states.close()  # as where there is no room
            session.process(prompt)
            (sequence,) = engine.sequences
            checkpoints = sequence.checkpoints.kept
            assert len(checkpoints) == 4
            on_host = [len(one.state) > 0 for one in checkpoints]
            assert on_host == [True, True, not on_device, not on_device]
            kept.append([(one.n_past, bytes(one.on_host().state)) for one in checkpoints])
    assert kept[0] == kept[1]


def test_kept_in_a_file(demo_pair: Pair, tmp_path: Path) -> None:
    """What a device has processed goes on there, and on the CPU."""
    prompt, path = demo_pair.prompts[0], tmp_path / "kept.prompt"
    with Session(demo_pair.there, settings(DEPTH)) as session:
        session.process(prompt[:-1])
        session.save(path)
    for model in (demo_pair.there, demo_pair.here):
        with Session(model, settings(DEPTH)) as session:
            session.restore(path)
            got = session.generate(prompt, max_tokens=N_TOKENS).run()
        assert got.tokens == demo_pair.texts[0]
        assert got.telemetry.n_cached > 0 and sum(got.telemetry.accepted) > 2


@pytest.mark.parametrize("depth", [0, DEPTH])
def test_several_sequences(demo_pair: Pair, depth: int) -> None:
    with BatchSession(demo_pair.there, settings(depth), n_sequences=2) as session:
        batch = session.generate(demo_pair.prompts, max_tokens=N_TOKENS)
        batch.run()
    assert [answer.tokens for answer in batch.results] == demo_pair.texts


@pytest.mark.parametrize("layers", [0, 1, 2, "half"])
def test_layers_on_both_sides(demo_pair: Pair, demo_file: Path, layers: int | str) -> None:
    """With 1 the output layer alone is on the device, with 2 the MTP block as well."""
    n = demo_pair.here.info.n_layer // 2 if layers == "half" else int(layers)
    with Model(demo_file, n_gpu_layers=n) as model:
        got = written(model, demo_pair.prompts[0])
    assert got.tokens == demo_pair.texts[0]
    assert sum(got.telemetry.accepted) > 2


def test_two_devices(demo_pair: Pair, demo_file: Path, device: native.Device) -> None:
    """A worker and this device: each has a half; or the block is on one, the output layer on the
    other, so that hidden rows travel."""
    if device.name.startswith("CUDA"):
        pytest.skip("a worker is never asked what it can do, and CUDA lacks the demo's convolution")
    n_layer = demo_pair.here.info.n_layer
    with worker() as address:
        for split in ((1.0, 1.0), (n_layer + 0.5, 1.5)):
            with Model(demo_file, rpc_servers=address, tensor_split=split) as model:
                got = written(model, demo_pair.prompts[0])
            assert got.tokens == demo_pair.texts[0]
            assert sum(got.telemetry.accepted) > 2


def test_candidates(demo_pair: Pair) -> None:
    """Candidates picked on the device are the best of its logits."""
    k, prompt = 20, np.array(demo_pair.prompts[0], dtype=np.int32)
    outputs = np.ones(len(prompt), dtype=np.int8)
    options = ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, n_outputs_max=64)
    with Context(demo_pair.there, options) as context:
        context.decode(prompt, 0, outputs)
        rows = [context.logits(row).copy() for row in range(len(prompt))]
        context.remove(0)
        context.set_greedy(True)
        context.set_candidates(k)
        context.decode(prompt, 0, outputs)
        for row, logits in enumerate(rows):
            ids, values = context.candidates(row)
            assert context.argmax(row) == ids[0] == logits.argmax()
            assert np.array_equal(values, logits[ids])
            assert np.array_equal(np.sort(values)[::-1], np.sort(logits)[::-1][:k])


def test_sampled_text(demo_pair: Pair) -> None:
    """One seed gives one text, with drafts drawn from the head or not."""
    sampling = Sampling(temperature=0.7, top_k=20, seed=5)
    for drawn in (False, True):
        with Session(demo_pair.there, settings(DEPTH, draft_sampling=drawn)) as session:
            runs = [
                session.generate(
                    demo_pair.prompts[0], max_tokens=N_TOKENS, sampling=sampling, ignore_eos=True
                ).run()
                for _ in range(2)
            ]
        assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == N_TOKENS
        assert sum(runs[0].telemetry.accepted) > 0


@pytest.mark.parametrize(
    "placed",
    [
        {"n_cpu_moe": 2},
        {"override_tensor": {"_exps": "CPU"}, "use_mmap": False},
        {"split_mode": "none", "main_gpu": 0, "use_mmap": False},
        {"device": "GPU", "override_tensor": {r"blk\.1\.": "CPU", "output|nextn": "GPU"}},
        {"n_gpu_layers": 2, "override_tensor": {r"blk\.[01]\.": "GPU"}},
    ],
    ids=str,
)
def test_wherever_tensors_lie(
    moe_pair: Pair, device: native.Device, placed: dict[str, Any]
) -> None:
    """Tensors on the CPU, or a file that is read, not mapped, give the same text."""
    options = json.loads(json.dumps(placed).replace("GPU", device.name))
    with Model(moe_pair.here.path, **options) as model:
        assert model.on_gpu
        got = written(model, moe_pair.prompts[0])
    assert got.tokens == moe_pair.texts[0]
    assert sum(got.telemetry.accepted) > 0


def test_an_adapter(demo_pair: Pair, demo_file: Path, tmp_path: Path) -> None:
    """An adapter's matrices lie beside those that they change; drafts follow the adapter."""
    info, prompt = demo_pair.here.info, demo_pair.prompts[0]
    adapter = write_adapter(tmp_path / "a.gguf", info, trunk(info))
    with (
        Model(demo_file, lora=adapter) as there,
        Model(demo_file, lora=adapter, n_gpu_layers=0) as here,
    ):
        expected, got = plain_text(here, prompt), written(there, prompt)
        assert_same_tokens(here, prompt, got.tokens, expected, demo_pair.gap)
    assert expected != demo_pair.texts[0]
    assert sum(got.telemetry.accepted) > 0
