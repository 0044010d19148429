#pragma once

// The vector code of few-rows-attention.cpp on x86 (AVX-512 or AVX2): queries, keys, values and weights of any type become shorts
// with a scale for each row, and are multiplied as integers. few-rows-attention-neon.h has the same names for ARM.

#include "attention-simd.h"

namespace {

typedef int16_t number; // what queries, keys, values and weights are multiplied as

constexpr int64_t MAX_SIZE = 1024; // of a head
constexpr bool    BALANCED = true; // channels of keys are, before they are rounded

constexpr int BLOCK = 16;        // cells whose keys are taken together
constexpr int STEP  = 32;        // numbers of a row of values that are taken together
constexpr int SIDE  = LANES / 4; // queries side by side, with 4 cells
constexpr int MOST  = LANES / 2; // queries whose values are summed side by side

constexpr int64_t SEGMENT = 16 * CHUNK; // numbers of a row of keys whose products are summed up as integers

FR_INLINE vec exp_of(vec x) { return ggml_v_expf(x); }

#if defined(__AVX512F__) && defined(__AVX512DQ__)
// out[q * TILE + c] = sum of the lanes of acc[q * 4 + c], always in the same order
FR_INLINE void store_sums(float * out, vec acc[LANES]) {
    FR_UNROLL for (int i = 0; i < 8; ++i) {
        acc[i] = FR(add_ps)(_mm512_shuffle_f32x4(acc[i], acc[i + 8], 0x44), _mm512_shuffle_f32x4(acc[i], acc[i + 8], 0xEE));
    }
    FR_UNROLL for (int i = 0; i < 4; ++i) {
        acc[i] = FR(add_ps)(_mm512_shuffle_f32x4(acc[i], acc[i + 4], 0x88), _mm512_shuffle_f32x4(acc[i], acc[i + 4], 0xDD));
    }
    FR_UNROLL for (int i = 0; i < 2; ++i) {
        acc[i] = FR(add_ps)(FR(unpacklo_ps)(acc[i], acc[i + 2]), FR(unpackhi_ps)(acc[i], acc[i + 2]));
    }
    const vec sums = FR(add_ps)(FR(unpacklo_ps)(acc[0], acc[1]), FR(unpackhi_ps)(acc[0], acc[1]));
    _mm_storeu_ps(out + 0*TILE, _mm512_extractf32x4_ps(sums, 0));
    _mm_storeu_ps(out + 1*TILE, _mm512_extractf32x4_ps(sums, 2));
    _mm_storeu_ps(out + 2*TILE, _mm512_extractf32x4_ps(sums, 1));
    _mm_storeu_ps(out + 3*TILE, _mm512_extractf32x4_ps(sums, 3));
}
#else
// the lanes' halves of a, of b, added
FR_INLINE vec add_halves(vec a, vec b) {
    return FR(add_ps)(FR(blend_ps)(a, b, 0xF0), FR(permute2f128_ps)(a, b, 0x21));
}

FR_INLINE void store_sums(float * out, vec acc[LANES]) {
    FR_UNROLL for (int i = 0; i < 4; ++i) {
        acc[i] = add_halves(acc[i], acc[i + 4]);
    }
    FR_UNROLL for (int i = 0; i < 2; ++i) {
        acc[i] = FR(add_ps)(FR(unpacklo_ps)(acc[i], acc[i + 2]), FR(unpackhi_ps)(acc[i], acc[i + 2]));
    }
    const vec sums = FR(add_ps)(FR(unpacklo_ps)(acc[0], acc[1]), FR(unpackhi_ps)(acc[0], acc[1]));
    _mm_storeu_ps(out + 0*TILE, _mm256_castps256_ps128(sums));
    _mm_storeu_ps(out + 1*TILE, _mm256_extractf128_ps(sums, 1));
}
#endif

// ---- rows to shorts, in pack order, with their scale (number = qscale * short): NaN if a number is none

// Queries, n a multiple of CHUNK: as large as sums allow with keys of up to 32767. A lane sums up as many products as it adds
// up numbers here.
float query_to_numbers(const float * x, int64_t n, number * out) {
    vec most = FR(setzero_ps)(), sums = most, all = most;
    for (int64_t i = 0; i < n; i += CHUNK) {
        const vec a = absolute(FR(loadu_ps)(x + i)), b = absolute(FR(loadu_ps)(x + i + LANES));
        const vec pairs = FR(add_ps)(FR(shuffle_ps)(a, b, 0x88), FR(shuffle_ps)(a, b, 0xDD));
        sums = i % SEGMENT == 0 ? pairs : FR(add_ps)(sums, pairs);
        most = FR(max_ps)(FR(max_ps)(a, b), FR(max_ps)(FR(mul_ps)(sums, FR(set1_ps)(0.501f)), most));
        all  = FR(add_ps)(all, pairs);
    }
    const float largest = max_of(most);
    const float factor  = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int64_t i = 0; i < n; i += CHUNK) {
        store_shorts(pack(FR(loadu_ps)(x + i), FR(loadu_ps)(x + i + LANES), FR(set1_ps)(factor)), out + i);
    }
    return sum_of(all) <= FLT_MAX ? largest / 32767.0f : NAN;
}

// What channels of keys are multiplied by, powers of two, and what these take from the exponents of halves.
struct balance_of {
    float    factors  [MAX_SIZE];
    uint16_t exponents[MAX_SIZE];
};

// From the largest numbers of channels. Returns whether there is anything to balance.
bool balance_channels(ggml_type type, int64_t n, balance_of & b) {
    for (int64_t d = 0; d < n && type == GGML_TYPE_Q8_0; d += QK8_0) {
        std::fill(b.factors + d, b.factors + d + QK8_0, *std::max_element(b.factors + d, b.factors + d + QK8_0));
    }
    balance(n, b.factors);
    bool any = false;
    for (int64_t d = 0; d < n; ++d) {
        int32_t bits;
        memcpy(&bits, b.factors + d, sizeof(bits));
        b.exponents[d] = (uint16_t) ((127 - (bits >> 23)) << 10);
        any |= b.exponents[d] != 0;
    }
    return any;
}

// The largest of numbers, and whether all of them are finite.
struct largest_of {
    vec most = FR(setzero_ps)(), zeros = most; // NaN where a number is not finite

    void add(vec x) {
        most  = FR(max_ps)(absolute(x), most);
        zeros = FR(fmadd_ps)(x, FR(setzero_ps)(), zeros);
    }
    float value() const { return max_of(most); }
    float qscale(float of_value) const { return sum_of(zeros) == 0.0f ? of_value : NAN; }
    vec   factor() const { return FR(set1_ps)(32767.0f / std::max(value(), FLT_MIN)); }
};

// The scales of shorts if the largest numbers are these, and what makes shorts of numbers.
FR_INLINE void scales_of(vec largest, float * qscale, float * factor) {
    const vec zero = FR(mul_ps)(largest, FR(setzero_ps)()); // NaN if it is not finite
    FR(storeu_ps)(qscale, FR(fmadd_ps)(largest, FR(set1_ps)(1.0f / 32767.0f), zero));
    FR(storeu_ps)(factor, FR(div_ps)(FR(set1_ps)(32767.0f), FR(max_ps)(largest, FR(set1_ps)(FLT_MIN))));
}

// Rows of K or V of up to TILE cells, which become shorts chunk by chunk.
struct rows_of {
    enum { F16, BALANCED_F16, Q8_0, SHORTS } kind;

    const char * row   [TILE];
    float        qscale[TILE];
    float        factor[TILE];                   // what makes shorts of numbers, or of the scales of Q8_0
    int16_t      shrink[MAX_SIZE / QK8_0][TILE]; // of Q8_0: of each block
    const balance_of * balance;                  // of keys; nullptr: none

    // `rest` has room for the shorts of other types, `floats` for a row, both in whole steps.
    void load(const ggml_tensor * t, const char * first, const uint8_t * cells, int n, const balance_of * balanced, float * floats, int16_t * rest, fetcher & other) {
        const int64_t size = t->ne[0];
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
                    const vec a = FR(mul_ps)(from_halves(x), FR(loadu_ps)(balance->factors + d)), b = FR(mul_ps)(from_halves(x + LANES), FR(loadu_ps)(balance->factors + d + LANES));
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
    // The largest of a row of halves, whose bits without a sign are in the order of numbers. Where channels are balanced, powers of
    // two are taken from their exponents.
    template <bool balanced> uint16_t largest_half(const ggml_fp16_t * x, int64_t size) const {
        ivec most = FR(set1_epi32)(0), before = most;
#pragma GCC unroll 4
        for (int64_t i = 0; i < size; i += CHUNK) {
            const ivec bits = load_shorts(x + i) & FR(set1_epi16)(0x7FFF);
            if (balanced) {
                most   = FR(max_epu16)(most, FR(subs_epu16)(bits, load_shorts(balance->exponents + i)));
                before = FR(max_epu16)(before, bits);
            } else {
                most = FR(max_epu16)(most, bits);
            }
        }
        const uint16_t largest = max_of_halves(most);
        return balanced && max_of_halves(before) >= 0x7C00 ? 0x7C00 : largest;
    }

    void scale_f16(int n, int64_t size, fetcher & other) {
        uint16_t largest[TILE];
        for (int r = 0; r < n; ++r) {
            const ggml_fp16_t * x = (const ggml_fp16_t *) row[r];
            other.lines(2);
            largest[r] = balance ? largest_half<true>(x, size) : largest_half<false>(x, size);
        }
        std::fill(largest + n, largest + GGML_PAD(n, LANES), (uint16_t) 0);
        for (int r = 0; r < n; r += LANES) {
            scales_of(from_halves(largest + r), qscale + r, factor + r);
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
            return FR(mul_ps)(from_halves(scale[i] + r), FR(set1_ps)(balance ? balance->factors[i * QK8_0] : 1.0f));
        };
        for (int r = 0; r < padded; r += LANES) {
            largest_of largest; // of each row
            for (int64_t i = 0; i < n_blocks; ++i) {
                largest.add(scales(i, r));
            }
            scales_of(FR(add_ps)(largest.most, largest.zeros), qscale + r, factor + r);
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

    void store_rest(ggml_type type, int n, int64_t size, float * floats, int16_t * rest) {
        const int64_t padded = GGML_PAD(size, STEP);
        for (int r = 0; r < n; ++r, rest += padded) {
            unpack(type, row[r], floats, size);
            std::fill(floats + size, floats + padded, 0.0f);
            for (int64_t d = 0; d < size && balance; ++d) {
                floats[d] *= balance->factors[d];
            }
            largest_of largest;
            for (int64_t i = 0; i < padded; i += LANES) {
                largest.add(FR(loadu_ps)(floats + i));
            }
            const vec factor_of = largest.factor();
            for (int64_t i = 0; i < padded; i += CHUNK) {
                store_shorts(pack(FR(loadu_ps)(floats + i), FR(loadu_ps)(floats + i + LANES), factor_of), rest + i);
            }
            qscale[r] = largest.qscale(largest.value() / 32767.0f);
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

// Weights of a tile's cells, times the scales of their values, to pairs of shorts: as large as sums allow with values of up to
// 32767. What is beyond n has no weight. Returns the scale of a product.
float weights_to_numbers(float * w, const float * qscale, int n, number * out) {
    vec most = FR(setzero_ps)(), sum = FR(setzero_ps)();
    for (int c = 0; c < n; c += LANES) {
        const vec x = FR(mul_ps)(FR(loadu_ps)(w + c), FR(loadu_ps)(qscale + c));
        FR(storeu_ps)(w + c, x);
        most = FR(max_ps)(x, most);
        sum  = FR(add_ps)(sum, x);
    }
    const float total   = sum_of(sum);
    const float largest = std::max(max_of(most), total * 0.501f);
    const vec   factor  = FR(set1_ps)(largest > 0.0f ? 32767.0f / largest : 0.0f);
    for (int c = 0; c < n; c += CHUNK) {
        store_shorts(from_pack_order(pack(FR(loadu_ps)(w + c), FR(loadu_ps)(w + c + LANES), factor)), out + c);
    }
    return total <= FLT_MAX ? largest / 32767.0f : NAN;
}

// ---- products

// A compiler that loads ahead runs out of registers, and keeps sums in memory.
FR_INLINE void in_turn(ivec & x) { __asm__ volatile("" : "+v"(x)); }

// sum += the sums of pairs of a * b. GCC 12 would add to another register, and move the sum back.
FR_INLINE void add_in_turn(ivec & sum, ivec a, ivec b) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    sum = add_pairs(sum, a, b); // one instruction
    in_turn(sum);
#else
    __asm__ volatile("vpaddd %1, %0, %0" : "+v"(sum) : "v"(FR(madd_epi16)(a, b)));
#endif
}

// scores[q][c] = q . k for SIDE queries and 4 cells, of the numbers [begin, end)
__attribute__((noinline)) void multiply_segment(const number * const * q, const number * k, int64_t size, int64_t begin, int64_t end, float * scores) {
    ivec acc[LANES];
    FR_UNROLL for (int i = 0; i < LANES; ++i) {
        acc[i] = FR(set1_epi32)(0);
    }
#pragma GCC unroll 2
    for (int64_t d = begin; d < end; d += CHUNK) {
        ivec cell[4];
        FR_UNROLL for (int c = 0; c < 4; ++c) {
            cell[c] = load_shorts(k + c * size + d);
        }
        FR_UNROLL for (int i = 0; i < SIDE; ++i) {
            const ivec query = load_shorts(q[i] + d);
            FR_UNROLL for (int c = 0; c < 4; ++c) {
                add_in_turn(acc[i * 4 + c], query, cell[c]);
            }
        }
    }
    vec sums[LANES];
    FR_UNROLL for (int i = 0; i < LANES; ++i) {
        sums[i] = FR(cvtepi32_ps)(acc[i]);
    }
    store_sums(scores, sums);
}

// the same of all numbers
FR_INLINE void multiply_keys(const number * const * q, const number * k, int64_t size, float * scores) {
    multiply_segment(q, k, size, 0, std::min(size, SEGMENT), scores);
    for (int64_t begin = SEGMENT; begin < size; begin += SEGMENT) {
        float more[SIDE * TILE];
        multiply_segment(q, k, size, begin, std::min(size, begin + SEGMENT), more);
        for (int i = 0; i < SIDE * 4; ++i) {
            scores[i / 4 * TILE + i % 4] += more[i / 4 * TILE + i % 4];
        }
    }
}

// A query, and what it does with the values of a tile.
struct value_sum {
    float *         value;   // what is summed up
    const int16_t * weights; // of a tile's cells
    float           shrink;  // of what was summed up before
    float           qscale;  // of a product
};

// a chunk of the values of N queries, from d on, takes in that of n cells
template <int N> __attribute__((noinline)) void add_values(const value_sum * q, int64_t d, const number * values, int n) {
    ivec acc[N][2];
    FR_UNROLL for (int i = 0; i < N; ++i) {
        acc[i][0] = acc[i][1] = FR(set1_epi32)(0);
    }
#pragma GCC unroll 2
    for (int c = 0; c < n; c += 2, values += 2 * CHUNK) {
        const ivec x = load_shorts(values), y = load_shorts(values + CHUNK);
        FR_UNROLL for (int i = 0; i < N; ++i) {
            int32_t two;
            memcpy(&two, q[i].weights + c, sizeof(two));
            ivec w = FR(set1_epi32)(two);
            in_turn(w);
            add_in_turn(acc[i][0], w, x);
            add_in_turn(acc[i][1], w, y);
        }
    }
    FR_UNROLL for (int i = 0; i < N; ++i) {
        FR_UNROLL for (int j = 0; j < 2; ++j) {
            float * value = q[i].value + d + j * LANES;
            const vec more = FR(mul_ps)(FR(cvtepi32_ps)(acc[i][j]), FR(set1_ps)(q[i].qscale));
            FR(storeu_ps)(value, FR(fmadd_ps)(FR(loadu_ps)(value), FR(set1_ps)(q[i].shrink), more));
        }
    }
}

} // namespace
