#pragma once

// The kernels of small-batch.cpp for super-blocks of 256 weights without minima (Q3_K, Q6_K, IQ1 to IQ4_XS) on x86 (AVX-512 or AVX2):
// some rows times 1 to 8 columns. Those with minima are in small-batch-lanes.h.

#include "small-batch-types.h"

#include "quants.h"

#include <algorithm>
#include <utility>

namespace {

// The integer sum of a super-block is exact, however it is added up. What an output takes in of it is rounded as in multiply_256()
// of large-batch-kernels.h, in the order of blocks: so no bit depends on the number of columns, nor on the kernel.

// Lane 4 l + v is the sum of the ints in 128 bits l of x[v], which are at most `most`: what 16 bits hold is added in pairs.
template <int most> SB_INLINE ivec sums_of_fours(const ivec * x) {
    const ivec ones = SB(set1_epi16)(1);
    ivec two[2];
    SB_UNROLL for (int i = 0; i < 2; ++i) {
        const ivec a = x[2 * i], b = x[2 * i + 1];
        two[i] = most < 32768 ? SB(madd_epi16)(SB(packs_epi32)(a, b), ones) : SB(add_epi32)(SB(unpacklo_epi32)(a, b), SB(unpackhi_epi32)(a, b));
    }
    if (2 * most < 32768) {
        return SB(madd_epi16)(SB(packs_epi32)(two[0], two[1]), ones);
    }
    if (most < 32768) {
        const fvec a = (fvec) two[0], b = (fvec) two[1];
        return SB(add_epi32)((ivec) SB(shuffle_ps)(a, b, 0x88), (ivec) SB(shuffle_ps)(a, b, 0xDD));
    }
    return SB(add_epi32)(SB(unpacklo_epi64)(two[0], two[1]), SB(unpackhi_epi64)(two[0], two[1]));
}

// 4 ints to a row of a and b, which have 8
SB_INLINE ivec halves_added(ivec a, ivec b) {
#ifdef SB_512
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
#else
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
#endif
}

// a lane for each of LANES registers: the sum of its ints
SB_INLINE ivec sums_of(const ivec * x) {
    const auto eight = [&](int i) { return halves_added(sums_of_fours<INT16_MAX + 1>(x + i), sums_of_fours<INT16_MAX + 1>(x + i + 4)); };
#ifdef SB_512
    return halves_added(eight(0), eight(8));
#else
    return eight(0);
#endif
}

// f(0) to f(n - 1); GCC leaves large bodies a loop, and arrays that it indexes in memory
template <typename F, int... i> SB_INLINE void unrolled(F f, std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename F> SB_INLINE void unrolled(F f) {
    unrolled(f, std::make_integer_sequence<int, n>());
}

// ---- super-blocks of 256

#ifdef SB_512

template <class> using scales_of_block = shorts;
template <class> SB_INLINE shorts multipliers(shorts scales) { return scales; }

template <class T, int v> SB_INLINE bytes scales_of_step(const scales_of_block<T> & scales) {
    if (T::OWN_SCALE == 32) { // in pairs: some CPUs take twice as long for words
        constexpr int a = 2 * v, b = a + 1;
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b), _mm512_castsi256_si512(scales));
    }
    const __m512i group = _mm512_set_epi16(3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2,
                                           1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_epi16(_mm512_add_epi16(group, _mm512_set1_epi16(4 * v)), _mm512_castsi256_si512(scales));
}

SB_INLINE ivec dot(ivec sum, bytes x, __mmask64 negative, bool is_signed, const char * y, bytes scales) {
    bytes b = load(y);
    if (is_signed) {
        b = _mm512_mask_sub_epi8(b, negative, _mm512_setzero_si512(), b);
    }
    return _mm512_dpwssd_epi32(sum, _mm512_maddubs_epi16(x, b), scales);
}

template <class T, int n, int v> SB_INLINE void step(const typename T::block & b, const scales_of_block<T> & scales, const char * y, ivec * sum) {
    bytes x = T::template quants<v>(b);
    const __mmask64 negative = IS_SIGNED<T> ? _mm512_movepi8_mask(x) : 0;
    if (IS_SIGNED<T>) {
        x = _mm512_abs_epi8(x);
    }
    const bytes s = scales_of_step<T, v>(scales);
    SB_UNROLL for (int j = 0; j < n; ++j) {
        sum[j] = dot(sum[j], x, negative, IS_SIGNED<T>, y + QK_K * j + 64 * v, s);
    }
}

#else

// Where 32 weights share a scale: in memory, from where a pair takes no shuffle to come to all places. Else each half twice: one
// shuffle brings two scales to theirs.
template <int OWN_SCALE> struct scales_at {
    int32_t pairs[8];
    scales_at(shorts x, bool eighths) {
        _mm256_storeu_si256((__m256i *) pairs, eighths ? _mm256_slli_epi16(x, 3) : x);
        __asm__("" : "+m"(pairs)); // GCC would take them out of the register
    }
    template <int i> __m256i group() const { return _mm256_set1_epi32(pairs[i]); }
};

template <> struct scales_at<16> {
    __m256i halves[2];
    scales_at(shorts x, bool) : halves{ _mm256_permute4x64_epi64(x, 0x44), _mm256_permute4x64_epi64(x, 0xEE) } {}
    template <int i> __m256i group() const {
        constexpr int64_t a = 0x0100010001000100 + 0x0404040404040404 * (i % 4), b = a + 0x0202020202020202;
        return _mm256_shuffle_epi8(halves[i / 4], _mm256_setr_epi64x(a, a, b, b));
    }
};

template <class T> using scales_of_block = scales_at<T::OWN_SCALE>;
template <class T> SB_INLINE scales_of_block<T> multipliers(shorts scales) { return { scales, T::FORMULA == formula::GRID_OFFSETS }; }

template <class T, int v> SB_INLINE bytes scales_of_step(const scales_of_block<T> & scales) {
    return { scales.template group<2 * v>(), scales.template group<2 * v + 1>() };
}

SB_INLINE ivec dot_256(ivec sum, __m256i x, __m256i sign, bool is_signed, const char * y, __m256i scales) {
    __m256i b = _mm256_load_si256((const __m256i *) y);
    if (is_signed) {
        b = _mm256_sign_epi8(b, sign);
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, b), scales));
}

template <class T, int n, int v> SB_INLINE void step(const typename T::block & b, const scales_of_block<T> & scales, const char * y, ivec * sum) {
    bytes x, sign;
    if constexpr (T::FORMULA == formula::GRID_SIGNS) { // a column takes them: to make weights signed takes one column longer
        x    = T::template grid<v>(b);
        sign = operator_or(T::template minuses<v>(b), fill(1));
    } else if constexpr (T::FORMULA == formula::GRID_OFFSETS) {
        x = T::template grid<v>(b); // from -1 on
        x = sign = { _mm256_add_epi8(x.lo, _mm256_set1_epi8(1)), _mm256_add_epi8(x.hi, _mm256_set1_epi8(1)) };
    } else {
        x = sign = T::template quants<v>(b);
    }
    if (IS_SIGNED<T>) {
        x = { _mm256_abs_epi8(x.lo), _mm256_abs_epi8(x.hi) };
    }
    const bytes s = scales_of_step<T, v>(scales);
    constexpr bool signs = IS_SIGNED<T> || T::FORMULA == formula::GRID_SIGNS;
    SB_UNROLL for (int j = 0; j < n; ++j) {
        sum[j] = dot_256(sum[j], x.lo, sign.lo, signs, y + QK_K * j + 64 * v, s.lo);
        sum[j] = dot_256(sum[j], x.hi, sign.hi, signs, y + QK_K * j + 64 * v + 32, s.hi);
    }
}

#endif

// What biases add, in products of shorts with sums of 16 quants. Quants whose signs go to the columns have no bias.
template <class T> SB_INLINE shorts offsets_of(const typename T::block & b, shorts scales) {
#ifndef SB_512
    if constexpr (T::FORMULA == formula::GRID_OFFSETS) {
        return T::offsets(b, scales);
    }
#endif
    return (void) b, _mm256_mullo_epi16(scales, _mm256_set1_epi16(-T::BIAS));
}
#ifdef SB_512
template <class T> constexpr bool BIASED = T::BIAS != 0;
SB_INLINE ivec widened(__m256i x) { return _mm512_zextsi256_si512(x); }
#else
template <class T> constexpr bool BIASED = T::BIAS != 0 && T::FORMULA != formula::GRID_SIGNS;
SB_INLINE ivec widened(__m256i x) { return x; }
#endif

template <class T, int n> void rows_256(const product & p, int64_t begin, int64_t end) {
    typedef typename T::block block;
    for (int64_t first = begin; first < end; first += LANES) {
        const int n_rows = (int) std::min<int64_t>(LANES, end - first);
        const block * rows[LANES]; // the last one stands for those that there are not
        for (int r = 0; r < LANES; ++r) {
            rows[r] = (const block *) (p.x + (first + std::min(r, n_rows - 1)) * p.x_stride);
        }
        const char * next = p.x + (first + LANES) * p.x_stride; // as they lie in memory, so that hardware goes ahead
        columns y = p.y;
        fvec acc[n];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            acc[j] = SB(setzero_ps)();
        }
        for (int64_t u = 0; u < p.n_units; ++u) {
            ivec dots[n][LANES];
            int n_group = LANES;
            __asm__("" : "+r"(n_group)); // a loop, since all their code takes longer
            const auto multiply_row = [&](int r) __attribute__((always_inline)) {
                const block & x = rows[r][u];
                SB_UNROLL for (size_t b = 0; b < sizeof(block); b += 64) {
                    _mm_prefetch(next + b, _MM_HINT_T1);
                }
                next += sizeof(block);
                shorts scales, none;
                T::groups(x, scales, none);
                const scales_of_block<T> each = multipliers<T>(scales);
                const shorts by = offsets_of<T>(x, scales);
                ivec sum[n];
                SB_UNROLL for (int j = 0; j < n; ++j) {
                    sum[j] = BIASED<T> ? widened(_mm256_madd_epi16(by, load_256(y.sums + 16 * j))) : SB(set1_epi32)(0);
                }
                step<T, n, 0>(x, each, y.y, sum);
                step<T, n, 1>(x, each, y.y, sum);
                step<T, n, 2>(x, each, y.y, sum);
                step<T, n, 3>(x, each, y.y, sum);
                SB_UNROLL for (int j = 0; j < n; ++j) {
                    dots[j][r] = sum[j];
                }
            };
            for (int r = 0; r < n_group; ++r) {
                multiply_row(r);
                if (n <= 2) { // two at a time; more columns have no registers for them
                    multiply_row(++r);
                }
            }
            const fvec d = SB(mul_ps)(lanes_of_halves([&](int r) { return T::d(rows[r][u]); }), SB(set1_ps)(T::FACTOR));
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const fvec scale = SB(set1_ps)(y.scales[j]);
                acc[j] = SB(fmadd_ps)(SB(mul_ps)(d, scale), SB(cvtepi32_ps)(sums_of(dots[j])), acc[j]);
            }
            y.y += n * QK_K, y.sums += n * 16, y.scales += n;
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            float some[LANES];
            SB(storeu_ps)(n_rows == LANES ? p.dst[j] + first : some, acc[j]);
            if (n_rows < LANES) {
                std::copy(some, some + n_rows, p.dst[j] + first);
            }
        }
    }
}

// 256 floats as quantize_row_q8_K_ref has them, and sums of each 16, as shorts
inline void prepare_256(const float * x, char * y, float * sums, float * scale) {
    __m256 most = _mm256_loadu_ps(x), least = most;
    for (int i = 8; i < QK_K; i += 8) {
        most  = _mm256_max_ps(most,  _mm256_loadu_ps(x + i));
        least = _mm256_min_ps(least, _mm256_loadu_ps(x + i));
    }
    float top[8], bottom[8];
    _mm256_storeu_ps(top, most);
    _mm256_storeu_ps(bottom, least);
    float max = *std::max_element(top, top + 8);
    const float min = *std::min_element(bottom, bottom + 8);
    if (max == -min) {
        max = *std::find_if(x, x + QK_K - 1, [&](float value) { return fabsf(value) == max; });
    } else if (max < -min) {
        max = min;
    }
    if (!max) {
        memset(y, 0, QK_K);
        std::fill(sums, sums + 16, 0.0f);
        *scale = 0;
        return;
    }
    const float inverse = -127.f / max;
    *scale = 1 / inverse;
    for (int i = 0; i < QK_K; i += 32) {
        __m256i q[4];
        for (int k = 0; k < 4; ++k) {
            q[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_set1_ps(inverse), _mm256_loadu_ps(x + i + 8 * k)));
        }
        const __m256i packed = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_store_si256((__m256i *) (y + i), packed);
        __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed), _mm256_set1_epi16(1));
        sum = _mm256_hadd_epi32(sum, sum);
        sum = _mm256_hadd_epi32(sum, sum);
        const int32_t a = _mm256_extract_epi32(sum, 0), b = _mm256_extract_epi32(sum, 4);
        const int16_t both[2] = { (int16_t) a, (int16_t) b };
        memcpy((char *) sums + i / 32 * sizeof(both), both, sizeof(both));
    }
}

// sums of 16 quants each, as shorts, become those of 32
SB_INLINE void sums_of_32(float * sums) {
    const __m256i two = _mm256_madd_epi16(load_256(sums), _mm256_set1_epi16(1));
    _mm_storeu_si128((__m128i *) sums, _mm_packs_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
}

} // namespace
