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

// COLUMN_VECTORS: of a delta net's state, side by side. FACTORS: numbers that are loaded together.
#if defined(__aarch64__)
#define SB(op) neon_##op
#define SB_LOAD(p) vld1q_f32((const float *) (p))
typedef float32x4_t fvec;
typedef float32x4_t ivec;
typedef float32x4_t factors;
constexpr int LANES          = 4;
constexpr int COLUMN_VECTORS = 2;
constexpr int FACTORS        = 4;

SB_INLINE factors load_factors(const float * p)                        { return vld1q_f32(p); }
SB_INLINE fvec    factor(factors x, int i)                             { return vdupq_n_f32(x[i]); }
SB_INLINE ivec    load_first(const char * p, int64_t n)                { return neon_load_first((const float *) p, n); }
SB_INLINE void    transpose(const ivec * x, char * out, size_t stride) { neon_transpose(x, out, stride); }
#else
#ifdef SB_512
constexpr int COLUMN_VECTORS = 2;
#else
constexpr int COLUMN_VECTORS = 1;
#endif
typedef float factors;
constexpr int FACTORS = 1;

SB_INLINE factors load_factors(const float * p) { return *p; }
SB_INLINE fvec    factor(factors x, int)        { return SB(set1_ps)(x); }

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
// A head's state S is [size, size]; a token takes it to g S + k (x) delta, delta = beta (v - g S^T k), and reads S^T q.
// Columns of S do not touch each other: as many as lanes are taken through all tokens, and stay in the first-level cache.
// CHUNK tokens at a time read what S has before them, S^T k and S^T q of each, and get the rest from products of their k
// and q with each other (the WY form of DeltaNet, Yang et al. 2024, arXiv:2406.06484, with gates as in arXiv:2412.06464).

namespace {

constexpr int CHUNK   = 4;
constexpr int COLUMNS = COLUMN_VECTORS * LANES;

// of the tokens of a chunk, a and b: what passes from one to the other, or from the state before
struct chunk {
    float beta[CHUNK];
    float decay[CHUNK];      // of the state before the chunk, up to a
    float decay_q[CHUNK];    // times the scale of the output
    float after[CHUNK];      // decay of what b adds, up to the chunk's end
    float kk[CHUNK][CHUNK];  // k_b . k_a, decayed from b to a
    float qk[CHUNK][CHUNK];  // k_b . q_a, decayed from b to a, times the scale of the output
};

typedef ggml_delta_net_tokens delta_net;
typedef ggml_delta_net_states states_of;

int64_t n_chunks(const delta_net & d) { return (d.n_tokens() + CHUNK - 1) / CHUNK; }
size_t  chunk_bytes(const delta_net & d) { return d.n_seqs() * d.n_heads() * n_chunks(d) * sizeof(chunk); }
size_t  state_bytes(const delta_net & d) { return d.size() * COLUMNS * sizeof(float); }

bool supported(const delta_net & d) {
    const int64_t size = d.size();
    return ggml_cpu_large_batch() && size % COLUMNS == 0 && size % LANES == 0 && d.g->ne[0] == 1 && d.q->ne[0] == size && d.k->ne[0] == size &&
           is_floats(d.q) && is_floats(d.k) && is_floats(d.v) && is_floats(d.g) && is_floats(d.beta);
}

float dot_product(const float * a, const float * b, int64_t n) {
    fvec sum = SB(setzero_ps)();
    for (int64_t i = 0; i < n; i += LANES) {
        sum = SB(fmadd_ps)(load_floats(a + i), load_floats(b + i), sum);
    }
    float lanes[LANES], all = 0;
    SB(storeu_ps)(lanes, sum);
    for (float lane : lanes) {
        all += lane;
    }
    return all;
}

void prepare_chunk(const delta_net & d, int64_t head, int64_t seq, int64_t first, chunk & c) {
    const int   n     = (int) std::min<int64_t>(CHUNK, d.n_tokens() - first);
    const float scale = 1.0f / sqrtf((float) d.size());
    for (int a = 0; a < n; ++a) {
        const float decay = expf(*d.row(d.g, head, first + a, seq));
        c.beta[a]    = *d.row(d.beta, head, first + a, seq);
        c.decay[a]   = (a ? c.decay[a - 1] : 1.0f) * decay;
        c.decay_q[a] = c.decay[a] * scale;
        for (int b = 0; b < a; ++b) {
            c.after[b] *= decay;
        }
        c.after[a] = 1.0f;
        for (int b = 0; b <= a; ++b) {
            const float * k = d.row(d.k, head, first + b, seq);
            c.kk[a][b] = c.after[b] * dot_product(k, d.row(d.k, head, first + a, seq), d.size());
            c.qk[a][b] = c.after[b] * dot_product(k, d.row(d.q, head, first + a, seq), d.size()) * scale;
        }
    }
}

// n tokens of a chunk and COLUMNS columns of the state, state[size][COLUMNS]
template <int n> void take_chunk(const chunk & c, const float * const * q, const float * const * k, const float * const * v, float * const * out, float * state, int64_t size) {
    constexpr int V = COLUMN_VECTORS;
    fvec sk[n][V], sq[n][V]; // S^T k, S^T q
    SB_UNROLL for (int a = 0; a < n * V; ++a) {
        sk[a / V][a % V] = sq[a / V][a % V] = SB(setzero_ps)();
    }
    for (int64_t i = 0; i < size; i += FACTORS) {
        factors ka[n], qa[n];
        SB_UNROLL for (int a = 0; a < n; ++a) {
            ka[a] = load_factors(k[a] + i);
            qa[a] = load_factors(q[a] + i);
        }
        SB_UNROLL for (int f = 0; f < FACTORS; ++f) {
            fvec s[V];
            SB_UNROLL for (int j = 0; j < V; ++j) {
                s[j] = SB(loadu_ps)(state + (i + f) * COLUMNS + j * LANES);
            }
            SB_UNROLL for (int a = 0; a < n; ++a) {
                SB_UNROLL for (int j = 0; j < V; ++j) {
                    sk[a][j] = SB(fmadd_ps)(s[j], factor(ka[a], f), sk[a][j]);
                    sq[a][j] = SB(fmadd_ps)(s[j], factor(qa[a], f), sq[a][j]);
                }
            }
        }
    }
    fvec delta[n][V];
    SB_UNROLL for (int j = 0; j < V; ++j) {
        SB_UNROLL for (int a = 0; a < n; ++a) {
            fvec x = SB(fnmadd_ps)(sk[a][j], SB(set1_ps)(c.decay[a]), SB(loadu_ps)(v[a] + j * LANES));
            fvec y = SB(mul_ps)(sq[a][j], SB(set1_ps)(c.decay_q[a]));
            SB_UNROLL for (int b = 0; b < a; ++b) {
                x = SB(fnmadd_ps)(delta[b][j], SB(set1_ps)(c.kk[a][b]), x);
                y = SB(fmadd_ps)(delta[b][j], SB(set1_ps)(c.qk[a][b]), y);
            }
            delta[a][j] = SB(mul_ps)(x, SB(set1_ps)(c.beta[a]));
            SB(storeu_ps)(out[a] + j * LANES, SB(fmadd_ps)(delta[a][j], SB(set1_ps)(c.qk[a][a]), y));
        }
        SB_UNROLL for (int a = 0; a < n; ++a) {
            delta[a][j] = SB(mul_ps)(delta[a][j], SB(set1_ps)(c.after[a]));
        }
    }
    const fvec decay = SB(set1_ps)(c.decay[n - 1]);
    for (int64_t i = 0; i < size; i += FACTORS) {
        factors ka[n];
        SB_UNROLL for (int a = 0; a < n; ++a) {
            ka[a] = load_factors(k[a] + i);
        }
        SB_UNROLL for (int f = 0; f < FACTORS; ++f) {
            fvec s[V];
            SB_UNROLL for (int j = 0; j < V; ++j) {
                s[j] = SB(mul_ps)(SB(loadu_ps)(state + (i + f) * COLUMNS + j * LANES), decay);
            }
            SB_UNROLL for (int a = 0; a < n; ++a) {
                SB_UNROLL for (int j = 0; j < V; ++j) {
                    s[j] = SB(fmadd_ps)(delta[a][j], factor(ka[a], f), s[j]);
                }
            }
            SB_UNROLL for (int j = 0; j < V; ++j) {
                SB(storeu_ps)(state + (i + f) * COLUMNS + j * LANES, s[j]);
            }
        }
    }
}

// columns [first, first + COLUMNS) of a head through all tokens; in memory a column is contiguous
void take_columns(const delta_net & d, const chunk * chunks, int64_t head, int64_t seq, int64_t first, float * state, const float * begin, float * end) {
    const int64_t size = d.size();
    begin += first * size;
    ivec square[LANES];
    for (int64_t i = 0; i < size; i += LANES) {
        for (int j = 0; j < COLUMNS; j += LANES) {
            for (int lane = 0; lane < LANES; ++lane) {
                square[lane] = SB_LOAD(begin + (j + lane) * size + i);
            }
            transpose(square, (char *) (state + i * COLUMNS + j), COLUMNS * sizeof(float));
        }
    }
    for (int64_t token = 0; token < d.n_tokens(); token += CHUNK) {
        const int n = (int) std::min<int64_t>(CHUNK, d.n_tokens() - token);
        const float * q[CHUNK], * k[CHUNK], * v[CHUNK];
        float * out[CHUNK];
        for (int a = 0; a < n; ++a) {
            q[a] = d.row(d.q, head, token + a, seq);
            k[a] = d.row(d.k, head, token + a, seq);
            v[a] = d.row(d.v, head, token + a, seq) + first;
            out[a] = d.out_row(head, token + a, seq) + first;
        }
        static constexpr decltype(&take_chunk<1>) take[] = { nullptr, take_chunk<1>, take_chunk<2>, take_chunk<3>, take_chunk<4> };
        take[n](chunks[token / CHUNK], q, k, v, out, state, size);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        for (int j = 0; j < COLUMNS; j += LANES) {
            for (int lane = 0; lane < LANES; ++lane) {
                square[lane] = SB_LOAD(state + (i + lane) * COLUMNS + j);
            }
            transpose(square, (char *) (end + (first + j) * size + i), size * sizeof(float));
        }
    }
}

#if defined(__aarch64__)

constexpr int MAX_SIZE = 256;
constexpr int STEP = 4; // columns
constexpr int SUMS = 4; // of each, as in upstream's ggml_vec_dot_f32() of NEON

float sum_of(const fvec * x) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3])));
}

// STEP columns of a head, from `first` on, through few tokens one by one, summed up as upstream does: first the n_before
// ones, which leave one state. Registers do not hold them: each token reads them twice, from where the one before left them.
void step_columns(const ggml_delta_net_rows & rows, int64_t n_before, int64_t n_tokens, int64_t head, int64_t seq, int64_t first, const float * decay, bool) {
    const states_of & states = rows.states;
    const int64_t size   = rows.tokens.size();
    const int64_t offset = (head * size + first) * size;
    const float   scale  = 1.0f / sqrtf((float) size);
    const float * from   = states.begin + seq * states.begin_stride + offset;
    float         memory[STEP * MAX_SIZE];

    for (int64_t i = 0; i < n_before + n_tokens; ++i) {
        const bool        at_hand = i >= n_before;
        const delta_net & d       = at_hand ? rows.tokens : rows.before;
        const int64_t     token   = at_hand ? i - n_before : i;
        const float * q = d.row(d.q, head, token, seq), * k = d.row(d.k, head, token, seq), * v = d.row(d.v, head, token, seq) + first;
        const float   beta = *d.row(d.beta, head, token, seq);
        const fvec    g    = vdupq_n_f32(decay[i]);
        const int64_t snap = n_tokens - 1 - token;
        const bool    kept = at_hand ? snap < states.n_snaps : i + 1 == n_before && (states.n_snaps == 0 || n_tokens == 0);
        float * to  = kept ? states.end + (at_hand ? snap * states.snap_stride : 0) + seq * states.end_stride + offset : memory;

        fvec sums[STEP][SUMS], delta[STEP];
        const auto clear = [&] {
            SB_UNROLL for (int i = 0; i < STEP * SUMS; ++i) {
                sums[i / SUMS][i % SUMS] = vdupq_n_f32(0);
            }
        };
        clear();
        for (int64_t j = 0; j < size; j += SUMS * LANES) {
            SB_UNROLL for (int s = 0; s < SUMS; ++s) {
                const fvec x = vld1q_f32(k + j + s * LANES);
                SB_UNROLL for (int n = 0; n < STEP; ++n) {
                    sums[n][s] = vfmaq_f32(sums[n][s], vmulq_f32(vld1q_f32(from + n * size + j + s * LANES), g), x);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < STEP; ++n) {
            delta[n] = vdupq_n_f32((v[n] - sum_of(sums[n])) * beta);
        }
        clear();
        for (int64_t j = 0; j < size; j += SUMS * LANES) {
            SB_UNROLL for (int s = 0; s < SUMS; ++s) {
                const fvec x = vld1q_f32(k + j + s * LANES), y = vld1q_f32(q + j + s * LANES);
                SB_UNROLL for (int n = 0; n < STEP; ++n) {
                    const int64_t at = n * size + j + s * LANES;
                    const fvec column = vfmaq_f32(vmulq_f32(vld1q_f32(from + at), g), x, delta[n]);
                    vst1q_f32(to + at, column);
                    sums[n][s] = vfmaq_f32(sums[n][s], column, y);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < STEP; ++n) {
            if (d.out != nullptr) {
                d.out_row(head, token, seq)[first + n] = sum_of(sums[n]) * scale;
            }
        }
        from = to;
    }
}

decltype(&step_columns) step_of(int64_t size) {
    return size % (SUMS * LANES) == 0 && size <= MAX_SIZE ? step_columns : nullptr;
}

bool past_caches(const delta_net &, const states_of &) { return false; }
void stored_past_caches() {}

#else

SB_INLINE void store_past_caches(float * p, GGML_F32_VEC x) {
#ifdef __AVX512F__
    _mm512_stream_ps(p, x);
#else
    _mm256_stream_ps(p, x);
#endif
}

// N columns of a head, V vectors each, that go through tokens one by one, as upstream's ggml_vec_dot_f32() and
// ggml_vec_mad_f32() sum them up. AVX2 has no registers for them: there a token decays them twice, which is cheaper than to
// store them once more.
template <int V, int N> struct few_columns {
#ifdef __AVX512F__
    static constexpr bool IN_REGISTERS = true;
#else
    static constexpr bool IN_REGISTERS = false;
#endif
    GGML_F32_VEC x[N][V];

    inline __attribute__((always_inline)) void load(const float * p) {
        SB_UNROLL for (int i = 0; i < N * V; ++i) {
            x[i / V][i % V] = GGML_F32_VEC_LOAD(p + i * GGML_F32_EPR);
        }
    }
    inline __attribute__((always_inline)) void store(float * p, bool past_caches) const {
        if (past_caches) {
            SB_UNROLL for (int i = 0; i < N * V; ++i) {
                store_past_caches(p + i * GGML_F32_EPR, x[i / V][i % V]);
            }
            return;
        }
        SB_UNROLL for (int i = 0; i < N * V; ++i) {
            GGML_F32_VEC_STORE(p + i * GGML_F32_EPR, x[i / V][i % V]);
        }
    }
    // columns from `first` on through a token of a head; without OUTPUTS nobody reads what it gives
    template <bool OUTPUTS> inline __attribute__((always_inline)) void step(const delta_net & d, int64_t head, int64_t seq, int64_t token, int64_t first, float decay, float scale) {
        const float * q = d.row(d.q, head, token, seq), * k = d.row(d.k, head, token, seq), * v = d.row(d.v, head, token, seq) + first;
        const float beta = *d.row(d.beta, head, token, seq);
        const GGML_F32_VEC g = GGML_F32_VEC_SET1(decay);

        GGML_F32_VEC sums[N][GGML_F32_ARR];
        const auto clear = [&] {
            SB_UNROLL for (int i = 0; i < N * GGML_F32_ARR; ++i) {
                sums[i / GGML_F32_ARR][i % GGML_F32_ARR] = GGML_F32_VEC_ZERO;
            }
        };
        const auto sum = [&](int n) {
            float all;
            GGML_F32_VEC_REDUCE(all, sums[n]);
            return all;
        };
        clear();
        SB_UNROLL for (int i = 0; i < V; ++i) {
            const GGML_F32_VEC y = GGML_F32_VEC_LOAD(k + i * GGML_F32_EPR);
            SB_UNROLL for (int n = 0; n < N; ++n) {
                const GGML_F32_VEC decayed = GGML_F32_VEC_MUL(x[n][i], g);
                if (IN_REGISTERS) {
                    x[n][i] = decayed;
                }
                sums[n][i % GGML_F32_ARR] = GGML_F32_VEC_FMA(sums[n][i % GGML_F32_ARR], decayed, y);
            }
        }
        GGML_F32_VEC delta[N];
        SB_UNROLL for (int n = 0; n < N; ++n) {
            delta[n] = GGML_F32_VEC_SET1((v[n] - sum(n)) * beta);
        }
        clear();
        SB_UNROLL for (int i = 0; i < V; ++i) {
            const GGML_F32_VEC y = GGML_F32_VEC_LOAD(k + i * GGML_F32_EPR), z = GGML_F32_VEC_LOAD(q + i * GGML_F32_EPR);
            SB_UNROLL for (int n = 0; n < N; ++n) {
                const GGML_F32_VEC decayed = IN_REGISTERS ? x[n][i] : GGML_F32_VEC_MUL(x[n][i], g);
                x[n][i] = GGML_F32_VEC_FMA(decayed, y, delta[n]);
                if (OUTPUTS) {
                    sums[n][i % GGML_F32_ARR] = GGML_F32_VEC_FMA(sums[n][i % GGML_F32_ARR], x[n][i], z);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < N && OUTPUTS; ++n) {
            d.out_row(head, token, seq)[first + n] = sum(n) * scale;
        }
    }
};

// first the n_before tokens, which leave one state
template <int V, int N> void step_columns(const ggml_delta_net_rows & rows, int64_t n_before, int64_t n_tokens, int64_t head, int64_t seq, int64_t first, const float * decay, bool stream) {
    const states_of & states = rows.states;
    const int64_t size   = rows.tokens.size();
    const int64_t offset = (head * size + first) * size;
    const float   scale  = 1.0f / sqrtf((float) size);
    float *       end    = states.end + seq * states.end_stride + offset;

    few_columns<V, N> s;
    s.load(states.begin + seq * states.begin_stride + offset);
    for (int64_t token = 0; token < n_before; ++token) {
        s.template step<false>(rows.before, head, seq, token, first, decay[token], scale);
    }
    if (n_before > 0 && (states.n_snaps == 0 || n_tokens == 0)) {
        s.store(end, false);
    }
    for (int64_t token = 0; token < n_tokens; ++token) {
        s.template step<true>(rows.tokens, head, seq, token, first, decay[n_before + token], scale);
        const int64_t snap = n_tokens - 1 - token;
        if (snap < states.n_snaps) {
            s.store(end + snap * states.snap_stride, stream);
        }
    }
}

constexpr int STEP = 2;

decltype(&step_columns<4, STEP>) step_of(int64_t size) {
    return size == 4 * GGML_F32_EPR ? step_columns<4, STEP> : size == 8 * GGML_F32_EPR ? step_columns<8, STEP> :
           size == 16 * GGML_F32_EPR ? step_columns<16, STEP> : nullptr;
}

// snapshots that no second-level cache holds: a line of them need not be read before it is written
bool past_caches(const delta_net & d, const states_of & states) {
    const int64_t state = d.size() * d.size() * d.n_heads();
    return states.begin != states.end && std::min(states.n_snaps, d.n_tokens()) * d.n_seqs() * state * sizeof(float) > (1 << 20) &&
           (uintptr_t) states.end % sizeof(GGML_F32_VEC) == 0 && states.snap_stride % GGML_F32_EPR == 0 && states.end_stride % GGML_F32_EPR == 0;
}

void stored_past_caches() { _mm_sfence(); }

#endif

} // namespace

bool ggml_delta_net_chunked(const delta_net & d, int64_t n_snaps) {
    return d.n_tokens() >= FEW && n_snaps == 1 && supported(d);
}

size_t ggml_delta_net_chunk_memory(int n_tasks, const delta_net & d) {
    return 64 + chunk_bytes(d) + n_tasks * state_bytes(d);
}

void ggml_delta_net_chunks(const ggml_compute_params * params, const delta_net & d, const states_of & states, void * work) {
    float * memory = (float *) GGML_PAD((uintptr_t) work, 64);
    chunk * chunks = (chunk *) ((char *) memory + params->nth * state_bytes(d));
    memory += params->ith * d.size() * COLUMNS;

    const int64_t n = n_chunks(d), n_heads = d.n_heads();
    int64_t begin, end;
    share(params, d.n_seqs() * n_heads * n, 1, begin, end);
    for (int64_t i = begin; i < end; ++i) {
        prepare_chunk(d, i / n % n_heads, i / n / n_heads, i % n * CHUNK, chunks[i]);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t parts = d.size() / COLUMNS;
    for (int64_t i = params->ith; i < d.n_seqs() * n_heads * parts; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t head = i / parts % n_heads, seq = i / parts / n_heads;
        const int64_t offset = head * d.size() * d.size();
        take_columns(d, chunks + (seq * n_heads + head) * n, head, seq, i % parts * COLUMNS, memory,
                     states.begin + seq * states.begin_stride + offset, states.end + seq * states.end_stride + offset);
    }
}

bool ggml_delta_net_steps(const ggml_compute_params * params, const ggml_delta_net_rows & rows, int64_t n_tokens, float * decay) {
    const delta_net & d = rows.tokens;
    const auto step = step_of(d.size());
    if (params->use_ref || step == nullptr || !supported(d)) {
        return false;
    }
    int64_t begin, end;
    share(params, d.n_seqs() * d.n_heads() * d.size(), STEP, begin, end);
    const bool stream = past_caches(d, rows.states);
    int64_t n_before = 0;
    for (int64_t i = begin; i < end; i += STEP) {
        const int64_t first = i % d.size(), head = i / d.size() % d.n_heads(), seq = i / d.size() / d.n_heads();
        if (i == begin || first == 0) {
            n_before = rows.n_before ? rows.n_before[seq] : 0;
            for (int64_t token = 0; token < n_before; ++token) {
                decay[token] = expf(*rows.before.row(rows.before.g, head, token, seq));
            }
            for (int64_t token = 0; token < n_tokens; ++token) {
                decay[n_before + token] = expf(*d.row(d.g, head, token, seq));
            }
        }
        if (n_before + n_tokens > 0) {
            step(rows, n_before, n_tokens, head, seq, first, decay, stream);
        }
    }
    stored_past_caches();
    return true;
}

static delta_net tokens_of(const ggml_tensor * dst) {
    return { dst->src[0], dst->src[1], dst->src[2], dst->src[3], dst->src[4], (float *) dst->data };
}

size_t ggml_large_batch_delta_net_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const delta_net d = tokens_of(dst);
    return ggml_delta_net_chunked(d, ggml_get_op_params_i32(dst, 0)) ? ggml_delta_net_chunk_memory(n_tasks, d) : 0;
}

bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * state = dst->src[5];
    const delta_net d = tokens_of(dst);
    const int64_t n_snaps = ggml_get_op_params_i32(dst, 0), size = d.size() * d.size() * d.n_heads();

    // behind the outputs
    const states_of states = { (const float *) state->data, (int64_t) (state->nb[3] / sizeof(float)), d.out + ggml_nelements(d.v), size, size * d.n_seqs(), n_snaps };
    if (!params->use_ref && ggml_delta_net_chunked(d, n_snaps)) {
        ggml_delta_net_chunks(params, d, states, params->wdata);
        return true;
    }
    float decay[FEW];
    return d.n_tokens() < FEW && ggml_delta_net_steps(params, { states, {}, nullptr, d }, d.n_tokens(), decay);
}

#else

bool ggml_compute_forward_large_batch_conv(const ggml_compute_params *, ggml_tensor *)   { return false; }
bool ggml_compute_forward_large_batch_concat(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_compute_forward_large_batch_mul(const ggml_compute_params *, ggml_tensor *)    { return false; }
bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params *, ggml_tensor *) { return false; }
size_t ggml_large_batch_delta_net_wdata_size(int, const ggml_tensor *) { return 0; }

bool   ggml_delta_net_chunked(const ggml_delta_net_tokens &, int64_t)         { return false; }
size_t ggml_delta_net_chunk_memory(int, const ggml_delta_net_tokens &)        { return 0; }
void   ggml_delta_net_chunks(const ggml_compute_params *, const ggml_delta_net_tokens &, const ggml_delta_net_states &, void *) {}
bool   ggml_delta_net_steps(const ggml_compute_params *, const ggml_delta_net_rows &, int64_t, float *) { return false; }

#endif
