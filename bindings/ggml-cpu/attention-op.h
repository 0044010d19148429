#pragma once

// The parameters of a FLASH_ATTN_EXT, what its masks show, and rows of K and V as floats: for few-rows-attention.cpp and
// large-batch-attention.cpp, on all CPUs.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#define FR_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define FR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

constexpr int64_t TILE = 64; // cells whose scores are known before their values are summed

struct attention_op {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;

    int64_t n_rows;  // per stream
    int64_t n_heads; // query heads per KV head

    float scale;
    float max_bias;
    float softcap;

    explicit attention_op(const ggml_tensor * dst) :
        q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), mask(dst->src[3]), sinks(dst->src[4]), n_rows(q->ne[1]), n_heads(q->ne[2] / k->ne[2]) {
        memcpy(&scale,    (const float *) dst->op_params + 0, sizeof(float));
        memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(float));
        memcpy(&softcap,  (const float *) dst->op_params + 2, sizeof(float));
        if (softcap != 0.0f) {
            scale /= softcap;
        }
    }

    int64_t DK() const { return k->ne[0]; }
    int64_t DV() const { return v->ne[0]; }

    bool supported() const {
        const auto readable = [](const ggml_tensor * t) {
            return (t->type == GGML_TYPE_F32 || ggml_get_type_traits(t->type)->to_float) && t->nb[0] == ggml_type_size(t->type);
        };
        return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && readable(k) && readable(v) &&
               k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && q->ne[3] == k->ne[3] && q->ne[2] % k->ne[2] == 0 &&
               (!mask || mask->ne[2] == 1);
    }

    const ggml_fp16_t * mask_of(int64_t stream, int64_t row) const {
        return mask ? (const ggml_fp16_t *) ((const char *) mask->data + row * mask->nb[1] + (stream % mask->ne[3]) * mask->nb[3]) : nullptr;
    }

    float slope(int64_t head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int64_t n_log2 = int64_t(1) << (int64_t) floor(log2((double) q->ne[2]));
        return head < n_log2 ? powf(powf(2.0f, -max_bias / n_log2), head + 1)
                             : powf(powf(2.0f, -max_bias / 2.0f / n_log2), 2 * (head - n_log2) + 1);
    }
};

// what a row sees of a tile of n cells: a bit for each cell
struct visibility {
    uint64_t cells;
    bool     biased; // not all of their masks are zero
};

inline visibility visibility_of(const ggml_fp16_t * mask, int n) {
    const uint64_t all = n == TILE ? ~uint64_t(0) : (uint64_t(1) << n) - 1;
    if (!mask) {
        return { all, false };
    }
    uint16_t any = 0;
    for (int c = 0; c < n; ++c) {
        any |= mask[c];
    }
    if (!any) {
        return { all, false };
    }
    visibility s = { 0, false };
    for (int c = 0; c < n; ++c) {
        const bool seen = mask[c] != 0xFC00; // -INFINITY
        s.cells  |= uint64_t(seen) << c;
        s.biased |= seen && mask[c] != 0;
    }
    return s;
}

inline void unpack_q8_0(const block_q8_0 * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n / QK8_0; ++i) {
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d);
        for (int j = 0; j < QK8_0; ++j) {
            y[i*QK8_0 + j] = d * x[i].qs[j];
        }
    }
}

inline void unpack_q4_0(const block_q4_0 * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n / QK4_0; ++i) {
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d);
        for (int j = 0; j < QK4_0 / 2; ++j) {
            y[i*QK4_0 + j]             = d * (int8_t) ((x[i].qs[j] & 0x0F) - 8);
            y[i*QK4_0 + j + QK4_0 / 2] = d * (int8_t) ((x[i].qs[j] >>   4) - 8);
        }
    }
}

// the row of K or V of a cell
inline const char * cell_of(const ggml_tensor * t, int64_t stream, int64_t kv_head, int64_t cell) {
    return (const char *) t->data + cell * t->nb[1] + kv_head * t->nb[2] + stream * t->nb[3];
}

// n numbers of a row of K or V
inline void unpack(ggml_type type, const void * x, float * y, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:  memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_F16:  ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) x, y, n); break;
        case GGML_TYPE_Q8_0: unpack_q8_0((const block_q8_0 *) x, y, n); break;
        case GGML_TYPE_Q4_0: unpack_q4_0((const block_q4_0 *) x, y, n); break;
        default:             ggml_get_type_traits(type)->to_float(x, y, n);
    }
}

// the largest number of each channel so far takes in a row's
inline void update_max_abs(const float * row, int64_t n, float * channels) {
    for (int64_t d = 0; d < n; ++d) {
        const float x = fabsf(row[d]);
        channels[d] = x > channels[d] && x <= FLT_MAX ? x : channels[d];
    }
}

// A channel of K that is far larger than the others would leave them few bits of a short: half of what it has too much, in bits,
// is moved to the queries. From the largest numbers of channels to what keys are multiplied by, and queries divided by: powers
// of two, which change scores by rounding only.
inline void balance(int64_t n, float * channels) {
    float mean = 0.0f;
    for (int64_t d = 0; d < n; ++d) {
        mean += channels[d] / n;
    }
    const float unit = mean > 0.0f ? 1.0f / mean : 0.0f;
    for (int64_t d = 0; d < n; ++d) {
        const float excess = channels[d] * unit;
        int32_t bits;
        memcpy(&bits, &excess, sizeof(bits));
        const int32_t power = std::max((bits >> 23) - 127, 0);
        bits = (127 - (power + 1) / 2) << 23;
        memcpy(channels + d, &bits, sizeof(bits));
    }
}

// arrays one after another, on cache lines; or their size, where there is no memory yet
struct memory {
    char * base;
    size_t size = 0;

    template <typename T> T * alloc(int64_t n) {
        T * p = base ? (T *) (base + size) : nullptr;
        size += GGML_PAD(n * sizeof(T), 64);
        return p;
    }
};

// Rows of K or V that are fetched from memory while others are computed with. Not many at a time: what computes would wait for
// its numbers behind them.
struct fetcher {
    const char * row;
    size_t       stride;
    int          left; // rows
    int64_t      line = 0, size;

    fetcher(const ggml_tensor * t, const char * row, int left) : row(row), stride(t->nb[1]), left(left), size(ggml_row_size(t->type, t->ne[0])) {}

    void lines(int n) {
        for (; n > 0 && left > 0; --n) {
            __builtin_prefetch(row + line, 0, 2);
            if ((line += 64) >= size) {
                line = 0;
                row += stride;
                --left;
            }
        }
    }
};

} // namespace
