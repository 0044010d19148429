#pragma once

// Vectors of floats and of shorts (AVX-512 or AVX2) for few-rows-attention-simd.h and large-batch-attention-simd.h.

#include "attention-op.h"

#include <immintrin.h>

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define FR(op) _mm512_##op
typedef __m512  vec;
typedef __m512i ivec;
constexpr int LANES = 16;

FR_INLINE float sum_of(vec v) { return FR(reduce_add_ps)(v); }
FR_INLINE float max_of(vec v) { return FR(reduce_max_ps)(v); }

FR_INLINE vec     from_halves(const ggml_fp16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }
FR_INLINE ivec    from_bytes(const int8_t * x)       { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) x)); }
FR_INLINE __m128i half_max(ivec x) {
    const __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}
FR_INLINE ivec to_pack_order(ivec x)   { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x); }
FR_INLINE ivec from_pack_order(ivec x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x); }
#else
#define FR(op) _mm256_##op
typedef __m256  vec;
typedef __m256i ivec;
constexpr int LANES = 8;

FR_INLINE float sum_of(vec v) {
    const __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

FR_INLINE float max_of(vec v) {
    const __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

FR_INLINE vec     from_halves(const ggml_fp16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
FR_INLINE ivec    from_bytes(const int8_t * x)       { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) x)); }
FR_INLINE __m128i half_max(ivec x) { return _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
FR_INLINE ivec    to_pack_order(ivec x)   { return _mm256_permute4x64_epi64(x, 0xD8); }
FR_INLINE ivec    from_pack_order(ivec x) { return _mm256_permute4x64_epi64(x, 0xD8); }
#endif

// of bits of halves without a sign
FR_INLINE uint16_t max_of_halves(ivec x) {
    return ~(uint16_t) _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half_max(x), _mm_set1_epi16(-1))), 0);
}

constexpr int CHUNK = LANES * 2; // shorts of a register, and numbers of a row that are taken together

FR_INLINE vec  absolute(vec x)                   { return FR(max_ps)(x, FR(sub_ps)(FR(setzero_ps)(), x)); }
FR_INLINE ivec load_shorts(const void * x)       { ivec v; memcpy(&v, x, sizeof(v)); __asm__("" : "+v"(v)); return v; } // once, not once per use
FR_INLINE void store_shorts(ivec v, int16_t * x) { memcpy(x, &v, sizeof(v)); }

// two vectors of floats, as shorts in the order of the pack instruction, which that of interleaving puts right
FR_INLINE ivec pack(vec a, vec b, vec factor) {
    return FR(packs_epi32)(FR(cvtps_epi32)(FR(mul_ps)(a, factor)), FR(cvtps_epi32)(FR(mul_ps)(b, factor)));
}

// sum += the sums of pairs of a * b
FR_INLINE ivec add_pairs(ivec sum, ivec a, ivec b) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__) && !defined(__AVX512DQ__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return FR(add_epi32)(sum, FR(madd_epi16)(a, b));
#endif
}

} // namespace
