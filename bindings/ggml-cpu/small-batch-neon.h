#pragma once

// The products of some rows with 1 to 8 columns, on ARM with i8mm.
//
// A lane has a row. The sums of a block's (super-block's) products are integers, so they are exact in whatever order; the
// floats are added up block by block. So the bits of a result depend neither on the number of columns, nor on the row's
// place.
//
// One instruction of i8mm multiplies two rows by two columns, so columns lie in pairs: 8 bytes of each in turn. One column
// goes through dot products.

#include "small-batch-product.h"

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cstring>

namespace {

// ---- types
//
// quants<v> are the signed bytes of weights 16 v to 16 v + 15 of a block, in the order of `read`, which may mix two rows.
// weight = FACTOR * d * scale * quant - dmin * min, a scale for every OWN_SCALE weights, a min for every 32.

SB_INLINE int8x16_t  as_signed(uint8x16_t x)    { return vreinterpretq_s8_u8(x); }
SB_INLINE uint8x16_t low_nibbles(uint8x16_t x)  { return vandq_u8(x, vdupq_n_u8(15)); }
SB_INLINE uint8x16_t high_nibbles(uint8x16_t x) { return vshrq_n_u8(x, 4); }

template <int by> SB_INLINE uint8x16_t shift_left(uint8x16_t x) {
    if constexpr (by < 0) {
        return vshrq_n_u8(x, -by);
    } else {
        return vshlq_n_u8(x, by);
    }
}

template <class B> struct neon_32 {
    typedef B block;
    static constexpr int   UNIT      = 32;
    static constexpr bool  MINS      = false;
    static constexpr float FACTOR    = 1;
    static ggml_half d(const B & b) { return b.d; }
};

template <class B> struct neon_256 : neon_32<B> {
    static constexpr int   UNIT      = QK_K;
    static constexpr int   OWN_SCALE = 32;
};

struct neon_q8_0 : neon_32<block_q8_0> {
    template <int v, class R> SB_INLINE int8x16_t quants(R read) {
        return as_signed(read(offsetof(block, qs) + 16 * v));
    }
};

struct neon_q4_0 : neon_32<block_q4_0> {
    static constexpr float FACTOR = 1 / 16.f; // nibbles less 8, in the upper half of bytes
    template <int v, class R> SB_INLINE int8x16_t quants(R read) {
        const uint8x16_t both = veorq_u8(read(offsetof(block, qs)), vdupq_n_u8(0x88));
        return as_signed(v ? vandq_u8(both, vdupq_n_u8(0xF0)) : vshlq_n_u8(both, 4));
    }
};

// 12 bytes: 8 scales and 8 minima of 6 bits
SB_INLINE void neon_scales_and_mins(const uint8_t * p, int16x8_t * scales, int8x8_t & mins) {
    const uint32_t low4 = 0x0f0f0f0f, low6 = 0x3f3f3f3f, high2 = 0x30303030;
    uint32_t u[3];
    memcpy(u, p, sizeof(u));
    const uint64_t s = (u[0] & low6) | (uint64_t) ((u[2] & low4) | ((u[0] >> 2) & high2)) << 32;
    const uint64_t m = (u[1] & low6) | (uint64_t) (((u[2] >> 4) & low4) | ((u[1] >> 2) & high2)) << 32;
    *scales = vmovl_s8(vcreate_s8(s));
    mins    = vcreate_s8(m);
}

template <class B> struct neon_mins : neon_256<B> {
    static constexpr bool MINS = true;
    static ggml_half d   (const B & b) { return b.data.data.d; }
    static ggml_half dmin(const B & b) { return b.data.data.dmin; }
    SB_INLINE void groups(const B & b, int16x8_t * scales, int8x8_t & mins) { neon_scales_and_mins(b.scales, scales, mins); }
    template <int v, class R> SB_INLINE uint8x16_t nibbles(R read) {
        const uint8x16_t both = read(offsetof(B, qs) + 32 * (v / 4) + 16 * (v % 2));
        return v / 2 % 2 ? high_nibbles(both) : low_nibbles(both);
    }
};

struct neon_q4_K : neon_mins<block_q4_K> {
    template <int v, class R> SB_INLINE int8x16_t quants(R read) { return as_signed(nibbles<v>(read)); }
};

struct neon_q5_K : neon_mins<block_q5_K> {
    template <int v, class R> SB_INLINE int8x16_t quants(R read) {
        const uint8x16_t top = shift_left<4 - v / 2>(read(offsetof(block, qh) + 16 * (v % 2)));
        return as_signed(vbslq_u8(vdupq_n_u8(16), top, nibbles<v>(read)));
    }
};

struct neon_q6_K : neon_256<block_q6_K> {
    static constexpr int   OWN_SCALE = 16;
    static constexpr float FACTOR    = 1 / 4.f; // quants less 32, in the upper 6 bits of bytes
    SB_INLINE void groups(const block & b, int16x8_t * scales, int8x8_t &) {
        const int8x16_t all = vld1q_s8(b.scales);
        scales[0] = vmovl_s8(vget_low_s8(all));
        scales[1] = vmovl_s8(vget_high_s8(all));
    }
    template <int v, class R> SB_INLINE int8x16_t quants(R read) {
        constexpr int half = v / 8, k = v / 2 % 4, byte = 16 * (v % 2); // bits 2 k and 2 k + 1 of qh
        const uint8x16_t low = read(offsetof(block, ql) + 64 * half + 32 * (k % 2) + byte);
        const uint8x16_t top = veorq_u8(read(offsetof(block, qh) + 32 * half + byte), vdupq_n_u8(0xAA));
        return as_signed(vsriq_n_u8(shift_left<6 - 2 * k>(top), k < 2 ? vshlq_n_u8(low, 4) : vandq_u8(low, vdupq_n_u8(0xF0)), 2));
    }
};

struct neon_iq4_xs : neon_256<block_iq4_xs> {
    SB_INLINE void groups(const block & b, int16x8_t * scales, int8x8_t &) {
        uint32_t low;
        memcpy(&low, b.scales_l, sizeof(low));
        const uint8x8_t low4 = vzip1_u8(vcreate_u8(low & 0x0f0f0f0f), vcreate_u8((low >> 4) & 0x0f0f0f0f));
        const int16x8_t down = { 0, -2, -4, -6, -8, -10, -12, -14 };
        const uint16x8_t high2 = vandq_u16(vshlq_u16(vdupq_n_u16(b.scales_h), down), vdupq_n_u16(3));
        *scales = vsubq_s16(vreinterpretq_s16_u16(vorrq_u16(vmovl_u8(low4), vshlq_n_u16(high2, 4))), vdupq_n_s16(32));
    }
    template <int v, class R> SB_INLINE int8x16_t quants(R read) {
        const uint8x16_t both = read(offsetof(block, qs) + 16 * (v / 2));
        return vqtbl1q_s8(vld1q_s8(kvalues_iq4nl), v % 2 ? high_nibbles(both) : low_nibbles(both));
    }
};

// ---- rows

struct one_row {
    const uint8_t * x;
    uint8x16_t operator()(size_t at) const { return vld1q_u8(x + at); }
};

// halves of two registers: 8 weights of one row, 8 of the other
template <int half> struct two_rows {
    const uint8_t * a, * b;
    uint8x16_t operator()(size_t at) const {
        const uint64x2_t first = vreinterpretq_u64_u8(vld1q_u8(a + at)), second = vreinterpretq_u64_u8(vld1q_u8(b + at));
        return vreinterpretq_u8_u64(half ? vzip2q_u64(first, second) : vzip1q_u64(first, second));
    }
};

struct block_rows {
    const uint8_t * row[GROUP];
    template <class T> const typename T::block & at(int r) const { return *(const typename T::block *) row[r]; }
};

template <typename F> SB_INLINE float32x4_t halves_of_rows(F half) {
    const uint64_t bits = (uint64_t) half(0) | (uint64_t) half(1) << 16 | (uint64_t) half(2) << 32 | (uint64_t) half(3) << 48;
    return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(bits)));
}

// what the minima take off: at y are the sums of a column's groups of 32, their lower 7 bits and then their upper bits
SB_INLINE int32x4_t minima(const int8x8_t * mins, const float * y) {
    const int8x16_t sums = vld1q_s8((const int8_t *) y);
    int32x4_t part[GROUP];
    SB_UNROLL for (int r = 0; r < GROUP; ++r) {
        part[r] = vdotq_s32(vdupq_n_s32(0), vcombine_s8(mins[r], mins[r]), sums);
    }
    const int32x4_t a = vpaddq_s32(part[0], part[1]), b = vpaddq_s32(part[2], part[3]);
    return vmlaq_n_s32(vuzp1q_s32(a, b), vuzp2q_s32(a, b), 128);
}

SB_INLINE int32x4_t sums_of_four(const int32x4_t * part) {
    return vpaddq_s32(vpaddq_s32(part[0], part[1]), vpaddq_s32(part[2], part[3]));
}

// ---- one column

template <class T> SB_INLINE int32x4_t sums_32(const block_rows & x, const char * y) {
    const int8x16_t a = vld1q_s8((const int8_t *) y), b = vld1q_s8((const int8_t *) y + 16);
    int32x4_t part[GROUP];
    SB_UNROLL for (int r = 0; r < GROUP; ++r) {
        const one_row read { x.row[r] };
        part[r] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), T::template quants<0>(read), a), T::template quants<1>(read), b);
    }
    return sums_of_four(part);
}

// four groups of weights: their sums side by side, then one multiplication by their scales
template <class T, int four> SB_INLINE int32x4_t four_groups(const uint8_t * x, const char * y, int16x4_t scales, int32x4_t sum) {
    constexpr int n_quants = T::OWN_SCALE / 4, v = n_quants * four, each = n_quants / 4;
    int8x16_t q[n_quants];
    const one_row read { x };
    q[0] = T::template quants<v + 0>(read), q[1] = T::template quants<v + 1>(read);
    q[2] = T::template quants<v + 2>(read), q[3] = T::template quants<v + 3>(read);
    if constexpr (each == 2) {
        q[4] = T::template quants<v + 4>(read), q[5] = T::template quants<v + 5>(read);
        q[6] = T::template quants<v + 6>(read), q[7] = T::template quants<v + 7>(read);
    }
    const int8_t * b = (const int8_t *) y + 16 * v;
    int32x4_t dot[4];
    SB_UNROLL for (int i = 0; i < 4; ++i) {
        dot[i] = vdotq_s32(vdupq_n_s32(0), q[each * i], vld1q_s8(b + 16 * each * i));
        if (each == 2) {
            dot[i] = vdotq_s32(dot[i], q[2 * i + 1], vld1q_s8(b + 32 * i + 16));
        }
    }
    return vmlaq_s32(sum, sums_of_four(dot), vmovl_s16(scales));
}

template <class T> SB_INLINE int32x4_t sums_256(const block_rows & x, const char * y, const int16x8_t (*scales)[2]) {
    int32x4_t part[GROUP];
    for (int r = 0; r < GROUP; ++r) {
        part[r] = four_groups<T, 0>(x.row[r], y, vget_low_s16(scales[r][0]), vdupq_n_s32(0));
        part[r] = four_groups<T, 1>(x.row[r], y, vget_high_s16(scales[r][0]), part[r]);
        if constexpr (T::OWN_SCALE == 16) {
            part[r] = four_groups<T, 2>(x.row[r], y, vget_low_s16(scales[r][1]), part[r]);
            part[r] = four_groups<T, 3>(x.row[r], y, vget_high_s16(scales[r][1]), part[r]);
        }
    }
    return sums_of_four(part);
}

// ---- rows and columns in pairs

SB_INLINE int8x16_t load_pair(const char * y, bool lone, int k) {
    return lone ? vreinterpretq_s8_s64(vld1q_dup_s64((const int64_t *) (y + 8 * k))) : vld1q_s8((const int8_t *) y + 16 * k);
}

// 32 weights of 4 rows times those of two columns at y: rows 0 and 1, rows 2 and 3
template <int first, int last> SB_INLINE void dots(const int8x16_t (*x)[4], const char * y, bool lone, int32x4_t * dot) {
    dot[0] = dot[1] = vdupq_n_s32(0);
    SB_UNROLL for (int k = first; k < last; ++k) {
        const int8x16_t b = load_pair(y, lone, k);
        dot[0] = vmmlaq_s32(dot[0], x[0][k], b);
        dot[1] = vmmlaq_s32(dot[1], x[1][k], b);
    }
}

template <class T, int v> SB_INLINE void quants_of_rows(const block_rows & x, int8x16_t (*q)[4]) {
    SB_UNROLL for (int p = 0; p < 2; ++p) {
        q[p][0] = T::template quants<v>(two_rows<0> { x.row[2 * p], x.row[2 * p + 1] });
        q[p][1] = T::template quants<v>(two_rows<1> { x.row[2 * p], x.row[2 * p + 1] });
        q[p][2] = T::template quants<v + 1>(two_rows<0> { x.row[2 * p], x.row[2 * p + 1] });
        q[p][3] = T::template quants<v + 1>(two_rows<1> { x.row[2 * p], x.row[2 * p + 1] });
    }
}

template <int n> SB_INLINE void rows_in_lanes(const int32x4_t (*pairs)[2], int32x4_t * sum) {
    SB_UNROLL for (int j = 0; j < n; ++j) {
        const int32x4_t a = pairs[j / 2][0], b = pairs[j / 2][1];
        sum[j] = j % 2 ? vuzp2q_s32(a, b) : vuzp1q_s32(a, b);
    }
}

template <class T, int n> SB_INLINE void pairs_32(const block_rows & x, const char * y, int32x4_t * sum) {
    int8x16_t q[2][4];
    quants_of_rows<T, 0>(x, q);
    int32x4_t pairs[(n + 1) / 2][2];
    SB_UNROLL for (int j = 0; j < n; j += 2) {
        dots<0, 4>(q, y + 32 * j, j + 1 == n, pairs[j / 2]);
    }
    rows_in_lanes<n>(pairs, sum);
}

// the scales of a group of weights: rows 0 and 1, rows 2 and 3, each twice
SB_INLINE void scales_of_rows(const int32x4_t (*scales)[8], int group, int32x4_t * out) {
    SB_UNROLL for (int p = 0; p < 2; ++p) {
        const int32x4_t two = scales[p][group / 2];
        out[p] = group % 2 ? vzip2q_s32(two, two) : vzip1q_s32(two, two);
    }
}

template <class T, int n, int g> SB_INLINE void pairs_step(const block_rows & x, const char * y, const int32x4_t (*scales)[8], int32x4_t (*sum)[2]) {
    int8x16_t q[2][4];
    quants_of_rows<T, 2 * g>(x, q);
    int32x4_t first[2], second[2];
    scales_of_rows(scales, T::OWN_SCALE == 32 ? g : 2 * g, first);
    if (T::OWN_SCALE == 16) {
        scales_of_rows(scales, 2 * g + 1, second);
    }
    SB_UNROLL for (int j = 0; j < n; j += 2) {
        const bool lone = j + 1 == n;
        const char * b = y + QK_K * j + (lone ? 32 : 64) * g;
        int32x4_t dot[2];
        dots<0, T::OWN_SCALE == 32 ? 4 : 2>(q, b, lone, dot);
        SB_UNROLL for (int p = 0; p < 2; ++p) {
            sum[j / 2][p] = vmlaq_s32(sum[j / 2][p], dot[p], first[p]);
        }
        if (T::OWN_SCALE == 16) {
            dots<2, 4>(q, b, lone, dot);
            SB_UNROLL for (int p = 0; p < 2; ++p) {
                sum[j / 2][p] = vmlaq_s32(sum[j / 2][p], dot[p], second[p]);
            }
        }
    }
}

template <class T, int n> SB_INLINE void pairs_256(const block_rows & x, const char * y, const int16x8_t (*scales)[2], int32x4_t * sum) {
    int32x4_t wide[2][8], pairs[(n + 1) / 2][2];
    SB_UNROLL for (int i = 0; i < 256 / T::OWN_SCALE; ++i) { // two groups of rows 0 and 1, or of rows 2 and 3
        const int p = i % 2, two = i / 2, from = two / 4;
        const int16x8_t a = scales[2 * p][from], b = scales[2 * p + 1][from];
        const int16x8_t ab = two / 2 % 2 ? vzip2q_s16(a, b) : vzip1q_s16(a, b);
        wide[p][two] = vmovl_s16(two % 2 ? vget_high_s16(ab) : vget_low_s16(ab));
    }
    SB_UNROLL for (int j = 0; j < n; j += 2) {
        pairs[j / 2][0] = pairs[j / 2][1] = vdupq_n_s32(0);
    }
    pairs_step<T, n, 0>(x, y, wide, pairs);
    pairs_step<T, n, 1>(x, y, wide, pairs);
    pairs_step<T, n, 2>(x, y, wide, pairs);
    pairs_step<T, n, 3>(x, y, wide, pairs);
    pairs_step<T, n, 4>(x, y, wide, pairs);
    pairs_step<T, n, 5>(x, y, wide, pairs);
    pairs_step<T, n, 6>(x, y, wide, pairs);
    pairs_step<T, n, 7>(x, y, wide, pairs);
    rows_in_lanes<n>(pairs, sum);
}

template <class T, int n> SB_INLINE void sums_of_unit(const block_rows & x, const char * y, [[maybe_unused]] const int16x8_t (*scales)[2], int32x4_t * sum) {
    if constexpr (n > 1 && T::UNIT == 32) {
        pairs_32<T, n>(x, y, sum);
    } else if constexpr (n > 1) {
        pairs_256<T, n>(x, y, scales, sum);
    } else if constexpr (T::UNIT == 32) {
        *sum = sums_32<T>(x, y);
    } else {
        *sum = sums_256<T>(x, y, scales);
    }
}

template <class T, int n> SB_INLINE void add_unit(const block_rows & x, columns y, float32x4_t * acc) {
    int32x4_t sum[n];
    [[maybe_unused]] int8x8_t mins[GROUP];
    int16x8_t scales[GROUP][2];
    if constexpr (T::UNIT == QK_K) {
        SB_UNROLL for (int r = 0; r < GROUP; ++r) {
            T::groups(x.at<T>(r), scales[r], mins[r]);
        }
    }
    sums_of_unit<T, n>(x, y.y, scales, sum);
    float32x4_t d = halves_of_rows([&](int r) { return T::d(x.at<T>(r)); });
    if (T::FACTOR != 1) {
        d = vmulq_n_f32(d, T::FACTOR);
    }
    SB_UNROLL for (int j = 0; j < n; ++j) {
        acc[j] = vfmaq_f32(acc[j], vcvtq_f32_s32(sum[j]), vmulq_n_f32(d, y.scales[j]));
    }
    if constexpr (T::MINS) {
        const float32x4_t dmin = halves_of_rows([&](int r) { return T::dmin(x.at<T>(r)); });
        SB_UNROLL for (int j = 0; j < n; ++j) {
            acc[j] = vfmsq_f32(acc[j], vcvtq_f32_s32(minima(mins, y.sums + 4 * j)), vmulq_n_f32(dmin, y.scales[j]));
        }
    }
}

template <class T, int n> void rows_neon(const product & p, int64_t begin, int64_t end) {
    constexpr int n_sums = T::MINS ? 4 : 0;
    for (int64_t first = begin; first < end; first += GROUP) {
        const int n_rows = (int) std::min<int64_t>(GROUP, end - first);
        block_rows x;
        SB_UNROLL for (int r = 0; r < GROUP; ++r) { // what is missing in the last group: its last row again
            x.row[r] = (const uint8_t *) p.x + (first + std::min(r, n_rows - 1)) * p.x_stride;
        }
        float32x4_t acc[n];
        SB_UNROLL for (int j = 0; j < n; ++j) {
            acc[j] = vdupq_n_f32(0);
        }
        columns y = p.y;
        for (int64_t u = 0; u < p.n_units; ++u) {
            add_unit<T, n>(x, y, acc);
            y.y += n * T::UNIT, y.sums += n * n_sums, y.scales += n;
            SB_UNROLL for (int r = 0; r < GROUP; ++r) {
                x.row[r] += sizeof(typename T::block);
            }
        }
        SB_UNROLL for (int j = 0; j < n; ++j) {
            float some[GROUP];
            vst1q_f32(some, acc[j]);
            std::copy(some, some + n_rows, p.dst[j] + first);
        }
    }
}

// ---- columns, quantized as upstream does it

template <class T> void prepare_neon(const float * x, char * y, [[maybe_unused]] float * sums, float * scale) {
    if constexpr (T::UNIT == QK8_0) {
        block_q8_0 block;
        quantize_row_q8_0(x, &block, QK8_0);
        memcpy(y, block.qs, QK8_0);
        *scale = GGML_CPU_FP16_TO_FP32(block.d);
    } else {
        block_q8_K block;
        quantize_row_q8_K(x, &block, QK_K);
        memcpy(y, block.qs, QK_K);
        *scale = block.d;
        if (T::MINS) {
            int8_t parts[16];
            for (int g = 0; g < 8; ++g) {
                const int sum = block.bsums[2 * g] + block.bsums[2 * g + 1];
                parts[g] = sum & 127, parts[g + 8] = sum >> 7;
            }
            memcpy(sums, parts, sizeof(parts));
        }
    }
}

} // namespace
