#pragma once

// How weights of each type are read, for small-batch-kernels*.h and large-batch-kernels.h: a struct for each type, with the formula
// of its weights, its scales, and its quants as bytes in order.

#include "small-batch-simd.h"

namespace {

// How a weight comes from its quant, with the d (and dmin) of its block and the scale (and min) of its group.
enum class formula {
    MIN,          // d * scale * quant - dmin * min
    BIAS,         // d * scale * (quant - BIAS)
    SIGNED,       // d * scale * quant, of either sign
    GRID_SIGNS,   // as BIAS; or grid<v>, sizes of a grid, with the signs of minuses<v>, which a column can take over
    GRID_OFFSETS, // as BIAS; or scale * (grid<v> + 1) and offsets() of the groups, both in eighths of d
};

template <class T> constexpr bool HAS_MIN   = T::FORMULA == formula::MIN;
template <class T> constexpr bool IS_SIGNED = T::FORMULA == formula::SIGNED;

// ---- Super-blocks of 256 weights, times columns in blocks of 256 with one scale (as block_q8_K) ----
//
// groups(): scale and min of 16 groups of 16 weights (of 8 groups of 32: twice each). quants<v>: those of weights 64 v to
// 64 v + 63, in order, at most 127; of formula SIGNED at least -127, else 0.

// 12 bytes: 8 scales and 8 minima of 6 bits
SB_INLINE void scales_and_mins(const uint8_t * p, shorts & scales, shorts & mins) {
    const int32_t low4 = 0x0f0f0f0f, low6 = 0x3f3f3f3f, high2 = 0x30303030;
    const __m128i u   = _mm_loadu_si128((const __m128i *) p); // and 4 bytes of quants
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(u, _MM_SHUFFLE(2, 1, 2, 0)), _mm_setr_epi32(0, 0, 0, 4));
    const __m128i top = _mm_srli_epi32(_mm_shuffle_epi32(u, _MM_SHUFFLE(1, 1, 0, 0)), 2);
    const __m128i all = _mm_or_si128(_mm_and_si128(low, _mm_setr_epi32(low6, low4, low6, low4)),
                                     _mm_and_si128(top, _mm_setr_epi32(0, high2, 0, high2)));
    scales = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(all, all));
    mins   = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(all, all));
}

struct type_k { // what most of them have in common
    static constexpr formula FORMULA = formula::BIAS;
    static constexpr int OWN_SCALE = 32;  // weights that share scale and min
    static constexpr int MOST      = 127; // of the quants
    static constexpr int BIAS      = 0;
    static constexpr float FACTOR  = 1;   // of d
};

struct type_q4_K : type_k {
    typedef block_q4_K block;
    static constexpr int MOST = 15;
    static constexpr formula FORMULA = formula::MIN;
    static ggml_half d   (const block & b) { return b.data.data.d; }
    static ggml_half dmin(const block & b) { return b.data.data.dmin; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts & mins) { scales_and_mins(b.scales, scales, mins); }
    template <int v> SB_INLINE bytes quants(const block & b) { return twice<0, 4, 0, 15>(b.qs + 32 * v); }
};

struct type_q5_K : type_k {
    typedef block_q5_K block;
    static constexpr int MOST = 31;
    static constexpr formula FORMULA = formula::MIN;
    static ggml_half d   (const block & b) { return b.data.data.d; }
    static ggml_half dmin(const block & b) { return b.data.data.dmin; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts & mins) { scales_and_mins(b.scales, scales, mins); }
    template <int v> SB_INLINE bytes quants(const block & b) {
        return operator_or(twice<0, 4, 0, 15>(b.qs + 32 * v), twice<2 * v, 2 * v + 1, 4, 1>(b.qh));
    }
};

struct type_q2_K : type_k {
    typedef block_q2_K block;
    static constexpr int OWN_SCALE = 16;
    static constexpr int MOST = 3;
    static constexpr formula FORMULA = formula::MIN;
    static ggml_half d   (const block & b) { return b.data.data.d; }
    static ggml_half dmin(const block & b) { return b.data.data.dmin; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts & mins) {
        const __m128i both = _mm_loadu_si128((const __m128i *) b.scales), low4 = _mm_set1_epi8(15);
        scales = _mm256_cvtepu8_epi16(_mm_and_si128(both, low4));
        mins   = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(both, 4), low4));
    }
    template <int v> SB_INLINE bytes quants(const block & b) {
        return twice<4 * (v % 2), 4 * (v % 2) + 2, 0, 3>(b.qs + 32 * (v / 2));
    }
};

struct type_q3_K : type_k {
    typedef block_q3_K block;
    static constexpr int OWN_SCALE = 16;
    static constexpr int MOST = 7;
    static constexpr int BIAS = 4;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        uint32_t u[3];
        memcpy(u, b.scales, sizeof(u));
        const uint32_t low4 = 0x0f0f0f0f, high2 = 0x30303030;
        const __m128i all = _mm_setr_epi32((u[0] & low4) | ((u[2] << 4) & high2), (u[1] & low4) | ((u[2] << 2) & high2),
                                           ((u[0] >> 4) & low4) | (u[2] & high2), ((u[1] >> 4) & low4) | ((u[2] >> 2) & high2));
        scales = _mm256_cvtepi8_epi16(_mm_sub_epi8(all, _mm_set1_epi8(32)));
    }
    template <int v> SB_INLINE bytes quants(const block & b) {
        return operator_or(twice<4 * (v % 2), 4 * (v % 2) + 2, 0, 3>(b.qs + 32 * (v / 2)), twice<2 * v, 2 * v + 1, 2, 1>(b.hmask));
    }
};

struct type_q6_K : type_k {
    typedef block_q6_K block;
    static constexpr int OWN_SCALE = 16;
    static constexpr int MOST = 63;
    static constexpr int BIAS = 32;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        scales = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) b.scales));
    }
    template <int v> SB_INLINE bytes quants(const block & b) {
        const bytes low = load(b.ql + 64 * (v / 2));
        return operator_or(v % 2 ? high_nibbles(low) : operator_and(low, fill(15)),
                           twice<4 * (v % 2), 4 * (v % 2) + 2, 4, 3>(b.qh + 32 * (v / 2)));
    }
};

struct type_iq4_xs : type_k {
    typedef block_iq4_xs block;
    static constexpr formula FORMULA = formula::SIGNED;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        uint32_t low;
        memcpy(&low, b.scales_l, sizeof(low));
        const __m128i low4  = _mm_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(low & 0x0f0f0f0f),
                                                                  _mm_cvtsi32_si128((low >> 4) & 0x0f0f0f0f)));
        const __m128i top   = _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1);
        const __m128i high2 = _mm_srli_epi16(_mm_mullo_epi16(_mm_set1_epi16((short) b.scales_h), top), 14);
        scales = twice_each(_mm_sub_epi16(_mm_or_si128(low4, _mm_slli_epi16(high2, 4)), _mm_set1_epi16(32)));
    }
    template <int v> SB_INLINE bytes quants(const block & b) { return lookup(kvalues_iq4nl, nibbles_by_16(b.qs + 32 * v)); }
};

// Grids: quants are looked up eight at a time, or four, and have signs of their own.

// grid<v> are their sizes, bit i of signs<v> says whether quant i is negative.

template <class T> struct type_grid : type_k {
    static constexpr formula FORMULA = formula::GRID_SIGNS;
    static constexpr int BIAS     = 64;
    template <int v, typename B> SB_INLINE bytes quants(const B & b) {
        return with_signs(T::template grid<v>(b), T::template signs<v>(b));
    }
    template <int v, typename B> SB_INLINE bytes minuses(const B & b) { // of quants that are negative
        return bits_to_minuses(T::template signs<v>(b));
    }
};

// 2 * x + 1 of the nibbles of 8 bytes, the lower one first
SB_INLINE shorts odd_scales(__m128i x) {
    const __m128i each = _mm_and_si128(_mm_unpacklo_epi8(x, _mm_srli_epi16(x, 4)), _mm_set1_epi8(15));
    return _mm256_cvtepu8_epi16(_mm_add_epi8(_mm_add_epi8(each, each), _mm_set1_epi8(1)));
}

// 2 * x + 1 of the highest nibbles of 8 words
SB_INLINE shorts odd_scales_of_words(__m256i words) {
    const __m256i x = _mm256_srli_epi32(words, 28);
    const __m128i each = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return twice_each(_mm_add_epi16(_mm_add_epi16(each, each), _mm_set1_epi16(1)));
}

// signs of 8 times 8 weights from the first seven of each: the number of minuses is even, as in ksigns_iq2xs
SB_INLINE uint64_t with_last_signs(uint64_t x) {
    uint64_t odd = x ^ (x >> 4);
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return x | (odd & 0x0101010101010101) << 7;
}

// the same from four times 7 bits of a word, and of another one
SB_INLINE uint64_t signs_of_words(uint32_t a, uint32_t b) {
    uint64_t x = a | (uint64_t) b << 32;
    x = (x & 0x00003fff00003fff) | (x & 0x0fffc0000fffc000) << 2;
    x = (x & 0x007f007f007f007f) | (x & 0x3f803f803f803f80) << 1;
    return with_last_signs(x);
}

struct type_iq2_xxs : type_grid<type_iq2_xxs> {
    typedef block_iq2_xxs block;
    static constexpr float FACTOR = 0.125f;
    static ggml_half d(const block & b) { return b.d; }
    static uint32_t aux(const block & b, int i32) { uint32_t u; memcpy(&u, b.qs + 4 * i32 + 2, sizeof(u)); return u; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) { // the odd words of 16
        const __m256i x = _mm256_loadu_si256((const __m256i *) b.qs), y = _mm256_loadu_si256((const __m256i *) b.qs + 1);
        const __m256 odd = _mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), 0xDD);
        scales = odd_scales_of_words(_mm256_permute4x64_epi64(_mm256_castps_si256(odd), 0xD8));
    }
    template <int v> SB_INLINE bytes grid(const block & b) {
        const uint8_t * q = (const uint8_t *) (b.qs + 8 * v);
        return from_eights([&](int i) { return iq2xxs_grid[q[i / 4 * 8 + i % 4]]; });
    }
    template <int v> SB_INLINE uint64_t signs(const block & b) { return signs_of_words(aux(b, 2 * v), aux(b, 2 * v + 1)); }
};

struct type_iq2_xs : type_grid<type_iq2_xs> {
    typedef block_iq2_xs block;
    static constexpr int OWN_SCALE = 16;
    static constexpr float FACTOR = 0.125f;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        scales = odd_scales(_mm_loadl_epi64((const __m128i *) b.scales));
    }
    template <int v> SB_INLINE __m128i words(const block & b) { return _mm_loadu_si128((const __m128i *) (b.qs + 8 * v)); }
    template <int v> SB_INLINE bytes grid(const block & b) {
        uint16_t index[8];
        _mm_storeu_si128((__m128i *) index, _mm_and_si128(words<v>(b), _mm_set1_epi16(511)));
        return from_eights([&](int i) { return iq2xs_grid[index[i]]; });
    }
    template <int v> SB_INLINE uint64_t signs(const block & b) {
        const __m128i q = words<v>(b);
        uint64_t signs;
        const __m128i first = _mm_srli_epi16(q, 9); // seven of each; the number of minuses is even
        const __m128i odd   = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
        const __m128i last  = _mm_shuffle_epi8(odd, _mm_xor_si128(first, _mm_srli_epi16(q, 13)));
        _mm_storel_epi64((__m128i *) &signs, _mm_packus_epi16(_mm_or_si128(first, last), q));
        return signs;
    }
};

struct type_iq2_s : type_grid<type_iq2_s> {
    typedef block_iq2_s block;
    static constexpr int OWN_SCALE = 16;
    static constexpr float FACTOR = 0.125f;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        scales = odd_scales(_mm_loadl_epi64((const __m128i *) b.scales));
    }
    template <int v> SB_INLINE bytes grid(const block & b) {
        return from_eights([&](int i) {
            return iq2s_grid[b.qs[8 * v + i] | (b.qh[2 * v + i / 4] << (8 - 2 * (i % 4)) & 0x300)];
        });
    }
    template <int v> SB_INLINE uint64_t signs(const block & b) {
        uint64_t signs;
        memcpy(&signs, b.qs + QK_K / 8 + 8 * v, sizeof(signs));
        return signs;
    }
};

struct type_iq3_xxs : type_grid<type_iq3_xxs> {
    typedef block_iq3_xxs block;
    static constexpr float FACTOR = 0.25f;
    static ggml_half d(const block & b) { return b.d; }
    static uint32_t aux(const block & b, int i32) { uint32_t u; memcpy(&u, b.qs + QK_K / 4 + 4 * i32, sizeof(u)); return u; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        scales = odd_scales_of_words(_mm256_loadu_si256((const __m256i *) (b.qs + QK_K / 4)));
    }
    template <int v> SB_INLINE bytes grid(const block & b) {
        return from_fours([&](int i) { return (int) iq3xxs_grid[b.qs[16 * v + i]]; });
    }
    template <int v> SB_INLINE bytes minuses(const block & b) {
        return from_eights([&](int i) { return ksigns64[(aux(b, 2 * v + i / 4) >> 7 * (i % 4)) & 127]; });
    }
    template <int v> SB_INLINE uint64_t signs(const block & b) {
        uint64_t signs = 0; // looked up: arithmetic takes longer
        SB_UNROLL for (int i = 0; i < 8; ++i) {
            signs |= (uint64_t) ksigns_iq2xs[(aux(b, 2 * v + i / 4) >> 7 * (i % 4)) & 127] << 8 * i;
        }
        return signs;
    }
};

struct type_iq3_s : type_grid<type_iq3_s> {
    typedef block_iq3_s block;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) {
        uint32_t u;
        memcpy(&u, b.scales, sizeof(u));
        scales = twice_each(_mm256_castsi256_si128(odd_scales(_mm_cvtsi32_si128(u))));
    }
    template <int v> SB_INLINE uint64_t signs(const block & b) {
        uint64_t signs;
        memcpy(&signs, b.signs + 8 * v, sizeof(signs));
        return signs;
    }
    template <int v> SB_INLINE bytes grid(const block & b) {
        uint16_t high, index[16]; // of 9 bits
        memcpy(&high, b.qh + 2 * v, sizeof(high));
        const __m256i low8 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *) (b.qs + 16 * v)));
        _mm256_storeu_si256((__m256i *) index, or_where(low8, high, 256));
        return from_fours([&](int i) { return (int) iq3s_grid[index[i]]; });
    }
};

// The grid has -1, 0 and 1; each has 1/8 added or taken away. quant = 8 * (value + 1), or 2 more.
struct type_iq1 : type_k {
    static constexpr int BIAS = 9;
    static constexpr int MOST = 18;
    SB_INLINE bytes eighths(bytes x, bytes two_or_none) {
        static const int8_t table[16] = { 8, 16 }; // of -1 a lookup makes 0
        return operator_or(lookup(table, x), two_or_none);
    }
};

struct type_iq1_s : type_iq1 {
    typedef block_iq1_s block;
    static constexpr formula FORMULA = formula::GRID_OFFSETS;
    static constexpr float FACTOR = 0.125f;
    static ggml_half d(const block & b) { return b.d; }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) { // 2 * x + 1 of 3 bits
        const __m128i x = _mm_srli_epi16(_mm_loadu_si128((const __m128i *) b.qh), 11);
        scales = twice_each(_mm_or_si128(_mm_and_si128(x, _mm_set1_epi16(14)), _mm_set1_epi16(1)));
    }
    template <int v> SB_INLINE bytes grid(const block & b) {
        return from_eights([&](int i) {
            return iq1s_grid[b.qs[8 * v + i] | ((b.qh[2 * v + i / 4] << 8 >> 3 * (i % 4)) & 0x700)];
        });
    }
    template <int v> SB_INLINE bytes quants(const block & b) {
        const auto up = [&](int i) { return _mm256_set1_epi8(b.qh[2 * v + i] & 0x8000 ? 0 : 2); };
        return eighths(grid<v>(b), joined(up(0), up(1)));
    }

    SB_INLINE shorts offsets(const block & b, shorts scales) { // of 8 * (value + 1): scales times -7 or -9
        const __m128i down = _mm_srai_epi16(_mm_loadu_si128((const __m128i *) b.qh), 15);
        return _mm256_mullo_epi16(scales, twice_each(_mm_add_epi16(_mm_set1_epi16(-7), _mm_add_epi16(down, down))));
    }
};

struct type_iq1_m : type_iq1 {
    typedef block_iq1_m block;
    static constexpr int OWN_SCALE = 16;
    static constexpr float FACTOR = 0.125f;
    static ggml_half d(const block & b) {
        uint16_t u[4];
        memcpy(u, b.scales, sizeof(u));
        return (u[0] >> 12) | ((u[1] >> 8) & 0x00f0) | ((u[2] >> 4) & 0x0f00) | (u[3] & 0xf000);
    }
    SB_INLINE void groups(const block & b, shorts & scales, shorts &) { // four times 3 bits of each word
        const __m256i each = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0504050405040504, 0x0706070607060706);
        const __m256i x    = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *) b.scales)), each);
        const __m256i top  = _mm256_mullo_epi16(x, _mm256_set1_epi64x(0x0010008004002000)); // 13, 10, 7, 4 to the left
        scales = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(top, 12), _mm256_set1_epi16(14)), _mm256_set1_epi16(1));
    }
    template <int v> SB_INLINE bytes quants(const block & b) {
        uint32_t high;
        memcpy(&high, b.qh + 4 * v, sizeof(high));
        const auto up = [&](int i) { // 2 where the highest bit of the nibble of 8 weights is not set
            const __m256i which = _mm256_setr_epi64x(0, 0, 0x0101010101010101, 0x0101010101010101);
            const __m256i bit   = _mm256_setr_epi64x(0x0808080808080808, (int64_t) 0x8080808080808080, 0x0808080808080808, (int64_t) 0x8080808080808080);
            const __m256i x     = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int) (high >> 16 * i)), which), bit);
            return _mm256_and_si256(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()), _mm256_set1_epi8(2));
        };
        return eighths(from_eights([&](int i) {
            return iq1s_grid[b.qs[8 * v + i] | ((i < 2 ? high << (8 - 4 * i) : high >> (4 * i - 8)) & 0x700)];
        }), joined(up(0), up(1)));
    }
};

// ---- Blocks of 32 weights, times columns in blocks of 32 (as block_q8_0) ----
//
// quants: signed bytes of block i of row a, and where there are 512 bits of row b; half: its scale, or where it has several,
// scales: the float of each 4 quants.

template <typename B> struct type_32 {
    typedef B block;
    static constexpr formula FORMULA = formula::SIGNED;
    static constexpr int  BIAS = 0, MOST = 127;
    static const B & at(const char * row, int64_t i) { return ((const B *) row)[i]; }
    static float scale(const B & b) { return GGML_CPU_FP16_TO_FP32(b.d); }
    SB_INLINE fvec scales(const char * x, size_t x_stride) {
        return lanes_of_halves([&](int i) { return ((const B *) (x + i * x_stride))->d; });
    }
};

struct type_q8_0 : type_32<block_q8_0> {
    SB_INLINE ivec quants(const char * a, const char * b, int64_t i) { return load_32(at(a, i).qs, at(b, i).qs); }
};

// 64 weights with a scale for each 16: two blocks of 32
struct type_nvfp4 : type_32<block_nvfp4> {
    SB_INLINE ivec quants(const char * a, const char * b, int64_t i) {
        return table_16(kvalues_mxfp4, nibbles_by_8(at(a, i / 2).qs + 16 * (i % 2), at(b, i / 2).qs + 16 * (i % 2)));
    }
    SB_INLINE fvec scales(const char * a, const char * b, int64_t i) {
        return four_ue4m3(at(a, i / 2).d + 2 * (i % 2), at(b, i / 2).d + 2 * (i % 2));
    }
};

// ---- Blocks of 32 weights in 16 bytes: low nibbles are the first 16, high ones the others. Columns as above. ----
//
// The bytes of as many rows as a register holds lie in it side by side, so that a lane gets 8 weights of a block.
// values() are unsigned operands of the dot product, or signed bytes (formula SIGNED) where that takes 7 bits only; of formula
// MIN: weight = scale * value + min.

#if defined(SB_512) || defined(__AVXVNNI__)
static constexpr int TABLE_BIAS = 128; // makes a signed table unsigned
#else
static constexpr int TABLE_BIAS = 0;
#endif

template <typename B> struct type_nibbles {
    typedef B block;
    static constexpr formula FORMULA = formula::BIAS;
    static constexpr bool FIFTH = false; // bits of weights, in qh
    static float scale(const B & b) { return GGML_CPU_FP16_TO_FP32(b.d); }
    SB_INLINE fvec scales(const char * x, size_t x_stride) {
        return lanes_of_halves([&](int i) { return ((const B *) (x + i * x_stride))->d; });
    }
};

struct type_q4_0 : type_nibbles<block_q4_0> {
    static constexpr int  BIAS   = 8;
    static constexpr int  MOST   = 15;
    SB_INLINE ivec values(ivec nibbles) { return nibbles; }
};

template <typename B> struct type_with_mins : type_nibbles<B> {
    static constexpr int  BIAS   = 0;
    static constexpr int  MOST   = 31;
    static constexpr formula FORMULA = formula::MIN;
    static float scale(const B & b) { return GGML_CPU_FP16_TO_FP32(b.data.data.d); }
    static float min  (const B & b) { return GGML_CPU_FP16_TO_FP32(b.data.data.m); }
    SB_INLINE ivec values(ivec nibbles) { return nibbles; }
    SB_INLINE fvec scales(const char * x, size_t x_stride) {
        return lanes_of_halves([&](int i) { return ((const B *) (x + i * x_stride))->data.data.d; });
    }
    SB_INLINE fvec mins(const char * x, size_t x_stride) {
        return lanes_of_halves([&](int i) { return ((const B *) (x + i * x_stride))->data.data.m; });
    }
};

struct type_q4_1 : type_with_mins<block_q4_1> {};

struct type_q5_0 : type_nibbles<block_q5_0> {
    static constexpr int  BIAS   = 16;
    static constexpr int  MOST   = 31;
    static constexpr bool FIFTH  = true;
    SB_INLINE ivec values(ivec nibbles) { return nibbles; }
};

struct type_q5_1 : type_with_mins<block_q5_1> {
    static constexpr bool FIFTH = true;
};

struct type_iq4_nl : type_nibbles<block_iq4_nl> {
    static constexpr int  BIAS   = TABLE_BIAS;
    static constexpr int  MOST   = 127; // or 241 where 16 bits need not hold a product
    static constexpr formula FORMULA = TABLE_BIAS ? formula::BIAS : formula::SIGNED;
    SB_INLINE ivec values(ivec nibbles) {
        return table_16(kvalues_iq4nl, nibbles, BIAS);
    }
};

struct type_mxfp4 : type_nibbles<block_mxfp4> {
    static constexpr int  BIAS   = 12; // the table has -12 to 12; more would cost the sums of the lanes precision
    static constexpr int  MOST   = 24;
    static float scale(const block_mxfp4 & b) { return GGML_CPU_E8M0_TO_FP32_HALF(b.e); }
    SB_INLINE ivec values(ivec nibbles) {
        return table_16(kvalues_mxfp4, nibbles, BIAS);
    }
    SB_INLINE fvec scales(const char * x, size_t x_stride) {
        float own[LANES];
        SB_UNROLL for (int i = 0; i < LANES; ++i) {
            own[i] = scale(*(const block_mxfp4 *) (x + i * x_stride));
        }
        return SB(loadu_ps)(own);
    }
};

} // namespace
