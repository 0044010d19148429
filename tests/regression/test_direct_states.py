"""Delta-net states written where they are kept, in a model's graphs: there is what the patch looks
for, and it changes nothing.

The operator itself: tests/ffi/test_state_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pyllama_mtp import Model
from pyllama_mtp.llama import native
from pyllama_mtp.llama.context import Context

from ..ffi.ggmlcalls import Ggml
from .twocontexts import trunk

SNAPSHOTS = 3
LOOKS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    yield
    native.load().set_cpu_switch("direct_states", True)


def decode(context: Context, n: int, start: int) -> list[bytes]:
    """The logits of `n` tokens at `start`."""
    tokens = np.arange(start + 20, start + 20 + n, dtype=np.int32)
    context.decode(tokens, start, np.ones(n, dtype=np.int8))
    return [context.logits(row).tobytes() for row in range(n)]


@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("n", [1, SNAPSHOTS, SNAPSHOTS + 1, 12])
def test_the_copy_follows_each_delta_net(model: Model, n: int, snapshots: bool) -> None:
    """Nothing that computes may come between them; else the patch does nothing any more. What may
    be taken back leaves no state, and follows a copy."""
    with trunk(model, n_rs_seq=SNAPSHOTS, trace=True) as traced:
        traced.set_snapshots(snapshots)
        decode(traced, n, 0)
        ops = [node.op for node in traced.nodes() if node.op not in LOOKS]
    layers = len(model.info.recurrent_layers)
    copied = [ops[i + 1] == "CPY" for i, op in enumerate(ops) if op == "GATED_DELTA_NET"]
    assert sum(copied) == layers * (1 if snapshots and n <= SNAPSHOTS + 1 else 2)
    assert len(copied) - sum(copied) == layers * snapshots


@pytest.mark.parametrize("n_seqs", [1, 3])
@pytest.mark.parametrize("n", [1, SNAPSHOTS + 1, 12])
def test_each_delta_net_reads_where_states_are_kept(model: Model, n: int, n_seqs: int) -> None:
    """In a graph that is computed as a whole, without a trace."""
    count = Ggml().ggml_cpu_count_direct_states
    with trunk(model, n_rs_seq=SNAPSHOTS, n_seq_max=n_seqs, trace=True) as traced:
        decode(traced, n, 0)
        layers = len(model.info.recurrent_layers)
        assert sum(node.op == "GATED_DELTA_NET" for node in traced.nodes()) >= 2 * layers
    with trunk(model, n_rs_seq=SNAPSHOTS, n_seq_max=n_seqs) as context:
        before = count()
        for step in range(3):
            decode(context, n, step * n)
    assert count() - before == 3 * layers > 0


def test_the_results_are_the_same_with_it_and_without(model: Model) -> None:
    """Logits and states are equal, also after going back and decoding on."""
    found = []
    for on in (True, False):
        assert native.load().set_cpu_switch("direct_states", on)
        with trunk(model, n_rs_seq=SNAPSHOTS, n_threads=2) as one:
            results = decode(one, 9, 0) + decode(one, SNAPSHOTS + 1, 9)
            assert one.remove(11)
            results += decode(one, 1, 11) + decode(one, 2, 12)
            results.append(bytes(one.save_state(recurrent_only=True)))
            found.append(results)
    assert found[0] == found[1]
