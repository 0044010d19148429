#pragma once

// For few-rows-attention-simd.h and large-batch-attention-simd.h, on x86 (AVX-512 or AVX2): vectors of floats and of shorts, and how
// queries, keys, values and weights become shorts with a scale each. What is multiplied as shorts is summed up in 32 bits, without
// a rounding, so that the order does not matter.

#include "attention-op.h"
#include "vec.h"

#include <immintrin.h>

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define FR(op) _mm512_##op
typedef __m512  vec;
typedef __m512i ivec;
constexpr int LANES = 16;

FR_INLINE float sum_of(vec v) { return FR(reduce_add_ps)(v); }
FR_INLINE float max_of(vec v) { return FR(reduce_max_ps)(v); }
FR_INLINE int   sum_of(ivec v) { return FR(reduce_add_epi32)(v); }

FR_INLINE vec     from_halves(const ggml_fp16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }
FR_INLINE ivec    from_bytes(const int8_t * x)       { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *) x)); }
FR_INLINE __m128i half_max(ivec x) {
    const __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}
FR_INLINE ivec to_pack_order(ivec x)   { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x); }
FR_INLINE ivec from_pack_order(ivec x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x); }
#else
#define FR(op) _mm256_##op
typedef __m256  vec;
typedef __m256i ivec;
constexpr int LANES = 8;

FR_INLINE float sum_of(vec v) {
    const __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 y = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

FR_INLINE float max_of(vec v) {
    const __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

FR_INLINE int sum_of(ivec v) {
    const __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    const __m128i y = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}

FR_INLINE vec     from_halves(const ggml_fp16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
FR_INLINE ivec    from_bytes(const int8_t * x)       { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) x)); }
FR_INLINE __m128i half_max(ivec x) { return _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
FR_INLINE ivec    to_pack_order(ivec x)   { return _mm256_permute4x64_epi64(x, 0xD8); }
FR_INLINE ivec    from_pack_order(ivec x) { return _mm256_permute4x64_epi64(x, 0xD8); }
#endif

// of bits of halves without a sign
FR_INLINE uint16_t max_of_halves(ivec x) {
    return ~(uint16_t) _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half_max(x), _mm_set1_epi16(-1))), 0);
}

typedef int16_t number; // what queries, keys, values and weights are multiplied as

constexpr int CHUNK = LANES * 2; // shorts of a register, and numbers of a row that are taken together

FR_INLINE vec  absolute(vec x)                   { return FR(max_ps)(x, FR(sub_ps)(FR(setzero_ps)(), x)); }
FR_INLINE ivec load_shorts(const void * x)       { ivec v; memcpy(&v, x, sizeof(v)); __asm__("" : "+v"(v)); return v; } // once, not once per use
FR_INLINE void store_shorts(ivec v, int16_t * x) { memcpy(x, &v, sizeof(v)); }

// two vectors of floats, as shorts in the order of the pack instruction, which that of interleaving puts right
FR_INLINE ivec pack(vec a, vec b, vec factor) {
    return FR(packs_epi32)(FR(cvtps_epi32)(FR(mul_ps)(a, factor)), FR(cvtps_epi32)(FR(mul_ps)(b, factor)));
}

// sum += the sums of pairs of a * b
FR_INLINE ivec add_pairs(ivec sum, ivec a, ivec b) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__) && !defined(__AVX512DQ__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return FR(add_epi32)(sum, FR(madd_epi16)(a, b));
#endif
}

FR_INLINE vec exp_of(vec x) { return ggml_v_expf(x); }

// ---- rows to shorts, in pack order, with their scale (number = qscale * short): NaN if a number is none

// What queries and keys are multiplied as has this norm, or less, in each segment of a row: the square root of 2^31, less what
// rounding adds (16, or 32 to rows of bytes), so that products fit in 32 bits (Cauchy-Schwarz). Those of segments are added as
// floats. Values are as large as shorts can be, and weights as sums of 65537 allow.
// The largest number of a row is 32767 where the norm allows it: it has no error then, which the other row's may multiply by much.
constexpr float NORM    = 46300.0f;
constexpr float WEIGHTS = 65500.0f; // half of TILE less, for rounding
constexpr float LEAST   = 1e-30f;   // what is smaller counts as zero

constexpr int64_t segment_of(int64_t size) { return size <= 256 ? 256 : 128; }

// The square of the largest norm of the segments of a row of n numbers, of which sum_of_squares(begin, end) tells, times what makes
// it the number that becomes 32767. NaN where a number is none.
template <typename F> FR_INLINE float measure(int64_t n, F sum_of_squares) {
    const int64_t segment = segment_of(n);
    float most = 0.0f, bad = 0.0f;
    for (int64_t begin = 0; begin < n; begin += segment) {
        const float squares = sum_of(sum_of_squares(begin, std::min(n, begin + segment)));
        most = std::max(most, squares);
        bad += 0.0f * squares;
    }
    return most * (32767.0f / NORM * (32767.0f / NORM)) + bad;
}

// n a multiple of CHUNK; by the norm, or the largest number
float to_shorts(const float * x, int64_t n, bool by_norm, int16_t * out) {
    vec most = FR(set1_ps)(LEAST);
    for (int64_t i = 0; i < n; i += LANES) {
        most = FR(max_ps)(absolute(FR(loadu_ps)(x + i)), most);
    }
    const float largest = max_of(most);
    const vec   unit    = FR(set1_ps)(1.0f / largest);
    const float measured = measure(n, [&](int64_t begin, int64_t end) {
        vec squares = FR(setzero_ps)();
        for (int64_t i = begin; i < end; i += LANES) {
            const vec y = FR(mul_ps)(FR(loadu_ps)(x + i), unit);
            squares = FR(fmadd_ps)(y, y, squares);
        }
        return squares;
    });
    const float scale = 32767.0f / (by_norm ? std::max(sqrtf(measured), 1.0f) : 1.0f);
    for (int64_t i = 0; i < n; i += CHUNK) {
        store_shorts(pack(FR(loadu_ps)(x + i), FR(loadu_ps)(x + i + LANES), FR(set1_ps)(scale / largest)), out + i);
    }
    return largest / scale + 0.0f * measured; // NaN where a number is none
}

// The scales of shorts if the largest numbers, or norms, are these, and what makes shorts of numbers.
FR_INLINE void scales_of(vec largest, float * qscale, float * factor) {
    const vec zero = FR(mul_ps)(largest, FR(setzero_ps)()); // NaN if it is not finite
    FR(storeu_ps)(qscale, FR(fmadd_ps)(largest, FR(set1_ps)(1.0f / 32767.0f), zero));
    FR(storeu_ps)(factor, FR(div_ps)(FR(set1_ps)(32767.0f), FR(max_ps)(largest, FR(set1_ps)(LEAST))));
}

// Rows of K or V of up to TILE cells, which become shorts chunk by chunk.
struct rows_of {
    enum { F16, BALANCED_F16, Q8_0, SHORTS } kind;

    const char * row   [TILE];
    float        qscale[TILE];
    float        factor[TILE];                   // what makes shorts of numbers, or of the scales of Q8_0
    int16_t      shrink[MAX_SIZE / QK8_0][TILE]; // of Q8_0: of each block
    bool          keys;                          // their norms are alike; not their largest numbers, as values'
    const float * balance;                       // of keys' channels; nullptr: none

    // `rest` has room for the shorts of other types, `floats` for a row, both in whole steps.
    void load(const ggml_tensor * t, const char * first, const uint16_t * cells, int n, bool of_keys, const float * balanced, float * floats, int16_t * rest, fetcher & other) {
        const int64_t size = t->ne[0];
        keys    = of_keys;
        balance = balanced;
        kind = t->type == GGML_TYPE_Q8_0 ? Q8_0 : t->type != GGML_TYPE_F16 || size % STEP ? SHORTS : balance ? BALANCED_F16 : F16;
        for (int r = 0; r < n; ++r) {
            row[r] = first + cells[r] * t->nb[1];
        }
        switch (kind) {
            case F16:
            case BALANCED_F16: scale_f16(n, size, other); break;
            case Q8_0:         scale_q8_0(n, size / QK8_0, other); break;
            case SHORTS:       store_rest(t->type, n, size, floats, rest); break;
        }
    }

    // f(chunk), chunk(r, d): the shorts of row r from d on
    template <typename F> void chunks(F f) const {
        switch (kind) {
            case F16:
                f([this](int r, int64_t d) {
                    const ggml_fp16_t * x = (const ggml_fp16_t *) row[r] + d;
                    return pack(from_halves(x), from_halves(x + LANES), FR(set1_ps)(factor[r]));
                });
                break;
            case BALANCED_F16:
                f([this](int r, int64_t d) {
                    const ggml_fp16_t * x = (const ggml_fp16_t *) row[r] + d;
                    const vec a = FR(mul_ps)(from_halves(x), FR(loadu_ps)(balance + d)), b = FR(mul_ps)(from_halves(x + LANES), FR(loadu_ps)(balance + d + LANES));
                    return pack(a, b, FR(set1_ps)(factor[r]));
                });
                break;
            case Q8_0: // a byte is shifted to a short, and shrinks by its block's scale to the row's largest one
                f([this](int r, int64_t d) {
                    const int8_t * x = ((const block_q8_0 *) row[r])[d / QK8_0].qs + d % QK8_0;
                    return to_pack_order(FR(mulhrs_epi16)(FR(slli_epi16)(from_bytes(x), 8), FR(set1_epi16)(shrink[d / QK8_0][r])));
                });
                break;
            case SHORTS:
                f([this](int r, int64_t d) { return load_shorts((const int16_t *) row[r] + d); });
                break;
        }
    }

  private:
    // The largest of a row of halves, whose bits without a sign are in the order of numbers.
    uint16_t largest_half(const ggml_fp16_t * x, int64_t size) const {
        ivec most = FR(set1_epi32)(0);
#pragma GCC unroll 4
        for (int64_t i = 0; i < size; i += CHUNK) {
            most = FR(max_epu16)(most, load_shorts(x + i) & FR(set1_epi16)(0x7FFF));
        }
        return max_of_halves(most);
    }

    template <bool balanced> float measure_f16(const ggml_fp16_t * x, int64_t size, float & largest) const {
        constexpr int N = STEP / LANES;
        vec most[N] = {};
        const float measured = measure(size, [&](int64_t begin, int64_t end) {
            vec squares[N] = {};
            for (int64_t i = begin; i < end; i += STEP) {
                FR_UNROLL for (int j = 0; j < N; ++j) {
                    vec y = from_halves(x + i + j * LANES);
                    y = balanced ? FR(mul_ps)(y, FR(loadu_ps)(balance + i + j * LANES)) : y;
                    squares[j] = FR(fmadd_ps)(y, y, squares[j]);
                    most[j]    = FR(max_ps)(FR(andnot_ps)(FR(set1_ps)(-0.0f), y), most[j]);
                }
            }
            FR_UNROLL for (int j = 1; j < N; ++j) {
                squares[0] = FR(add_ps)(squares[0], squares[j]);
            }
            return squares[0];
        });
        FR_UNROLL for (int j = 1; j < N; ++j) {
            most[0] = FR(max_ps)(most[0], most[j]);
        }
        largest = max_of(most[0]);
        return measured;
    }

    void scale_f16(int n, int64_t size, fetcher & other) {
        float largest[TILE] = {}, measured[TILE] = {};
        for (int r = 0; r < n; ++r) {
            const ggml_fp16_t * x = (const ggml_fp16_t *) row[r];
            other.lines(2);
            if (keys) {
                measured[r] = balance ? measure_f16<true>(x, size, largest[r]) : measure_f16<false>(x, size, largest[r]);
            } else {
                largest[r] = GGML_CPU_FP16_TO_FP32(largest_half(x, size));
            }
        }
        for (int r = 0; r < n; r += LANES) {
            scales_of(FR(max_ps)(FR(loadu_ps)(largest + r), FR(sqrt_ps)(FR(loadu_ps)(measured + r))), qscale + r, factor + r); // NaN stays
        }
    }

    // Scales of the same block of many rows lie beside each other, so that the scales of many rows are found together.
    void scale_q8_0(int n, int64_t n_blocks, fetcher & other) {
        uint16_t scale[MAX_SIZE / QK8_0][TILE];
        for (int r = 0; r < n; ++r) {
            other.lines(2);
            const block_q8_0 * x = (const block_q8_0 *) row[r];
            for (int64_t i = 0; i < n_blocks; ++i) {
                scale[i][r] = x[i].d;
            }
        }
        const int padded = GGML_PAD(n, CHUNK);
        for (int64_t i = 0; i < n_blocks; ++i) {
            std::fill(scale[i] + n, scale[i] + padded, (uint16_t) 0);
        }
        const auto scales = [&](int64_t i, int r) { // one balance for all channels of a block
            return FR(mul_ps)(from_halves(scale[i] + r), FR(set1_ps)(balance ? balance[i * QK8_0] : 1.0f));
        };
        float measured[TILE] = {};
        if (keys) {
            measure_q8_0(n, n_blocks, padded, scales, measured);
        }
        for (int r = 0; r < padded; r += LANES) {
            vec largest = FR(mul_ps)(FR(sqrt_ps)(FR(loadu_ps)(measured + r)), FR(set1_ps)(1.0f / 128.0f)), zeros = FR(setzero_ps)();
            for (int64_t i = 0; i < n_blocks; ++i) {
                largest = FR(max_ps)(absolute(scales(i, r)), largest);
                zeros   = FR(fmadd_ps)(scales(i, r), FR(setzero_ps)(), zeros); // NaN where a number is not finite
            }
            scales_of(FR(add_ps)(largest, zeros), qscale + r, factor + r);
            FR(storeu_ps)(qscale + r, FR(mul_ps)(FR(loadu_ps)(qscale + r), FR(set1_ps)(32768.0f / 256.0f)));
        }
        for (int64_t i = 0; i < n_blocks; ++i) {
            for (int r = 0; r < padded; r += CHUNK) {
                const ivec a = FR(cvtps_epi32)(FR(mul_ps)(scales(i, r),         FR(loadu_ps)(factor + r)));
                const ivec b = FR(cvtps_epi32)(FR(mul_ps)(scales(i, r + LANES), FR(loadu_ps)(factor + r + LANES)));
                store_shorts(from_pack_order(FR(packs_epi32)(a, b)), shrink[i] + r);
            }
        }
    }

    template <typename F> void measure_q8_0(int n, int64_t n_blocks, int padded, F scales, float * out) const {
        float squares[MAX_SIZE / QK8_0][TILE]; // of scales
        for (int64_t i = 0; i < n_blocks; ++i) {
            for (int r = 0; r < padded; r += LANES) {
                FR(storeu_ps)(squares[i] + r, FR(mul_ps)(scales(i, r), scales(i, r)));
            }
        }
        for (int r = 0; r < n; ++r) {
            const block_q8_0 * x = (const block_q8_0 *) row[r];
            out[r] = measure(n_blocks * QK8_0, [&](int64_t begin, int64_t end) {
                vec sums = FR(setzero_ps)();
                for (int64_t i = begin / QK8_0; i < end / QK8_0; ++i) {
                    ivec of_bytes = FR(set1_epi32)(0);
                    FR_UNROLL for (int j = 0; j < QK8_0; j += CHUNK) {
                        const ivec y = from_bytes(x[i].qs + j);
                        of_bytes = add_pairs(of_bytes, y, y);
                    }
                    sums = FR(fmadd_ps)(FR(cvtepi32_ps)(of_bytes), FR(set1_ps)(squares[i][r]), sums);
                }
                return sums;
            });
        }
    }

    void store_rest(ggml_type type, int n, int64_t size, float * floats, int16_t * rest) {
        const int64_t padded = GGML_PAD(size, STEP);
        for (int r = 0; r < n; ++r, rest += padded) {
            unpack(type, row[r], floats, size);
            std::fill(floats + size, floats + padded, 0.0f);
            for (int64_t d = 0; d < size && balance; ++d) {
                floats[d] *= balance[d];
            }
            qscale[r] = to_shorts(floats, padded, keys, rest);
            row[r]    = (const char *) rest;
        }
    }
};

// n rows one after another, of numbers
void store_keys(const rows_of & k, int n, int64_t size, number * out, fetcher & other) {
    k.chunks([&](auto chunk) {
        for (int r = 0; r < n; ++r) {
            other.lines(4);
            for (int64_t d = 0; d < size; d += CHUNK) {
                store_shorts(chunk(r, d), out + r * size + d);
            }
        }
    });
}

// STEP numbers of n rows, from d on: chunk after chunk, pair of rows after pair, [CHUNK][2]
void store_values(const rows_of & v, int n, int64_t d, number * out) {
    v.chunks([&](auto chunk) {
        for (int r = 0; r < n; r += 2, out += 2 * CHUNK) {
            FR_UNROLL for (int i = 0; i < STEP; i += CHUNK) {
                const ivec a = chunk(r, d + i), b = chunk(std::min(r + 1, n - 1), d + i);
                store_shorts(FR(unpacklo_epi16)(a, b), out + i * TILE);
                store_shorts(FR(unpackhi_epi16)(a, b), out + i * TILE + CHUNK);
            }
        }
    });
}

// ---- weights

// The sum of weights, and of their products with the scales of values, are sums of integers: parts of the largest one.
constexpr float PARTS = 1 << 24;

FR_INLINE ivec parts_of(vec x, vec parts) { return FR(cvtps_epi32)(FR(mul_ps)(x, parts)); }

// What makes shorts of weights, from the largest of them and their sum in its parts, and what takes it back.
FR_INLINE void scale_weights(vec largest, ivec total, vec & factor, vec & product) {
    const vec shorts = FR(min_ps)(FR(div_ps)(FR(set1_ps)(WEIGHTS * PARTS), FR(cvtepi32_ps)(total)), FR(set1_ps)(32767.0f));
    factor  = FR(div_ps)(shorts, largest);
    product = FR(div_ps)(largest, shorts);
}

} // namespace

#include "attention-sums.h"
