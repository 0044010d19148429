#pragma once

// The vector code of few-rows-attention.cpp on 64-bit ARM: queries, keys and values of any type are multiplied as floats, since
// NEON multiplies shorts no faster. few-rows-attention-simd.h has the same names for x86.

#include "attention-op.h"
#include "vectors-neon.h"

namespace {

#define FR(op) neon_##op

typedef float32x4_t vec;
typedef float       number; // what queries, keys, values and weights are multiplied as

constexpr bool    BALANCED = false; // numbers are not rounded

constexpr int LANES = 4;
constexpr int BLOCK = 16; // cells whose keys are taken together
constexpr int CHUNK = 16; // numbers of a step (a block of a quantized type), with which weights are multiplied at a time
constexpr int SIDE  = 4;  // queries side by side, with 4 cells
constexpr int MOST  = 4;  // queries whose values are summed side by side

FR_INLINE float sum_of(vec v) { return vaddvq_f32(v); }
FR_INLINE float max_of(vec v) { return vmaxvq_f32(v); }
FR_INLINE vec   exp_of(vec v) { return neon_exp(v); }

// a chunk of bytes, times scale
FR_INLINE void store_bytes(const int8_t * x, float scale, number * out) {
    const int8x16_t bytes = vld1q_s8(x);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    vst1q_f32(out + 0,  vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scale));
    vst1q_f32(out + 4,  vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), scale));
    vst1q_f32(out + 8,  vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scale));
    vst1q_f32(out + 12, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), scale));
}

// Rows of K or V of up to TILE cells. Floats need no scale.
struct rows_of {
    const ggml_tensor * t;
    const char *        row   [TILE];
    float               qscale[TILE];

    void load(const ggml_tensor * tensor, const char * first, const uint16_t * cells, int n, bool, const float *, float *, number *, fetcher & other) {
        t = tensor;
        for (int r = 0; r < n; ++r) {
            other.lines(2);
            row[r]    = first + cells[r] * t->nb[1];
            qscale[r] = 1.0f;
        }
    }

    // STEP numbers of row r from d on, of which some may be beyond the last: a chunk to each
    FR_INLINE void numbers(const rows_of & x, int r, int64_t d, number * first, number * second) {
        if (x.t->type == GGML_TYPE_F16 && d + STEP <= x.t->ne[0]) {
            const __fp16 * halves = (const __fp16 *) x.row[r] + d;
            FR_UNROLL for (int i = 0; i < CHUNK; i += LANES) {
                vst1q_f32(first  + i, vcvt_f32_f16(vld1_f16(halves + i)));
                vst1q_f32(second + i, vcvt_f32_f16(vld1_f16(halves + CHUNK + i)));
            }
        } else if (x.t->type == GGML_TYPE_Q8_0) {
            const block_q8_0 & block = ((const block_q8_0 *) x.row[r])[d / STEP];
            const float scale = GGML_CPU_FP16_TO_FP32(block.d);
            store_bytes(block.qs,         scale, first);
            store_bytes(block.qs + CHUNK, scale, second);
        } else {
            number step[STEP] = {};
            unpack(x.t->type, x.row[r] + ggml_row_size(x.t->type, d), step, std::min<int64_t>(STEP, x.t->ne[0] - d));
            memcpy(first,  step,         CHUNK * sizeof(number));
            memcpy(second, step + CHUNK, CHUNK * sizeof(number));
        }
    }
};

// n rows one after another, of numbers
void store_keys(const rows_of & k, int n, int64_t size, number * out, fetcher & other) {
    for (int r = 0; r < n; ++r, out += size) {
        other.lines(4);
        for (int64_t d = 0; d < size; d += STEP) {
            rows_of::numbers(k, r, d, out + d, out + d + CHUNK);
        }
    }
}

// STEP numbers of n rows, from d on: chunk after chunk, row after row
void store_values(const rows_of & v, int n, int64_t d, number * out) {
    for (int r = 0; r < n; ++r, out += CHUNK) {
        rows_of::numbers(v, r, d, out, out + CHUNK * TILE);
    }
}

FR_INLINE float to_shorts(const float * x, int64_t n, bool, number * out) { // floats stay
    memcpy(out, x, n * sizeof(number));
    return 1.0f;
}

// Scores of a tile, whose largest is `here`, become weights. Returns their sum.
FR_INLINE float weights_to_numbers(const float * s, const float *, int n, float here, number * out, float & product) {
    vec sum = FR(setzero_ps)();
    for (int c = 0; c < n; c += LANES) {
        const vec w = exp_of(FR(sub_ps)(FR(loadu_ps)(s + c), FR(set1_ps)(here)));
        FR(storeu_ps)(out + c, w);
        sum = FR(add_ps)(sum, w);
    }
    product = 1.0f;
    return sum_of(sum);
}

// scores[q][c] = q . k for SIDE queries and 4 cells
void multiply_keys(const number * const * q, const number * k, int64_t size, float * scores) {
    vec acc[SIDE][4];
    FR_UNROLL for (int i = 0; i < SIDE * 4; ++i) {
        acc[i / 4][i % 4] = vdupq_n_f32(0);
    }
    for (int64_t d = 0; d < size; d += LANES) {
        vec cell[4];
        FR_UNROLL for (int c = 0; c < 4; ++c) {
            cell[c] = vld1q_f32(k + c * size + d);
        }
        FR_UNROLL for (int i = 0; i < SIDE; ++i) {
            const vec query = vld1q_f32(q[i] + d);
            FR_UNROLL for (int c = 0; c < 4; ++c) {
                acc[i][c] = vfmaq_f32(acc[i][c], query, cell[c]);
            }
        }
    }
    FR_UNROLL for (int i = 0; i < SIDE; ++i) {
        vst1q_f32(scores + i * TILE, vpaddq_f32(vpaddq_f32(acc[i][0], acc[i][1]), vpaddq_f32(acc[i][2], acc[i][3])));
    }
}

// A query, and what it does with the values of a tile.
struct value_sum {
    float *        value;   // what is summed up
    const number * weights; // of a tile's cells
    float          shrink;  // of what was summed up before
    float          qscale;  // of a tile's weights
};

// a chunk of the values of N queries, from d on, takes in that of n cells
template <int N> void add_values(const value_sum * q, int64_t d, const number * values, int n) {
    constexpr int V = CHUNK / LANES;
    vec acc[N][V];
    FR_UNROLL for (int i = 0; i < N * V; ++i) {
        acc[i / V][i % V] = vdupq_n_f32(0);
    }
    for (int c = 0; c < n; ++c, values += CHUNK) {
        vec x[V];
        FR_UNROLL for (int j = 0; j < V; ++j) {
            x[j] = vld1q_f32(values + j * LANES);
        }
        FR_UNROLL for (int i = 0; i < N; ++i) {
            FR_UNROLL for (int j = 0; j < V; ++j) {
                acc[i][j] = vfmaq_n_f32(acc[i][j], x[j], q[i].weights[c]);
            }
        }
    }
    FR_UNROLL for (int i = 0; i < N * V; ++i) {
        float * value = q[i / V].value + d + i % V * LANES;
        vst1q_f32(value, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(value), q[i / V].shrink), acc[i / V][i % V], q[i / V].qscale));
    }
}

} // namespace

#include "attention-sums.h"
