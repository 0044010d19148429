#pragma once

// What the programs for ARM need beside the kernels, in place of ggml-cpu.c: one thread, matrices, a product.

#include "ggml-cpu-impl.h"
#include "ggml.h"
#include "small-batch.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

static int chunk;
extern "C" {
void ggml_barrier(struct ggml_threadpool *) {}
void ggml_threadpool_chunk_set(struct ggml_threadpool *, int value) { chunk = value; }
int  ggml_threadpool_chunk_add(struct ggml_threadpool *, int value) { return (chunk += value) - value; }
bool ggml_is_numa(void) { return false; }
}

static ggml_tensor matrix(ggml_type type, void * data, int64_t k, int64_t n, int64_t planes = 1) {
    ggml_tensor t = {};
    t.type = type;
    t.data = data;
    t.ne[0] = k, t.ne[1] = n, t.ne[2] = planes, t.ne[3] = 1;
    t.nb[0] = ggml_type_size(type), t.nb[1] = ggml_row_size(type, k), t.nb[2] = n * t.nb[1], t.nb[3] = planes * t.nb[2];
    return t;
}

static void compute(ggml_tensor & dst) {
    std::vector<char> memory(ggml_small_batch_wdata_size(1, &dst));
    ggml_compute_params params = {};
    params.nth   = 1;
    params.wdata = memory.data();
    params.wsize = memory.size();
    if (memory.empty() || !ggml_compute_forward_small_batch(&params, &dst)) {
        fprintf(stderr, "not computed\n");
        exit(2);
    }
}

// [n, m]: m rows of k weights times n columns
static std::vector<float> product(ggml_type type, void * weights, float * y, int64_t k, int64_t m, int64_t n) {
    std::vector<float> out(m * n, NAN);
    ggml_tensor rows = matrix(type, weights, k, m), columns = matrix(GGML_TYPE_F32, y, k, n);
    ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), m, n);
    dst.op = GGML_OP_MUL_MAT;
    dst.src[0] = &rows, dst.src[1] = &columns;
    compute(dst);
    return out;
}
