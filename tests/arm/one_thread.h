#pragma once

// What the programs for ARM need beside the kernels, in place of ggml-cpu.c: one thread, and matrices.

#include "ggml-cpu-impl.h"
#include "ggml.h"

#include <cstdio>
#include <cstdlib>

static int chunk;
extern "C" {
void ggml_barrier(struct ggml_threadpool *) {}
void ggml_threadpool_chunk_set(struct ggml_threadpool *, int value) { chunk = value; }
int  ggml_threadpool_chunk_add(struct ggml_threadpool *, int value) { return (chunk += value) - value; }
}

static ggml_tensor matrix(ggml_type type, void * data, int64_t k, int64_t n, int64_t planes = 1) {
    ggml_tensor t = {};
    t.type = type;
    t.data = data;
    t.ne[0] = k, t.ne[1] = n, t.ne[2] = planes, t.ne[3] = 1;
    t.nb[0] = ggml_type_size(type), t.nb[1] = ggml_row_size(type, k), t.nb[2] = n * t.nb[1], t.nb[3] = planes * t.nb[2];
    return t;
}
