"""Batches of more tokens than can be taken back are not kept apart: same results to the bit as
where none can be. Going back after them: test_going_back.py."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from pyllama_mtp import Model, Session
from pyllama_mtp.engine import Engine
from pyllama_mtp.llama.context import Context
from pyllama_mtp.sequence import Sequence

from .support import N_BATCH, N_UBATCH, decode, engine_of, made_up, settings
from .twocontexts import trunk as context

SNAPSHOTS = 3


def computed(context: Context) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Nodes that compute; the others look at a cache, which is larger with room for snapshots."""
    looks = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
    return [(node.op, node.shape) for node in context.nodes() if node.op not in looks]


@pytest.mark.parametrize("n", [1, 5, N_UBATCH, N_BATCH])
def test_without_snapshots_it_is_the_graph_of_a_context_that_keeps_none(
    model: Model, n: int
) -> None:
    """On a CPU, nodes, logits and state are those of n_rs_seq = 0, but for convolutions, norms."""
    if model.on_gpu:
        pytest.skip("delta nets are the same node on a CPU only")
    tokens = made_up(model, n)
    with (
        context(model, trace=True) as plain,
        context(model, n_rs_seq=SNAPSHOTS, trace=True) as rollback,
    ):
        assert decode(rollback, tokens).tobytes() == decode(plain, tokens).tobytes()
        more = Counter(op for op, _ in computed(rollback))
        more.subtract(op for op, _ in computed(plain))
        layers = len(model.info.recurrent_layers) * -(-n // N_UBATCH)
        norms = layers * (model.info.architecture != "qwen3next")  # q and k are normed together
        assert {op: count for op, count in more.items() if count} == {
            **({"RMS_NORM": -norms} if norms else {}),
            "CPY": -2 * layers,  # of states that move, and of the new ones
            "SCALE": -layers - norms,  # a convolution's state begins with a row of zeros
            "SET_ROWS": layers,  # inputs of convolutions
        }
        states = [bytes(c.save_state(recurrent_only=True)) for c in (plain, rollback)]
        assert states[0] == states[1]


@pytest.mark.parametrize("n_rs_seq", [0, SNAPSHOTS])
def test_a_delta_net_is_one_node(model: Model, n_rs_seq: int) -> None:
    """On a CPU, whether its tokens are pending or not: nothing gathers or copies states."""
    if model.on_gpu:
        pytest.skip("the operator is the CPU's")
    for n in (1, SNAPSHOTS, 12):
        with context(model, n_rs_seq=n_rs_seq, trace=True) as c:
            decode(c, made_up(model, n))
            ops = Counter(op for op, _ in computed(c))
        assert ops["GATED_DELTA_NET_ROWS"] == len(model.info.recurrent_layers)
        assert not ops["GATED_DELTA_NET"]


def test_the_core_of_a_verification_is_four_kernels_a_layer_on_cuda(model: Model) -> None:
    """One for the nodes of a convolution, which follow each other, one for the norm of q and k,
    two for the net; between them nothing gathers or copies."""
    if model.on_gpu:
        pytest.skip("where the operator is missing there are more nodes")
    with context(model, n_rs_seq=SNAPSHOTS, trace=True) as c:
        tokens = made_up(model, 2 + SNAPSHOTS)
        decode(c, tokens[:2])
        decode(c, tokens[2:], 2)
        ops = " ".join(op for op, _ in computed(c))
    convolution = "GET_ROWS SET_ROWS CONCAT SSM_CONV UNARY"
    between = r"(?:(?!GET_ROWS|SET_ROWS|CPY|CONCAT)\S+ )*"
    cores = re.findall(rf"{convolution} {between}GATED_DELTA_NET_ROWS", ops)
    assert len(cores) == len(model.info.recurrent_layers), ops
    assert model.info.architecture == "qwen3next" or all(
        "UNARY RMS_NORM SCALE " in c for c in cores
    )


def test_a_short_batch_does_not_pay_for_room(model: Model) -> None:
    """Its graph has as many convolution states as tokens, however many snapshots there can be."""
    for n in (1, 3):
        nodes = []
        for n_rs_seq in (n - 1 or 1, 6):
            with context(model, n_rs_seq=n_rs_seq, trace=True) as c:
                decode(c, made_up(model, n))
                nodes.append([op for op, _ in computed(c)])
        assert nodes[0] == nodes[1]


def test_the_driver_keeps_them_where_it_verifies(
    demo: Model, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off in the prompt, on in a pass with drafts."""
    rewinds, verify = list[int](), Engine.verify

    def watched(engine: Engine, sequences: list[Sequence]) -> None:
        rewinds.append(engine.target.rewind())
        verify(engine, sequences)
        rewinds.append(engine.target.rewind())

    monkeypatch.setattr(Engine, "verify", watched)
    with Session(demo, settings(SNAPSHOTS, rollback="snapshot")) as session:
        session.process(text[:40])
        assert engine_of(session).target.rewind() == 0
        session.generate(text[:40], max_tokens=3, ignore_eos=True).run()
    assert rewinds[:2] == [0, SNAPSHOTS]
