#pragma once

// The kernels of small-batch.cpp for blocks of 32 weights (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, NVFP4) on x86 (AVX-512 or
// AVX2): some rows times 1 to 8 columns.

#include "small-batch-kernels.h"

#include <utility>

namespace {

// ---- blocks of 32: the lanes of ggml_vec_dot_q8_0_q8_0, so that Q8_0 gives what upstream's single columns give

#ifdef SB_512
constexpr int VECS = 2; // two rows in each
#else
constexpr int VECS = 4; // one row in each
#endif
constexpr int VEC_ROWS = GROUP / VECS;

// The integer dot product takes an unsigned and a signed operand.
#if defined(SB_512) || defined(__AVXVNNI__)
constexpr bool VNNI = true;

#ifdef SB_512
#define SB_DPBUSD _mm512_dpbusd_epi32
SB_INLINE ivec load_col(const char * y) { return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *) y)); }
#else
#define SB_DPBUSD _mm256_dpbusd_avx_epi32
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

// Whether one product has the scales of all rows, times the column's. Of more columns that is more work for CPUs that
// multiply and permute in the same units.
#ifdef SB_512
template <class T, int n> constexpr bool FEW = n <= 2 && T::HALVES;
#else
template <class T, int n> constexpr bool FEW = false;
#endif

template <class T> SB_INLINE fvec scales_of_blocks(const char * a, const char * b, int64_t i) {
    if constexpr (T::HALVES) {
        return halves(T::half(T::at(a, i)), T::half(T::at(b, i)));
    } else {
        return T::scales(a, b, i);
    }
}

// GROUP rows, or one in all places, to p.dst[j] + first
template <class T, int n> SB_INLINE void group_32(const product & p, const char * x, size_t x_stride, float (*result)[GROUP]) {
    fvec acc[n][VECS];
    SB_UNROLL for (int i = 0; i < n * VECS; ++i) {
        acc[i / VECS][i % VECS] = SB(setzero_ps)();
    }
    columns y = p.y;
    const char * next = x + GROUP * x_stride;
    for (int64_t i = 0; i < p.n_units; ++i) {
        // hardware prefetchers lose track of several short rows
        _mm_prefetch(next, _MM_HINT_T0);
        if (GROUP * sizeof(typename T::block) > 64) {
            _mm_prefetch(next + 64, _MM_HINT_T0);
        }
        next += GROUP * x_stride / p.n_units;

        __m128 by_row[n];
        if constexpr (FEW<T, n>) {
            const __m128 d = four_halves([&](int r) { return T::half(T::at(x + r * x_stride, i)); });
            SB_UNROLL for (int j = 0; j < n; ++j) {
                by_row[j] = _mm_mul_ps(d, _mm_set1_ps(y.scales[j]));
            }
        }
        SB_UNROLL for (int v = 0; v < VECS; ++v) {
            const char * a = x + (VEC_ROWS * v) * x_stride;
            const char * b = x + (VEC_ROWS * v + VEC_ROWS - 1) * x_stride;
            const ivec q = T::quants(a, b, i), prepared = prepare_rows(q);
            fvec d;
            if constexpr (!FEW<T, n>) {
                d = scales_of_blocks<T>(a, b, i);
            }
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const fvec sum = SB(cvtepi32_ps)(dot_32(q, prepared, load_col(y.y + QK8_0 * j)));
                fvec by;
                if constexpr (FEW<T, n>) {
                    by = eight_each(by_row[j], v);
                } else {
                    by = SB(mul_ps)(d, SB(set1_ps)(y.scales[j]));
                }
                acc[j][v] = SB(fmadd_ps)(by, sum, acc[j][v]);
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

// rows [begin, end), what is left over in all places of a group
template <int n, typename F> SB_INLINE void rows_by_group(const product & p, int64_t begin, int64_t end, F group) {
    for (int64_t first = begin; first < end; first += GROUP) {
        float result[n][GROUP];
        const int n_rows = (int) std::min<int64_t>(GROUP, end - first);
        if (n_rows == GROUP) {
            group(p.x + first * p.x_stride, p.x_stride, result);
            SB_UNROLL for (int j = 0; j < n; ++j) {
                _mm_storeu_ps(p.dst[j] + first, _mm_loadu_ps(result[j]));
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

template <class T, int n> void rows_32(const product & p, int64_t begin, int64_t end) {
    rows_by_group<n>(p, begin, end, [&](const char * x, size_t x_stride, float (*result)[GROUP]) {
        group_32<T, n>(p, x, x_stride, result);
    });
}

// a block as upstream has it; with MINS, its sum times the scale, which is rounded to 16 bits, as a part for each lane of a row
template <bool MINS> SB_INLINE float quantize_block(const float * x, int8_t * y, float * sums, int lanes) {
    if constexpr (MINS) {
        block_q8_1 block;
        quantize_row_q8_1(x, &block, QK8_1);
        memcpy(y, block.qs, QK8_1);
        *sums = GGML_CPU_FP16_TO_FP32(block.data.data.s) / lanes;
        return GGML_CPU_FP16_TO_FP32(block.data.data.d);
    }
    block_q8_0 block;
    quantize_row_q8_0(x, &block, QK8_0);
    memcpy(y, block.qs, QK8_0);
    return GGML_CPU_FP16_TO_FP32(block.d);
}

void prepare_32(const float * x, char * y, float *, float * scale) {
    int8_t quants[QK8_0];
    *scale = quantize_block<false>(x, quants, nullptr, 0);
    const __m256i q = _mm256_loadu_si256((const __m256i *) quants);
    _mm256_store_si256((__m256i *) y, _mm256_add_epi8(q, _mm256_set1_epi8(COL_OFFSET)));
}

// ---- nibbles in blocks of 32: two dot products to each conversion

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

#ifdef SB_512
SB_INLINE ivec load_16(const char * y) { return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *) y)); }
#else
SB_INLINE ivec load_16(const char * y) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *) y)); }
#endif

// rows in a register, and registers of a group
constexpr int ROWS = sizeof(ivec) / 16, REGISTERS = GROUP / ROWS;

template <int n> SB_INLINE void sums_of_rows(const fvec (*acc)[REGISTERS], float (*result)[GROUP]) {
    SB_UNROLL for (int j = 0; j < n; ++j) {
        SB_UNROLL for (int v = 0; v < REGISTERS; ++v) {
            fvec sum = SB(add_ps)(acc[j][v], SB(shuffle_ps)(acc[j][v], acc[j][v], 0xEE));
            sum = SB(add_ps)(sum, SB(movehdup_ps)(sum));
            float lanes[sizeof(fvec) / sizeof(float)];
            SB(storeu_ps)(lanes, sum);
            SB_UNROLL for (int r = 0; r < ROWS; ++r) {
                result[j][v * ROWS + r] = lanes[4 * r];
            }
        }
    }
}

// f(0) to f(n - 1); GCC leaves large bodies a loop, and arrays that it indexes in memory
template <typename F, int... i> SB_INLINE void unrolled(F f, std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename F> SB_INLINE void unrolled(F f) {
    unrolled(f, std::make_integer_sequence<int, n>());
}

// GROUP rows from x on, or one in all places; its lanes are 4 to a row
template <class T, int n> SB_INLINE void group_nibbles(const product & p, const char * x, size_t x_stride, float (*result)[GROUP]) {
    fvec acc[n][REGISTERS];
    SB_UNROLL for (int i = 0; i < n * REGISTERS; ++i) {
        acc[i / REGISTERS][i % REGISTERS] = SB(setzero_ps)();
    }
    columns y = p.y;
    const char * next = x + GROUP * x_stride;
    for (int64_t i = 0; i < p.n_units; ++i, x += sizeof(typename T::block), next += GROUP * sizeof(typename T::block)) {
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + 64, _MM_HINT_T0);
        __m128 scales = T::scales(x, x_stride), mins = scales;
        if constexpr (HAS_MIN<T>) {
            mins = T::mins(x, x_stride);
        }
        if (n == 1) {
            scales = _mm_mul_ps(scales, _mm_set1_ps(y.scales[0]));
        }
        unrolled<REGISTERS>([&](auto v) __attribute__((always_inline)) {
            const char * own = x + v * ROWS * x_stride;
            const ivec both = rows_of_16(own + offsetof(typename T::block, qs), x_stride), low4 = SB(set1_epi8)(15);
            ivec low  = T::values(SB_AND(both, low4));
            ivec high = T::values(SB_AND(SB(srli_epi16)(both, 4), low4));
            if constexpr (T::FIFTH) {
                const ivec bits = rows_of_16(own + offsetof(typename T::block, qh), x_stride);
                low  = with_fifth_bits<false>(low, bits);
                high = with_fifth_bits<true>(high, bits);
            }
            const fvec d    = four_each(scales, v);
            unrolled<n>([&](auto j) __attribute__((always_inline)) {
                int32_t bias = 0;
                if (T::BIAS) {
                    memcpy(&bias, y.sums + j, sizeof(bias));
                }
                const char * q = y.y + QK8_0 * j;
                const ivec sum = dot_nibbles<IS_SIGNED<T>, n == 1>(SB(set1_epi32)(bias), low, load_16(q), high, load_16(q + 16));
                const fvec by = n == 1 ? d : SB(mul_ps)(d, SB(set1_ps)(y.scales[j]));
                acc[j][v] = SB(fmadd_ps)(by, SB(cvtepi32_ps)(sum), acc[j][v]);
                if (HAS_MIN<T>) {
                    acc[j][v] = SB(fmadd_ps)(four_each(mins, v), SB(set1_ps)(y.sums[j]), acc[j][v]);
                }
            });
        });
        y.y += n * QK8_0, y.sums += n, y.scales += n;
    }
    sums_of_rows<n>(acc, result);
}

template <class T, int n> void rows_nibbles(const product & p, int64_t begin, int64_t end) {
    rows_by_group<n>(p, begin, end, [&](const char * x, size_t x_stride, float (*result)[GROUP]) {
        group_nibbles<T, n>(p, x, x_stride, result);
    });
}

// the block and, as an int, what the bias adds in each of the 4 lanes of a row; or with MINS its sum for each of them
template <class T> void prepare_nibbles(const float * x, char * y, float * sums, float * scale) {
    *scale = quantize_block<HAS_MIN<T>>(x, (int8_t *) y, sums, 4);
    if (!HAS_MIN<T>) {
        int32_t sum = 0;
        for (int i = 0; i < QK8_0; ++i) {
            sum += y[i];
        }
        sum *= -T::BIAS / 4;
        memcpy(sums, &sum, sizeof(sum));
    }
}

} // namespace
