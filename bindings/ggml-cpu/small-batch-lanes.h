#pragma once

// The kernel of small-batch.cpp for Q4_K, Q5_K and Q2_K on x86 (AVX-512 or AVX2): some rows times 1 to 8 columns, where a lane is a row. No sums
// go across lanes, and as many products are added as 16 bits hold in pairs, or share a scale, before a scale is applied to them.

#include "small-batch-kernels-32.h"

namespace {

// keeps a sum in its register: GCC would add up in trees, and keep what they need in memory
SB_INLINE void hold(ivec & x) { __asm__("" : "+x"(x)); }
template <int n> SB_INLINE void to_memory(ivec (&x)[n]) { __asm__("" : "+m"(x)); }

SB_INLINE void lanes_of_32(const char * x, size_t x_stride, ivec * out) {
    lanes_of_16(x, x_stride, out);
    lanes_of_16(x + 16, x_stride, out + 4);
}

template <int n_bits> SB_INLINE void shift_all(ivec * x) { // of bytes, whose upper bits are then others'
    SB_UNROLL for (int k = 0; k < 8; ++k) {
        x[k] = SB(srli_epi16)(x[k], n_bits);
    }
}

// bytes a and b of each lane as shorts; none: 0
constexpr int NONE = 0x80;
template <int a, int b> SB_INLINE ivec shorts_of(ivec x) {
    constexpr int32_t at = (int32_t) 0x80008000 | b << 16 | a, next = 0x00040004;
    return SB(shuffle_epi8)(x, SB_BROADCAST_128(_mm_setr_epi32(at, at + next, at + 2 * next, at + 3 * next)));
}

// byte i of each lane as what sums are multiplied by: an int, or twice a short
template <int i> SB_INLINE ivec scale_of(ivec x) { return shorts_of<i, VNNI ? NONE : i>(x); }

// A block of each row. A step has weights 64 s to 64 s + 63: the first 32 are low nibbles, four of each row in a register.
template <typename B> struct lanes_with_mins {
    typedef B block;
    static constexpr int OWN_SCALE = 32;

    ivec quants[8]; // of a step
    ivec scales[8]; // of 32 weights, by scale_of()
    ivec mins[4];   // shorts, two by two
    fvec d, dmin;

    inline __attribute__((always_inline)) void begin(const char * own, size_t x_stride) {
        const ivec low6 = SB(set1_epi8)(0x3f), low4 = SB(set1_epi8)(15), high2 = SB(set1_epi8)(0x30);
        ivec x[4]; // d and dmin, then 12 bytes as scales_and_mins() takes them
        lanes_of_16(own, x_stride, x);
        const ivec scale[2] = { SB_AND(x[1], low6),
            SB_OR(SB_AND(x[3], low4), SB_AND(SB(srli_epi32)(x[1], 2), high2)) };
        const ivec min[2] = { SB_AND(x[2], low6),
            SB_OR(SB_AND(SB(srli_epi32)(x[3], 4), low4), SB_AND(SB(srli_epi32)(x[2], 2), high2)) };
        SB_UNROLL for (int i = 0; i < 2; ++i) {
            scales[4 * i + 0] = scale_of<0>(scale[i]);
            scales[4 * i + 1] = scale_of<1>(scale[i]);
            scales[4 * i + 2] = scale_of<2>(scale[i]);
            scales[4 * i + 3] = scale_of<3>(scale[i]);
            mins[2 * i + 0] = shorts_of<0, 1>(min[i]);
            mins[2 * i + 1] = shorts_of<2, 3>(min[i]);
        }
        to_memory(scales);
        to_memory(mins);
#ifdef SB_512
        d    = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x[0]));
        dmin = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x[0], 16)));
#else
        const ivec both = _mm256_packus_epi32(_mm256_and_si256(x[0], _mm256_set1_epi32(0xFFFF)), _mm256_srli_epi32(x[0], 16));
        const ivec halves = _mm256_permute4x64_epi64(both, 0xD8);
        d    = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        dmin = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
    }

    inline __attribute__((always_inline)) ivec low(int k) const { return SB_AND(quants[k], SB(set1_epi8)(15)); }
    inline __attribute__((always_inline)) ivec high(int k) const {
        return SB_AND(SB(srli_epi16)(quants[k], 4), SB(set1_epi8)(15));
    }
};

struct lanes_q4_K : lanes_with_mins<block_q4_K> {
    static constexpr int CHAIN = 8; // of at most 2 * 15 * 127

    inline __attribute__((always_inline)) void step(const char * own, size_t x_stride, int s) {
        lanes_of_32(own + offsetof(block, qs) + 32 * s, x_stride, quants);
    }
};

struct lanes_q5_K : lanes_with_mins<block_q5_K> {
    static constexpr int CHAIN = 4; // of at most 2 * 31 * 127

    ivec fifth[8]; // bits: the lowest ones of low nibbles, the next of high ones

    inline __attribute__((always_inline)) void step(const char * own, size_t x_stride, int s) {
        if (s == 0) {
            lanes_of_32(own + offsetof(block, qh), x_stride, fifth);
        } else {
            shift_all<2>(fifth);
        }
        lanes_of_32(own + offsetof(block, qs) + 32 * s, x_stride, quants);
    }
    inline __attribute__((always_inline)) ivec low(int k) const {
        return SB_OR(lanes_with_mins::low(k), SB_AND(SB(slli_epi16)(fifth[k], 4), SB(set1_epi8)(16)));
    }
    inline __attribute__((always_inline)) ivec high(int k) const {
        return SB_OR(lanes_with_mins::high(k), SB_AND(SB(slli_epi16)(fifth[k], 3), SB(set1_epi8)(16)));
    }
};

struct lanes_q2_K { // the lowest two bits of a byte, and the next: two steps go through the same bytes
    typedef block_q2_K block;
    static constexpr int OWN_SCALE = 16;
    static constexpr int CHAIN = 4; // 16 weights

    ivec quants[8];
    ivec scales[16];
    ivec mins[8];
    fvec d, dmin;

    inline __attribute__((always_inline)) void begin(const char * own, size_t x_stride) {
        ivec x[4];
        lanes_of_16(own + offsetof(block, scales), x_stride, x);
        SB_UNROLL for (int i = 0; i < 4; ++i) {
            const ivec low4 = SB(set1_epi8)(15), scale = SB_AND(x[i], low4), min = SB_AND(SB(srli_epi16)(x[i], 4), low4);
            scales[4 * i + 0] = scale_of<0>(scale);
            scales[4 * i + 1] = scale_of<1>(scale);
            scales[4 * i + 2] = scale_of<2>(scale);
            scales[4 * i + 3] = scale_of<3>(scale);
            mins[2 * i + 0] = shorts_of<0, 1>(min);
            mins[2 * i + 1] = shorts_of<2, 3>(min);
        }
        to_memory(scales);
        to_memory(mins);
        d    = lanes_of_halves([&](int i) { return type_q2_K::d   (*(const block *) (own + i * x_stride)); });
        dmin = lanes_of_halves([&](int i) { return type_q2_K::dmin(*(const block *) (own + i * x_stride)); });
    }

    inline __attribute__((always_inline)) void step(const char * own, size_t x_stride, int s) {
        if (s % 2 == 0) {
            lanes_of_32(own + offsetof(block, qs) + 16 * s, x_stride, quants);
        } else {
            shift_all<4>(quants);
        }
    }
    inline __attribute__((always_inline)) ivec low (int k) const { return SB_AND(quants[k], SB(set1_epi8)(3)); }
    inline __attribute__((always_inline)) ivec high(int k) const {
        return SB_AND(SB(srli_epi16)(quants[k], 2), SB(set1_epi8)(3));
    }
};

// ---- the product

// weights 4 k to 4 k + 3 of 32, in their chain, which is multiplied by `scale` where it ends
template <class T> SB_INLINE void add_fours(ivec & sum, ivec & chain, int k, ivec x, const char * y, const ivec & scale) {
#ifdef SB_DPBUSD
    constexpr int length = T::OWN_SCALE / 4;
    chain = SB_DPBUSD(k % length ? chain : SB(set1_epi32)(0), x, four_of(y + 4 * k));
    const auto scaled = [&] { return SB(mullo_epi32)(chain, scale); };
#else
    constexpr int length = T::CHAIN;
    const ivec pairs = _mm256_maddubs_epi16(x, four_of(y + 4 * k));
    chain = k % length ? _mm256_add_epi16(chain, pairs) : pairs;
    hold(chain);
    const auto scaled = [&] { return _mm256_madd_epi16(chain, scale); };
#endif
    if (k % length == length - 1) {
        sum = SB(add_epi32)(sum, scaled());
    }
}

// asks for lines k, k + 8, and so on, of what the next group of rows has for a step
template <class T> SB_INLINE void fetch(const char * next, size_t k) {
    SB_UNROLL for (size_t i = 64 * k; i < LANES * sizeof(typename T::block) * 64 / QK_K; i += 8 * 64) {
        _mm_prefetch(next + i, _MM_HINT_T1);
    }
}

// the first 32 weights of a step, and the others, of each row times n columns; memory is asked meanwhile, not all at once
template <class T, int n> SB_INLINE void step(const T & x, const ivec * scales, const char * y, ivec * sum, const char * next) {
    constexpr int own = T::OWN_SCALE;
    if (n > 4) { // one after the other: there are no registers for both
        SB_UNROLL for (int i = 0; i < 2; ++i) {
            ivec chain[n];
            SB_UNROLL for (int k = 0; k < 8; ++k) {
                const ivec quants = i ? x.high(k) : x.low(k);
                if (i == 0) {
                    fetch<T>(next, k);
                }
                SB_UNROLL for (int j = 0; j < n; ++j) {
                    add_fours<T>(sum[j], chain[j], k, quants, y + QK_K * j + 32 * i, scales[(32 * i + 4 * k) / own]);
                }
            }
        }
        return;
    }
    ivec low[n], high[n];
    SB_UNROLL for (int k = 0; k < 8; ++k) {
        const ivec x_low = x.low(k), x_high = x.high(k);
        fetch<T>(next, k);
        SB_UNROLL for (int j = 0; j < n; ++j) {
            add_fours<T>(sum[j], low[j],  k, x_low,  y + QK_K * j,      scales[4 * k / own]);
            add_fours<T>(sum[j], high[j], k, x_high, y + QK_K * j + 32, scales[(32 + 4 * k) / own]);
        }
    }
}

template <class T, int n> void rows_lanes(const product & p, int64_t begin, int64_t end) {
    constexpr size_t bytes = sizeof(typename T::block);
    rows_by_group<n, LANES>(p, begin, end, [&](const char * own, size_t x_stride, float (*result)[LANES]) {
        const char * next = own + LANES * x_stride; // in one stream, not in one for each row
        columns y = p.y;
        fvec acc[n];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            acc[j] = SB(setzero_ps)();
        }
        for (int64_t u = 0; u < p.n_units; ++u, own += bytes) {
            T x;
            x.begin(own, x_stride);

            ivec sum[n];
            SB_UNROLL for (int j = 0; j < n; ++j) {
                sum[j] = SB(set1_epi32)(0);
            }
            int n_steps = QK_K / 64;
            __asm__("" : "+r"(n_steps)); // a loop, since four times the code takes longer
            for (int s = 0; s < n_steps; ++s, next += LANES * bytes * 64 / QK_K) {
                x.step(own, x_stride, s);
#ifndef SB_512
                if (n > 4) {
                    to_memory(x.quants);
                }
#endif
                step<T, n>(x, x.scales + 64 / T::OWN_SCALE * s, y.y + 64 * s, sum, next);
            }
            SB_UNROLL for (int j = 0; j < n; ++j) {
                const char * sums = (const char *) (y.sums + 16 * j);
                ivec less = SB(madd_epi16)(x.mins[0], four_of(sums));
                SB_UNROLL for (int i = 1; i < 128 / T::OWN_SCALE; ++i) {
                    less = add_pairs(less, x.mins[i], four_of(sums + 4 * i));
                }
                const fvec by = SB(set1_ps)(y.scales[j]);
                acc[j] = SB(fmadd_ps) (SB(mul_ps)(x.d,    by), SB(cvtepi32_ps)(sum[j]), acc[j]);
                acc[j] = SB(fnmadd_ps)(SB(mul_ps)(x.dmin, by), SB(cvtepi32_ps)(less),   acc[j]);
            }
            y.y += n * QK_K, y.sums += n * 16, y.scales += n;
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            SB(storeu_ps)(result[j], acc[j]);
        }
    });
}

// as prepare_256(), with sums of as many as share a scale
template <class T> void prepare_lanes(const float * x, char * y, float * sums, float * scale) {
    prepare_256(x, y, sums, scale);
    if (T::OWN_SCALE == 32) {
        sums_of_32(sums);
    }
}

} // namespace
