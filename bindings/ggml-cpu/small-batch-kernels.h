#pragma once

// The kernels of small-batch.cpp for super-blocks of 256 weights (K quants, IQ1 to IQ4_XS) on x86 (AVX-512 or AVX2): some rows times
// 1 to 8 columns. Q4_K on AVX2 is in small-batch-lanes.h.

#include "small-batch-types.h"

#include "quants.h"

#include <algorithm>

namespace {

constexpr int64_t TILE_BYTES = 24 * 1024;  // of columns
constexpr size_t  PREFETCH   = 4096;       // bytes ahead: the hardware's prefetchers keep less

// What a lane adds up, and in which order, depends neither on the number of columns nor on the row's place: so the
// results are those of each column alone, bit for bit.

// Rows [begin, end). add(x, n_rows, y, n_units, acc) adds n_units of some rows from x on, times the columns at y, to
// acc[n_rows][n]. Columns that are longer than a first-level cache are gone through in tiles, with a group of rows each.
template <class T, int n, typename F> SB_INLINE void each_group(const product & p, size_t y_bytes, int n_sums, int64_t begin, int64_t end, F add) {
    const int64_t tile = TILE_BYTES / (n * y_bytes);
    for (int64_t first = begin; first < end; first += GROUP) {
        fvec acc[GROUP][n];
        const int n_rows = (int) std::min<int64_t>(GROUP, end - first);
        SB_UNROLL for (int i = 0; i < GROUP * n; ++i) {
            acc[i / n][i % n] = SB(setzero_ps)();
        }
        for (int64_t u = 0; u < p.n_units; u += tile) {
            const columns y = { p.y.y + u * n * y_bytes, p.y.sums + u * n * n_sums, p.y.scales + u * n };
            const typename T::block * x = (const typename T::block *) (p.x + first * p.x_stride);
            add((const char *) (x + u), n_rows, y, std::min(tile, p.n_units - u), acc);
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            const __m128 sums = reduce(acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
            if (n_rows == GROUP) {
                _mm_storeu_ps(p.dst[j] + first, sums);
            } else {
                alignas(16) float some[GROUP];
                _mm_store_ps(some, sums);
                std::copy(some, some + n_rows, p.dst[j] + first);
            }
        }
    }
}

// ---- super-blocks of 256

// the groups of 32 weights that a step multiplies
template <class T> constexpr bool SPLIT = T::FORMULA == formula::MIN_SPLIT;
template <class T> constexpr int first_group(int v)  { return SPLIT<T> ? v / 2 * 4 + v % 2 : 2 * v; }
template <class T> constexpr int second_group(int v) { return first_group<T>(v) + (SPLIT<T> ? 2 : 1); }

template <class T, int v> SB_INLINE bytes quants_of_step(const typename T::block & b) {
    if constexpr (SPLIT<T>) {
        return T::template quants_split<v>(b);
    } else {
        return T::template quants<v>(b);
    }
}

#ifdef SB_512

template <class> using scales_of_block = shorts;
template <class> SB_INLINE shorts multipliers(shorts scales) { return scales; }

template <class T, int v> SB_INLINE bytes scales_of_step(const scales_of_block<T> & scales) {
    if (T::OWN_SCALE == 32) { // in pairs: some CPUs take twice as long for words
        constexpr int a = first_group<T>(v), b = second_group<T>(v);
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

// What biases and minima take away: floats of groups of 16; or of groups of 32 each once, then zeros.
template <class T> struct offsets {
    floats by;
    SB_INLINE floats of(const typename T::block & b, shorts scales, shorts mins, float d) {
        float by = T::BIAS * d;
        if constexpr (HAS_MIN<T>) {
            scales = mins;
            by = T::dmin(b);
        }
        if (T::OWN_SCALE == 16) {
            return scaled(scales, by);
        }
        return zero_extended(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(scales, 16)), _mm256_set1_ps(by)));
    }
    offsets(const typename T::block & b, shorts scales, shorts mins, float d) : by(of(b, scales, mins, d)) {}
    ivec begin(const float *) const { return _mm512_setzero_si512(); }
    fvec end(fvec acc, const float * sums, float) const {
        return HAS_MIN<T> || T::BIAS ? _mm512_fnmadd_ps(by, _mm512_load_ps(sums), acc) : acc;
    }
};

template <int OWN_SCALE> SB_INLINE void set_sums(float * sums, int i, int32_t a, int32_t b, float scale) {
    if (OWN_SCALE == 32) {
        sums[i] = scale * (a + b);
        sums[i + 8] = 0;
    } else {
        sums[2 * i + 0] = scale * a;
        sums[2 * i + 1] = scale * b;
    }
}

template <class T, int n, int v> SB_INLINE void step(const typename T::block & b, const scales_of_block<T> & scales, const char * y, ivec * sum) {
    bytes x = quants_of_step<T, v>(b);
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
    return { scales.template group<first_group<T>(v)>(), scales.template group<second_group<T>(v)>() };
}

SB_INLINE ivec dot_256(ivec sum, __m256i x, __m256i sign, bool is_signed, const char * y, __m256i scales) {
    __m256i b = _mm256_load_si256((const __m256i *) y);
    if (is_signed) {
        b = _mm256_sign_epi8(b, sign);
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, b), scales));
}

// What biases and minima take away: products of shorts, with sums of 16 quants. A bias goes into the sums of products. Quants
// whose signs go to the columns have none.
template <class T> struct offsets {
    static constexpr int BIAS = T::FORMULA == formula::GRID_SIGNS ? 0 : T::BIAS;
    shorts by;
    float dmin;
    SB_INLINE float dmin_of(const typename T::block & b) {
        if constexpr (HAS_MIN<T>) {
            return T::dmin(b);
        }
        return (void) b, 0.0f;
    }
    SB_INLINE shorts of(const typename T::block & b, shorts scales, shorts mins) {
        if constexpr (T::FORMULA == formula::GRID_OFFSETS) {
            return T::offsets(b, scales);
        }
        return (void) b, HAS_MIN<T> ? mins : _mm256_mullo_epi16(scales, _mm256_set1_epi16(-BIAS));
    }
    offsets(const typename T::block & b, shorts scales, shorts mins, float) : by(of(b, scales, mins)), dmin(dmin_of(b)) {}
    ivec begin(const float * sums) const {
        const shorts own = _mm256_load_si256((const __m256i *) sums);
        return BIAS ? _mm256_madd_epi16(by, own) : _mm256_setzero_si256();
    }
    fvec end(fvec acc, const float * sums, float y_scale) const {
        if (!HAS_MIN<T>) {
            return acc;
        }
        const ivec sum = _mm256_madd_epi16(by, _mm256_load_si256((const __m256i *) sums));
        return _mm256_fnmadd_ps(_mm256_set1_ps(dmin * y_scale), _mm256_cvtepi32_ps(sum), acc);
    }
};

template <int> SB_INLINE void set_sums(float * sums, int i, int32_t a, int32_t b, float) {
    const int16_t both[2] = { (int16_t) a, (int16_t) b };
    memcpy((char *) sums + i * sizeof(both), both, sizeof(both));
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
        x = sign = quants_of_step<T, v>(b);
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

template <class T, int n> SB_INLINE void add_256(const typename T::block * x, columns y, int64_t n_units, fvec * result) {
    fvec acc[n];
    SB_UNROLL for (int j = 0; j < n; ++j) {
        acc[j] = result[j];
    }
    for (int64_t i = 0; i < n_units; ++i) {
        SB_UNROLL for (size_t b = 0; b < sizeof(x[i]); b += 64) {
            _mm_prefetch((const char *) (x + i) + PREFETCH + b, _MM_HINT_T0);
        }
        shorts scales, mins = _mm256_setzero_si256();
        T::groups(x[i], scales, mins);
        const float d = T::d(x[i]);
        const scales_of_block<T> each = multipliers<T>(scales);
        const offsets<T> less(x[i], scales, mins, d);

        ivec sum[n];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            sum[j] = less.begin(y.sums + 16 * j);
        }
        step<T, n, 0>(x[i], each, y.y, sum);
        step<T, n, 1>(x[i], each, y.y, sum);
        step<T, n, 2>(x[i], each, y.y, sum);
        step<T, n, 3>(x[i], each, y.y, sum);

        SB_UNROLL for (int j = 0; j < n; ++j) {
            const fvec by = SB(mul_ps)(SB(set1_ps)(d), SB(set1_ps)(y.scales[j]));
            acc[j] = less.end(SB(fmadd_ps)(by, SB(cvtepi32_ps)(sum[j]), acc[j]), y.sums + 16 * j, y.scales[j]);
        }
        y.y += n * QK_K, y.sums += n * 16, y.scales += n;
    }
    SB_UNROLL for (int j = 0; j < n; ++j) {
        result[j] = acc[j];
    }
}

template <class T, int n> void rows_256(const product & p, int64_t begin, int64_t end) {
    each_group<T, n>(p, QK_K, 16, begin, end, [&](const char * x, int n_rows, columns y, int64_t n_units, fvec (*acc)[n]) {
        for (int i = 0; i < n_rows; ++i) {
            add_256<T, n>((const typename T::block *) (x + i * p.x_stride), y, n_units, acc[i]);
        }
    });
}

// 256 floats as quantize_row_q8_K_ref has them, and sums of each 16 or 32, as offsets wants them
template <int OWN_SCALE = 16, bool SPLIT = false> void prepare_256(const float * x, char * y, float * sums, float * scale) {
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
        const bool swapped = SPLIT && (i / 32 % 4 == 1 || i / 32 % 4 == 2);
        _mm256_store_si256((__m256i *) (y + (swapped ? i ^ 96 : i)), packed);
        __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed), _mm256_set1_epi16(1));
        sum = _mm256_hadd_epi32(sum, sum);
        sum = _mm256_hadd_epi32(sum, sum);
        const int32_t a = _mm256_extract_epi32(sum, 0), b = _mm256_extract_epi32(sum, 4);
        set_sums<OWN_SCALE>(sums, i / 32, a, b, *scale);
    }
}

} // namespace
