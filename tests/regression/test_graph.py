"""What is computed, and for how many rows: counted on the graphs that llama.cpp evaluates.

A decode runs one graph per ubatch; its rows are checked in every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import numpy.typing as npt
import pytest

from pyllama_mtp import Model
from pyllama_mtp.context import Context, ContextOptions
from pyllama_mtp.hidden import Ints
from pyllama_mtp.trace import Node

RunPython = Callable[..., "CompletedProcess[str]"]
Int8s = npt.NDArray[np.int8]

#: Sizes that are no dimension of either model, so that a shape shows what it is made of.
N_UBATCH, N_TOKENS = 19, 43
COMMON = {"n_ctx": 256, "n_batch": 57, "n_ubatch": N_UBATCH, "n_threads": 1, "n_outputs_max": 57}
#: The operations of a K/V-only graph, those without data movement apart.
KV_ONLY_OPS = {
    "GET_ROWS": 2,  # embeddings, hidden rows
    "RMS_NORM": 4,  # of both, of the input of the attention, of K
    "MUL": 4,
    "CONCAT": 1,
    "MUL_MAT": 3,  # to one row, K, V
    "ROPE": 1,  # K
    "SET_ROWS": 2,  # into the K and the V cache
}
NO_WORK = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}


def context(model: Model, target: Context | None = None, **options: object) -> Context:
    chosen = {**COMMON, "trace": True, **options}
    return Context(model, ContextOptions(**chosen), target)  # type: ignore[arg-type]


#: Entries of a batch of N_TOKENS whose logits are wanted: none, the last, some of each graph, some
#: of the second graph only, all.
REQUESTED: dict[str, Sequence[int]] = {
    "none": (),
    "last": (N_TOKENS - 1,),
    "some": (0, 3, 7, 20, 40, 42),
    "second": (19, 30, 37),
    "all": range(N_TOKENS),
}


def marks_of(requested: Sequence[int], n: int = N_TOKENS) -> Int8s:
    return np.isin(np.arange(n), list(requested)).astype(np.int8)


def per_graph(requested: Sequence[int], n: int = N_TOKENS) -> list[int]:
    """How many of the requested rows each graph has."""
    marks = marks_of(requested, n)
    return [int(marks[start : start + N_UBATCH].sum()) for start in range(0, n, N_UBATCH)]


TOKENS_PER_GRAPH = per_graph(REQUESTED["all"])


def tokens_of(model: Model, n: int = N_TOKENS) -> Ints:
    i = np.arange(n, dtype=np.int64)
    return ((7 * i * i + 13 * i + 5) % model.n_vocab).astype(np.int32)


def rows(nodes: Sequence[Node], name: str) -> list[int]:
    """Rows of the node of that name, or of that name and a layer, graph by graph."""
    return [n.rows for n in nodes if n.name == name or n.name.rpartition("-")[0] == name]


# -- the target ------------------------------------------------------------------------------------

#: Options, and whether the final norm runs for every row then.
TARGETS: dict[str, tuple[dict[str, object], bool]] = {
    "MTP off": ({}, False),
    "tap off": ({"need_embd_pre_norm": True}, False),
    "post-norm": ({"need_embd_pre_norm": True}, True),
    "pre-norm": ({"need_embd_pre_norm": True, "hidden": "pre-norm"}, False),
    "upstream's tap": ({"tap": "all"}, True),
    "no slices": ({"full_block": True}, True),
    "pre-norm, no slices": (
        {"need_embd_pre_norm": True, "hidden": "pre-norm", "full_block": True},
        True,
    ),
}


@pytest.mark.parametrize("requested", REQUESTED.values(), ids=REQUESTED)
@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_the_norm_and_of_the_head(
    model: Model, name: str, requested: Sequence[int]
) -> None:
    options, norm_of_all = TARGETS[name]
    with context(model, **options) as target:
        target.set_tap(name != "tap off")
        target.decode(tokens_of(model), 0, marks_of(requested))
        nodes = target.nodes()
    asked = per_graph(requested)
    assert rows(nodes, "result_output") == asked
    assert rows(nodes, "result_norm") == asked
    norm = TOKENS_PER_GRAPH if norm_of_all else asked
    assert [n.rows for n in nodes if n.name == "norm"] == norm
    tapped = bool(options.get("need_embd_pre_norm")) and name != "tap off"
    assert len(rows(nodes, "mtp_tap_store")) == (len(TOKENS_PER_GRAPH) if tapped else 0)


# -- the draft context -----------------------------------------------------------------------------


def block(
    model: Model, requested: Sequence[int], target: Context, **options: object
) -> Iterator[list[Node]]:
    """Nodes of a decode on a draft context, with rows as arrays and with rows of the tap."""
    tokens = tokens_of(model)
    with context(model, target, mtp_head=True, **options) as draft:
        assert target.tap
        states = target.tap.rows(N_TOKENS).part(0, N_TOKENS - 1).after(target.tap.zero())
        for hidden in (states, states.to_host()):
            draft.decode(tokens, 0, marks_of(requested), hidden)
            yield draft.nodes()
            draft.clear()


@pytest.fixture
def target(model: Model) -> Iterator[Context]:
    """A target that has decoded the tokens, with a tap."""
    with context(model, need_embd_pre_norm=True, trace=False) as found:
        found.decode(tokens_of(model), 0, marks_of(()))
        yield found


def works(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.op not in NO_WORK]


@pytest.mark.parametrize("tap", [{}, {"need_embd_pre_norm": True}, {"tap": "outputs"}])
def test_without_outputs_only_k_and_v_are_computed(
    model: Model, target: Context, tap: dict[str, object]
) -> None:
    n_graphs = len(TOKENS_PER_GRAPH)
    for nodes, from_tap in zip(block(model, (), target, **tap), (True, False), strict=True):
        ops = [node.op for node in works(nodes)]
        wanted = {op: n * n_graphs for op, n in KV_ONLY_OPS.items()}
        wanted["GET_ROWS"] -= 0 if from_tap else n_graphs
        assert {op: ops.count(op) for op in set(ops)} == wanted
        assert len(nodes) <= 21 * n_graphs, "upstream's block has 51 nodes, 75 with experts"
        names = " ".join(node.name for node in nodes)
        for absent in ("Qcur", "attn_out", "ffn", "post", "head", "result", "h_nextn", "tap_store"):
            assert absent not in names
        assert rows(nodes, "mtp_hidden") == (TOKENS_PER_GRAPH if from_tap else [])
        assert rows(nodes, "mtp_attn_norm") == TOKENS_PER_GRAPH


@pytest.mark.parametrize(("cache", "rotated"), [("q8_0", 2), ("q4_0", 2), ("f32", 0)])
def test_a_quantized_cache_costs_its_rotation_only(
    model: Model, target: Context, cache: str, rotated: int
) -> None:
    for nodes in block(model, (), target, type_k=cache, type_v=cache):
        products = sum(node.op == "MUL_MAT" for node in nodes)
        assert products == (KV_ONLY_OPS["MUL_MAT"] + rotated) * len(TOKENS_PER_GRAPH)


@pytest.mark.parametrize("tap", [{}, {"need_embd_pre_norm": True}, {"tap": "outputs"}])
@pytest.mark.parametrize("requested", ["last", "some", "second", "all"])
def test_past_the_attention_only_output_rows_are_computed(
    model: Model, target: Context, requested: str, tap: dict[str, object]
) -> None:
    """From the residual after the attention to the logits, experts included, in every graph."""
    asked = [n for n in per_graph(REQUESTED[requested]) if n > 0]
    for nodes in block(model, REQUESTED[requested], target, **tap):
        for name in ("mtp_attn_residual", "mtp_ffn_out", "mtp_post_ffn", "result_output"):
            assert rows(nodes, name) == asked, name
        assert [n.rows for n in nodes if n.name == "norm"] == asked
        assert rows(nodes, "mtp_attn_norm") == TOKENS_PER_GRAPH, "K and V are stored for all"
        left = iter(asked)
        n_rows = 0
        for node in nodes:
            if node.name.startswith("mtp_attn_residual"):
                n_rows = next(left)
            elif node.name.startswith("mtp_tok_embd"):  # the next graph
                n_rows = 0
            if n_rows and node.name != "mtp_tap_store":  # whose shape is the tap's
                assert n_rows in node.shape[1:], node
                # A graph's tokens are in no shape any more, unless they are all outputs.
                assert n_rows == N_UBATCH or N_UBATCH not in node.shape, node
        stored = [n for n in nodes if n.name == "mtp_tap_store"]
        assert len(stored) == (len(asked) if "need_embd_pre_norm" in tap else 0)


def test_a_full_block_is_run_for_every_token(model: Model, target: Context) -> None:
    """The switch that turns it all off, for comparison."""
    for requested in REQUESTED.values():
        for nodes in block(model, requested, target, full_block=True):
            for name in ("mtp_attn_residual", "mtp_ffn_out", "mtp_post_ffn", "h_nextn"):
                assert rows(nodes, name) == TOKENS_PER_GRAPH, name
            assert rows(nodes, "result_output") == per_graph(requested)


def test_switches_act_on_the_next_batch(model: Model, target: Context) -> None:
    """Of the same shape, whose graph would be used again if nobody looked."""
    tokens, none = tokens_of(model, N_UBATCH), marks_of((), N_UBATCH)
    some = marks_of((1, 5), N_UBATCH)
    with context(model, target, mtp_head=True) as draft:
        assert target.tap
        states = target.tap.rows(N_UBATCH)

        def nodes(marks: Int8s) -> list[Node]:
            draft.clear()
            draft.decode(tokens, 0, marks, states)
            return draft.nodes()

        for on in (True, False, True):
            draft.library.lib.llama_mtp_set_kv_only(draft.handle, on)
            assert (len(nodes(none)) <= 21) is on
        for on in (True, False, True):
            draft.library.lib.llama_mtp_set_slice(draft.handle, on)
            assert rows(nodes(some), "mtp_attn_residual") == [2 if on else N_UBATCH]


# -- upstream's graphs -----------------------------------------------------------------------------

#: Model file; prints the nodes of batches on a target and on a draft context, in either variant.
CODE = f"""
import json, sys

import numpy as np

from pyllama_mtp import Model, native
from pyllama_mtp.context import Context, ContextOptions

found = {{}}
with Model(sys.argv[1]) as model:
    i = np.arange({N_TOKENS}, dtype=np.int64)
    tokens = ((7 * i * i + 13 * i + 5) % model.n_vocab).astype(np.int32)
    states = np.zeros((len(tokens), model.n_embd), dtype=np.float32)
    for flash_attn in ("on", "off"):
        for tap in ("off", "all", "outputs"):
            for head in (False, True):
                options = dict({COMMON!r}, tap=tap, flash_attn=flash_attn, mtp_head=head)
                options |= dict(full_block=True, trace=True)
                for wanted in {[list(r) for r in REQUESTED.values()]!r}:
                    with Context(model, ContextOptions(**options)) as context:
                        marks = np.isin(i, wanted).astype(np.int8)
                        context.decode(tokens, 0, marks, states if head else None)
                        found[f"{{head}} {{tap}} {{flash_attn}} {{wanted}}"] = [
                            (n.name, n.op, n.shape) for n in context.nodes()
                        ]
print(json.dumps([native.load().variant, found]))
"""


@pytest.mark.parametrize("name", ["demo_file", "moe_file"])
def test_with_everything_off_the_graphs_are_upstreams(
    run_python: RunPython, name: str, request: pytest.FixtureRequest
) -> None:
    """Name by name, operation by operation, shape by shape: target and draft context."""
    file: Path = request.getfixturevalue(name)
    outcomes = []
    for env in ({"PYLLAMA_MTP_LIB": "upstream"}, {}):
        done = run_python(CODE, file, env=env)
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout))
    (variant, upstreams), (ours, found) = outcomes
    assert (variant, ours) == ("upstream", "patched")
    for case, wanted in upstreams.items():
        assert len(wanted) > 100
        assert found[case] == wanted, case
