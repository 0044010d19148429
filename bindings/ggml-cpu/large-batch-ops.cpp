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

struct delta_net {
    const ggml_tensor * q, * k, * v, * g, * beta, * state;
    int64_t size, n_heads, n_tokens, n_seqs, n_chunks;

    explicit delta_net(const ggml_tensor * dst) :
        q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), g(dst->src[3]), beta(dst->src[4]), state(dst->src[5]),
        size(v->ne[0]), n_heads(v->ne[1]), n_tokens(v->ne[2]), n_seqs(v->ne[3]), n_chunks((n_tokens + CHUNK - 1) / CHUNK) {}

    const float * row(const ggml_tensor * t, int64_t head, int64_t token, int64_t seq) const {
        return (const float *) at(t, 0, head % t->ne[1], token, seq / (n_seqs / t->ne[3]));
    }
    bool chunked(const ggml_tensor * dst) const { return n_tokens >= FEW && ggml_get_op_params_i32(dst, 0) == 1; }
    bool supported() const {
        return ggml_cpu_large_batch() && size % COLUMNS == 0 && size % LANES == 0 &&
               g->ne[0] == 1 && q->ne[0] == size && k->ne[0] == size && is_floats(q) && is_floats(k) && is_floats(v) && is_floats(g) && is_floats(beta) && is_floats(state);
    }
    int64_t n_snaps(const ggml_tensor * dst) const { return std::min<int64_t>(ggml_get_op_params_i32(dst, 0), n_tokens); }
    // tokens without those at the end that change no state: gate and beta are zero
    int64_t n_changing(int64_t head, int64_t seq) const {
        int64_t n = n_tokens;
        while (n > 0 && *row(g, head, n - 1, seq) == 0.0f && *row(beta, head, n - 1, seq) == 0.0f) {
            --n;
        }
        return n;
    }
    size_t chunk_bytes() const { return n_seqs * n_heads * n_chunks * sizeof(chunk); }
    size_t state_bytes() const { return size * COLUMNS * sizeof(float); }
};

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
    const int   n     = (int) std::min<int64_t>(CHUNK, d.n_tokens - first);
    const float scale = 1.0f / sqrtf((float) d.size);
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
            c.kk[a][b] = c.after[b] * dot_product(k, d.row(d.k, head, first + a, seq), d.size);
            c.qk[a][b] = c.after[b] * dot_product(k, d.row(d.q, head, first + a, seq), d.size) * scale;
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
void take_columns(const delta_net & d, const chunk * chunks, ggml_tensor * dst, int64_t head, int64_t seq, int64_t first, float * state, const float * begin, float * end) {
    begin += first * d.size;
    ivec square[LANES];
    for (int64_t i = 0; i < d.size; i += LANES) {
        for (int j = 0; j < COLUMNS; j += LANES) {
            for (int lane = 0; lane < LANES; ++lane) {
                square[lane] = SB_LOAD(begin + (j + lane) * d.size + i);
            }
            transpose(square, (char *) (state + i * COLUMNS + j), COLUMNS * sizeof(float));
        }
    }
    for (int64_t token = 0; token < d.n_tokens; token += CHUNK) {
        const int n = (int) std::min<int64_t>(CHUNK, d.n_tokens - token);
        const float * q[CHUNK], * k[CHUNK], * v[CHUNK];
        float * out[CHUNK];
        for (int a = 0; a < n; ++a) {
            q[a] = d.row(d.q, head, token + a, seq);
            k[a] = d.row(d.k, head, token + a, seq);
            v[a] = d.row(d.v, head, token + a, seq) + first;
            out[a] = (float *) dst->data + ((seq * d.n_tokens + token + a) * d.n_heads + head) * d.size + first;
        }
        static constexpr decltype(&take_chunk<1>) take[] = { nullptr, take_chunk<1>, take_chunk<2>, take_chunk<3>, take_chunk<4> };
        take[n](chunks[token / CHUNK], q, k, v, out, state, d.size);
    }
    for (int64_t i = 0; i < d.size; i += LANES) {
        for (int j = 0; j < COLUMNS; j += LANES) {
            for (int lane = 0; lane < LANES; ++lane) {
                square[lane] = SB_LOAD(state + (i + lane) * COLUMNS + j);
            }
            transpose(square, (char *) (end + (first + j) * d.size + i), d.size * sizeof(float));
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

// STEP columns of a head, from `first` on, through few tokens one by one, summed up as upstream does. Registers do not hold
// them: each token reads them twice, from where the one before left them.
void step_columns(const delta_net & d, const ggml_gated_delta_net_states & states, ggml_tensor * dst, int64_t head, int64_t seq, const float * decay, int64_t n_tokens, int64_t first, bool) {
    const int64_t size    = d.size;
    const int64_t n_snaps = states.no_states ? 0 : d.n_snaps(dst);
    const int64_t offset  = (head * size + first) * size;
    const float * from    = ggml_gated_delta_net_begin(&states, dst, seq) + offset;
    const float   scale   = 1.0f / sqrtf((float) size);
    float         memory[STEP * MAX_SIZE];

    for (int64_t token = 0; token < n_tokens; ++token) {
        const float * q = d.row(d.q, head, token, seq), * k = d.row(d.k, head, token, seq), * v = d.row(d.v, head, token, seq) + first;
        const float   beta = *d.row(d.beta, head, token, seq);
        const fvec    g    = vdupq_n_f32(decay[token]);
        const int64_t snap = n_tokens - 1 - token;
        float * to  = snap < n_snaps ? states.data + snap * states.snap_stride + seq * states.seq_stride + offset : memory;
        float * out = (float *) dst->data + ((seq * d.n_tokens + token) * d.n_heads + head) * size + first;

        fvec sums[STEP][SUMS], delta[STEP];
        const auto clear = [&] {
            SB_UNROLL for (int i = 0; i < STEP * SUMS; ++i) {
                sums[i / SUMS][i % SUMS] = vdupq_n_f32(0);
            }
        };
        clear();
        for (int64_t i = 0; i < size; i += SUMS * LANES) {
            SB_UNROLL for (int s = 0; s < SUMS; ++s) {
                const fvec x = vld1q_f32(k + i + s * LANES);
                SB_UNROLL for (int n = 0; n < STEP; ++n) {
                    sums[n][s] = vfmaq_f32(sums[n][s], vmulq_f32(vld1q_f32(from + n * size + i + s * LANES), g), x);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < STEP; ++n) {
            delta[n] = vdupq_n_f32((v[n] - sum_of(sums[n])) * beta);
        }
        clear();
        for (int64_t i = 0; i < size; i += SUMS * LANES) {
            SB_UNROLL for (int s = 0; s < SUMS; ++s) {
                const fvec x = vld1q_f32(k + i + s * LANES), y = vld1q_f32(q + i + s * LANES);
                SB_UNROLL for (int n = 0; n < STEP; ++n) {
                    const int64_t at = n * size + i + s * LANES;
                    const fvec column = vfmaq_f32(vmulq_f32(vld1q_f32(from + at), g), x, delta[n]);
                    vst1q_f32(to + at, column);
                    sums[n][s] = vfmaq_f32(sums[n][s], column, y);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < STEP; ++n) {
            out[n] = sum_of(sums[n]) * scale;
        }
        from = to;
    }
}

template <bool> decltype(&step_columns) step_of(int64_t size) {
    return size % (SUMS * LANES) == 0 && size <= MAX_SIZE ? step_columns : nullptr;
}

bool past_caches(const delta_net &, const ggml_gated_delta_net_states &, const ggml_tensor *) { return false; }
void stored_past_caches() {}

#else

SB_INLINE void store_past_caches(float * p, GGML_F32_VEC x) {
#ifdef __AVX512F__
    _mm512_stream_ps(p, x);
#else
    _mm256_stream_ps(p, x);
#endif
}

// N columns of a head, from `first` on, through few tokens one by one, as upstream's ggml_vec_dot_f32() and
// ggml_vec_mad_f32() sum them up; V vectors each. AVX2 has no registers for them: there a token decays them twice, which is
// cheaper than to store them once more.
template <int V, int N, bool OUTPUTS> void step_columns(const delta_net & d, const ggml_gated_delta_net_states & states, ggml_tensor * dst, int64_t head, int64_t seq, const float * decay, int64_t n_tokens, int64_t first, bool stream) {
#ifdef __AVX512F__
    constexpr bool IN_REGISTERS = true;
#else
    constexpr bool IN_REGISTERS = false;
#endif
    const int64_t n_snaps = states.no_states ? 0 : d.n_snaps(dst);
    const int64_t offset  = (head * d.size + first) * d.size;
    const float * begin   = ggml_gated_delta_net_begin(&states, dst, seq) + offset;
    const float   scale   = 1.0f / sqrtf((float) d.size);
    GGML_F32_VEC column[N][V];
    SB_UNROLL for (int i = 0; i < N * V; ++i) {
        column[i / V][i % V] = GGML_F32_VEC_LOAD(begin + i * GGML_F32_EPR);
    }
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
    for (int64_t token = 0; token < n_tokens; ++token) {
        const float * q = d.row(d.q, head, token, seq), * k = d.row(d.k, head, token, seq), * v = d.row(d.v, head, token, seq) + first;
        const float beta = *d.row(d.beta, head, token, seq);
        const GGML_F32_VEC g = GGML_F32_VEC_SET1(decay[token]);
        float * out = (float *) dst->data + ((seq * d.n_tokens + token) * d.n_heads + head) * d.size + first;
        clear();
        SB_UNROLL for (int i = 0; i < V; ++i) {
            const GGML_F32_VEC x = GGML_F32_VEC_LOAD(k + i * GGML_F32_EPR);
            SB_UNROLL for (int n = 0; n < N; ++n) {
                const GGML_F32_VEC decayed = GGML_F32_VEC_MUL(column[n][i], g);
                if (IN_REGISTERS) {
                    column[n][i] = decayed;
                }
                sums[n][i % GGML_F32_ARR] = GGML_F32_VEC_FMA(sums[n][i % GGML_F32_ARR], decayed, x);
            }
        }
        GGML_F32_VEC delta[N];
        SB_UNROLL for (int n = 0; n < N; ++n) {
            delta[n] = GGML_F32_VEC_SET1((v[n] - sum(n)) * beta);
        }
        clear();
        SB_UNROLL for (int i = 0; i < V; ++i) {
            const GGML_F32_VEC x = GGML_F32_VEC_LOAD(k + i * GGML_F32_EPR), y = GGML_F32_VEC_LOAD(q + i * GGML_F32_EPR);
            SB_UNROLL for (int n = 0; n < N; ++n) {
                const GGML_F32_VEC decayed = IN_REGISTERS ? column[n][i] : GGML_F32_VEC_MUL(column[n][i], g);
                column[n][i] = GGML_F32_VEC_FMA(decayed, x, delta[n]);
                if (OUTPUTS) {
                    sums[n][i % GGML_F32_ARR] = GGML_F32_VEC_FMA(sums[n][i % GGML_F32_ARR], column[n][i], y);
                }
            }
        }
        SB_UNROLL for (int n = 0; n < N && OUTPUTS; ++n) {
            out[n] = sum(n) * scale;
        }
        const int64_t snap = n_tokens - 1 - token;
        if (snap < n_snaps) {
            float * end = states.data + snap * states.snap_stride + seq * states.seq_stride + offset;
            if (stream && end != begin) {
                SB_UNROLL for (int i = 0; i < N * V; ++i) {
                    store_past_caches(end + i * GGML_F32_EPR, column[i / V][i % V]);
                }
                continue;
            }
            SB_UNROLL for (int i = 0; i < N * V; ++i) {
                GGML_F32_VEC_STORE(end + i * GGML_F32_EPR, column[i / V][i % V]);
            }
        }
    }
}

constexpr int STEP = 2;

template <bool OUTPUTS> decltype(&step_columns<4, STEP, OUTPUTS>) step_of(int64_t size) {
    return size == 4 * GGML_F32_EPR ? step_columns<4, STEP, OUTPUTS> : size == 8 * GGML_F32_EPR ? step_columns<8, STEP, OUTPUTS> :
           size == 16 * GGML_F32_EPR ? step_columns<16, STEP, OUTPUTS> : nullptr;
}

// snapshots that no second-level cache holds: a line of them need not be read before it is written
bool past_caches(const delta_net & d, const ggml_gated_delta_net_states & states, const ggml_tensor * dst) {
    return d.n_snaps(dst) * d.n_seqs * d.n_heads * d.size * d.size * sizeof(float) > (1 << 20) &&
           (uintptr_t) states.data % sizeof(GGML_F32_VEC) == 0 && states.snap_stride % GGML_F32_EPR == 0 && states.seq_stride % GGML_F32_EPR == 0;
}

void stored_past_caches() { _mm_sfence(); }

#endif

bool step_few(const ggml_compute_params * params, const delta_net & d, const ggml_gated_delta_net_states & states, ggml_tensor * dst) {
    const auto step = states.no_outputs ? step_of<false>(d.size) : step_of<true>(d.size);
    if (step == nullptr || d.n_tokens >= FEW) {
        return false;
    }
    int64_t begin, end;
    share(params, d.n_seqs * d.n_heads * d.size, STEP, begin, end);
    const bool stream = past_caches(d, states, dst);
    float decay[FEW];
    int64_t n_tokens = 0;
    for (int64_t i = begin; i < end; i += STEP) {
        const int64_t first = i % d.size, head = i / d.size % d.n_heads, seq = i / d.size / d.n_heads;
        if (i == begin || first == 0) {
            n_tokens = states.no_outputs ? d.n_changing(head, seq) : d.n_tokens;
            for (int64_t token = 0; token < n_tokens; ++token) {
                decay[token] = expf(*d.row(d.g, head, token, seq));
            }
        }
        if (n_tokens > 0) {
            step(d, states, dst, head, seq, decay, n_tokens, first, stream);
            continue;
        }
        const int64_t offset = (head * d.size + first) * d.size;
        const float * kept = ggml_gated_delta_net_begin(&states, dst, seq) + offset;
        float * end_of = states.data + seq * states.seq_stride + offset;
        if (kept != end_of) {
            memcpy(end_of, kept, STEP * d.size * sizeof(float));
        }
    }
    stored_past_caches();
    return true;
}

} // namespace

size_t ggml_large_batch_delta_net_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const delta_net d(dst);
    return d.chunked(dst) && d.supported() ? 64 + d.chunk_bytes() + n_tasks * d.state_bytes() : 0;
}

bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params * params, ggml_tensor * dst, const ggml_gated_delta_net_states * states) {
    const delta_net d(dst);
    if (params->use_ref || !d.supported()) {
        return false;
    }
    if (!d.chunked(dst) || states->no_outputs || states->no_states) { // the bits of steps
        return step_few(params, d, *states, dst);
    }
    float * memory = (float *) GGML_PAD((uintptr_t) params->wdata, 64);
    chunk * chunks = (chunk *) ((char *) memory + params->nth * d.state_bytes());
    memory += params->ith * d.size * COLUMNS;

    int64_t begin, end;
    share(params, d.n_seqs * d.n_heads * d.n_chunks, 1, begin, end);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / d.n_chunks % d.n_heads, seq = i / d.n_chunks / d.n_heads;
        prepare_chunk(d, head, seq, i % d.n_chunks * CHUNK, chunks[i]);
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    const int64_t parts = d.size / COLUMNS;
    for (int64_t i = params->ith; i < d.n_seqs * d.n_heads * parts; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t head = i / parts % d.n_heads, seq = i / parts / d.n_heads;
        const int64_t offset = head * d.size * d.size;
        take_columns(d, chunks + (seq * d.n_heads + head) * d.n_chunks, dst, head, seq, i % parts * COLUMNS, memory,
                     ggml_gated_delta_net_begin(states, dst, seq) + offset, states->data + seq * states->seq_stride + offset);
    }
    return true;
}

#else

bool ggml_compute_forward_large_batch_conv(const ggml_compute_params *, ggml_tensor *)   { return false; }
bool ggml_compute_forward_large_batch_concat(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_compute_forward_large_batch_mul(const ggml_compute_params *, ggml_tensor *)    { return false; }
bool ggml_compute_forward_large_batch_delta_net(const ggml_compute_params *, ggml_tensor *, const ggml_gated_delta_net_states *) { return false; }
size_t ggml_large_batch_delta_net_wdata_size(int, const ggml_tensor *) { return 0; }

#endif
