"""Profiles of a prompt: every node counted once, known kinds, MTP and mixtures of experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pyllama_mtp import Model, Session, Settings, bench
from pyllama_mtp.errors import UsageError
from pyllama_mtp.llama import contextoptions, native
from pyllama_mtp.llama.context import Context
from pyllama_mtp.llama.contextoptions import Cost, NodeTimes
from pyllama_mtp.measure.profile import (
    KINDS,
    kind_of,
    made_profile,
    profile_markdown,
    profile_prompt,
)
from pyllama_mtp.measure.sample import Profile

#: Of a prompt in two graphs.
SETTINGS = Settings(n_ctx=256, n_ubatch=64, n_threads=1, checkpoints=0, draft_n_max=2)
PROMPT = list(range(300, 400))
VIEWS = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")


@pytest.mark.parametrize("model", ["demo", "moe"], indirect=True)
@pytest.mark.parametrize("depth", [0, 2])
def test_every_node_is_counted_once(model: Model, depth: int) -> None:
    settings = replace(SETTINGS, draft_n_max=depth)
    found = profile_prompt(model, settings, PROMPT)
    with Session(model, settings) as session:
        options = replace(session._engine.target.options, trace=True)
    with Context(model, options) as context:
        context.set_greedy(True)
        outputs = np.zeros(len(PROMPT), dtype=np.int8)
        outputs[-1] = 1
        context.decode(np.array(PROMPT, dtype=np.int32), 0, outputs)
        nodes = Counter(node.op for node in context.nodes() if node.op not in VIEWS)
    counted: Counter[str] = Counter()
    for cost in found.costs:
        counted[cost.op] += cost.n
    assert counted == nodes and found.n_prompt == len(PROMPT)
    assert len({(cost.op, cost.tensor) for cost in found.costs}) == len(found.costs)
    assert all(cost.s > 0 for cost in found.costs) and found.prompt_s > 0
    assert sum(found.kinds.values()) == pytest.approx(found.sum_s)
    dense = model.path.name != "moe.gguf"
    assert [kind for kind, s in found.kinds.items() if not s] == ["experts' products"] * dense
    head = any("nextn" in cost.tensor for cost in found.costs)
    assert head == (depth > 0), "the head's part of the prompt is there with MTP alone"


def test_all_graphs_of_a_longer_prompt_and_nothing_of_the_one_before(demo: Model) -> None:
    times = NodeTimes(native.load())
    with Session(demo, SETTINGS, times=times) as session:
        counts = []
        for n in (64, 100, 64):
            times.start()
            session.process(PROMPT[: n + 1])
            costs = {(cost.op, cost.tensor): cost.n for cost in times.stop()}
            counts.append(costs["SSM_CONV", "ssm_conv1d.weight"])
            session.reset()
        session.process(PROMPT)
    assert counts == [4, 8, 4], "a graph for each 64 tokens"
    costs = {(cost.op, cost.tensor): cost.n for cost in times.stop()}
    assert costs["SSM_CONV", "ssm_conv1d.weight"] == counts[-1], "off, it measures nothing"


def test_more_kinds_of_nodes_than_there_is_room_for(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contextoptions, "COSTS", 3)
    with pytest.raises(UsageError, match=r"\d+ kinds of graph nodes; 3 can"):
        profile_prompt(demo, SETTINGS, PROMPT)


@pytest.mark.parametrize(
    ("op", "tensor", "kind"),
    [
        ("MUL_MAT", "ffn_up.weight", "products of weights"),
        ("MUL_MAT_ID", "ffn_up_exps.weight", "experts' products"),
        ("MUL_MAT", "kq", "attention"),
        ("MUL_MAT", "v_attn", "delta net"),
        ("RMS_NORM", "norm", "norms"),
        ("L2_NORM", "q_conv_predelta", "norms"),
        ("MUL", "attn_q_norm.weight", "norms"),
        ("SSM_CONV", "ssm_conv1d.weight", "convolution"),
        ("CONCAT", "conv_input", "convolution"),
        ("SET_ROWS", "cache_k_l", "attention"),
        ("GATED_DELTA_NET_ROWS", "q_conv_predelta", "delta net"),
        ("CPY", "cache_s_l", "delta net"),
        ("MUL", "ffn_moe_weighted", "rest"),
        ("GET_ROWS", "token_embd.weight", "rest"),
        ("ADD", "attn_residual", "rest"),
    ],
)
def test_kinds(op: str, tensor: str, kind: str) -> None:
    assert kind_of(Cost(op, tensor, 1, 1.0)) == kind


def test_the_table_and_the_record() -> None:
    costs = (Cost("MUL_MAT", "ffn_up.weight", 4, 0.3), Cost("ADD", "l_out", 2, 0.1))
    one = made_profile(200, 0.36, costs)
    lines = [line.split(" | ") for line in profile_markdown({"no MTP": one}).splitlines()]
    assert lines[0] == ["| ", "no MTP: %", "ms per token |"]
    assert lines[2] == ["| products of weights", "75.0", "1.5000 |"]
    assert lines[-2:] == [
        ["| sum", "100.0", "2.0000 |"],
        ["| the prompt itself", "90.0", "1.8000 |"],
    ]
    assert msgspec.convert(one.to_dict(), Profile) == one
    assert one.to_dict()["costs"][1] == {
        **{"kind": "rest", "op": "ADD", "tensor": "l_out", "n": 2, "s": 0.1}
    }
    assert tuple(one.to_dict()["kinds"]) == KINDS


def test_from_python(demo: Model) -> None:
    found = bench.profile(demo, size=70, settings=Settings(n_threads=1, draft_n_max=0))
    assert found.n_prompt == 70 and not any("nextn" in cost.tensor for cost in found.costs)
    with pytest.raises(UsageError, match="size is 0"):
        bench.profile(demo, size=0)
    with pytest.raises(UsageError, match="longer n_ctx"):
        bench.profile(demo, size=5000, settings=Settings(n_ctx=256, draft_n_max=0))
