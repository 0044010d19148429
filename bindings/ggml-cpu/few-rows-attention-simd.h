#pragma once

// The vector code of few-rows-attention.cpp on x86 (AVX-512 or AVX2): queries, keys, values and weights are multiplied as shorts. few-rows-attention-neon.h has the same names for ARM.

#include "attention-simd.h"

namespace {

constexpr bool    BALANCED = true; // channels of keys are, before they are rounded

constexpr int BLOCK = 16;        // cells whose keys are taken together
constexpr int SIDE  = LANES / 4; // queries side by side, with 4 cells
constexpr int MOST  = LANES / 2; // queries whose values are summed side by side

#if defined(__AVX512F__) && defined(__AVX512DQ__)
// out[q * TILE + c] = sum of the lanes of acc[q * 4 + c]
FR_INLINE void store_sums(float * out, ivec acc[LANES]) {
    FR_UNROLL for (int i = 0; i < 8; ++i) {
        acc[i] = FR(add_epi32)(_mm512_shuffle_i32x4(acc[i], acc[i + 8], 0x44), _mm512_shuffle_i32x4(acc[i], acc[i + 8], 0xEE));
    }
    FR_UNROLL for (int i = 0; i < 4; ++i) {
        acc[i] = FR(add_epi32)(_mm512_shuffle_i32x4(acc[i], acc[i + 4], 0x88), _mm512_shuffle_i32x4(acc[i], acc[i + 4], 0xDD));
    }
    FR_UNROLL for (int i = 0; i < 2; ++i) {
        acc[i] = FR(add_epi32)(FR(unpacklo_epi32)(acc[i], acc[i + 2]), FR(unpackhi_epi32)(acc[i], acc[i + 2]));
    }
    const vec sums = FR(cvtepi32_ps)(FR(add_epi32)(FR(unpacklo_epi32)(acc[0], acc[1]), FR(unpackhi_epi32)(acc[0], acc[1])));
    _mm_storeu_ps(out + 0*TILE, _mm512_extractf32x4_ps(sums, 0));
    _mm_storeu_ps(out + 1*TILE, _mm512_extractf32x4_ps(sums, 2));
    _mm_storeu_ps(out + 2*TILE, _mm512_extractf32x4_ps(sums, 1));
    _mm_storeu_ps(out + 3*TILE, _mm512_extractf32x4_ps(sums, 3));
}
#else
FR_INLINE void store_sums(float * out, ivec acc[LANES]) {
    FR_UNROLL for (int i = 0; i < 4; ++i) { // the lanes' halves of two, added
        acc[i] = FR(add_epi32)(FR(blend_epi32)(acc[i], acc[i + 4], 0xF0), _mm256_permute2x128_si256(acc[i], acc[i + 4], 0x21));
    }
    FR_UNROLL for (int i = 0; i < 2; ++i) {
        acc[i] = FR(add_epi32)(FR(unpacklo_epi32)(acc[i], acc[i + 2]), FR(unpackhi_epi32)(acc[i], acc[i + 2]));
    }
    const vec sums = FR(cvtepi32_ps)(FR(add_epi32)(FR(unpacklo_epi32)(acc[0], acc[1]), FR(unpackhi_epi32)(acc[0], acc[1])));
    _mm_storeu_ps(out + 0*TILE, _mm256_castps256_ps128(sums));
    _mm_storeu_ps(out + 1*TILE, _mm256_extractf128_ps(sums, 1));
}
#endif

// Scores of a tile, whose largest is `here`, become weights, times the scales of values, as pairs of shorts. What is beyond n has no
// weight. Returns their sum, and the scale of a product.
float weights_to_numbers(float * s, const float * qscale, int n, float here, number * out, float & product) {
    vec most = FR(set1_ps)(LEAST), bad = FR(setzero_ps)();
    ivec total = FR(set1_epi32)(0), products = total;
    for (int c = 0; c < n; c += LANES) {
        const vec w = exp_of(FR(sub_ps)(FR(loadu_ps)(s + c), FR(set1_ps)(here)));
        const vec x = FR(mul_ps)(w, FR(loadu_ps)(qscale + c));
        FR(storeu_ps)(s + c, x);
        total = FR(add_epi32)(total, parts_of(w, FR(set1_ps)(PARTS)));
        most  = FR(max_ps)(x, most);
        bad   = FR(fmadd_ps)(x, FR(setzero_ps)(), bad); // NaN where a number is none
    }
    const vec largest = FR(set1_ps)(max_of(most)), parts = FR(div_ps)(FR(set1_ps)(PARTS), largest);
    for (int c = 0; c < n; c += LANES) {
        products = FR(add_epi32)(products, parts_of(FR(loadu_ps)(s + c), parts));
    }
    vec factor, back;
    scale_weights(largest, FR(set1_epi32)(sum_of(products)), factor, back);
    for (int c = 0; c < n; c += CHUNK) {
        store_shorts(from_pack_order(pack(FR(loadu_ps)(s + c), FR(loadu_ps)(s + c + LANES), factor)), out + c);
    }
    product = max_of(back);
    return (float) sum_of(total) * (1.0f / PARTS) + sum_of(bad);
}

// ---- products

// A compiler that loads ahead runs out of registers, and keeps sums in memory.
FR_INLINE void in_turn(ivec & x) { __asm__ volatile("" : "+v"(x)); }

// sum += the sums of pairs of a * b. GCC 12 would add to another register, and move the sum back.
FR_INLINE void add_in_turn(ivec & sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    sum = add_pairs(sum, a, b); // one instruction
    in_turn(sum);
#else
    __asm__ volatile("vpaddd %1, %0, %0" : "+v"(sum) : "v"(FR(madd_epi16)(a, b)));
#endif
}

// scores[q][c] = q . k for SIDE queries and 4 cells, of the numbers [begin, end)
__attribute__((noinline)) void multiply_segment(const number * const * q, const number * k, int64_t size, int64_t begin, int64_t end, float * scores) {
    ivec acc[LANES];
    FR_UNROLL for (int i = 0; i < LANES; ++i) {
        acc[i] = FR(set1_epi32)(0);
    }
#pragma GCC unroll 2
    for (int64_t d = begin; d < end; d += CHUNK) {
        ivec cell[4];
        FR_UNROLL for (int c = 0; c < 4; ++c) {
            cell[c] = load_shorts(k + c * size + d);
        }
        FR_UNROLL for (int i = 0; i < SIDE; ++i) {
            const ivec query = load_shorts(q[i] + d);
            FR_UNROLL for (int c = 0; c < 4; ++c) {
                add_in_turn(acc[i * 4 + c], query, cell[c]);
            }
        }
    }
    store_sums(scores, acc);
}

// the same of all numbers
FR_INLINE void multiply_keys(const number * const * q, const number * k, int64_t size, float * scores) {
    const int64_t segment = segment_of(size);
    multiply_segment(q, k, size, 0, std::min(size, segment), scores);
    for (int64_t begin = segment; begin < size; begin += segment) {
        float more[SIDE * TILE];
        multiply_segment(q, k, size, begin, std::min(size, begin + segment), more);
        for (int i = 0; i < SIDE * 4; ++i) {
            scores[i / 4 * TILE + i % 4] += more[i / 4 * TILE + i % 4];
        }
    }
}

// A query, and what it does with the values of a tile.
struct value_sum {
    float *         value;   // what is summed up
    const int16_t * weights; // of a tile's cells
    float           shrink;  // of what was summed up before
    float           qscale;  // of a product
};

// a chunk of the values of N queries, from d on, takes in that of n cells
template <int N> __attribute__((noinline)) void add_values(const value_sum * q, int64_t d, const number * values, int n) {
    ivec acc[N][2];
    FR_UNROLL for (int i = 0; i < N; ++i) {
        acc[i][0] = acc[i][1] = FR(set1_epi32)(0);
    }
#pragma GCC unroll 2
    for (int c = 0; c < n; c += 2, values += 2 * CHUNK) {
        const ivec x = load_shorts(values), y = load_shorts(values + CHUNK);
        FR_UNROLL for (int i = 0; i < N; ++i) {
            int32_t two;
            memcpy(&two, q[i].weights + c, sizeof(two));
            ivec w = FR(set1_epi32)(two);
            in_turn(w);
            add_in_turn(acc[i][0], w, x);
            add_in_turn(acc[i][1], w, y);
        }
    }
    FR_UNROLL for (int i = 0; i < N; ++i) {
        FR_UNROLL for (int j = 0; j < 2; ++j) {
            float * value = q[i].value + d + j * LANES;
            const vec more = FR(mul_ps)(FR(cvtepi32_ps)(acc[i][j]), FR(set1_ps)(q[i].qscale));
            FR(storeu_ps)(value, FR(fmadd_ps)(FR(loadu_ps)(value), FR(set1_ps)(q[i].shrink), more));
        }
    }
}

} // namespace
