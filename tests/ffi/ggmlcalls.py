"""ggml called directly, through the libraries that this process has loaded, so that tests can build
graphs of any shape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt

from pyllama_mtp.llama import native

Floats = npt.NDArray[np.float32]
F32, F16, Q4_0, Q4_1, Q8_0, I32, BF16 = 0, 1, 2, 3, 8, 26, 30

DECLARATIONS = """
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
void * ggml_init(struct ggml_init_params params);
void ggml_free(void * ctx);
void * ggml_new_tensor_2d(void * ctx, int type, int64_t ne0, int64_t ne1);
void * ggml_new_tensor_4d(void * ctx, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
void * ggml_view_2d(void * ctx, void * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
void * ggml_view_3d(void * ctx, void * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1,
                    size_t nb2, size_t offset);
void * ggml_view_4d(void * ctx, void * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,
                    size_t nb1, size_t nb2, size_t nb3, size_t offset);
void * ggml_mul_mat(void * ctx, void * a, void * b);
void * ggml_mul_mat_id(void * ctx, void * as, void * b, void * ids);
void * ggml_mul(void * ctx, void * a, void * b);
void * ggml_transpose(void * ctx, void * a);
void * ggml_concat(void * ctx, void * a, void * b, int dim);
void * ggml_silu(void * ctx, void * a);
void * ggml_ssm_conv(void * ctx, void * sx, void * c);
void * ggml_get_rows(void * ctx, void * a, void * ids);
void * ggml_reshape_4d(void * ctx, void * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
void * ggml_cpy(void * ctx, void * a, void * b);
void * ggml_gated_delta_net(void * ctx, void * q, void * k, void * v, void * g, void * beta,
                            void * state, int64_t K);
void * ggml_gated_delta_net_rows(void * ctx, void * q, void * k, void * v, void * g, void * beta,
                                 void * states, void * pend, void * gates, void * ids,
                                 int64_t first, int64_t n_max, bool keep);
void * ggml_flash_attn_ext(void * ctx, void * q, void * k, void * v, void * mask, float scale,
                           float max_bias, float logit_softcap);
void ggml_flash_attn_ext_add_sinks(void * a, void * sinks);
void * ggml_get_data(void * tensor);
size_t ggml_nbytes(void * tensor);
void * ggml_new_graph(void * ctx);
void ggml_build_forward_expand(void * graph, void * tensor);
bool ggml_cpu_small_batch_type(int32_t type);
void * ggml_backend_cpu_reg(void);
void * ggml_backend_reg_get_proc_address(void * reg, const char * name);
int ggml_graph_compute_with_ctx(void * ctx, void * graph, int n_threads);
size_t ggml_row_size(int type, int64_t ne);
size_t ggml_quantize_chunk(int type, const float * src, void * dst, int64_t start, int64_t nrows,
                           int64_t n_per_row, const float * imatrix);
"""


class Ggml:
    """The functions of ggml, by their names."""

    def __init__(self) -> None:
        native.load()
        maps = Path("/proc/self/maps").read_text()
        paths = sorted(set(re.findall(r"/\S*libggml(?:-base|-cpu)[^/\s]*\.so\S*", maps)))
        self.ffi = cffi.FFI()
        self.ffi.cdef(DECLARATIONS)
        self._libraries = [self.ffi.dlopen(path) for path in paths]

    def __getattr__(self, name: str) -> Any:
        for library in self._libraries:
            try:
                return getattr(library, name)
            except AttributeError:
                continue
        raise AttributeError(name)

    @contextmanager
    def context(self, n_bytes: int, no_alloc: bool = False) -> Iterator[Any]:
        """A ggml_context with room for so much data, and a graph."""
        size = n_bytes + 2**23  # work buffers have half a MiB for each thread
        ctx = self.ggml_init({"mem_size": size, "mem_buffer": self.ffi.NULL, "no_alloc": no_alloc})
        try:
            yield ctx
        finally:
            self.ggml_free(ctx)

    def computed(self, ctx: Any, out: Any, n_threads: int) -> Floats:
        """A copy of an F32 tensor's values, once it and what it comes from are computed."""
        self.compute(ctx, [out], n_threads)
        return self.data(out).copy()

    def compute(self, ctx: Any, tensors: Sequence[Any], n_threads: int) -> None:
        """Compute these tensors in this order."""
        graph = self.ggml_new_graph(ctx)
        for tensor in tensors:
            self.ggml_build_forward_expand(graph, tensor)
        assert self.ggml_graph_compute_with_ctx(ctx, graph, n_threads) == 0

    def work_size(self, node: Any, n_threads: int) -> int:
        """Bytes of the CPU backend's work buffer that a node needs."""
        name, kind = b"ggml_backend_cpu_work_size", "size_t (*)(void *, int)"
        found = self.ggml_backend_reg_get_proc_address(self.ggml_backend_cpu_reg(), name)
        return int(self.ffi.cast(kind, found)(node, n_threads))

    def random(self, ctx: Any, rng: np.random.Generator, *dims: int) -> Any:
        """An F32 tensor of small random numbers."""
        made = self.ggml_new_tensor_4d(ctx, F32, *dims)
        self.data(made)[:] = rng.standard_normal(self.data(made).size) / 4
        return made

    def tensor(self, ctx: Any, values: Floats) -> Any:
        """An F32 tensor of up to four dimensions: the last one of `values` is ne[0]."""
        made = self.ggml_new_tensor_4d(ctx, F32, *((1,) * (4 - values.ndim) + values.shape)[::-1])
        self.data(made)[:] = values.ravel()
        return made

    def ints(self, ctx: Any, values: list[int]) -> Any:
        """A tensor of these I32 values."""
        made = self.ggml_new_tensor_2d(ctx, I32, len(values), 1)
        self.fill(made, np.array(values, np.int32).tobytes())
        return made

    def fill(self, tensor: Any, data: bytes) -> None:
        """Write the bytes of a contiguous tensor."""
        assert self.ggml_nbytes(tensor) == len(data)
        self.ffi.memmove(self.ggml_get_data(tensor), data, len(data))

    def data(self, tensor: Any) -> Floats:
        """The values of a contiguous F32 tensor, to read and to write; no copy."""
        n_bytes = self.ggml_nbytes(tensor)
        return np.frombuffer(self.ffi.buffer(self.ggml_get_data(tensor), n_bytes), np.float32)
