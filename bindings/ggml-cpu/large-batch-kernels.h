#pragma once

// The kernels of large-batch.cpp on x86 (AVX-512 or AVX2): a tile of rows of any type becomes bytes in one layout, and is multiplied
// with any number of columns. How a type is read is in small-batch-types.h.

#include "small-batch-kernels-32.h"

#include <numeric>

namespace {

constexpr int VECTORS   = 2;               // of rows
constexpr int TILE_ROWS = VECTORS * LANES;
constexpr int LINE      = TILE_ROWS * sizeof(int32_t);
constexpr int PIECE     = 64;              // weights that are unpacked together
#ifdef SB_512
constexpr int MAX_COLS  = 6;               // in registers: 2 * 6 sums of ints, as many of floats, weights, a column
#else
constexpr int MAX_COLS  = 2;
#endif

constexpr int PAIRS = QK_K / 32; // of sums of 16 quants

// pairs of sums that minima are multiplied by: sums of 32 quants where 32 share a minimum, else of 16
template <int GROUP_SIZE> constexpr int min_pairs = GROUP_SIZE == 32 ? PAIRS / 2 : PAIRS;

// A tile holds TILE_ROWS rows of a part of a matrix. The bytes of four weights of each row lie side by side, one lane to a
// row; so do the scales of a block, and, of super-blocks, those of groups of weights and what minima or biases take away.
struct tile {
    char    * quants; // [weight / 4][TILE_ROWS][4]
    float   * d;      // [unit][TILE_ROWS]
    float   * min;
    int32_t * scales; // [group][TILE_ROWS]: see group_scales()
    int32_t * less;   // [unit][PAIRS][TILE_ROWS]: two shorts each
};

// Columns are quantized in units, as upstream does: 32 values (Q8_0), or 256 (Q8_K).
template <int UNIT> struct column_unit {
    int8_t  quants[UNIT];
    // sums of 16 quants, as shorts; what the sums of a block or of parts of groups begin with, where they are ints; of a block with minima its
    // own sum as a float
    int32_t offsets[UNIT == QK_K ? QK_K / 8 : 1];
    float   scale;
};

// ---- from rows to tiles

#ifdef SB_512

SB_INLINE void transpose_bytes(const bytes * x, char * out)            { transpose(x, out, LINE); }
SB_INLINE void transpose_floats(const floats * x, float * out)         { transpose((const __m512i *) x, (char *) out, LINE); }
SB_INLINE bytes join(ivec x, ivec)                                     { return x; }
SB_INLINE bytes plus_128(bytes x)                                      { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }

#else

template <typename T> SB_INLINE void transpose_halves(const T * x, char * out) {
    __m256i half[8];
    SB_UNROLL for (int i = 0; i < 8; ++i) {
        half[i] = (__m256i) x[i].lo;
    }
    transpose(half, out, LINE);
    SB_UNROLL for (int i = 0; i < 8; ++i) {
        half[i] = (__m256i) x[i].hi;
    }
    transpose(half, out + 8 * LINE, LINE);
}

SB_INLINE void transpose_bytes(const bytes * x, char * out)            { transpose_halves(x, out); }
SB_INLINE void transpose_floats(const floats * x, float * out)         { transpose_halves(x, (char *) out); }
SB_INLINE bytes join(ivec x, ivec y)                                   { return { x, y }; }
SB_INLINE bytes plus_128(bytes x)                                      { return { _mm256_xor_si256(x.lo, _mm256_set1_epi8(-128)), _mm256_xor_si256(x.hi, _mm256_set1_epi8(-128)) }; }

#endif

// What a tile's bytes are: T's weights as they are, or, where the integer dot product wants an unsigned operand, plus 128.
template <class T> struct in_tile {
#if defined(SB_512) || defined(__AVXVNNI__)
    static constexpr bool SIGNED = false;
    static constexpr int  BIAS   = IS_SIGNED<T> ? 128 : T::BIAS;
    SB_INLINE bytes bytes_of(bytes x) { return IS_SIGNED<T> ? plus_128(x) : x; }
#else
    static constexpr bool SIGNED = IS_SIGNED<T>;
    static constexpr int  BIAS   = T::BIAS;
    SB_INLINE bytes bytes_of(bytes x) { return x; }
#endif
};

// Into how many parts, 1 or 2, a group of weights is cut for sums of 16 bits: one instruction multiplies such a sum by the group's scale and
// adds it. 0: not even half of a group has one.
template <class T> constexpr int short_parts() {
    const int fit = INT16_MAX / (127 * std::max(T::MOST - T::BIAS, T::BIAS)), own = T::OWN_SCALE;
    return !VNNI || 2 * fit < own ? 0 : fit < own ? 2 : 1;
}

// LANES rows of a super-block to the place of the first of them
template <class T, int v> SB_INLINE void unpack_step(const typename T::block * const * x, char * out) {
    bytes rows[LANES];
    SB_UNROLL for (int i = 0; i < LANES; ++i) {
        rows[i] = in_tile<T>::bytes_of(T::template quants<v>(*x[i]));
    }
    transpose_bytes(rows, out + v * PIECE * TILE_ROWS);
}

// Scales of 16 groups as ints: what multiply_256() multiplies by. Sums of 16 bits take it as a short beside zero, pairs of products as
// two shorts.
template <bool SHORT> SB_INLINE floats group_scales(shorts x) {
#if defined(SB_512)
    return (floats) (SHORT ? _mm512_cvtepu16_epi32(x) : _mm512_cvtepi16_epi32(x));
#else
    const auto half = [](__m128i y) {
#if defined(__AVXVNNI__)
        return (__m256) (SHORT ? _mm256_cvtepu16_epi32(y) : _mm256_cvtepi16_epi32(y));
#else
        const __m256i one = _mm256_cvtepu16_epi32(y);
        return (__m256) _mm256_or_si256(one, _mm256_slli_epi32(one, 16));
#endif
    };
    return { half(_mm256_castsi256_si128(x)), half(_mm256_extracti128_si256(x, 1)) };
#endif
}

// 8 ints of each row to 8 lines
SB_INLINE void transpose_pairs(const shorts * x, int32_t * out) {
#ifdef SB_512
    alignas(64) int32_t all[16 * TILE_ROWS];
    __m512i wide[LANES];
    SB_UNROLL for (int i = 0; i < LANES; ++i) {
        wide[i] = _mm512_zextsi256_si512(x[i]);
    }
    transpose(wide, (char *) all, LINE);
    for (int i = 0; i < PAIRS; ++i) {
        memcpy(out + i * TILE_ROWS, all + i * TILE_ROWS, LANES * sizeof(int32_t));
    }
#else
    transpose(x, (char *) out, LINE);
#endif
}

// one of each two equal shorts, in the lower half
SB_INLINE shorts every_second(shorts x) {
    const __m256i ones = _mm256_srli_epi32(x, 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(ones, _mm256_setzero_si256()), 0xD8);
}

// every second line, where groups of 32 have two each
template <int GROUP_SIZE> SB_INLINE void transpose_groups(const floats * x, int32_t * out) {
    alignas(64) float all[16 * TILE_ROWS];
    transpose_floats(x, all);
    for (int i = 0; i < QK_K / GROUP_SIZE; ++i) {
        memcpy(out + i * TILE_ROWS, all + i * (GROUP_SIZE / 16) * TILE_ROWS, LANES * sizeof(float));
    }
}

// rows[TILE_ROWS] from block `first` on
template <class T> void unpack_256(const char * const * rows, int64_t first, int64_t n_units, const tile & out) {
    constexpr int n_groups = QK_K / T::OWN_SCALE;
    for (int v = 0; v < VECTORS; ++v) {
        for (int64_t u = 0; u < n_units; ++u) {
            const typename T::block * x[LANES];
            floats scales[LANES];
            shorts less[LANES];
            for (int i = 0; i < LANES; ++i) {
                x[i] = (const typename T::block *) rows[v * LANES + i] + first + u;
                shorts s, m = _mm256_setzero_si256();
                T::groups(*x[i], s, m);
                scales[i] = group_scales<short_parts<T>() != 0>(s);
                less[i]   = !HAS_MIN<T> ? _mm256_mullo_epi16(s, _mm256_set1_epi16(in_tile<T>::BIAS)) : T::OWN_SCALE == 32 ? every_second(m) : m;
            }
            const auto of_rows = [&](auto half) { return lanes_of_halves([&](int i) { return half(*x[i]); }); };
            const int64_t at = u * TILE_ROWS + v * LANES;
            SB(storeu_ps)(out.d + at, SB(mul_ps)(of_rows(T::d), SB(set1_ps)(T::FACTOR)));
            if constexpr (HAS_MIN<T>) {
                SB(storeu_ps)(out.min + at, of_rows(T::dmin));
            }
            transpose_groups<T::OWN_SCALE>(scales, out.scales + u * n_groups * TILE_ROWS + v * LANES);
            if (HAS_MIN<T> || (!VNNI && in_tile<T>::BIAS != 0)) {
                transpose_pairs(less, out.less + u * PAIRS * TILE_ROWS + v * LANES);
            }
            char * quants = out.quants + u * QK_K * TILE_ROWS + v * sizeof(ivec);
            unpack_step<T, 0>(x, quants);
            unpack_step<T, 1>(x, quants);
            unpack_step<T, 2>(x, quants);
            unpack_step<T, 3>(x, quants);
        }
    }
}

// both: blocks a and b of 32 weights of a row, as 64 bytes
template <class T> struct blocks_32 : T {
    SB_INLINE bytes both(const char * row, int64_t a, int64_t b) {
        return join(T::quants(row + a * sizeof(typename T::block), row + b * sizeof(typename T::block), 0), T::quants(row, row, b));
    }
    static const typename T::block & at(const char * row, int64_t i) { return ((const typename T::block *) row)[i]; }
};

template <class T> struct blocks_of_nibbles : T {
    SB_INLINE bytes both(const char * row, int64_t a, int64_t b) {
        return join(two(at(row, a), at(row, b)), two(at(row, b), at(row, b)));
    }
    SB_INLINE ivec two(const typename T::block & a, const typename T::block & b) { // b where there are 512 bits
        const ivec x = T::values(nibbles_16(a.qs, b.qs));
        if constexpr (T::FIFTH) {
            uint32_t high[2];
            memcpy(high + 0, a.qh, sizeof(high[0]));
            memcpy(high + 1, b.qh, sizeof(high[1]));
            return minus_where(x, high[0], high[1], -16);
        }
        return x;
    }
    static const typename T::block & at(const char * row, int64_t i) { return ((const typename T::block *) row)[i]; }
};

// two blocks at a time; of an odd number the last one twice, which the tile has room for
template <class T> void unpack_32(const char * const * rows, int64_t first, int64_t n_units, const tile & out) {
    for (int v = 0; v < VECTORS; ++v) {
        for (int64_t u = 0; u < n_units; u += 2) {
            bytes x[LANES];
            SB_UNROLL for (int i = 0; i < LANES; ++i) {
                const char * row = rows[v * LANES + i];
                const int64_t a = first + u, b = u + 1 < n_units ? a + 1 : a, place = u * TILE_ROWS + v * LANES + i;
                x[i] = in_tile<T>::bytes_of(T::both(row, a, b));
                out.d[place] = T::scale(T::at(row, a));
                out.d[place + TILE_ROWS] = T::scale(T::at(row, b));
                if constexpr (HAS_MIN<T>) {
                    out.min[place] = T::min(T::at(row, a));
                    out.min[place + TILE_ROWS] = T::min(T::at(row, b));
                }
            }
            transpose_bytes(x, out.quants + u * QK8_0 * TILE_ROWS + v * sizeof(ivec));
        }
    }
}

// ---- columns

template <class T> void prepare_unit_256(const float * x, void * out) {
    column_unit<QK_K> & y = *(column_unit<QK_K> *) out;
    alignas(64) char quants[QK_K];
    float sums[16];
    prepare_256(x, quants, sums, &y.scale);
    memcpy(y.quants, quants, QK_K);
    if (HAS_MIN<T> && T::OWN_SCALE == 32) {
        sums_of_32(sums);
    }
    if (HAS_MIN<T> || !VNNI) {
        memcpy(y.offsets, sums, PAIRS * sizeof(*y.offsets));
        return;
    }
    constexpr int part = T::OWN_SCALE / std::max(short_parts<T>(), 1);
    for (int i = 0; i < QK_K / part; ++i) {
        y.offsets[i] = -in_tile<T>::BIAS * std::accumulate(y.quants + i * part, y.quants + (i + 1) * part, 0);
    }
}

template <class T> void prepare_unit_32(const float * x, void * out) {
    column_unit<QK8_0> & y = *(column_unit<QK8_0> *) out;
    float sum;
    y.scale = quantize_block<HAS_MIN<T>>(x, y.quants, &sum);
    if (HAS_MIN<T>) {
        memcpy(y.offsets, &sum, sizeof(sum));
        return;
    }
    int32_t all = 0;
    for (int i = 0; i < QK8_0; ++i) {
        all += y.quants[i];
    }
    y.offsets[0] = -in_tile<T>::BIAS * all;
}

// ---- products

// dot += x . y in each lane, for place `i` of CHAIN, which are added up in 16 bits where there is no better instruction, and then
// multiplied by `scale`, each as a short twice
template <bool SIGNED, int CHAIN> SB_INLINE void add_dot(ivec & dot, ivec & pairs, int i, ivec x, ivec y, ivec scale) {
#if defined(SB_512) || defined(__AVXVNNI__)
    (void) pairs, (void) i, (void) scale;
    dot = SB_DPBUSD(dot, x, y);
#else
    const ivec two = SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(y, x)) : _mm256_maddubs_epi16(x, y);
    pairs = i % CHAIN ? _mm256_add_epi16(pairs, two) : two;
    if (i % CHAIN == CHAIN - 1) {
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, scale));
    }
    // in this order, or GCC begins so many steps at once that their vectors do not fit the registers
    __asm__ volatile("" : "+x"(i % CHAIN == CHAIN - 1 ? dot : pairs) : : "memory");
#endif
}

// acc[column][TILE_ROWS] += tile times n columns, n_units of blocks of 32 each from y[column] on
template <bool MINS, bool SIGNED, int CHAIN, int n>
void multiply_32(const tile & t, int64_t n_units, const char * const * y, float (*acc)[TILE_ROWS]) {
    const ivec one = SB(set1_epi16)(1);
    const column_unit<QK8_0> * column[n];
    fvec sums[n][VECTORS];
    SB_UNROLL for (int j = 0; j < n; ++j) {
        column[j] = (const column_unit<QK8_0> *) y[j];
        SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
            sums[j][v] = SB(loadu_ps)(acc[j] + v * LANES);
        }
    }
    const char  * quants = t.quants;
    const float * d = t.d, * min = t.min;
    for (int64_t u = 0; u < n_units; ++u, quants += QK8_0 * TILE_ROWS, d += TILE_ROWS, min += TILE_ROWS) {
        ivec dots[n][VECTORS], pairs[n][VECTORS];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                dots[j][v] = MINS ? SB(set1_epi32)(0) : four_of(column[j]->offsets);
            }
        }
        SB_UNROLL for (int k = 0; k < QK8_0 / 4; ++k) {
            ivec x[VECTORS];
            SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                x[v] = SB_LOAD(quants + (k * VECTORS + v) * sizeof(ivec));
            }
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const ivec four = four_of(column[j]->quants + 4 * k);
                SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                    add_dot<SIGNED, CHAIN>(dots[j][v], pairs[j][v], k, x[v], four, one);
                }
            }
        }
        SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
            const fvec scale = SB(loadu_ps)(d + v * LANES);
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const fvec dot = SB(cvtepi32_ps)(dots[j][v]);
                sums[j][v] = SB(fmadd_ps)(SB(mul_ps)(dot, scale), SB(set1_ps)(column[j]->scale), sums[j][v]);
                if (MINS) {
                    sums[j][v] = SB(fmadd_ps)(SB(loadu_ps)(min + v * LANES), (fvec) four_of(column[j]->offsets), sums[j][v]);
                }
            }
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            ++column[j];
        }
    }
    SB_UNROLL for (int j = 0; j < n; ++j) {
        SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
            SB(storeu_ps)(acc[j] + v * LANES, sums[j][v]);
        }
    }
}

// The same with super-blocks of 256, whose groups have scales of their own: all of one is summed up as integers. What minima take away
// is so, too; what a bias does (MINS is false, BIASED) belongs to the products. SHORT_PARTS: see short_parts().
template <int GROUP_SIZE, int SHORT_PARTS, bool MINS, bool BIASED, bool SIGNED, int CHAIN, int n>
void multiply_256(const tile & t, int64_t n_units, const char * const * y, float (*acc)[TILE_ROWS]) {
    constexpr bool OWN_BIAS = BIASED && !MINS && !VNNI; // else sums begin with what it does
    constexpr int PARTS = std::max(SHORT_PARTS, 1);
    const char    * quants = t.quants;
    const int32_t * scales = t.scales;
    for (int64_t u = 0; u < n_units; ++u) {
        const column_unit<QK_K> * column[n];
        ivec sums[n][VECTORS];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            column[j] = (const column_unit<QK_K> *) y[j] + u;
            SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                sums[j][v] = SB(set1_epi32)(0);
            }
        }
        for (int g = 0; g < QK_K / GROUP_SIZE; ++g, quants += GROUP_SIZE * TILE_ROWS, scales += TILE_ROWS) {
            SB_UNROLL for (int part = 0; part < PARTS; ++part) {
                ivec dots[n][VECTORS], pairs[n][VECTORS];
                SB_UNROLL for (int j = 0; j < n && VNNI; ++j) {
                    SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                        dots[j][v] = MINS ? SB(set1_epi32)(0) : four_of(column[j]->offsets + g * PARTS + part);
                    }
                }
                SB_UNROLL for (int k = part * GROUP_SIZE / PARTS / 4; k < (part + 1) * GROUP_SIZE / PARTS / 4; ++k) {
                    ivec x[VECTORS];
                    SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                        x[v] = SB_LOAD(quants + (k * VECTORS + v) * sizeof(ivec));
                    }
                    SB_UNROLL for (int j = 0; j < n; ++j) {
                        const ivec four = four_of(column[j]->quants + g * GROUP_SIZE + 4 * k);
                        SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                            add_dot<SIGNED, CHAIN>(VNNI ? dots[j][v] : sums[j][v], pairs[j][v], k, x[v], four, SB_LOAD(scales + v * LANES));
                        }
                    }
                }
                SB_UNROLL for (int v = 0; v < VECTORS && VNNI; ++v) {
                    const ivec scale = SB_LOAD(scales + v * LANES);
                    SB_UNROLL for (int j = 0; j < n; ++j) {
                        sums[j][v] = SHORT_PARTS ? add_pairs(sums[j][v], dots[j][v], scale) : SB(add_epi32)(sums[j][v], SB(mullo_epi32)(dots[j][v], scale));
                    }
                }
            }
        }
        ivec less[n][VECTORS];
        SB_UNROLL for (int i = 0; i < n * VECTORS; ++i) {
            less[i / VECTORS][i % VECTORS] = SB(set1_epi32)(0);
        }
        const int32_t * pair = t.less + u * PAIRS * TILE_ROWS;
        for (int k = 0; k < (MINS ? min_pairs<GROUP_SIZE> : OWN_BIAS ? PAIRS : 0); ++k, pair += TILE_ROWS) {
            SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
                const ivec x = SB_LOAD(pair + v * LANES);
                SB_UNROLL for (int j = 0; j < n; ++j) {
                    less[j][v] = add_pairs(less[j][v], x, four_of(column[j]->offsets + k));
                }
            }
        }
        SB_UNROLL for (int v = 0; v < VECTORS; ++v) {
            const fvec d = SB(loadu_ps)(t.d + u * TILE_ROWS + v * LANES);
            SB_UNROLL for (int j = 0; j < n; ++j) {
                float * to = acc[j] + v * LANES;
                const fvec scale = SB(set1_ps)(column[j]->scale);
                const ivec sum = OWN_BIAS ? SB(sub_epi32)(sums[j][v], less[j][v]) : sums[j][v];
                fvec all = SB(fmadd_ps)(SB(mul_ps)(d, scale), SB(cvtepi32_ps)(sum), SB(loadu_ps)(to));
                if (MINS) {
                    const fvec min = SB(mul_ps)(SB(loadu_ps)(t.min + u * TILE_ROWS + v * LANES), scale);
                    all = SB(fnmadd_ps)(min, SB(cvtepi32_ps)(less[j][v]), all);
                }
                SB(storeu_ps)(to, all);
            }
        }
    }
}

} // namespace
