#pragma once

// The vector code of large-batch-attention.cpp on x86 (AVX-512 or AVX2): products of shorts. A lane has a query: maxima and sums of a
// softmax do not cross lanes.

#include "attention-simd.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int VECTORS = 3, PARTNERS = 8; // in registers: 3 * 8 sums, 3 vectors of queries, a pair
#else
constexpr int VECTORS = 2, PARTNERS = 4;
#endif

FR_INLINE ivec pair_of(ivec low, ivec high) { return (low & FR(set1_epi32)(0xFFFF)) | FR(slli_epi32)(high, 16); }

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
