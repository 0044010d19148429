"""What is computed, and for how many rows: counted on the graphs that llama.cpp evaluates.

A decode runs one graph per ubatch; its rows are checked in every one of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pyllama_mtp import Model

from .support import made_up
from .test_greedy_tokens import REQUESTED, in_graphs, marks_of
from .test_greedy_tokens import N as N_TOKENS
from .traced import Node
from .twocontexts import rows_of, trunk, turns

#: Sizes that are no dimension of either model, so that a shape shows what it is made of.
N_UBATCH = 19
COMMON = {"n_ctx": 256, "n_batch": 57, "n_ubatch": N_UBATCH, "n_threads": 1, "n_outputs_max": 57}
#: The operations that K and V of the block take, those without data movement apart.
KV_ONLY_OPS = {
    "RMS_NORM": 4,  # of both, of the input of the attention, of K
    "MUL": 4,
    "CONCAT": 2,  # the carry and the rows, these and the embeddings
    "MUL_MAT": 3,  # to one row, K, V
    "ROPE": 1,  # K
    "SET_ROWS": 2,  # into the K and the V cache
}
NO_WORK = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}


SOME_ROWS = pytest.mark.parametrize(
    "requested",
    [
        pytest.param(rows, id=name, marks=pytest.mark.long if name in ("last", "second") else ())
        for name, rows in {"none": (), **REQUESTED}.items()
    ],
)


def per_graph(requested: Sequence[int]) -> list[int]:
    """How many of the requested rows each graph has."""
    return in_graphs(requested, N_UBATCH)


TOKENS_PER_GRAPH = per_graph(REQUESTED["all"])


# -- the target ------------------------------------------------------------------------------------

#: Options, and whether the last layer and the final norm run for every row then.
TARGETS: dict[str, tuple[dict[str, object], bool]] = {
    "MTP off": ({}, False),
    "tap off": ({"need_embd_pre_norm": True}, False),
    "post-norm": ({"need_embd_pre_norm": True}, True),
    "pre-norm": ({"need_embd_pre_norm": True, "hidden": "pre-norm"}, True),
    "upstream's tap": ({"tap": "all"}, True),
    "upstream's tap of outputs": ({"tap": "outputs"}, False),
    "no slices": ({"slice": False}, True),
    "with the block": ({"with_mtp": True}, True),
}


@SOME_ROWS
@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_the_norm_and_of_the_head(
    model: Model, name: str, requested: Sequence[int]
) -> None:
    options, all_rows = TARGETS[name]
    with trunk(model, **COMMON, trace=True, **options) as target:
        target.set_tap(name != "tap off")
        target.decode(made_up(model, N_TOKENS), 0, marks_of(requested))
        nodes = target.nodes()
    asked = per_graph(requested)
    assert rows_of(nodes, "result_output") == asked
    assert rows_of(nodes, "result_norm") == asked
    last = max(
        int(n.name.removeprefix("l_out-")) for n in nodes if re.fullmatch(r"l_out-\d+", n.name)
    )
    wanted = TOKENS_PER_GRAPH if all_rows else asked
    assert rows_of(nodes, f"l_out-{last}") == wanted
    assert [n.rows for n in nodes if n.name == "norm"] == wanted
    tapped = bool(options.get("need_embd_pre_norm")) and name != "tap off"
    assert len(rows_of(nodes, "hidden_tap_store")) == (len(TOKENS_PER_GRAPH) if tapped else 0)


# -- with the block in the trunk -------------------------------------------------------------------


def works(nodes: Sequence[Node]) -> Counter[str]:
    """How often each operation is computed."""
    return Counter(node.op for node in nodes if node.op not in NO_WORK)


def decoded(model: Model, requested: Sequence[int], **options: object) -> list[Node]:
    with trunk(model, **COMMON, trace=True, **options) as found:
        found.decode(made_up(model, N_TOKENS), 0, marks_of(requested))
        return found.nodes()


@SOME_ROWS
@pytest.mark.parametrize("hidden", ["post-norm", "pre-norm"])
def test_of_the_block_only_k_and_v_are_computed(
    model: Model, hidden: str, requested: Sequence[int]
) -> None:
    """Compared with the graph of the trunk without the block, for any requested rows."""
    plain = {"need_embd_pre_norm": True, "hidden": hidden}  # the norm runs for as many rows
    without = decoded(model, requested, **plain)
    nodes = decoded(model, requested, with_mtp=True, hidden=hidden)
    n_graphs = len(TOKENS_PER_GRAPH)
    # GET_ROWS and CPY: of the carry, which may be moved first
    wanted = {op: n * n_graphs for op, n in KV_ONLY_OPS.items()}
    added = works(nodes)
    added.subtract(works(without))
    added["SET_ROWS"] += n_graphs  # the tap's
    for op, n in wanted.items():
        assert added.pop(op) == n, op
    assert set(+added) <= {"GET_ROWS", "CPY", "SCALE"} and not -added
    assert len(nodes) - len(without) <= 40 * n_graphs, "the block has 51 nodes, 75 with experts"
    names = " ".join(node.name for node in nodes)
    for absent in ("mtp_attn_out", "mtp_ffn", "mtp_post", "mtp_shared_head", "hidden_tap_store"):
        assert absent not in names
    assert rows_of(nodes, "mtp_attn_norm") == TOKENS_PER_GRAPH
    assert rows_of(nodes, "result_output") == per_graph(requested)


@pytest.mark.parametrize(("cache", "rotated"), [("q8_0", 2), ("q4_0", 2), ("f32", 0)])
def test_a_quantized_cache_costs_its_rotation_only(model: Model, cache: str, rotated: int) -> None:
    options = {"type_k": cache, "type_v": cache}
    products = [
        works(decoded(model, REQUESTED["last"], with_mtp=with_mtp, **options))["MUL_MAT"]
        for with_mtp in (False, True)
    ]
    added = (KV_ONLY_OPS["MUL_MAT"] + rotated) * len(TOKENS_PER_GRAPH)
    assert products[1] - products[0] == added


@pytest.mark.parametrize("model", ["demo", "moe", "qwen3next"], indirect=True)
@pytest.mark.parametrize("slices", [True, False])
def test_the_block_alone_is_upstreams(model: Model, slices: bool) -> None:
    """Run whole for every token, whatever the switch of the trunk says; that of qwen3next behind
    its attention for output rows."""
    states = np.random.default_rng(0).standard_normal((N_TOKENS, model.n_embd)).astype("f4")
    for requested in ((), *REQUESTED.values()):
        with trunk(model, **COMMON, trace=True, mtp_head=True, slice=slices) as block:
            block.decode(made_up(model, N_TOKENS), 0, marks_of(requested), states)
            nodes = block.nodes()
        sliced = model.architecture == "qwen3next"
        for name in ("mtp_attn_residual", "mtp_ffn_out", "mtp_post_ffn", "h_nextn"):
            wanted = per_graph(requested) if sliced else TOKENS_PER_GRAPH
            assert rows_of(nodes, name) == wanted, name
        assert rows_of(nodes, "result_output") == per_graph(requested)


@pytest.mark.parametrize("n_seqs", [2, 4])
def test_a_product_reads_its_weights_once_for_all_sequences(model: Model, n_seqs: int) -> None:
    """So it has two dimensions. (Attention is no product here: it is one operation.)"""
    options = {"n_seq_max": n_seqs, "unified": True, "flash_attn": "on"}
    with trunk(model, **COMMON, trace=True, **options) as target:
        for batch in turns(model, [4] * n_seqs, 4 * n_seqs):
            target.decode_batch(batch)
        products = [node for node in target.nodes() if node.op == "MUL_MAT"]
    assert products and all(node.shape[2] == 1 for node in products)


# -- upstream's graphs -----------------------------------------------------------------------------
