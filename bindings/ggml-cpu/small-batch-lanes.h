#pragma once

// The kernel of small-batch.cpp for Q4_K, Q5_K and Q2_K on AVX2: some rows times 1 to 8 columns, where a lane is a row. No sums go across lanes,
// and as many pairs of products are added as 16 bits hold before a scale is applied to them.

#include "small-batch-kernels.h"

#ifndef SB_512

namespace {

constexpr int LANE_ROWS = 8;

// keeps a sum in its register: GCC would add up in trees, and keep what they need in memory
SB_INLINE void hold(__m256i & x) { __asm__("" : "+x"(x)); }
template <int n> SB_INLINE void to_memory(__m256i (&x)[n]) { __asm__("" : "+m"(x)); }

SB_INLINE __m256i four_bytes(const char * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return _mm256_set1_epi32(x);
}

// 16 bytes of each row: the first 4 to out[0], and so on
SB_INLINE void lanes_of_16(const char * const * rows, size_t at, __m256i * out) {
    __m256i x[4], two[4];
    SB_UNROLL for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_set_m128i(_mm_loadu_si128((const __m128i *) (rows[i + 4] + at)), _mm_loadu_si128((const __m128i *) (rows[i] + at)));
    }
    SB_UNROLL for (int i = 0; i < 4; i += 2) {
        two[i + 0] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        two[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    SB_UNROLL for (int i = 0; i < 2; ++i) {
        out[2 * i + 0] = _mm256_unpacklo_epi64(two[i], two[i + 2]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(two[i], two[i + 2]);
    }
}

SB_INLINE void lanes_of_32(const char * const * rows, size_t at, __m256i * out) {
    lanes_of_16(rows, at, out);
    lanes_of_16(rows, at + 16, out + 4);
}

template <int n_bits> SB_INLINE void shift_all(__m256i * x) { // of bytes, whose upper bits are then others'
    SB_UNROLL for (int k = 0; k < 8; ++k) {
        x[k] = _mm256_srli_epi16(x[k], n_bits);
    }
}

// bytes a and b of each lane as shorts
template <int a, int b> SB_INLINE __m256i shorts_of(__m256i x) {
    constexpr int32_t at = (int32_t) 0x80008000 | b << 16 | a, next = 0x00040004;
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi32(at, at + next, at + 2 * next, at + 3 * next)));
}

// A block of each row. A step has weights 64 s to 64 s + 63: the first 32 are low nibbles, four of each row in a register.
template <typename B> struct lanes_with_mins {
    typedef B block;
    static constexpr int OWN_SCALE = 32;

    __m256i quants[8]; // of a step
    __m256i scales[8]; // of 32 weights: shorts, each twice
    __m256i mins[4];   // shorts, two by two
    __m256  d, dmin;

    inline __attribute__((always_inline)) void begin(const char * const * rows, size_t at) {
        const __m256i low6 = _mm256_set1_epi8(0x3f), low4 = _mm256_set1_epi8(15), high2 = _mm256_set1_epi8(0x30);
        __m256i x[4]; // d and dmin, then 12 bytes as scales_and_mins() takes them
        lanes_of_16(rows, at, x);
        const __m256i scale[2] = { _mm256_and_si256(x[1], low6),
            _mm256_or_si256(_mm256_and_si256(x[3], low4), _mm256_and_si256(_mm256_srli_epi32(x[1], 2), high2)) };
        const __m256i min[2] = { _mm256_and_si256(x[2], low6),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(x[3], 4), low4), _mm256_and_si256(_mm256_srli_epi32(x[2], 2), high2)) };
        SB_UNROLL for (int i = 0; i < 2; ++i) {
            scales[4 * i + 0] = shorts_of<0, 0>(scale[i]);
            scales[4 * i + 1] = shorts_of<1, 1>(scale[i]);
            scales[4 * i + 2] = shorts_of<2, 2>(scale[i]);
            scales[4 * i + 3] = shorts_of<3, 3>(scale[i]);
            mins[2 * i + 0] = shorts_of<0, 1>(min[i]);
            mins[2 * i + 1] = shorts_of<2, 3>(min[i]);
        }
        to_memory(scales);
        to_memory(mins);
        const __m256i both = _mm256_packus_epi32(_mm256_and_si256(x[0], _mm256_set1_epi32(0xFFFF)), _mm256_srli_epi32(x[0], 16));
        const __m256i halves = _mm256_permute4x64_epi64(both, 0xD8);
        d    = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        dmin = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }

    inline __attribute__((always_inline)) __m256i low(int k) const { return _mm256_and_si256(quants[k], _mm256_set1_epi8(15)); }
    inline __attribute__((always_inline)) __m256i high(int k) const {
        return _mm256_and_si256(_mm256_srli_epi16(quants[k], 4), _mm256_set1_epi8(15));
    }
};

struct lanes_q4_K : lanes_with_mins<block_q4_K> {
    static constexpr int CHAIN = 8; // of at most 2 * 15 * 127

    inline __attribute__((always_inline)) void step(const char * const * rows, size_t at, int s) {
        lanes_of_32(rows, at + offsetof(block, qs) + 32 * s, quants);
    }
};

struct lanes_q5_K : lanes_with_mins<block_q5_K> {
    static constexpr int CHAIN = 4; // of at most 2 * 31 * 127

    __m256i fifth[8]; // bits: the lowest ones of low nibbles, the next of high ones

    inline __attribute__((always_inline)) void step(const char * const * rows, size_t at, int s) {
        if (s == 0) {
            lanes_of_32(rows, at + offsetof(block, qh), fifth);
        } else {
            shift_all<2>(fifth);
        }
        lanes_of_32(rows, at + offsetof(block, qs) + 32 * s, quants);
    }
    inline __attribute__((always_inline)) __m256i low(int k) const {
        return _mm256_or_si256(lanes_with_mins::low(k), _mm256_and_si256(_mm256_slli_epi16(fifth[k], 4), _mm256_set1_epi8(16)));
    }
    inline __attribute__((always_inline)) __m256i high(int k) const {
        return _mm256_or_si256(lanes_with_mins::high(k), _mm256_and_si256(_mm256_slli_epi16(fifth[k], 3), _mm256_set1_epi8(16)));
    }
};

struct lanes_q2_K { // the lowest two bits of a byte, and the next: two steps go through the same bytes
    typedef block_q2_K block;
    static constexpr int OWN_SCALE = 16;
    static constexpr int CHAIN = 4; // 16 weights

    __m256i quants[8];
    __m256i scales[16];
    __m256i mins[8];
    __m256  d, dmin;

    inline __attribute__((always_inline)) void begin(const char * const * rows, size_t at) {
        __m256i x[4];
        lanes_of_16(rows, at + offsetof(block, scales), x);
        SB_UNROLL for (int i = 0; i < 4; ++i) {
            const __m256i low4 = _mm256_set1_epi8(15), scale = _mm256_and_si256(x[i], low4), min = _mm256_and_si256(_mm256_srli_epi16(x[i], 4), low4);
            scales[4 * i + 0] = shorts_of<0, 0>(scale);
            scales[4 * i + 1] = shorts_of<1, 1>(scale);
            scales[4 * i + 2] = shorts_of<2, 2>(scale);
            scales[4 * i + 3] = shorts_of<3, 3>(scale);
            mins[2 * i + 0] = shorts_of<0, 1>(min);
            mins[2 * i + 1] = shorts_of<2, 3>(min);
        }
        to_memory(scales);
        to_memory(mins);
        d    = lanes_of_halves([&](int i) { return type_q2_K::d   (*(const block *) (rows[i] + at)); });
        dmin = lanes_of_halves([&](int i) { return type_q2_K::dmin(*(const block *) (rows[i] + at)); });
    }

    inline __attribute__((always_inline)) void step(const char * const * rows, size_t at, int s) {
        if (s % 2 == 0) {
            lanes_of_32(rows, at + offsetof(block, qs) + 16 * s, quants);
        } else {
            shift_all<4>(quants);
        }
    }
    inline __attribute__((always_inline)) __m256i low (int k) const { return _mm256_and_si256(quants[k], _mm256_set1_epi8(3)); }
    inline __attribute__((always_inline)) __m256i high(int k) const {
        return _mm256_and_si256(_mm256_srli_epi16(quants[k], 2), _mm256_set1_epi8(3));
    }
};

// ---- the product

// weights 4 k to 4 k + 3 of 32, in their chain, which is multiplied by `scale` where it ends
template <class T> SB_INLINE void add_pairs(__m256i & sum, __m256i & chain, int k, __m256i x, const char * y, const __m256i & scale) {
    const __m256i pairs = _mm256_maddubs_epi16(x, four_bytes(y + 4 * k));
    chain = k % T::CHAIN ? _mm256_add_epi16(chain, pairs) : pairs;
    hold(chain);
    if (k % T::CHAIN == T::CHAIN - 1) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(chain, scale));
    }
}

// the first 32 weights of a step, and the others, of each row times n columns
template <class T, int n> SB_INLINE void step(const T & x, const __m256i * scales, const char * y, __m256i * sum) {
    constexpr int own = T::OWN_SCALE;
    if (n > 4) { // one after the other: there are no registers for both
        SB_UNROLL for (int i = 0; i < 2; ++i) {
            __m256i chain[n];
            SB_UNROLL for (int k = 0; k < 8; ++k) {
                const __m256i quants = i ? x.high(k) : x.low(k);
                SB_UNROLL for (int j = 0; j < n; ++j) {
                    add_pairs<T>(sum[j], chain[j], k, quants, y + QK_K * j + 32 * i, scales[(32 * i + 4 * k) / own]);
                }
            }
        }
        return;
    }
    __m256i low[n], high[n];
    SB_UNROLL for (int k = 0; k < 8; ++k) {
        const __m256i x_low = x.low(k), x_high = x.high(k);
        SB_UNROLL for (int j = 0; j < n; ++j) {
            add_pairs<T>(sum[j], low[j],  k, x_low,  y + QK_K * j,      scales[4 * k / own]);
            add_pairs<T>(sum[j], high[j], k, x_high, y + QK_K * j + 32, scales[(32 + 4 * k) / own]);
        }
    }
}

template <class T, int n> void rows_lanes(const product & p, int64_t begin, int64_t end) {
    constexpr size_t bytes = sizeof(typename T::block);
    for (int64_t first = begin; first < end; first += LANE_ROWS) {
        const int n_rows = (int) std::min<int64_t>(LANE_ROWS, end - first);
        const char * rows[LANE_ROWS]; // the last one stands for those that there are not
        for (int i = 0; i < LANE_ROWS; ++i) {
            rows[i] = p.x + (first + std::min(i, n_rows - 1)) * p.x_stride;
        }
        const char * next = rows[0] + LANE_ROWS * p.x_stride; // in one stream, not in eight
        columns y = p.y;
        __m256 acc[n];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            acc[j] = _mm256_setzero_ps();
        }
        for (int64_t u = 0; u < p.n_units; ++u) {
            SB_UNROLL for (size_t i = 0; i < LANE_ROWS * bytes; i += 64) {
                _mm_prefetch(next + i, _MM_HINT_T0);
            }
            next += LANE_ROWS * bytes;

            T x;
            x.begin(rows, u * bytes);

            __m256i sum[n];
            SB_UNROLL for (int j = 0; j < n; ++j) {
                sum[j] = _mm256_setzero_si256();
            }
            int n_steps = QK_K / 64;
            __asm__("" : "+r"(n_steps)); // a loop, since four times the code takes longer
            for (int s = 0; s < n_steps; ++s) {
                x.step(rows, u * bytes, s);
                if (n > 4) {
                    to_memory(x.quants);
                }
                step<T, n>(x, x.scales + 64 / T::OWN_SCALE * s, y.y + 64 * s, sum);
            }
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const char * sums = (const char *) (y.sums + 16 * j);
                __m256i less = _mm256_madd_epi16(x.mins[0], four_bytes(sums));
                SB_UNROLL for (int i = 1; i < 128 / T::OWN_SCALE; ++i) {
                    less = _mm256_add_epi32(less, _mm256_madd_epi16(x.mins[i], four_bytes(sums + 4 * i)));
                }
                const __m256 by = _mm256_broadcast_ss(y.scales + j);
                acc[j] = _mm256_fmadd_ps (_mm256_mul_ps(x.d,    by), _mm256_cvtepi32_ps(sum[j]), acc[j]);
                acc[j] = _mm256_fnmadd_ps(_mm256_mul_ps(x.dmin, by), _mm256_cvtepi32_ps(less),   acc[j]);
            }
            y.y += n * QK_K, y.sums += n * 16, y.scales += n;
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            float some[LANE_ROWS];
            _mm256_storeu_ps(n_rows == LANE_ROWS ? p.dst[j] + first : some, acc[j]);
            if (n_rows < LANE_ROWS) {
                std::copy(some, some + n_rows, p.dst[j] + first);
            }
        }
    }
}

// as prepare_256(), with sums of as many as share a scale
template <class T> void prepare_lanes(const float * x, char * y, float * sums, float * scale) {
    prepare_256(x, y, sums, scale);
    if (T::OWN_SCALE == 32) {
        const __m256i two = _mm256_madd_epi16(load_256(sums), _mm256_set1_epi16(1));
        _mm_storeu_si128((__m128i *) sums, _mm_packs_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
    }
}

} // namespace

#endif
