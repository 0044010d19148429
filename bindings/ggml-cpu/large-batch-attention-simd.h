#pragma once

// The vector code of large-batch-attention.cpp on x86 (AVX-512 or AVX2): shorts from floats, and their products.

#include "attention-simd.h"

#include <cfloat>

// Keys, values, queries and weights are multiplied as shorts: pairs of them, summed in 32 bits, which takes half as long as
// floats do. A row's scale makes its norm, not its largest number, as large as the sums allow (Cauchy-Schwarz), which rounds
// less than F16 does. A lane has a query: maxima and sums of a softmax do not cross lanes.

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int VECTORS = 3, PARTNERS = 8; // in registers: 3 * 8 sums, 3 vectors of queries, a pair
#else
constexpr int VECTORS = 2, PARTNERS = 4;
#endif
constexpr float NORM  = 46300.0f; // of two rows that are multiplied: the square root of 2^31, less what rounding adds
constexpr float LEAST = 1e-30f;   // what is smaller counts as zero

// ---- from floats to shorts

FR_INLINE ivec pair_of(ivec low, ivec high) { return (low & FR(set1_epi32)(0xFFFF)) | FR(slli_epi32)(high, 16); }

// what numbers up to 1 are multiplied by, from the sum of their squares
FR_INLINE vec scale_of(vec squares) {
    return FR(min_ps)(FR(set1_ps)(32767.0f), FR(div_ps)(FR(set1_ps)(NORM), FR(sqrt_ps)(squares))); // NaN stays
}

bool all_finite(const float * x, int64_t n) {
    vec zeros = FR(setzero_ps)();
    for (int64_t i = 0; i < n; i += LANES) {
        zeros = FR(fmadd_ps)(FR(loadu_ps)(x + i), FR(setzero_ps)(), zeros);
    }
    return sum_of(zeros) == 0.0f;
}

FR_INLINE void store_shorts(ivec x, int32_t * pairs) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    _mm256_storeu_si256((__m256i *) pairs, _mm512_cvtepi32_epi16(x));
#else
    _mm_storeu_si128((__m128i *) pairs, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
#endif
}

// To pairs of shorts. Returns their scale: number = scale * short.
float to_shorts(const float * x, int64_t n, int32_t * pairs) {
    vec most = FR(set1_ps)(LEAST);
    for (int64_t i = 0; i < n; i += LANES) {
        most = FR(max_ps)(absolute(FR(loadu_ps)(x + i)), most);
    }
    const float largest = max_of(most);
    const vec unit = FR(set1_ps)(1.0f / largest);
    vec squares = FR(setzero_ps)();
    for (int64_t i = 0; i < n; i += LANES) {
        const vec y = FR(mul_ps)(FR(loadu_ps)(x + i), unit);
        squares = FR(fmadd_ps)(y, y, squares);
    }
    const float norm2 = sum_of(squares);
    const float scale = NORM / sqrtf(norm2) > 32767.0f ? 32767.0f : NORM / sqrtf(norm2);
    const vec factor = FR(set1_ps)(scale / largest);
    for (int64_t i = 0; i < n; i += LANES) {
        store_shorts(FR(cvtps_epi32)(FR(mul_ps)(FR(loadu_ps)(x + i), factor)), pairs + i / 2);
    }
    return largest / scale;
}

// Cells side by side; the scale is that of a column of the tile.
void to_pairs(const float * x, int n, int64_t size, int32_t * out, float * qscale) {
    for (int64_t d = 0; d < size; d += LANES) {
        vec most = FR(set1_ps)(LEAST), squares = FR(setzero_ps)();
        for (int c = 0; c < n; ++c) {
            most = FR(max_ps)(absolute(FR(loadu_ps)(x + c * size + d)), most);
        }
        const vec unit = FR(div_ps)(FR(set1_ps)(1.0f), most);
        for (int c = 0; c < n; ++c) {
            const vec y = FR(mul_ps)(FR(loadu_ps)(x + c * size + d), unit);
            squares = FR(fmadd_ps)(y, y, squares);
        }
        const vec scale = scale_of(squares), factor = FR(mul_ps)(unit, scale);
        FR(storeu_ps)(qscale + d, FR(div_ps)(most, scale));
        for (int c = 0; c < n; c += 2) {
            const ivec low  = FR(cvtps_epi32)(FR(mul_ps)(FR(loadu_ps)(x + c * size + d), factor));
            const ivec high = c + 1 < n ? FR(cvtps_epi32)(FR(mul_ps)(FR(loadu_ps)(x + (c + 1) * size + d), factor)) : low ^ low;
            const ivec two = pair_of(low, high);
            memcpy(out + c / 2 * size + d, &two, sizeof(ivec));
        }
    }
}

// ---- products

// Queries, or weights of queries, x[n_pairs][V], times PARTNERS that are `across` apart, their pairs `along`. Not inlined: the
// sums must have the registers.
template <int V>
__attribute__((noinline)) void multiply(const int32_t * x, int64_t n_pairs, const int32_t * y, int64_t along, int64_t across, ivec (* out)[V]) {
    ivec sums[PARTNERS][V];
    FR_UNROLL for (int s = 0; s < PARTNERS; ++s) {
        FR_UNROLL for (int v = 0; v < V; ++v) {
            sums[s][v] = FR(set1_epi32)(0);
        }
    }
    for (int64_t p = 0; p < n_pairs; ++p) {
        ivec lanes[V];
        FR_UNROLL for (int v = 0; v < V; ++v) {
            lanes[v] = load_shorts(x + (p * V + v) * LANES);
        }
        FR_UNROLL for (int s = 0; s < PARTNERS; ++s) {
            ivec two = FR(set1_epi32)(y[p * along + s * across]);
            __asm__("" : "+v"(two)); // once, not once per use
            FR_UNROLL for (int v = 0; v < V; ++v) {
                sums[s][v] = add_pairs(sums[s][v], lanes[v], two);
            }
        }
    }
    FR_UNROLL for (int s = 0; s < PARTNERS; ++s) {
        FR_UNROLL for (int v = 0; v < V; ++v) {
            out[s][v] = sums[s][v];
        }
    }
}

} // namespace
