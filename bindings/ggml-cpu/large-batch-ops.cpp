// SSM_CONV, CONCAT, MUL by a number for each row, and GATED_DELTA_NET of many tokens, all in F32. x86 with AVX2 or AVX-512, 64-bit ARM.
// Called by the ggml_compute_forward_*() of these operations in ops.cpp and binary-ops.cpp.

// GCC 12 warns of its own header wherever an AVX-512 function of it is inlined
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "large-batch-ops.h"

#include "delta-net-rows.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops.h"
#include "vec.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

static std::atomic<bool> large_batch { true };

void ggml_cpu_set_large_batch(bool value) {
    large_batch = value;
}

bool ggml_cpu_large_batch(void) {
    return large_batch;
}

#if defined(__GNUC__) && (defined(__aarch64__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)))

#if defined(__aarch64__)
#include "vectors-neon.h"
#else
#include "small-batch-simd.h"
#endif

namespace {

#if defined(__aarch64__)
#define SB(op) neon_##op
#define SB_LOAD(p) vld1q_f32((const float *) (p))
typedef float32x4_t fvec;
typedef float32x4_t ivec;
constexpr int LANES = 4;

SB_INLINE ivec load_first(const char * p, int64_t n)                { return neon_load_first((const float *) p, n); }
SB_INLINE void transpose(const ivec * x, char * out, size_t stride) { neon_transpose(x, out, stride); }
#else
// the first n floats at p
ivec load_first(const char * p, int64_t n) {
#ifdef SB_512
    return _mm512_maskz_loadu_epi32(n < LANES ? (1 << n) - 1 : 0xffff, p);
#else
    return _mm256_maskload_epi32((const int *) p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int) n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
#endif
}
#endif

// [begin, end) of n items for a thread, in steps
void share(const ggml_compute_params * params, int64_t n, int64_t step, int64_t & begin, int64_t & end) {
    const int64_t n_steps = (n + step - 1) / step;
    begin = n_steps * params->ith / params->nth * step;
    end   = std::min(n, n_steps * (params->ith + 1) / params->nth * step);
}

bool is_floats(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

fvec load_floats(const void * p) {
    return SB(loadu_ps)((const float *) p);
}

char * at(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (char *) t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

// where the squares of LANES begin that cover n; the last one overlaps
template <typename F> void squares(int64_t n, F square) {
    for (int64_t i = 0; i < n; i += LANES) {
        square(std::min(i, n - LANES));
    }
}

// the first n floats of LANES rows of t, from `row` on: columns[n][LANES]
void load_columns(const ggml_tensor * t, int64_t row, int64_t n, float * columns, int64_t i2, int64_t i3 = 0) {
    for (int64_t first = 0; first < n; first += LANES) {
        ivec lines[LANES];
        for (int i = 0; i < LANES; ++i) {
            lines[i] = load_first(at(t, first, row + i, i2, i3), n - first);
        }
        transpose(lines, (char *) (columns + first * LANES), LANES * sizeof(float));
    }
}

constexpr int64_t FEW = 16; // tokens

} // namespace

// Of many tokens the lanes are tokens while they are summed up, channels when they are stored; of few tokens channels.
bool ggml_compute_forward_large_batch_conv(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * x = dst->src[0]; // [width - 1 + tokens, channels, sequences]
    const ggml_tensor * c = dst->src[1]; // [width, channels]
    const int64_t width = c->ne[0], n_channels = x->ne[1], n_tokens = dst->ne[1];
    if (!ggml_cpu_large_batch() || params->use_ref || width > FEW || n_channels % LANES || !is_floats(x) || !is_floats(c) || !is_floats(dst)) {
        return false;
    }
    int64_t begin, end;
    share(params, n_channels, LANES, begin, end);
    if (n_tokens < FEW) {
        float weights[(FEW + LANES) * LANES], columns[(2 * FEW + LANES) * LANES];
        for (int64_t channel = begin; channel < end; channel += LANES) {
            load_columns(c, channel, width, weights, 0);
            for (int64_t seq = 0; seq < dst->ne[2]; ++seq) {
                load_columns(x, channel, width - 1 + n_tokens, columns, seq);
                for (int64_t token = 0; token < n_tokens; ++token) {
                    fvec sum = SB(setzero_ps)();
                    for (int64_t k = 0; k < width; ++k) {
                        sum = SB(fmadd_ps)(load_floats(columns + (token + k) * LANES), load_floats(weights + k * LANES), sum);
                    }
                    SB(storeu_ps)((float *) at(dst, channel, token, seq), sum);
                }
            }
        }
        return true;
    }
    for (int64_t seq = 0; seq < dst->ne[2]; ++seq) {
        for (int64_t channel = begin; channel < end; channel += LANES) {
            squares(n_tokens, [&](int64_t token) {
                ivec sums[LANES];
                for (int i = 0; i < LANES; ++i) {
                    const float * weights = (const float *) at(c, 0, channel + i);
                    fvec sum = SB(setzero_ps)();
                    for (int64_t k = 0; k < width; ++k) {
                        sum = SB(fmadd_ps)(load_floats(at(x, token + k, channel + i, seq)), SB(set1_ps)(weights[k]), sum);
                    }
                    sums[i] = (ivec) sum;
                }
                transpose(sums, at(dst, channel, token, seq), dst->nb[1]);
            });
        }
    }
    return true;
}

bool ggml_compute_forward_large_batch_concat(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * a = dst->src[0];
    const ggml_tensor * b = dst->src[1]; // transposed
    const int64_t n_before = a->ne[0], n = b->ne[0], n_rows = dst->ne[1];
    const bool few = n_before + n <= LANES && ggml_is_contiguous(dst);
    const auto transposed = [](const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[1] == sizeof(float) && t->nb[0] != sizeof(float); };
    if (!ggml_cpu_large_batch() || params->use_ref || ggml_get_op_params_i32(dst, 0) != 0 || (n < FEW && !few) || n_rows % LANES ||
        !(is_floats(a) || transposed(a)) || !is_floats(dst) || !transposed(b)) {
        return false;
    }
    int64_t begin, end;
    share(params, n_rows, LANES, begin, end);
    for (int64_t i = 0; i < dst->ne[2] * dst->ne[3]; ++i) {
        const int64_t i2 = i % dst->ne[2], i3 = i / dst->ne[2];
        for (int64_t row = begin; row < end; row += LANES) {
            if (few) {
                ivec lines[LANES];
                float rows[LANES * LANES];
                if (is_floats(a)) {
                    load_columns(a, row, n_before, rows, i2, i3);
                }
                for (int k = 0; k < LANES; ++k) {
                    lines[k] = k >= n_before ? SB_LOAD(at(b, std::min<int64_t>(k - n_before, n - 1), row, i2, i3)) :
                        is_floats(a) ? SB_LOAD(rows + k * LANES) : SB_LOAD(at(a, k, row, i2, i3));
                }
                transpose(lines, (char *) rows, LANES * sizeof(float));
                // in their order: what is stored beyond a row is overwritten by the next ones
                for (int r = 0; r < LANES; ++r) {
                    float * out = (float *) at(dst, 0, row + r, i2, i3);
                    if ((LANES - r) * dst->ne[0] >= LANES) {
                        SB(storeu_ps)(out, load_floats(rows + r * LANES));
                    } else {
                        memcpy(out, rows + r * LANES, dst->ne[0] * sizeof(float));
                    }
                }
                continue;
            }
            for (int64_t r = row; r < row + LANES; ++r) {
                for (int64_t k = 0; k < n_before; ++k) {
                    memcpy(at(dst, k, r, i2, i3), at(a, k, r, i2, i3), sizeof(float));
                }
            }
            squares(n, [&](int64_t first) {
                ivec lines[LANES];
                for (int k = 0; k < LANES; ++k) {
                    lines[k] = SB_LOAD(at(b, first + k, row, i2, i3));
                }
                transpose(lines, at(dst, n_before + first, row, i2, i3), dst->nb[1]);
            });
        }
    }
    return true;
}

// Rows of tokens as they lie in memory, a few channels at a time. The graph may have given the memory of `x` to dst.
bool ggml_compute_forward_large_batch_conv_silu(const ggml_compute_params * params, const ggml_tensor * concat, ggml_tensor * dst) {
    constexpr int64_t CHANNELS = 256;
    const ggml_tensor * conv = dst->src[0], * before = concat->src[0], * x = concat->src[1], * c = conv->src[1];
    const int64_t width = c->ne[0], n_before = before->ne[0], n_channels = x->ne[1], n_tokens = conv->ne[1];
    const auto overlap = [&](const ggml_tensor * t) {
        return (char *) t->data < (char *) dst->data + ggml_nbytes(dst) && (char *) dst->data < (char *) t->data + ggml_nbytes(t);
    };
    const bool in_place = x->data == dst->data && x->nb[0] == dst->nb[1] && x->nb[2] == dst->nb[2];
    if (!ggml_cpu_large_batch() || ggml_get_unary_op(dst) != GGML_UNARY_OP_SILU || conv->src[0] != concat || n_tokens < FEW ||
        ggml_get_op_params_i32(concat, 0) != 0 || n_before != width - 1 || width > FEW || n_channels % LANES || x->ne[3] != 1 || x->nb[1] != sizeof(float) ||
        x->type != GGML_TYPE_F32 || before->type != GGML_TYPE_F32 || !is_floats(c) || !is_floats(dst) || overlap(before) || (overlap(x) && !in_place)) {
        return false;
    }
    int64_t begin, end;
    share(params, n_channels, LANES, begin, end);
    alignas(64) float weights[FEW][CHANNELS], last[FEW][CHANNELS]; // inputs of the last tokens, each in the place of the one that it follows by `width`
    for (int64_t seq = 0; seq < x->ne[2]; ++seq) {
        for (int64_t channel = begin; channel < end; channel += CHANNELS) {
            const int64_t n = std::min(CHANNELS, end - channel);
            for (int64_t k = 0; k < width; ++k) {
                for (int64_t i = 0; i < n; ++i) {
                    weights[k][i] = *(const float *) at(c, k, channel + i);
                    last[k][i]    = k < n_before ? *(const float *) at(before, k, channel + i, seq) : 0.0f;
                }
            }
            for (int64_t token = 0; token < n_tokens; ++token) {
                float * y = (float *) at(dst, channel, token, seq);
                memcpy(last[(token + n_before) % width], at(x, token, channel, seq), n * sizeof(float));
                for (int64_t i = 0; i < n; i += LANES) {
                    fvec sum = SB(setzero_ps)();
                    for (int64_t k = 0; k < width; ++k) {
                        sum = SB(fmadd_ps)(load_floats(last[(token + k) % width] + i), load_floats(weights[k] + i), sum);
                    }
                    SB(storeu_ps)(y + i, sum);
                }
                ggml_vec_silu_f32((int) n, y, y);
            }
        }
    }
    return true;
}

bool ggml_compute_forward_large_batch_mul(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * a = dst->src[0];
    const ggml_tensor * b = dst->src[1];
    if (!ggml_cpu_large_batch() || params->use_ref || b->ne[0] != 1 || a->ne[0] < 16 || !is_floats(a) || !is_floats(dst) || b->type != GGML_TYPE_F32) {
        return false;
    }
    int64_t begin, end;
    share(params, ggml_nrows(a), 1, begin, end);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t i1 = i % a->ne[1], i2 = i / a->ne[1] % a->ne[2], i3 = i / a->ne[1] / a->ne[2];
        const float factor = *(const float *) at(b, 0, i1 % b->ne[1], i2 % b->ne[2], i3 % b->ne[3]);
        const float * x = (const float *) at(a, 0, i1, i2, i3);
        float * y = (float *) at(dst, 0, i1, i2, i3);
        for (int64_t k = 0; k < a->ne[0]; ++k) {
            y[k] = x[k] * factor;
        }
    }
    return true;
}

// ---- delta net
//
// A head's state S is [size, size]; a token takes it to g S + k (x) delta, delta = beta (v - g S^T k), and gives S^T q.
// Columns of S do not touch each other: a block of them goes through all tokens, one by one, and stays in the first-level cache.
// One pass over it takes a token in, decays what it leaves, and multiplies that by the next one's k. Sums are upstream's, in
// vectors as its ggml_vec_dot_f32() has them, so bits do not depend on how many tokens come together.

namespace {

#if defined(__aarch64__)
#define ROW(op) neon_##op
#elif defined(__AVX512F__)
#define ROW(op) _mm512_##op
#else
#define ROW(op) _mm256_##op
#endif
typedef decltype(ROW(setzero_ps)()) rvec;

constexpr int64_t WIDTH = sizeof(rvec) / sizeof(float);
constexpr int64_t SUMS  = 4;    // of a column, in turns
constexpr int64_t STEP  = 4;    // columns side by side
constexpr int64_t BLOCK = 4096; // floats of columns

typedef ggml_delta_net_tokens delta_net;
typedef ggml_delta_net_states states_of;

// of a head; v and out from a block's first column on
struct token {
    const float * q, * k, * v;
    float       * out;
    float         beta, decay;
};

// what the lanes of each of STEP vectors add up to
SB_INLINE void add_lanes(const rvec * x, float * sums) {
#if defined(__aarch64__)
    vst1q_f32(sums, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
#elif defined(__AVX512F__)
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    const __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    const __m512 pairs = _mm512_add_ps(fours, _mm512_shuffle_ps(fours, fours, 0x4e));
    const __m512 all   = _mm512_add_ps(pairs, _mm512_shuffle_ps(pairs, pairs, 0xb1));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), all)));
#else
    const __m256 a = _mm256_add_ps(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
    const __m256 b = _mm256_add_ps(_mm256_permute2f128_ps(x[2], x[3], 0x20), _mm256_permute2f128_ps(x[2], x[3], 0x31));
    const __m256 pairs = _mm256_hadd_ps(a, b), all = _mm256_hadd_ps(pairs, pairs);
    _mm_storeu_ps(sums, _mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#endif
}

// n columns: takes `now` in, whose deltas are there, and finds those of `next`, for which `to` is decayed; as is `from`, if it is not
// the state that all begin with. KEEP: what `now` leaves goes to `kept`.
template <bool NOW, bool NEXT, bool KEEP> void pass(int64_t size, int64_t n, const float * from, float * to, float * kept, const token & now, const token & next, float * delta, float scale) {
    const float * q_of = now.q, * k_of = now.k, * next_k_of = next.k; // stores might change `now`
    const rvec g = ROW(set1_ps)(next.decay);
    for (int64_t column = 0; column < n; column += STEP) {
        rvec d[STEP], sq[2][STEP], sk[2][STEP]; // S^T q, S^T k of the next one
        SB_UNROLL for (int j = 0; j < STEP && NOW; ++j) {
            d[j] = ROW(set1_ps)(delta[column + j]);
        }
        SB_UNROLL for (int s = 0; s < SUMS; ++s) { // 0 and 2, then 1 and 3
            rvec q_sum[STEP], k_sum[STEP];
            SB_UNROLL for (int j = 0; j < STEP; ++j) {
                q_sum[j] = k_sum[j] = ROW(setzero_ps)();
            }
            for (int64_t i = (s % 2 * 2 + s / 2) * WIDTH; i < size; i += SUMS * WIDTH) {
                const rvec q = ROW(loadu_ps)(q_of + i), k = ROW(loadu_ps)(k_of + i), next_k = ROW(loadu_ps)(next_k_of + i);
                SB_UNROLL for (int j = 0; j < STEP; ++j) {
                    const int64_t at = (column + j) * size + i;
                    rvec x = ROW(loadu_ps)(from + at);
                    if (NOW) {
                        x = ROW(fmadd_ps)(k, d[j], x);
                        q_sum[j] = ROW(fmadd_ps)(x, q, q_sum[j]);
                        if (KEEP) {
                            ROW(storeu_ps)(kept + at, x);
                        }
                    } else {
                        __builtin_prefetch(from + at + n * size, 0, 2); // the next block
                    }
                    if (NEXT) {
                        x = ROW(mul_ps)(x, g);
                        ROW(storeu_ps)(to + at, x);
                        k_sum[j] = ROW(fmadd_ps)(x, next_k, k_sum[j]);
                    }
                }
            }
            SB_UNROLL for (int j = 0; j < STEP; ++j) {
                sq[s / 2][j] = s % 2 ? ROW(add_ps)(sq[s / 2][j], q_sum[j]) : q_sum[j];
                sk[s / 2][j] = s % 2 ? ROW(add_ps)(sk[s / 2][j], k_sum[j]) : k_sum[j];
            }
        }
        SB_UNROLL for (int j = 0; j < STEP; ++j) {
            sq[0][j] = ROW(add_ps)(sq[0][j], sq[1][j]);
            sk[0][j] = ROW(add_ps)(sk[0][j], sk[1][j]);
        }
        float sums[STEP];
        if (NOW && now.out != nullptr) {
            add_lanes(sq[0], sums);
            for (int j = 0; j < STEP; ++j) {
                now.out[column + j] = sums[j] * scale;
            }
        }
        if (NEXT) {
            add_lanes(sk[0], sums);
            for (int j = 0; j < STEP; ++j) {
                delta[column + j] = (next.v[column + j] - sums[j]) * next.beta;
            }
        }
    }
}

// snapshots that no second-level cache holds: a line of them need not be read before it is written
#if defined(__aarch64__)
bool past_caches(const delta_net &, const states_of &) { return false; }
void copy_past_caches(const float *, float *, int64_t) {}
#else
bool past_caches(const delta_net & d, const states_of & states) {
    const int64_t state = d.size() * d.size() * d.n_heads();
    return states.begin != states.end && std::min(states.n_snaps, d.n_tokens()) * d.n_seqs() * state * sizeof(float) > (1 << 20) &&
           (uintptr_t) states.end % sizeof(rvec) == 0 && states.snap_stride % WIDTH == 0 && states.end_stride % WIDTH == 0;
}

void copy_past_caches(const float * from, float * to, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDTH) {
        ROW(stream_ps)(to + i, ROW(loadu_ps)(from + i));
    }
    _mm_sfence();
}
#endif

// columns [first, first + n) of a head through what is before, which leaves one state, and the tokens at hand
void take_columns(const ggml_delta_net_rows & rows, int64_t head, int64_t seq, int64_t first, int64_t n, bool stream) {
    const states_of & states = rows.states;
    const int64_t size     = rows.tokens.size();
    const int64_t offset   = (head * size + first) * size;
    const int64_t n_before = rows.n_before ? rows.n_before[seq] : 0;
    const int64_t n_all    = n_before + rows.tokens.n_tokens();
    const float   scale    = 1.0f / sqrtf((float) size);
    alignas(64) float memory[BLOCK], snapshot[BLOCK], delta[BLOCK / (SUMS * WIDTH)];

    const auto token_at = [&](int64_t i) -> token {
        const delta_net & d = i < n_before ? rows.before : rows.tokens;
        i -= i < n_before ? 0 : n_before;
        return { d.row(d.q, head, i, seq), d.row(d.k, head, i, seq), d.row(d.v, head, i, seq) + first, d.out ? d.out_row(head, i, seq) + first : nullptr,
                 *d.row(d.beta, head, i, seq), expf(*d.row(d.g, head, i, seq)) };
    };
    token now = token_at(0);
    pass<false, true, false>(size, n, states.begin + seq * states.begin_stride + offset, memory, nullptr, now, now, delta, scale);
    for (int64_t i = 0; i < n_all; ++i) {
        const int64_t snap = n_all - 1 - i;
        const bool    keep = i < n_before ? i + 1 == n_before && states.n_snaps == 0 : snap < states.n_snaps;
        float * end  = states.end + (i < n_before ? 0 : snap * states.snap_stride) + seq * states.end_stride + offset;
        float * kept = keep && !stream ? end : snapshot;
        if (snap == 0) {
            pass<true, false, true>(size, n, memory, memory, kept, now, now, delta, scale);
        } else {
            const token next = token_at(i + 1);
            (keep ? pass<true, true, true> : pass<true, true, false>)(size, n, memory, memory, kept, now, next, delta, scale);
            now = next;
        }
        if (keep && stream) {
            copy_past_caches(snapshot, end, n * size);
        }
    }
}

} // namespace

bool ggml_delta_net_steps(const ggml_compute_params * params, const ggml_delta_net_rows & rows) {
    const delta_net & d = rows.tokens;
    const int64_t size = d.size(), n_columns = d.n_seqs() * d.n_heads() * size;
    if (params->use_ref || !ggml_cpu_large_batch() || size % (SUMS * WIDTH) || size > BLOCK / STEP || d.g->ne[0] != 1 || d.q->ne[0] != size || d.k->ne[0] != size ||
        !is_floats(d.q) || !is_floats(d.k) || !is_floats(d.v) || !is_floats(d.g) || !is_floats(d.beta)) {
        return false;
    }
    const bool stream = past_caches(d, rows.states);
    // of few tokens small ones, so that memory is never idle for long
    const int64_t block = std::max(STEP, (d.n_tokens() < FEW ? BLOCK / 4 : BLOCK) / size / STEP * STEP);
    const auto take = [&](int64_t begin, int64_t end) {
        for (int64_t n; begin < end; begin += n) {
            const int64_t first = begin % size;
            n = std::min({ block, size - first, end - begin });
            take_columns(rows, begin / size % d.n_heads(), begin / size / d.n_heads(), first, n, stream);
        }
    };
    int64_t begin, end;
    share(params, n_columns, STEP, begin, end);
    if (d.n_tokens() < FEW || params->nth == 1) {
        take(begin, end);
        return true;
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const int64_t width = std::clamp(n_columns / params->nth / 2, STEP, BLOCK / size) / STEP * STEP;
    for (int64_t i = params->ith * width; i < n_columns; i = ggml_threadpool_chunk_add(params->threadpool, 1) * width) {
        take(i, std::min(n_columns, i + width));
    }
    return true;
}

bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * state = dst->src[5];
    const delta_net d = { dst->src[0], dst->src[1], dst->src[2], dst->src[3], dst->src[4], (float *) dst->data };
    const int64_t size = d.size() * d.size() * d.n_heads();

    // behind the outputs
    const states_of states = { (const float *) state->data, (int64_t) (state->nb[3] / sizeof(float)), d.out + ggml_nelements(d.v), size, size * d.n_seqs(), ggml_get_op_params_i32(dst, 0) };
    return ggml_delta_net_steps(params, { states, {}, nullptr, d });
}

#else

bool ggml_compute_forward_large_batch_conv(const ggml_compute_params *, ggml_tensor *)   { return false; }
bool ggml_compute_forward_large_batch_concat(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_compute_forward_large_batch_conv_silu(const ggml_compute_params *, const ggml_tensor *, ggml_tensor *) { return false; }
bool ggml_compute_forward_large_batch_mul(const ggml_compute_params *, ggml_tensor *)    { return false; }
bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_delta_net_steps(const ggml_compute_params *, const ggml_delta_net_rows &) { return false; }

#endif
