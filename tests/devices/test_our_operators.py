"""Our operators of the CUDA backend compute what the CPU computes, and write the same states.

A device without the operator of delta nets skips its test, and computes convolutions by node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama_mtp.llama import native

from ..ffi.ggmlcalls import F32, I32, Floats, Ggml
from ..ffi.test_delta_net_rows import FIRST, N_MAX, Case, found

OWN = [FIRST, FIRST + 1]
CASES = [
    *(Case(OWN, n_tokens=n, size=size) for size in (16, 32, 64, 128) for n in (1, 21)),
    *(Case(OWN[:1], [n], 3, keep, 128) for n in (0, 4) for keep in (False, True)),
    *(Case(OWN, [2, N_MAX], 5, True, size) for size in (16, 32, 64, 128)),
    *(Case(reads, [2], 4, True, 64) for reads in ([0], [2, 1], [6, 6], [3, 1, 2], [2, 2, 3])),
    Case([3, 1, 2], [2, 0, N_MAX], 17),
    Case([0], [3], 17),
    Case([FIRST], [2], 3, True, repeated=True),
]
#: Channels, tokens, sequences, tokens of each that are stored, rows that are read, and written.
CONVOLUTIONS = [
    (128, 1, 1, 1, [5, 6, 0], [1]),
    (384, 4, 1, 3, [0, 1, 2], [3, 4, 5]),
    (256, 3, 2, 3, [0, 1, 2, 14, 14, 7], [3, 4, 5, 8, 9, 10]),
    (128, 20, 1, 3, [5, 6, 0], [1, 2, 3]),
]
MORE = """
void * ggml_set_rows(void * ctx, void * a, void * b, void * ids);
void * ggml_backend_dev_by_name(const char * name);
void * ggml_backend_dev_init(void * dev, const char * params);
bool ggml_backend_dev_supports_op(void * dev, void * op);
void * ggml_backend_alloc_ctx_tensors(void * ctx, void * backend);
void ggml_backend_buffer_free(void * buffer);
void ggml_backend_free(void * backend);
void ggml_backend_tensor_set(void * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(void * tensor, void * data, size_t offset, size_t size);
int ggml_backend_graph_compute(void * backend, void * graph);
"""


class Place(Ggml):
    """ggml with its tensors in the memory of a device, where graphs are computed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.ffi.cdef(MORE)
        paths = re.findall(r"/\S*libggml(?:-base)?\.so\S*", Path("/proc/self/maps").read_text())
        self._libraries = [self.ffi.dlopen(path) for path in sorted(set(paths))]
        self.device = self.ggml_backend_dev_by_name(name.encode())
        self.backend = self.ggml_backend_dev_init(self.device, self.ffi.NULL)
        self._values: list[tuple[Any, bytes]] = []
        self._buffer = self.ffi.NULL

    @contextmanager
    def context(self, n_bytes: int, no_alloc: bool = True) -> Iterator[Any]:
        """A context whose tensors get memory in compute()."""
        with super().context(n_bytes, no_alloc=True) as ctx:
            try:
                yield ctx
            finally:
                self.ggml_backend_buffer_free(self._buffer)
                self._values, self._buffer = [], self.ffi.NULL

    def tensor(self, ctx: Any, values: Floats) -> Any:
        made = self.ggml_new_tensor_4d(ctx, F32, *((1,) * (4 - values.ndim) + values.shape)[::-1])
        self._values.append((made, values.tobytes()))
        return made

    def ints(self, ctx: Any, values: list[int]) -> Any:
        made = self.ggml_new_tensor_2d(ctx, I32, len(values), 1)
        self._values.append((made, np.array(values, np.int32).tobytes()))
        return made

    def compute(self, ctx: Any, tensors: Sequence[Any], n_threads: int) -> None:
        if not all(self.ggml_backend_dev_supports_op(self.device, one) for one in tensors):
            pytest.skip("the device has not this operator")
        graph = self.ggml_new_graph(ctx)
        for tensor in tensors:
            self.ggml_build_forward_expand(graph, tensor)
        self._buffer = self.ggml_backend_alloc_ctx_tensors(ctx, self.backend)
        for tensor, values in self._values:
            self.ggml_backend_tensor_set(tensor, values, 0, len(values))
        assert self.ggml_backend_graph_compute(self.backend, graph) == 0

    def data(self, tensor: Any) -> Floats:
        """A copy."""
        out = np.empty(self.ggml_nbytes(tensor) // 4, np.float32)
        self.ggml_backend_tensor_get(tensor, self.ffi.from_buffer(out), 0, out.nbytes)
        return out


@pytest.fixture(scope="module")
def there(device: native.Device) -> Iterator[Place]:
    place = Place(device.name)
    yield place
    place.ggml_backend_free(place.backend)


@pytest.fixture(scope="module")
def here() -> Iterator[Place]:
    place = Place("CPU")
    yield place
    place.ggml_backend_free(place.backend)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_delta_nets(there: Place, here: Place, case: Case) -> None:
    on_device, on_cpu = found(there, case, 1), found(here, case, 1)
    assert on_device[2:] == on_cpu[2:], "what is pending"
    for one, other in zip(on_device[:2], on_cpu[:2], strict=True):
        wanted = np.frombuffer(other, np.float32)
        worst = np.abs(np.frombuffer(one, np.float32) - wanted).max()
        assert worst < 1e-4 * np.abs(wanted).max()


def convolution(ggml: Place, case: tuple[Any, ...]) -> list[Floats]:
    """As in build_pending_conv(): what comes of it, and the ring then."""
    n, n_tokens, n_seqs, n_kept, read, written = case
    rng = np.random.default_rng([n, n_tokens, n_seqs])
    shapes = (15, n), (n_seqs, n_tokens, n), (n, 4)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    with ggml.context(2**20) as ctx:
        ring, x, kernel = (ggml.tensor(ctx, one) for one in values)
        states = ggml.ggml_get_rows(ctx, ring, ggml.ints(ctx, read))
        row, first = 4 * n, (n_tokens - n_kept) * 4 * n
        kept = ggml.ggml_view_3d(ctx, x, n, n_kept, n_seqs, row, row * n_tokens, first)
        kept = ggml.ggml_reshape_4d(ctx, kept, n, n_kept * n_seqs, 1, 1)
        stored = ggml.ggml_set_rows(ctx, ring, kept, ggml.ints(ctx, written))
        state = ggml.ggml_transpose(ctx, ggml.ggml_reshape_4d(ctx, states, n, 3, n_seqs, 1))
        inputs = ggml.ggml_concat(ctx, state, ggml.ggml_transpose(ctx, x), 0)
        out = ggml.ggml_silu(ctx, ggml.ggml_ssm_conv(ctx, inputs, kernel))
        ggml.compute(ctx, [states, stored, inputs, out], 1)
        return [ggml.data(out), ggml.data(ring)]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=repr)
def test_convolutions_with_a_ring(there: Place, here: Place, case: tuple[Any, ...]) -> None:
    (out, ring), (wanted, wanted_ring) = convolution(there, case), convolution(here, case)
    assert np.array_equal(ring, wanted_ring) and np.abs(out - wanted).max() < 1e-5
