#pragma once

// What the kernels of small-batch.cpp and large-batch.cpp are given, and vectors for them: of 512 bits where there is AVX-512 VNNI,
// of 256 (AVX2) else.

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "simd-mappings.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#define SB_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SB_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define SB_512
#endif

namespace {

constexpr int MAX_PASS = 8; // columns that one pass over the rows computes

// Columns are prepared once for all rows, in units: a number of bytes, then for some types sums and a scale. The units
// of the columns of a pass lie side by side: unit 0 of each, unit 1 of each and so on.
struct columns {
    char  * y;
    float * sums;
    float * scales;
};

struct product {
    int64_t      n_units; // per row and per column
    const char * x;       // rows
    size_t       x_stride;
    columns      y;
    float *      dst[MAX_PASS];
};

// 64 bytes; what belongs to 16 groups of weights: 16 shorts, 16 floats; and a register of floats
typedef __m256i shorts;

SB_INLINE __m256i load_256(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }

SB_INLINE __m256i bits_to_bytes(uint32_t bits) {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit   = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    const __m256i x     = _mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), which);
    return _mm256_cmpeq_epi8(_mm256_and_si256(x, bit), bit);
}

#ifdef SB_512
#define SB(op) _mm512_##op
#define SB_AND _mm512_and_si512
#define SB_OR _mm512_or_si512
#define SB_XOR _mm512_xor_si512
#define SB_BROADCAST_128 _mm512_broadcast_i32x4
#define SB_LOAD(p) _mm512_loadu_si512(p)
typedef __m512i ivec;
typedef __m512  fvec;
typedef ivec    bytes;
typedef fvec    floats;

SB_INLINE bytes  load(const void * p)            { return _mm512_loadu_si512(p); }
SB_INLINE bytes  fill(int8_t value)              { return _mm512_set1_epi8(value); }
SB_INLINE bytes  operator_and(bytes a, bytes b)  { return _mm512_and_si512(a, b); }
SB_INLINE bytes  operator_or(bytes a, bytes b)   { return _mm512_or_si512(a, b); }
SB_INLINE bytes  high_nibbles(bytes a)           { return operator_and(_mm512_srli_epi16(a, 4), fill(15)); }
SB_INLINE bytes  joined(__m256i a, __m256i b)    { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

SB_INLINE bytes lookup(const int8_t * table, bytes index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), index);
}

// the 32 bytes at p, twice: `mask` of the bits from s0 on, then of those from s1 on, at bit d
template <int s0, int s1, int d, int mask> SB_INLINE bytes twice(const void * p) {
    const bytes x = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) p));
    constexpr int64_t a = (s0 - d) & 63, b = (s1 - d) & 63;
    return operator_and(_mm512_rorv_epi64(x, _mm512_setr_epi64(a, a, a, a, b, b, b, b)), fill(mask << d));
}

// 32 bytes at p: the low nibbles of 16 of them, their high ones, and the same of the others
SB_INLINE bytes nibbles_by_16(const void * p) {
    const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) p));
    const __m512i twin = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), x);
    return operator_and(_mm512_srlv_epi64(twin, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), fill(15));
}

// 8 entries of a grid, of 8 weights each. Loads that leave the other lanes cost less than to join registers.
template <typename F> SB_INLINE bytes from_eights(F entry) {
    const auto two = [&](int i) { return _mm_mask_set1_epi64(_mm_cvtsi64_si128(entry(i)), 2, entry(i + 1)); };
    const auto four = [&](int i) { return _mm256_set_m128i(two(i + 2), two(i)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(4), 1);
}

// 16 entries of 4 weights
template <typename F> SB_INLINE bytes from_fours(F entry) {
    const auto four = [&](int i) {
        const __m128i two = _mm_mask_set1_epi32(_mm_cvtsi32_si128(entry(i)), 2, entry(i + 1));
        return _mm_mask_set1_epi32(_mm_mask_set1_epi32(two, 4, entry(i + 2)), 8, entry(i + 3));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(four(4), four(0))), _mm256_set_m128i(four(12), four(8)), 1);
}

// words, with `value` where their bit is set
SB_INLINE __m256i or_where(__m256i x, uint16_t bits, short value) {
    return _mm256_mask_add_epi16(x, bits, x, _mm256_set1_epi16(value));
}

// weights, negative where their bit is set, plus 64
SB_INLINE bytes with_signs(bytes x, uint64_t signs) {
    return _mm512_add_epi8(_mm512_mask_sub_epi8(x, signs, _mm512_setzero_si512(), x), fill(64));
}

#else

#define SB(op) _mm256_##op
#define SB_AND _mm256_and_si256
#define SB_OR _mm256_or_si256
#define SB_XOR _mm256_xor_si256
#define SB_BROADCAST_128 _mm256_broadcastsi128_si256
#define SB_LOAD(p) _mm256_loadu_si256((const __m256i *) (p))
typedef __m256i ivec;
typedef __m256  fvec;
struct bytes  { __m256i lo, hi; };
struct floats { __m256  lo, hi; };

SB_INLINE bytes  load(const void * p)            { return { load_256(p), load_256((const char *) p + 32) }; }
SB_INLINE bytes  fill(int8_t value)              { return { _mm256_set1_epi8(value), _mm256_set1_epi8(value) }; }
SB_INLINE bytes  operator_and(bytes a, bytes b)  { return { _mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi) }; }
SB_INLINE bytes  operator_or(bytes a, bytes b)   { return { _mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi) }; }
SB_INLINE bytes  high_nibbles(bytes a)           { return operator_and({ _mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4) }, fill(15)); }
SB_INLINE bytes  joined(__m256i a, __m256i b)    { return { a, b }; }

SB_INLINE bytes lookup(const int8_t * table, bytes index) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table));
    return { _mm256_shuffle_epi8(t, index.lo), _mm256_shuffle_epi8(t, index.hi) };
}

template <int s> SB_INLINE __m256i shift_right(__m256i x) {
    return s == 0 ? x : s > 0 ? _mm256_srli_epi64(x, s & 63) : _mm256_slli_epi64(x, -s & 63);
}

template <int s0, int s1, int d, int mask> SB_INLINE bytes twice(const void * p) {
    const __m256i x = load_256(p);
    return operator_and({ shift_right<s0 - d>(x), shift_right<s1 - d>(x) }, fill(mask << d));
}

SB_INLINE __m256i nibbles_of_16(const void * p) {
    const __m128i x = _mm_loadu_si128((const __m128i *) p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), _mm256_set1_epi8(15));
}

SB_INLINE bytes nibbles_by_16(const void * p) {
    return { nibbles_of_16(p), nibbles_of_16((const char *) p + 16) };
}

SB_INLINE __m256i or_where(__m256i x, uint16_t bits, short value) {
    const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short) bits), bit), bit);
    return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi16(value)));
}

template <typename F> SB_INLINE bytes from_eights(F entry) {
    return { _mm256_set_epi64x(entry(3), entry(2), entry(1), entry(0)), _mm256_set_epi64x(entry(7), entry(6), entry(5), entry(4)) };
}

template <typename F> SB_INLINE bytes from_fours(F entry) {
    const auto eight = [&](int i) {
        return _mm256_setr_epi32(entry(i), entry(i + 1), entry(i + 2), entry(i + 3), entry(i + 4), entry(i + 5), entry(i + 6), entry(i + 7));
    };
    return { eight(0), eight(8) };
}

SB_INLINE __m256i with_signs_256(__m256i x, uint32_t signs) {
    const __m256i mask = bits_to_bytes(signs);
    return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(x, mask), mask), _mm256_set1_epi8(64));
}

SB_INLINE bytes bits_to_minuses(uint64_t bits) {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit   = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    const __m256i x     = _mm256_set1_epi64x((int64_t) bits);
    const __m256i a = _mm256_and_si256(_mm256_shuffle_epi8(x, which), bit);
    const __m256i b = _mm256_and_si256(_mm256_shuffle_epi8(x, _mm256_or_si256(which, _mm256_set1_epi8(4))), bit);
    return { _mm256_cmpeq_epi8(a, bit), _mm256_cmpeq_epi8(b, bit) };
}

SB_INLINE bytes with_signs(bytes x, uint64_t signs) {
    return { with_signs_256(x.lo, (uint32_t) signs), with_signs_256(x.hi, (uint32_t) (signs >> 32)) };
}

#endif

// ---- for blocks of 32

static constexpr int LANES = sizeof(ivec) / sizeof(int32_t);

// a lane for each row
template <typename F> SB_INLINE fvec lanes_of_halves(F half) {
    const auto eight = [&](int i) {
        return _mm_setr_epi16((short) half(i), (short) half(i + 1), (short) half(i + 2), (short) half(i + 3),
                              (short) half(i + 4), (short) half(i + 5), (short) half(i + 6), (short) half(i + 7));
    };
#ifdef SB_512
    return _mm512_cvtph_ps(_mm256_set_m128i(eight(8), eight(0)));
#else
    return _mm256_cvtph_ps(eight(0));
#endif
}

#ifdef SB_512
SB_INLINE ivec load_32(const void * a, const void * b) {
    return joined(_mm256_loadu_si256((const __m256i *) a), _mm256_loadu_si256((const __m256i *) b));
}
SB_INLINE ivec nibbles_16(const void * a, const void * b) {
    const __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)),
                                              _mm_loadu_si128((const __m128i *) b), 1);
    const __m512i twin = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(x));
    return _mm512_and_si512(_mm512_srlv_epi64(twin, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), _mm512_set1_epi8(15));
}
SB_INLINE ivec nibbles_by_8(const void * a, const void * b) {
    const __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) a)),
                                              _mm_loadu_si128((const __m128i *) b), 1);
    const __m512i twin = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(x));
    return _mm512_and_si512(_mm512_srlv_epi64(twin, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4)), _mm512_set1_epi8(15));
}
SB_INLINE ivec table_16(const int8_t * table, ivec x, int plus = 0) {
    const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table));
    return _mm512_shuffle_epi8(_mm512_add_epi8(t, _mm512_set1_epi8((int8_t) plus)), x);
}
SB_INLINE ivec minus_where(ivec x, uint32_t a, uint32_t b, int8_t value) {
    return _mm512_mask_sub_epi8(x, (uint64_t) b << 32 | a, x, _mm512_set1_epi8(value));
}
// each of 4 floats for 4 lanes
SB_INLINE fvec four_floats(__m128 x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_castps128_ps512(x));
}
// ggml_ue4m3_to_fp32: 4 bits of exponent, 3 of mantissa, half of that value
SB_INLINE __m128 ue4m3(__m128i x) {
    const __m128i none = _mm_cmpeq_epi32(x, _mm_set1_epi32(0x7F));
    const __m128i bits = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x7F)), 20);
    return _mm_mul_ps(_mm_castsi128_ps(_mm_andnot_si128(none, bits)), _mm_set1_ps(0x1p119f));
}
// two of a and of b, each for 4 lanes
SB_INLINE fvec four_ue4m3(const uint8_t * a, const uint8_t * b) {
    uint16_t da, db;
    memcpy(&da, a, sizeof(da));
    memcpy(&db, b, sizeof(db));
    return four_floats(ue4m3(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(da | (uint32_t) db << 16))));
}
#else
SB_INLINE ivec load_32(const void * a, const void *)         { return load_256(a); }
SB_INLINE ivec nibbles_16(const void * a, const void *)      { return nibbles_of_16(a); }
SB_INLINE ivec table_16(const int8_t * table, ivec x, int plus = 0) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table));
    return _mm256_shuffle_epi8(_mm256_add_epi8(t, _mm256_set1_epi8((int8_t) plus)), x);
}
SB_INLINE ivec minus_where(ivec x, uint32_t a, uint32_t, int8_t value) {
    return _mm256_sub_epi8(x, _mm256_and_si256(bits_to_bytes(a), _mm256_set1_epi8(value)));
}
SB_INLINE fvec four_ue4m3(const uint8_t * a, const uint8_t *) {
    return _mm256_blend_ps(_mm256_set1_ps(GGML_CPU_UE4M3_TO_FP32(a[0])), _mm256_set1_ps(GGML_CPU_UE4M3_TO_FP32(a[1])), 0xF0);
}
SB_INLINE ivec nibbles_by_8(const void * a, const void *) {
    const __m128i x = _mm_loadu_si128((const __m128i *) a), high = _mm_srli_epi16(x, 4);
    return _mm256_and_si256(_mm256_set_m128i(_mm_unpackhi_epi64(x, high), _mm_unpacklo_epi64(x, high)), _mm256_set1_epi8(15));
}
#endif

// ---- for nibbles in blocks of 32

#ifdef SB_512
SB_INLINE ivec rows_of_16(const char * x, size_t x_stride) {
    const auto two = [&](const char * p) {
        return _mm256_set_m128i(_mm_loadu_si128((const __m128i *) (p + x_stride)), _mm_loadu_si128((const __m128i *) p));
    };
    return joined(two(x), two(x + 2 * x_stride));
}
// plus 16 where the bit of a weight is set: those of the first 16 of each row, or of the others, in 4 bytes
template <bool second> SB_INLINE ivec with_fifth_bits(ivec x, ivec bits) {
    const __m512i which = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0101010101010101, 0));
    const __m512i own   = _mm512_shuffle_epi8(bits, _mm512_add_epi8(which, _mm512_set1_epi8(second ? 2 : 0)));
    const __mmask64 set = _mm512_test_epi8_mask(own, _mm512_set1_epi64((int64_t) 0x8040201008040201));
    return _mm512_mask_add_epi8(x, set, x, _mm512_set1_epi8(16));
}
#else
SB_INLINE ivec rows_of_16(const char * x, size_t x_stride) {
    return _mm256_set_m128i(_mm_loadu_si128((const __m128i *) (x + x_stride)), _mm_loadu_si128((const __m128i *) x));
}
template <bool second> SB_INLINE ivec with_fifth_bits(ivec x, ivec bits) {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101);
    const __m256i bit   = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    const __m256i own   = _mm256_shuffle_epi8(bits, _mm256_add_epi8(which, _mm256_set1_epi8(second ? 2 : 0)));
    const __m256i set   = _mm256_cmpeq_epi8(_mm256_and_si256(own, bit), bit);
    return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}
#endif

// ---- of all

SB_INLINE shorts twice_each(__m128i a) { // 8 shorts
    return _mm256_set_m128i(_mm_unpackhi_epi16(a, a), _mm_unpacklo_epi16(a, a));
}

#ifdef SB_512

// the sums of four registers: lanes 8 apart first, then 4, 2, 1
SB_INLINE __m128 reduce(const fvec & a, const fvec & b, const fvec & c, const fvec & d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    v = _mm512_add_ps(v, _mm512_shuffle_ps(v, v, 0xEE));
    v = _mm512_add_ps(v, _mm512_movehdup_ps(v));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), v));
}

#else

SB_INLINE __m128 reduce(const fvec & a, const fvec & b, const fvec & c, const fvec & d) {
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    __m256 v = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE)); // a c | b d
    v = _mm256_add_ps(v, _mm256_movehdup_ps(v));
    const __m128 ac = _mm256_castps256_ps128(v), bd = _mm256_extractf128_ps(v, 1);
    return _mm_shuffle_ps(_mm_unpacklo_ps(ac, bd), _mm_unpackhi_ps(ac, bd), 0x44);
}

#endif

// ---- squares of 4-byte lanes

#ifdef SB_512

// int i of all x to out + i * stride, for each i
SB_INLINE void transpose(const __m512i * x, char * out, size_t stride) {
    __m512i a[16], b[16];
    SB_UNROLL for (int i = 0; i < 16; i += 2) {
        a[i + 0] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    SB_UNROLL for (int i = 0; i < 16; i += 4) {
        b[i + 0] = _mm512_unpacklo_epi64(a[i + 0], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i + 0], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    SB_UNROLL for (int i = 0; i < 4; ++i) {
        const __m512i even_low  = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88),     odd_low  = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        const __m512i even_high = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), odd_high = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        const __m512i lines[4] = { _mm512_shuffle_i32x4(even_low, even_high, 0x88), _mm512_shuffle_i32x4(odd_low, odd_high, 0x88),
                                   _mm512_shuffle_i32x4(even_low, even_high, 0xDD), _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD) };
        SB_UNROLL for (int k = 0; k < 4; ++k) {
            _mm512_storeu_si512(out + (4 * k + i) * stride, lines[k]);
        }
    }
}

#else

SB_INLINE void transpose(const __m256i * x, char * out, size_t stride) {
    __m256i a[8], b[8];
    SB_UNROLL for (int i = 0; i < 8; i += 2) {
        a[i + 0] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    SB_UNROLL for (int i = 0; i < 8; i += 4) {
        b[i + 0] = _mm256_unpacklo_epi64(a[i + 0], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i + 0], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    SB_UNROLL for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256((__m256i *) (out + (i + 0) * stride), _mm256_permute2x128_si256(b[i], b[i + 4], 0x20));
        _mm256_storeu_si256((__m256i *) (out + (i + 4) * stride), _mm256_permute2x128_si256(b[i], b[i + 4], 0x31));
    }
}

#endif

} // namespace
