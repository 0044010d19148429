// MUL_MAT and MUL_MAT_ID of many columns (17 of super-blocks, 33 of blocks of 32, or more). x86 with AVX2 or AVX-512; all types of
// small-batch.cpp but NVFP4.
// Called by ggml_compute_forward_mul_mat() and _mul_mat_id() (ggml-cpu.c) before small-batch.cpp; ggml_graph_plan() asks for its
// work size.

// GCC 12 warns of its own header wherever an AVX-512 function of it is inlined
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

#include "large-batch.h"

#include "large-batch-ops.h"
#include "small-batch.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__GNUC__)

#include "large-batch-kernels.h"
#include "small-batch-experts.h"

namespace {

constexpr int64_t MIN_TOKENS = 6;    // of an expert, on average
constexpr int64_t TILE_DEPTH = 1024; // weights of a row in a tile, which a first-level cache can hold

// ---- types

struct kernel {
    int    unit;       // weights
    int    own_scale;  // weights
    size_t unit_bytes; // of a column
    void (*prepare)(const float * x, void * unit);
    void (*unpack)(const char * const * rows, int64_t first, int64_t n_units, const tile & out);
    void (*multiply[MAX_COLS + 1])(const tile & t, int64_t n_units, const char * const * y, float (*acc)[TILE_ROWS]);
};

constexpr int chain(int most, int own_scale) { // how many products of pairs 16 bits can hold, in a group
    return most <= 15 ? own_scale / 4 : most <= 31 ? 4 : most <= 63 ? 2 : 1;
}

template <class T, int... n> kernel make_kernel_256(std::integer_sequence<int, n...>) {
    constexpr int own = T::OWN_SCALE;
    return { QK_K, own, sizeof(column_unit<QK_K>), prepare_unit_256<T>, unpack_256<T>,
             { nullptr, multiply_256<own, short_parts<T>(), HAS_MIN<T>, in_tile<T>::BIAS != 0, in_tile<T>::SIGNED, VNNI ? 1 : chain(T::MOST, own), n + 1>... } };
}

template <class T, int... n> kernel make_kernel_32(std::integer_sequence<int, n...>) {
    return { QK8_0, QK8_0, sizeof(column_unit<QK8_0>), prepare_unit_32<T>, unpack_32<T>,
             { nullptr, multiply_32<HAS_MIN<T>, in_tile<T>::SIGNED, VNNI ? 1 : chain(T::MOST, QK8_0), n + 1>... } };
}

typedef std::make_integer_sequence<int, MAX_COLS> all_cols;

template <class T> const kernel * kernel_256() {
    static const kernel k = make_kernel_256<T>(all_cols());
    return &k;
}

template <class T> const kernel * kernel_32() {
    static const kernel k = make_kernel_32<T>(all_cols());
    return &k;
}

const kernel * kernel_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q2_K:    return kernel_256<type_q2_K>();
        case GGML_TYPE_Q3_K:    return kernel_256<type_q3_K>();
        case GGML_TYPE_Q4_K:    return kernel_256<type_q4_K>();
        case GGML_TYPE_Q5_K:    return kernel_256<type_q5_K>();
        case GGML_TYPE_Q6_K:    return kernel_256<type_q6_K>();
        case GGML_TYPE_IQ4_XS:  return kernel_256<type_iq4_xs>();
        case GGML_TYPE_IQ2_XXS: return kernel_256<type_iq2_xxs>();
        case GGML_TYPE_IQ2_XS:  return kernel_256<type_iq2_xs>();
        case GGML_TYPE_IQ2_S:   return kernel_256<type_iq2_s>();
        case GGML_TYPE_IQ3_XXS: return kernel_256<type_iq3_xxs>();
        case GGML_TYPE_IQ3_S:   return kernel_256<type_iq3_s>();
        case GGML_TYPE_IQ1_S:   return kernel_256<type_iq1_s>();
        case GGML_TYPE_IQ1_M:   return kernel_256<type_iq1_m>();
        case GGML_TYPE_Q8_0:    return kernel_32<blocks_32<type_q8_0>>();
        case GGML_TYPE_Q5_0:    return kernel_32<blocks_of_nibbles<type_q5_0>>();
        case GGML_TYPE_Q4_0:    return kernel_32<blocks_of_nibbles<type_q4_0>>();
        case GGML_TYPE_IQ4_NL:  return kernel_32<blocks_of_nibbles<type_iq4_nl>>();
        case GGML_TYPE_MXFP4:   return kernel_32<blocks_of_nibbles<type_mxfp4>>();
        case GGML_TYPE_Q4_1:    return kernel_32<blocks_of_nibbles<type_q4_1>>();
        case GGML_TYPE_Q5_1:    return kernel_32<blocks_of_nibbles<type_q5_1>>();
        default:                return nullptr;
    }
}

// ---- the operators

// fewer columns go to small-batch.cpp, which rounds alike: so this is a matter of time only
int64_t min_cols(const kernel * k) {
    return k->unit == QK_K ? 17 : 33;
}

// the kernel for a product, or null where it goes another way
const kernel * kernel_for(const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const kernel * k = ggml_cpu_large_batch() && ggml_cpu_small_batch_type(src0->type) ? kernel_of(src0->type) : nullptr;
    if (!k || src0->nb[0] != ggml_type_size(src0->type) || src1->type != GGML_TYPE_F32 ||
        src1->nb[0] != sizeof(float) || dst->nb[0] != sizeof(float)) {
        return nullptr;
    }
    if (dst->op == GGML_OP_MUL_MAT_ID) {
        const ggml_tensor * ids = dst->src[2];
        const bool enough = ids->ne[1] >= min_cols(k) && ids->ne[0] * ids->ne[1] >= MIN_TOKENS * src0->ne[2];
        return enough && src0->ne[3] == 1 && src1->ne[3] == 1 ? k : nullptr;
    }
    return src1->ne[1] >= min_cols(k) ? k : nullptr;
}

size_t column_bytes(const kernel * k, const ggml_tensor * src1) {
    return src1->ne[0] / k->unit * k->unit_bytes;
}

// of what lies in a tile beside its quants: of units, of groups, of pairs of groups
size_t per_unit (const kernel * k) { return TILE_DEPTH / k->unit * TILE_ROWS; }
size_t per_group(const kernel * k) { return TILE_DEPTH / k->own_scale * TILE_ROWS; }
size_t per_pair (const kernel * k) { return k->unit == QK_K ? TILE_DEPTH / 32 * TILE_ROWS : 0; }

size_t tile_bytes(const kernel * k) {
    return TILE_DEPTH * TILE_ROWS + (2 * per_unit(k) + per_group(k) + per_pair(k)) * sizeof(float);
}

char * aligned(void * p) {
    return (char *) GGML_PAD((uintptr_t) p, 64);
}

// one column of a product
struct place {
    const char * y;
    float      * dst; // of row 0
};

// a tile's rows, from `row` on, times columns [begin, end), which find(i) says where to find
template <typename F>
void multiply_tile(const kernel * k, const ggml_tensor * src0, const char * x, int64_t row, char * memory, int64_t begin, int64_t end, F find) {
    const int    n_rows = (int) std::min<int64_t>(TILE_ROWS, src0->ne[1] - row);
    float   * d      = (float *) (memory + TILE_DEPTH * TILE_ROWS);
    int32_t * scales = (int32_t *) (d + 2 * per_unit(k));
    const tile t = { memory, d, d + per_unit(k), scales, scales + per_group(k) };
    const char * rows[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; ++i) {
        rows[i] = x + (row + std::min(i, n_rows - 1)) * src0->nb[1];
    }
    const int64_t n_all = src0->ne[0] / k->unit, step = TILE_DEPTH / k->unit, n_passes = (end - begin + MAX_COLS - 1) / MAX_COLS;
    for (int64_t unit = 0; unit < n_all; unit += step) {
        const int64_t n_units = std::min(step, n_all - unit);
        k->unpack(rows, unit, n_units, t);
        for (int64_t pass = 0; pass < n_passes; ++pass) {
            const int64_t first = begin + (end - begin) * pass / n_passes;
            const int     n     = (int) (begin + (end - begin) * (pass + 1) / n_passes - first);
            alignas(64) float acc[MAX_COLS][TILE_ROWS];
            const char * y[MAX_COLS];
            float * dst[MAX_COLS];
            for (int j = 0; j < n; ++j) {
                const place p = find(first + j);
                y[j]   = p.y + unit * k->unit_bytes;
                dst[j] = p.dst + row;
                if (unit) {
                    memcpy(acc[j], dst[j], n_rows * sizeof(float));
                } else {
                    memset(acc[j], 0, sizeof(acc[j]));
                }
            }
            k->multiply[n](t, n_units, y, acc);
            for (int j = 0; j < n; ++j) {
                memcpy(dst[j], acc[j], n_rows * sizeof(float));
            }
        }
    }
}

void mul_mat(const ggml_compute_params * params, ggml_tensor * dst, const kernel * k) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const ggml_tensor * ids  = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;

    const int64_t n_units = src1->ne[0] / k->unit, n_all = ggml_nrows(src1);
    const size_t  bytes   = n_units * k->unit_bytes;

    char * base   = aligned(params->wdata);
    char * memory = aligned(base + n_all * bytes);
    int32_t * n_experts = (int32_t *) (memory + params->nth * tile_bytes(k));
    memory += params->ith * tile_bytes(k);

    const int64_t begin = n_all * n_units * params->ith / params->nth, end = n_all * n_units * (params->ith + 1) / params->nth;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t unit = i % n_units, col = i / n_units, i1 = col % src1->ne[1], i2 = col / src1->ne[1] % src1->ne[2], i3 = col / src1->ne[1] / src1->ne[2];
        const char * x = (const char *) src1->data + i1 * src1->nb[1] + i2 * src1->nb[2] + i3 * src1->nb[3];
        k->prepare((const float *) x + unit * k->unit, base + col * bytes + unit * k->unit_bytes);
    }
    plan plan(n_experts, dst);
    if (params->ith == 0) {
        if (ids) {
            *n_experts = sort_by_expert(ids, src0->ne[2], plan);
        }
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t n_tiles    = (src0->ne[1] + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t n_matrices = ids ? *n_experts : src1->ne[2] * src1->ne[3];
    for (int64_t c = params->ith; c < n_tiles * n_matrices; c = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t row = c % n_tiles * TILE_ROWS, matrix = c / n_tiles;
        if (ids) {
            const int32_t expert = plan.expert[matrix];
            multiply_tile(k, src0, (const char *) src0->data + expert * src0->nb[2], row, memory, expert ? plan.end[expert - 1] : 0, plan.end[expert], [&](int64_t i) {
                const use & u = plan.uses[i];
                return place { base + (u.token * src1->ne[1] + u.id % src1->ne[1]) * bytes,
                               (float *) ((char *) dst->data + u.id * dst->nb[1] + u.token * dst->nb[2]) };
            });
            continue;
        }
        const int64_t i2 = matrix % src1->ne[2], i3 = matrix / src1->ne[2];
        const char * x = (const char *) src0->data + i2 / (src1->ne[2] / src0->ne[2]) * src0->nb[2] + i3 / (src1->ne[3] / src0->ne[3]) * src0->nb[3];
        multiply_tile(k, src0, x, row, memory, 0, src1->ne[1], [&](int64_t i) {
            return place { base + (matrix * src1->ne[1] + i) * bytes,
                           (float *) ((char *) dst->data + i * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3]) };
        });
    }
}

} // namespace

size_t ggml_large_batch_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const kernel * k = kernel_for(dst);
    if (!k) {
        return 0;
    }
    const size_t size = 128 + ggml_nrows(dst->src[1]) * column_bytes(k, dst->src[1]) + n_tasks * tile_bytes(k);
    return size + (dst->op == GGML_OP_MUL_MAT_ID ? plan::size(dst) : 0);
}

bool ggml_compute_forward_large_batch(const ggml_compute_params * params, ggml_tensor * dst) {
    const kernel * k = params->use_ref ? nullptr : kernel_for(dst);
    if (!k) {
        return false;
    }
    mul_mat(params, dst, k);
    return true;
}

#else

size_t ggml_large_batch_wdata_size(int, const ggml_tensor *) {
    return 0;
}

bool ggml_compute_forward_large_batch(const ggml_compute_params *, ggml_tensor *) {
    return false;
}

#endif
