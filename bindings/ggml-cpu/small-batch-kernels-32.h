#pragma once

// The kernels of small-batch.cpp for blocks of 32 weights (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, NVFP4) on x86 (AVX-512 or
// AVX2): some rows times 1 to 8 columns.

#include "small-batch-kernels.h"

namespace {

// ---- A lane is a row
//
// The integer sum of a block is exact, however it is added up. What an output takes in of it is rounded as in multiply() of
// large-batch-kernels.h, in the order of blocks: so no bit depends on the number of columns, nor on the kernel.

// The integer dot product takes an unsigned and a signed operand.
#if defined(SB_512) || defined(__AVXVNNI__)
constexpr bool VNNI = true;

#ifdef SB_512
#define SB_DPBUSD _mm512_dpbusd_epi32
#define SB_DPWSSD _mm512_dpwssd_epi32
SB_INLINE ivec load_col(const char * y) { return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *) y)); }
#else
#define SB_DPBUSD _mm256_dpbusd_avx_epi32
#define SB_DPWSSD _mm256_dpwssd_avx_epi32
SB_INLINE ivec load_col(const char * y) { return _mm256_load_si256((const __m256i *) y); }
#endif

// sum x*y = sum x*(y + 128) - 128 * sum x, and the second term serves all columns
constexpr int8_t COL_OFFSET = -128;

SB_INLINE ivec prepare_rows(ivec x) {
    const ivec zero = SB(set1_epi32)(0);
    return SB(sub_epi32)(zero, SB_DPBUSD(zero, SB(set1_epi8)(-128), x));
}

SB_INLINE ivec dot_32(ivec x, ivec prepared, ivec y) {
    return SB_DPBUSD(prepared, y, x);
}

#else

constexpr bool VNNI = false;

// y + 128 could saturate maddubs: |x| * (y with the sign of x), as vec_dot does
constexpr int8_t COL_OFFSET = 0;

SB_INLINE ivec load_col(const char * y) { return _mm256_load_si256((const __m256i *) y); }

SB_INLINE ivec prepare_rows(ivec x) {
    return _mm256_sign_epi8(x, x);
}

SB_INLINE ivec dot_32(ivec x, ivec prepared, ivec y) {
    return _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(prepared, _mm256_sign_epi8(y, x)));
}

#endif

// sum + x . y, of shorts in pairs
SB_INLINE ivec add_pairs(ivec sum, ivec x, ivec y) {
#ifdef SB_DPWSSD
    return SB_DPWSSD(sum, x, y);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
#endif
}

// the same 16 bytes in each 128 bits, the same 4 in each lane
SB_INLINE ivec load_16(const char * y) { return SB_BROADCAST_128(_mm_load_si128((const __m128i *) y)); }
SB_INLINE ivec four_of(const void * y) {
    int32_t four;
    memcpy(&four, y, sizeof(four));
    return SB(set1_epi32)(four);
}

// registers in which a group of LANES rows is multiplied, 4 ints to a row
constexpr int QUARTERS = 4;

// keeps weights in memory, where there are no registers for them beside the columns
template <int n> SB_INLINE void to_stack(ivec (&x)[n]) {
#ifndef SB_512
    __asm__("" : "+m"(x));
#endif
    (void) x;
}

// Rows [begin, end), R at a time; what is left over stands in all places of a group. group(x, x_stride, result).
template <int n, int R, typename F> SB_INLINE void rows_by_group(const product & p, int64_t begin, int64_t end, F group) {
    for (int64_t first = begin; first < end; first += R) {
        float result[n][R];
        const int n_rows = (int) std::min<int64_t>(R, end - first);
        if (n_rows == R) {
            group(p.x + first * p.x_stride, p.x_stride, result);
            SB_UNROLL for (int j = 0; j < n; ++j) {
                memcpy(p.dst[j] + first, result[j], sizeof(result[j]));
            }
            continue;
        }
        for (int i = 0; i < n_rows; ++i) {
            group(p.x + (first + i) * p.x_stride, 0, result);
            for (int j = 0; j < n; ++j) {
                p.dst[j][first + i] = result[j][0];
            }
        }
    }
}

// LANES rows from x on times n columns. prepare(x) reads the block of each row; dot(j, y) is its product with column j.
template <class T, int n, typename P, typename D>
SB_INLINE void group_of_lanes(const product & p, const char * x, size_t x_stride, float (*result)[LANES], P prepare, D dot) {
    fvec acc[n];
    SB_UNROLL for (int j = 0; j < n; ++j) {
        acc[j] = SB(setzero_ps)();
    }
    columns y = p.y;
    const char * next = x + LANES * x_stride; // hardware prefetchers lose track of several short rows
    for (int64_t i = 0; i < p.n_units; ++i, x += sizeof(typename T::block), next += LANES * sizeof(typename T::block)) {
        SB_UNROLL for (size_t b = 0; b < LANES * sizeof(typename T::block); b += 64) {
            _mm_prefetch(next + b, _MM_HINT_T1);
        }
        prepare(x);
        const fvec d = T::scales(x, x_stride);
        fvec mins = d;
        if constexpr (HAS_MIN<T>) {
            mins = T::mins(x, x_stride);
        }
        unrolled<n>([&](auto j) __attribute__((always_inline)) {
            const fvec sum = SB(cvtepi32_ps)(dot(j, y));
            acc[j] = SB(fmadd_ps)(SB(mul_ps)(sum, d), SB(set1_ps)(y.scales[j]), acc[j]);
            if (HAS_MIN<T>) {
                acc[j] = SB(fmadd_ps)(mins, SB(set1_ps)(y.sums[j]), acc[j]);
            }
        });
        y.y += n * QK8_0, y.sums += n, y.scales += n;
    }
    SB_UNROLL for (int j = 0; j < n; ++j) {
        SB(storeu_ps)(result[j], acc[j]);
    }
}

// sum + low . a + high . b in each lane; the absolute values are those of the weights, or if they serve one column only, its own
#if defined(SB_512) || defined(__AVXVNNI__)
template <bool, bool> SB_INLINE ivec dot_nibbles(ivec sum, ivec low, ivec a, ivec high, ivec b) {
    return SB_DPBUSD(SB_DPBUSD(sum, low, a), high, b);
}
#else
template <bool is_signed, bool alone> SB_INLINE ivec dot_nibbles(ivec sum, ivec low, ivec a, ivec high, ivec b) {
    const ivec ones = _mm256_set1_epi16(1);
    if (is_signed) {
        const auto dot = [&](ivec x, ivec y) {
            const ivec unsigned_one = alone ? _mm256_abs_epi8(y) : _mm256_abs_epi8(x);
            return _mm256_madd_epi16(ones, _mm256_maddubs_epi16(unsigned_one, alone ? _mm256_sign_epi8(x, y) : _mm256_sign_epi8(y, x)));
        };
        return _mm256_add_epi32(sum, _mm256_add_epi32(dot(low, a), dot(high, b)));
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(ones, _mm256_add_epi16(_mm256_maddubs_epi16(low, a), _mm256_maddubs_epi16(high, b))));
}
#endif

// 16 bytes of each row: the first 4 to out[0], and so on
SB_INLINE void lanes_of_16(const char * x, size_t x_stride, ivec * out) {
    ivec four[4], two[4];
    SB_UNROLL for (int i = 0; i < 4; ++i) {
        four[i] = rows_of_16(x + i * x_stride, 4 * x_stride);
    }
    SB_UNROLL for (int i = 0; i < 4; i += 2) {
        two[i + 0] = SB(unpacklo_epi32)(four[i], four[i + 1]);
        two[i + 1] = SB(unpackhi_epi32)(four[i], four[i + 1]);
    }
    SB_UNROLL for (int i = 0; i < 2; ++i) {
        out[2 * i + 0] = SB(unpacklo_epi64)(two[i], two[i + 2]);
        out[2 * i + 1] = SB(unpackhi_epi64)(two[i], two[i + 2]);
    }
}

// 16 bytes of each row: as lanes_of_16() has them, which pays from three or four columns on; or 128 bits l of out[v] are row v + 4 l
template <bool in_lanes> SB_INLINE void sixteen_of_rows(const char * x, size_t x_stride, ivec * out) {
    if (in_lanes) {
        lanes_of_16(x, x_stride, out);
        return;
    }
    SB_UNROLL for (int v = 0; v < QUARTERS; ++v) {
        out[v] = rows_of_16(x + v * x_stride, QUARTERS * x_stride);
    }
}

// sums of weights with a bias, without what it adds: an int for all rows
template <int BIAS> SB_INLINE ivec add_bias(ivec sums, const float * of_column) {
    return BIAS ? SB(add_epi32)(sums, four_of(of_column)) : sums;
}

// 32 weights in lanes, of which a has the first 16, times a column, and what the bias adds: no sums go across lanes
template <int BIAS> SB_INLINE ivec dot_lanes(const ivec * a, const ivec * b, const char * y, const float * of_column) {
    ivec sum = BIAS ? four_of(of_column) : SB(set1_epi32)(0);
    SB_UNROLL for (int k = 0; k < QUARTERS; ++k) {
        sum = dot_nibbles<false, false>(sum, a[k], four_of(y + 4 * k), b[k], four_of(y + 16 + 4 * k));
    }
    return sum;
}

// what is added to signed weights, where the integer dot product takes an unsigned operand
constexpr int BYTES_BIAS = VNNI ? 128 : 0;

template <class T, int n> void rows_bytes(const product & p, int64_t begin, int64_t end) {
    constexpr bool in_lanes = VNNI && n > 3;
    rows_by_group<n, LANES>(p, begin, end, [&](const char * x, size_t x_stride, float (*result)[LANES]) {
        ivec quants[2 * QUARTERS];
        group_of_lanes<T, n>(p, x, x_stride, result, [&](const char * own) __attribute__((always_inline)) {
            SB_UNROLL for (int i = 0; i < 2; ++i) { // the first 16 weights of rows, then the others
                sixteen_of_rows<in_lanes>(own + offsetof(typename T::block, qs) + 16 * i, x_stride, quants + QUARTERS * i);
            }
            SB_UNROLL for (int r = 0; r < 2 * QUARTERS; ++r) {
                quants[r] = SB_XOR(quants[r], SB(set1_epi8)((int8_t) BYTES_BIAS));
            }
            if (n > 1 && !VNNI) {
                to_stack(quants);
            }
        }, [&](int j, const columns & y) __attribute__((always_inline)) {
            if (in_lanes) {
                return dot_lanes<BYTES_BIAS>(quants, quants + QUARTERS, y.y + QK8_0 * j, y.sums + j);
            }
            const ivec a = load_16(y.y + QK8_0 * j), b = load_16(y.y + QK8_0 * j + 16);
            ivec sums[QUARTERS];
            SB_UNROLL for (int v = 0; v < QUARTERS; ++v) {
                sums[v] = dot_nibbles<!VNNI, n == 1>(SB(set1_epi32)(0), quants[v], a, quants[v + QUARTERS], b);
            }
            return add_bias<BYTES_BIAS>(sums_of_fours<INT16_MAX + 1>(sums), y.sums + j);
        });
    });
}

// ---- two scales to a block (NVFP4): lanes of a row are added up at its end. No other kernel has this type.

constexpr int GROUP = 4; // rows that are finished together
#ifdef SB_512
constexpr int VECS = 2; // two rows in each
#else
constexpr int VECS = 4; // one row in each
#endif
constexpr int VEC_ROWS = GROUP / VECS;

// GROUP rows, or one in all places
template <class T, int n> SB_INLINE void group_32(const product & p, const char * x, size_t x_stride, float (*result)[GROUP]) {
    fvec acc[n][VECS];
    SB_UNROLL for (int i = 0; i < n * VECS; ++i) {
        acc[i / VECS][i % VECS] = SB(setzero_ps)();
    }
    columns y = p.y;
    const char * next = x + GROUP * x_stride;
    for (int64_t i = 0; i < p.n_units; ++i) {
        _mm_prefetch(next, _MM_HINT_T0);
        if (GROUP * sizeof(typename T::block) > 64) {
            _mm_prefetch(next + 64, _MM_HINT_T0);
        }
        next += GROUP * x_stride / p.n_units;
        SB_UNROLL for (int v = 0; v < VECS; ++v) {
            const char * a = x + (VEC_ROWS * v) * x_stride;
            const char * b = x + (VEC_ROWS * v + VEC_ROWS - 1) * x_stride;
            const ivec q = T::quants(a, b, i), prepared = prepare_rows(q);
            const fvec d = T::scales(a, b, i);
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const fvec sum = SB(cvtepi32_ps)(dot_32(q, prepared, load_col(y.y + QK8_0 * j)));
                acc[j][v] = SB(fmadd_ps)(SB(mul_ps)(d, SB(set1_ps)(y.scales[j])), sum, acc[j][v]);
            }
        }
        y.y += n * QK8_0, y.scales += n;
    }
    SB_UNROLL for (int j = 0; j < n; ++j) {
#ifdef SB_512
        const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
        fvec v = _mm512_add_ps(_mm512_shuffle_f32x4(acc[j][0], acc[j][1], 0xDD), _mm512_shuffle_f32x4(acc[j][0], acc[j][1], 0x88));
        v = _mm512_add_ps(v, _mm512_shuffle_ps(v, v, 0xEE));
        v = _mm512_add_ps(v, _mm512_movehdup_ps(v));
        _mm_storeu_ps(result[j], _mm512_castps512_ps128(_mm512_permutexvar_ps(first, v)));
#else
        _mm_storeu_ps(result[j], reduce(acc[j][0], acc[j][1], acc[j][2], acc[j][3]));
#endif
    }
}

template <class T, int n> void rows_32(const product & p, int64_t begin, int64_t end) {
    rows_by_group<n, GROUP>(p, begin, end, [&](const char * x, size_t x_stride, float (*result)[GROUP]) {
        group_32<T, n>(p, x, x_stride, result);
    });
}

// ---- columns

// a block as upstream has it; with MINS, its sum times the scale, which is rounded to 16 bits
template <bool MINS> SB_INLINE float quantize_block(const float * x, int8_t * y, float * sum) {
    if constexpr (MINS) {
        block_q8_1 block;
        quantize_row_q8_1(x, &block, QK8_1);
        memcpy(y, block.qs, QK8_1);
        *sum = GGML_CPU_FP16_TO_FP32(block.data.data.s);
        return GGML_CPU_FP16_TO_FP32(block.data.data.d);
    }
    block_q8_0 block;
    quantize_row_q8_0(x, &block, QK8_0);
    memcpy(y, block.qs, QK8_0);
    return GGML_CPU_FP16_TO_FP32(block.d);
}

void prepare_32(const float * x, char * y, float *, float * scale) {
    int8_t quants[QK8_0];
    *scale = quantize_block<false>(x, quants, nullptr);
    const __m256i q = _mm256_loadu_si256((const __m256i *) quants);
    _mm256_store_si256((__m256i *) y, _mm256_add_epi8(q, _mm256_set1_epi8(COL_OFFSET)));
}

// ---- nibbles in blocks of 32: two dot products to each conversion

template <class T, int n> void rows_nibbles(const product & p, int64_t begin, int64_t end) {
    constexpr bool in_lanes = VNNI && n > 2 && !T::FIFTH;
    rows_by_group<n, LANES>(p, begin, end, [&](const char * x, size_t x_stride, float (*result)[LANES]) {
        ivec low[QUARTERS], high[QUARTERS];
        group_of_lanes<T, n>(p, x, x_stride, result, [&](const char * own) __attribute__((always_inline)) {
            const ivec low4 = SB(set1_epi8)(15);
            ivec both[QUARTERS];
            sixteen_of_rows<in_lanes>(own + offsetof(typename T::block, qs), x_stride, both);
            SB_UNROLL for (int v = 0; v < QUARTERS; ++v) {
                low [v] = T::values(SB_AND(both[v], low4));
                high[v] = T::values(SB_AND(SB(srli_epi16)(both[v], 4), low4));
                if constexpr (T::FIFTH) {
                    const ivec bits = rows_of_16(own + v * x_stride + offsetof(typename T::block, qh), QUARTERS * x_stride);
                    low [v] = with_fifth_bits<false>(low [v], bits);
                    high[v] = with_fifth_bits<true> (high[v], bits);
                }
            }
            if (n > 2) {
                to_stack(low);
                to_stack(high);
            }
        }, [&](int j, const columns & y) __attribute__((always_inline)) {
            const char * q = y.y + QK8_0 * j;
            if (in_lanes) {
                return dot_lanes<T::BIAS>(low, high, q, y.sums + j);
            }
            const ivec a = load_16(q), b = load_16(q + 16);
            ivec sums[QUARTERS];
            SB_UNROLL for (int v = 0; v < QUARTERS; ++v) {
                sums[v] = dot_nibbles<IS_SIGNED<T>, n == 1>(SB(set1_epi32)(0), low[v], a, high[v], b);
            }
            return add_bias<T::BIAS>(sums_of_fours<8 * 127 * T::MOST>(sums), y.sums + j);
        });
    });
}

// the block and, as an int, what the bias adds to its sum; or with MINS its own sum
template <bool MINS, int BIAS> void prepare_biased(const float * x, char * y, float * sums, float * scale) {
    *scale = quantize_block<MINS>(x, (int8_t *) y, sums);
    if (!MINS) {
        int32_t sum = 0;
        for (int i = 0; i < QK8_0; ++i) {
            sum += y[i];
        }
        sum *= -BIAS;
        memcpy(sums, &sum, sizeof(sum));
    }
}

} // namespace
