// MUL_MAT and MUL_MAT_ID of a few columns (1 to 8 in a pass) for quantized types but Q1_0, Q2_0, TQ1_0 and TQ2_0. x86 with AVX2 or AVX-512.
// Called by ggml_compute_forward_mul_mat() and _mul_mat_id() (ggml-cpu.c); ggml_graph_plan() asks for its work size; repack.cpp and
// amx.cpp leave weights of these types as they are in the file.

// GCC 12 warns of its own header wherever an AVX-512 function of it is inlined
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

#include "small-batch.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>

static std::atomic<bool> small_batch { true };

void ggml_cpu_set_small_batch(bool value) {
    small_batch = value;
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__GNUC__)

#include "small-batch-experts.h"
#include "small-batch-kernels-32.h"
#include "small-batch-lanes.h"

namespace {

constexpr int64_t PASS_BYTES = 256 * 1024; // of rows, where they are passed over more than once

// ---- types

struct kernel {
    int64_t unit;     // weights, and bytes of a column's quants
    size_t  n_sums;
    void (*prepare)(const float * x, char * y, float * sums, float * scale);
    void (*rows[MAX_PASS + 1])(const product & p, int64_t begin, int64_t end);

    size_t column_bytes(int64_t n_units) const {
        return n_units * (unit + (n_sums + 1) * sizeof(float));
    }
    // the areas of n columns from column `first` on, of n_all
    columns at(char * base, int64_t n_units, int64_t first, int64_t n_all) const {
        float * sums = (float *) (base + n_all * n_units * unit);
        return unit_at({ base, sums, sums + n_all * n_units * n_sums }, first * n_units);
    }
    // the areas from a unit on
    columns unit_at(columns y, int64_t i) const {
        return { y.y + i * unit, y.sums + i * n_sums, y.scales + i };
    }
};

#define SB_ROWS(rows, T) { nullptr, rows<T, 1>, rows<T, 2>, rows<T, 3>, rows<T, 4>, rows<T, 5>, rows<T, 6>, rows<T, 7>, rows<T, 8> }

template <class T> const kernel * kernel_256() {
    static const kernel k = { QK_K, 16, prepare_256, SB_ROWS(rows_256, T) };
    return &k;
}

template <class T> const kernel * kernel_lanes() {
    static const kernel k = { QK_K, 16, prepare_lanes<T>, SB_ROWS(rows_lanes, T) };
    return &k;
}

template <class T> const kernel * kernel_bytes() {
    static const kernel k = { QK8_0, 1, prepare_biased<false, BYTES_BIAS>, SB_ROWS(rows_bytes, T) };
    return &k;
}

template <class T> const kernel * kernel_32() {
    static const kernel k = { QK8_0, 0, prepare_32, SB_ROWS(rows_32, T) };
    return &k;
}

template <class T> const kernel * kernel_nibbles() {
    static const kernel k = { QK8_0, 1, prepare_biased<HAS_MIN<T>, T::BIAS>, SB_ROWS(rows_nibbles, T) };
    return &k;
}

const kernel * kernel_of(int32_t type) {
    switch (type) {
        case GGML_TYPE_Q3_K:    return kernel_256<type_q3_K>();
        case GGML_TYPE_Q2_K:    return kernel_lanes<lanes_q2_K>();
        case GGML_TYPE_Q4_K:    return kernel_lanes<lanes_q4_K>();
        case GGML_TYPE_Q5_K:    return kernel_lanes<lanes_q5_K>();
        case GGML_TYPE_Q6_K:    return kernel_256<type_q6_K>();
        case GGML_TYPE_IQ4_XS:  return kernel_256<type_iq4_xs>();
        case GGML_TYPE_IQ2_XXS: return kernel_256<type_iq2_xxs>();
        case GGML_TYPE_IQ2_XS:  return kernel_256<type_iq2_xs>();
        case GGML_TYPE_IQ2_S:   return kernel_256<type_iq2_s>();
        case GGML_TYPE_IQ3_XXS: return kernel_256<type_iq3_xxs>();
        case GGML_TYPE_IQ3_S:   return kernel_256<type_iq3_s>();
        case GGML_TYPE_IQ1_S:   return kernel_256<type_iq1_s>();
        case GGML_TYPE_IQ1_M:   return kernel_256<type_iq1_m>();
        case GGML_TYPE_Q8_0:    return kernel_bytes<type_q8_0>();
        case GGML_TYPE_Q4_0:    return kernel_nibbles<type_q4_0>();
        case GGML_TYPE_Q5_0:    return kernel_nibbles<type_q5_0>();
        case GGML_TYPE_IQ4_NL:  return kernel_nibbles<type_iq4_nl>();
        case GGML_TYPE_MXFP4:   return kernel_nibbles<type_mxfp4>();
        case GGML_TYPE_NVFP4:   return kernel_32<type_nvfp4>();
        case GGML_TYPE_Q4_1:    return kernel_nibbles<type_q4_1>();
        case GGML_TYPE_Q5_1:    return kernel_nibbles<type_q5_1>();
        default:                return nullptr;
    }
}

// ---- the operators

// the kernel for a product, or null where it goes another way
const kernel * kernel_for(const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const kernel * k = small_batch ? kernel_of(src0->type) : nullptr;
    if (!k || src0->ne[0] % k->unit || src0->nb[0] != ggml_type_size(src0->type) ||
        src1->type != GGML_TYPE_F32 || src1->nb[0] != sizeof(float) || dst->nb[0] != sizeof(float)) {
        return nullptr;
    }
    return dst->op == GGML_OP_MUL_MAT || (src0->ne[3] == 1 && src1->ne[3] == 1) ? k : nullptr;
}

char * aligned(void * p) {
    return (char *) GGML_PAD((uintptr_t) p, 64);
}

// Of a matrix with few rows each thread gets a part; else chunks of some 1000, so that fast threads help slow ones.
int64_t rows_per_chunk(int64_t n_rows, int nth, size_t row_bytes, bool several_passes) {
    const int64_t share = (n_rows + nth - 1) / nth;
    int64_t chunk = ggml_is_numa() || share < 64 ? share
                                   : std::min<int64_t>(std::max<int64_t>((share + 1) / 2, 64), 1024);
    if (several_passes) {
        chunk = std::min<int64_t>(chunk, std::max<int64_t>(PASS_BYTES / row_bytes, 64));
    }
    return GGML_PAD(chunk, 16); // of all kernels' groups
}

void mul_mat(const ggml_compute_params * params, ggml_tensor * dst, const kernel * k) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];

    const int64_t n_units = src1->ne[0] / k->unit;
    const int64_t n_cols  = src1->ne[1];
    const int64_t n_all   = ggml_nrows(src1);

    // the columns of a matrix in passes of up to MAX_PASS
    const int64_t n_passes = (n_cols + MAX_PASS - 1) / MAX_PASS;
    const auto first = [&](int64_t pass) { return n_cols * pass / n_passes; };

    char * base = aligned(params->wdata);
    const int64_t begin = n_all * n_units * params->ith / params->nth, end = n_all * n_units * (params->ith + 1) / params->nth;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t unit = i % n_units, col = i / n_units % n_cols, matrix = i / n_units / n_cols;
        const int64_t pass = ((col + 1) * n_passes - 1) / n_cols;
        const int64_t n = first(pass + 1) - first(pass);
        const columns y = k->unit_at(k->at(base, n_units, matrix * n_cols + first(pass), n_all), unit * n + col - first(pass));
        const char * x = (const char *) src1->data + col * src1->nb[1] + matrix % src1->ne[2] * src1->nb[2] + matrix / src1->ne[2] * src1->nb[3];
        k->prepare((const float *) x + unit * k->unit, y.y, y.sums, y.scales);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t n_rows   = src0->ne[1];
    const int64_t chunk    = rows_per_chunk(n_rows, params->nth, src0->nb[1], n_passes > 1);
    const int64_t n_chunks = (n_rows + chunk - 1) / chunk;
    for (int64_t c = params->ith; c < n_chunks * src1->ne[2] * src1->ne[3]; c = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t row = c % n_chunks * chunk, matrix = c / n_chunks, i2 = matrix % src1->ne[2], i3 = matrix / src1->ne[2];
        const char * x = (const char *) src0->data + i2 / (src1->ne[2] / src0->ne[2]) * src0->nb[2] + i3 / (src1->ne[3] / src0->ne[3]) * src0->nb[3];
        for (int64_t i = 0; i < n_passes; ++i) {
            product p = { n_units, x, src0->nb[1], k->at(base, n_units, matrix * n_cols + first(i), n_all), {} };
            for (int64_t j = first(i); j < first(i + 1); ++j) {
                p.dst[j - first(i)] = (float *) ((char *) dst->data + j * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3]);
            }
            k->rows[first(i + 1) - first(i)](p, row, std::min(n_rows, row + chunk));
        }
    }
}

// copies columns, each of which lies by itself, side by side
columns side_by_side(const kernel * k, int64_t n_units, const columns * from, int n, char * base) {
    const columns to = k->at(base, n_units, 0, n);
    for (int j = 0; j < n; ++j) {
        for (int64_t i = 0; i < n_units; ++i) {
            const columns a = k->unit_at(from[j], i), b = k->unit_at(to, i * n + j);
            memcpy(b.y, a.y, k->unit);
            memcpy(b.sums, a.sums, k->n_sums * sizeof(float));
            *b.scales = *a.scales;
        }
    }
    return to;
}

void mul_mat_id(const ggml_compute_params * params, ggml_tensor * dst, const kernel * k) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];

    const int64_t n_units = src1->ne[0] / k->unit;
    const int64_t n_all   = ggml_nrows(src1);

    char * base = aligned(params->wdata);
    char * own  = base + GGML_PAD(n_all * k->column_bytes(n_units), 64);
    const size_t own_bytes = GGML_PAD(MAX_PASS * k->column_bytes(n_units), 64);
    int32_t * n_experts = (int32_t *) (own + params->nth * own_bytes);
    plan plan(n_experts, dst);
    own += params->ith * own_bytes;

    const int64_t begin = n_all * n_units * params->ith / params->nth, end = n_all * n_units * (params->ith + 1) / params->nth;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t unit = i % n_units, col = i / n_units;
        const columns y = k->unit_at(k->at(base, n_units, col, n_all), unit);
        const char * x = (const char *) src1->data + col % src1->ne[1] * src1->nb[1] + col / src1->ne[1] * src1->nb[2];
        k->prepare((const float *) x + unit * k->unit, y.y, y.sums, y.scales);
    }
    if (params->ith == 0) {
        *n_experts = sort_by_expert(dst->src[2], src0->ne[2], plan);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t n_rows   = src0->ne[1];
    const int64_t chunk    = rows_per_chunk(n_rows, params->nth, src0->nb[1], dst->src[2]->ne[1] > MAX_PASS);
    const int64_t n_chunks = (n_rows + chunk - 1) / chunk;
    for (int64_t c = params->ith; c < n_chunks * *n_experts; c = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int32_t expert = plan.expert[c / n_chunks];
        const int64_t row    = c % n_chunks * chunk;
        product p = { n_units, (const char *) src0->data + expert * src0->nb[2], src0->nb[1], {}, {} };

        for (int32_t u = expert ? plan.end[expert - 1] : 0; u < plan.end[expert]; u += MAX_PASS) {
            const int n = std::min<int>(MAX_PASS, plan.end[expert] - u);
            columns y[MAX_PASS];
            for (int j = 0; j < n; ++j) {
                const use & one = plan.uses[u + j];
                y[j] = k->at(base, n_units, one.token * src1->ne[1] + one.id % src1->ne[1], n_all);
                p.dst[j] = (float *) ((char *) dst->data + one.id * dst->nb[1] + one.token * dst->nb[2]);
            }
            p.y = n == 1 ? y[0] : side_by_side(k, n_units, y, n, own);
            k->rows[n](p, row, std::min(n_rows, row + chunk));
        }
    }
}

} // namespace

bool ggml_cpu_small_batch_type(int32_t type) {
    const bool is_float = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; // llamafile/sgemm.cpp
    return small_batch && (is_float || kernel_of(type));
}

size_t ggml_small_batch_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const kernel * k = kernel_for(dst);
    if (!k) {
        return 0;
    }
    const ggml_tensor * src1 = dst->src[1];
    const int64_t n_units = src1->ne[0] / k->unit;
    size_t size = 64 + GGML_PAD(ggml_nrows(src1) * k->column_bytes(n_units), 64);
    if (dst->op == GGML_OP_MUL_MAT_ID) {
        size += n_tasks * GGML_PAD(MAX_PASS * k->column_bytes(n_units), 64);
        size += plan::size(dst);
    }
    return size;
}

bool ggml_cpu_small_batch(void) {
    return small_batch;
}

bool ggml_compute_forward_small_batch(const ggml_compute_params * params, ggml_tensor * dst) {
    const kernel * k = params->use_ref ? nullptr : kernel_for(dst);
    if (!k) {
        return false;
    }
    (dst->op == GGML_OP_MUL_MAT_ID ? mul_mat_id : mul_mat)(params, dst, k);
    return true;
}

#else

bool ggml_cpu_small_batch(void) {
    return false;
}

bool ggml_cpu_small_batch_type(int32_t) {
    return false;
}

size_t ggml_small_batch_wdata_size(int, const ggml_tensor *) {
    return 0;
}

bool ggml_compute_forward_small_batch(const ggml_compute_params *, ggml_tensor *) {
    return false;
}

#endif
