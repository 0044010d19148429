// GATED_DELTA_NET_ROWS: see ggml.h. A column of a state is spread over a few lanes of a warp and stays in their registers while
// all tokens pass, those that are pending and those at hand.

#include "delta-net-rows.cuh"

#include <algorithm>
#include <cstdlib>

namespace {

constexpr int MAX_WARPS   = 4;         // of a block
constexpr int MOVED_BYTES = 48 * 1024; // of shared memory
constexpr int MAX_IDS     = MOVED_BYTES / sizeof(float) / WARP_SIZE;

template <int SIZE> constexpr int LANES_OF_COLUMN = SIZE < 32 ? SIZE / 4 : 8;

// F32 [size or 1, n_heads, n_tokens, n_seqs]; strides in floats
struct heads_of {
    const float * data;
    int64_t       head_stride, token_stride, seq_stride;
    int           n_heads, seqs_per_seq;

    heads_of(const ggml_tensor * t, int64_t n_seqs) :
        data((const float *) t->data), head_stride(t->nb[1] / sizeof(float)), token_stride(t->nb[2] / sizeof(float)),
        seq_stride(t->nb[3] / sizeof(float)), n_heads(t->ne[1]), seqs_per_seq(n_seqs / t->ne[3]) {}

    __device__ const float * of(int head, int seq) const {
        return data + head % n_heads * head_stride + seq / seqs_per_seq * seq_stride;
    }
};

struct delta_net_rows {
    heads_of q, k, v, g, beta;
    float *  states, * pend, * gates, * betas, * out;

    const int32_t * ids;
    int             n_ids, first, n_max, n_tokens, n_seqs, size, n_heads, n_heads_p;
    bool            keep;

    explicit delta_net_rows(const ggml_tensor * dst) :
        q(dst->src[0], dst->ne[3]), k(dst->src[1], dst->ne[3]), v(dst->src[2], dst->ne[3]), g(dst->src[3], dst->ne[3]), beta(dst->src[4], dst->ne[3]),
        states((float *) dst->src[5]->data), pend(nullptr), gates(nullptr), betas(nullptr), out((float *) dst->data),
        ids((const int32_t *) dst->src[8]->data), n_ids(dst->src[8]->ne[0]),
        first(ggml_get_op_params_i32(dst, 0)), n_max(ggml_get_op_params_i32(dst, 1)), n_tokens(dst->ne[2]), n_seqs(dst->ne[3]),
        size(dst->ne[0]), n_heads(dst->ne[1]), n_heads_p(0), keep(ggml_get_op_params_i32(dst, 2)) {
        if (const ggml_tensor * kv = dst->src[6]) {
            pend      = (float *) kv->data;
            gates     = (float *) dst->src[7]->data;
            betas     = gates + kv->ne[1] * n_heads;
            n_ids    -= n_seqs;
            n_heads_p = kv->ne[0] / size - n_heads;
        }
    }

    __host__ __device__ int pend_size() const { return size * (n_heads_p + n_heads); }

    __device__ float * column(int64_t cell, int head, int i) const { return states + ((cell * n_heads + head) * size + i) * size; }

    // of a token that is pending; heads of k, then those of v
    __device__ float * pend_row(int64_t cell, int token, int head) const { return pend + (cell * n_max + token) * pend_size() + head * size; }
    __device__ int64_t gate_at (int64_t cell, int token, int head) const { return (cell * n_max + token) * n_heads + head; }
};

// Tokens as one lane of a head's column sees them: v is a number, and so are the gates.
struct tokens_of_lane {
    const float * q, * k, * v, * g, * beta;
    int64_t       q_stride, k_stride, v_stride, g_stride, beta_stride;
};

template <int LANES, int N> __device__ void load(float4 (&to)[N], const float * from) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        to[i] = ((const float4 *) from)[i * LANES];
    }
}

template <int LANES, int N> __device__ void store(float * to, const float4 (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        ((float4 *) to)[i * LANES] = from[i];
    }
}

template <int N> __device__ float dot(const float4 (&a)[N], const float4 (&b)[N]) {
    float4 sum = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum.x += a[i].x * b[i].x;
        sum.y += a[i].y * b[i].y;
        sum.z += a[i].z * b[i].z;
        sum.w += a[i].w * b[i].w;
    }
    return sum.x + sum.y + (sum.z + sum.w);
}

// One column through n tokens. What comes of a token is summed up over lanes with the next token's product, so that a token
// waits for one sum. The next token is on its way meanwhile.
template <int LANES, bool OUT, int N>
__device__ void pass(float4 (&state)[N], const tokens_of_lane & t, int n, float * out, int64_t out_stride, float scale, bool writes) {
    float4 next_k[N], next_q[N];
    float  next_v, next_g, next_beta;

    const auto fetch = [&](int i) {
        load<LANES>(next_k, t.k + i * t.k_stride);
        if (OUT) {
            load<LANES>(next_q, t.q + i * t.q_stride);
        }
        next_v    = t.v[i * t.v_stride];
        next_g    = t.g[i * t.g_stride];
        next_beta = t.beta[i * t.beta_stride];
    };
    fetch(0);

    float partial = 0.0f;
    for (int i = 0; i < n; ++i) {
        float4 k[N], q[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            k[j] = next_k[j];
            if (OUT) {
                q[j] = next_q[j];
            }
        }
        const float v = next_v, decay = expf(next_g), beta = next_beta;
        if (i + 1 < n) {
            fetch(i + 1);
        }
        float product = dot(state, k);
        if (OUT) {
            const float2 sums = warp_reduce_sum<LANES>(make_float2(product, partial));
            product = sums.x;
            if (i > 0 && writes) {
                out[(i - 1) * out_stride] = sums.y * scale;
            }
        } else {
            product = warp_reduce_sum<LANES>(product);
        }
        const float delta = (v - decay * product) * beta;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            state[j].x = decay * state[j].x + k[j].x * delta;
            state[j].y = decay * state[j].y + k[j].y * delta;
            state[j].z = decay * state[j].z + k[j].z * delta;
            state[j].w = decay * state[j].w + k[j].w * delta;
        }
        if (OUT) {
            partial = dot(state, q);
        }
    }
    if (OUT) {
        partial = warp_reduce_sum<LANES>(partial);
        if (writes) {
            out[(n - 1) * out_stride] = partial * scale;
        }
    }
}

// What is pending for a single sequence goes where its cell goes: a head's part.
static __device__ __forceinline__ void move_pending(const delta_net_rows & op, int64_t from, int64_t to, int head) {
    for (int token = 0; token < op.n_max; ++token) {
        for (int i = threadIdx.x; i < op.size; i += blockDim.x) {
            if (head < op.n_heads_p) {
                op.pend_row(to, token, head)[i] = op.pend_row(from, token, head)[i];
            }
            op.pend_row(to, token, op.n_heads_p + head)[i] = op.pend_row(from, token, op.n_heads_p + head)[i];
        }
        if (threadIdx.x == 0) {
            op.gates[op.gate_at(to, token, head)] = op.gates[op.gate_at(from, token, head)];
            op.betas[op.gate_at(to, token, head)] = op.betas[op.gate_at(from, token, head)];
        }
    }
}

template <int SIZE>
__global__ void __launch_bounds__(MAX_WARPS * WARP_SIZE, 4) delta_net_kernel(const delta_net_rows op, const float scale) {
    constexpr int LANES = LANES_OF_COLUMN<SIZE>;
    constexpr int N     = SIZE / 4 / LANES;

    const int head = blockIdx.x, seq = blockIdx.y, at = 4 * (threadIdx.x % LANES);
    const int column = (blockIdx.z * blockDim.x + threadIdx.x) / LANES;

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    // if there are several, move_kernel has moved them
    const int64_t own = op.first + seq, cell = op.n_ids == 1 ? op.ids[0] : own;

    float4 state[N];
    load<LANES>(state, op.column(cell, head, column) + at);

    bool changed = cell != own;
    if (op.pend) {
        const int n_pend = op.ids[op.n_ids + seq], head_p = head % op.n_heads_p;
        if (n_pend > 0) {
            const tokens_of_lane t = {
                nullptr, op.pend_row(cell, 0, head_p) + at, op.pend_row(cell, 0, op.n_heads_p + head) + column,
                op.gates + op.gate_at(cell, 0, head), op.betas + op.gate_at(cell, 0, head),
                0, op.pend_size(), op.pend_size(), op.n_heads, op.n_heads,
            };
            pass<LANES, false>(state, t, n_pend, nullptr, 0, 0.0f, false);
            changed = true;
        }
        if (cell != own && blockIdx.z == 0) {
            move_pending(op, cell, own, head);
        }
    }
    if (op.keep && changed) {
        store<LANES>(op.column(own, head, column) + at, state);
    }
    const tokens_of_lane t = {
        op.q.of(head, seq) + at, op.k.of(head, seq) + at, op.v.of(head, seq) + column, op.g.of(head, seq), op.beta.of(head, seq),
        op.q.token_stride, op.k.token_stride, op.v.token_stride, op.g.token_stride, op.beta.token_stride,
    };
    float * out = op.out + ((int64_t) seq * op.n_tokens * op.n_heads + head) * SIZE + column;
    pass<LANES, true>(state, t, op.n_tokens, out, (int64_t) op.n_heads * SIZE, scale, at == 0);
    if (!op.keep) {
        store<LANES>(op.column(own, head, column) + at, state);
    }
}

// The tokens at hand are pending now. A kernel of its own: blocks of several heads have read the same k.
__global__ void store_kernel(const delta_net_rows op) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int     token = blockIdx.y, seq = blockIdx.z, size = op.size, n = op.pend_size();
    const int64_t cell  = op.first + seq;
    const int     i     = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const int        head = i / size;
        const bool       is_k = head < op.n_heads_p;
        const heads_of & t    = is_k ? op.k : op.v;
        op.pend_row(cell, token, 0)[i] = t.of(is_k ? head : head - op.n_heads_p, seq)[token * t.token_stride + i % size];
    } else if (i < n + op.n_heads) {
        op.gates[op.gate_at(cell, token, i - n)] = op.g.of(i - n, seq)[token * op.g.token_stride];
    } else if (i < n + 2 * op.n_heads) {
        const int head = i - n - op.n_heads;
        op.betas[op.gate_at(cell, token, head)] = op.beta.of(head, seq)[token * op.beta.token_stride];
    }
}

// Cells first + i take what those of `ids` have. A thread holds what all of them have in one place before it writes there.
__global__ void move_kernel(const delta_net_rows op) {
    extern __shared__ float moved[];

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    bool any = false;
    for (int i = threadIdx.x; i < op.n_ids; i += blockDim.x) {
        any = any || op.ids[i] != op.first + i;
    }
    if (!__syncthreads_or(any)) {
        return;
    }
    const auto move = [&](float * cells, int64_t size) {
        for (int64_t at = blockIdx.x * blockDim.x + threadIdx.x; at < size; at += gridDim.x * blockDim.x) {
            for (int i = 0; i < op.n_ids; ++i) {
                moved[i * blockDim.x + threadIdx.x] = cells[op.ids[i] * size + at];
            }
            for (int i = 0; i < op.n_ids; ++i) {
                cells[(op.first + i) * size + at] = moved[i * blockDim.x + threadIdx.x];
            }
        }
    };
    move(op.states, (int64_t) op.n_heads * op.size * op.size);
    if (op.pend) {
        move(op.pend,  (int64_t) op.n_max * op.pend_size());
        move(op.gates, (int64_t) op.n_max * op.n_heads);
        move(op.betas, (int64_t) op.n_max * op.n_heads);
    }
}

template <int SIZE> void launch(const delta_net_rows & op, int n_sm, cudaStream_t stream) {
    constexpr int COLUMNS = WARP_SIZE / LANES_OF_COLUMN<SIZE>; // of a warp
    int n_warps = std::min(MAX_WARPS, SIZE / COLUMNS);
    while (n_warps > 1 && op.n_heads * op.n_seqs * (SIZE / COLUMNS / n_warps) < n_sm) {
        n_warps /= 2; // more blocks, for all processors
    }
    const dim3 grid(op.n_heads, op.n_seqs, SIZE / COLUMNS / n_warps);
    ggml_cuda_kernel_launch(delta_net_kernel<SIZE>, { grid, dim3(n_warps * WARP_SIZE), 0, stream }, op, 1.0f / sqrtf(SIZE));
}

// as float4
static bool aligned(const ggml_tensor * t) {
    return t->view_offs % sizeof(float4) == 0 && t->nb[1] % sizeof(float4) == 0 && t->nb[2] % sizeof(float4) == 0 && t->nb[3] % sizeof(float4) == 0;
}

}  // namespace

bool pyllama_cuda_trial() {
    static const bool asked = getenv("PYLLAMA_MTP_TRIAL") != nullptr;
    return asked;
}

bool ggml_cuda_supports_gated_delta_net_rows(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * states = dst->src[5], * pend = dst->src[6], * ids = dst->src[8];

    const int64_t size = dst->ne[0];
    const bool    own  = !states->buffer || !ggml_backend_buffer_is_host(states->buffer); // not a copy: it is written
    return pyllama_cuda_trial() && own && (size == 16 || size == 32 || size == 64 || size == 128) && aligned(q) && aligned(k) && aligned(states) &&
           (!pend || aligned(pend)) && ids->ne[0] <= MAX_IDS;
}

void ggml_cuda_op_gated_delta_net_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const delta_net_rows op(dst);
    const int            n_sm   = ggml_cuda_info().devices[ctx.device].nsm;
    cudaStream_t         stream = ctx.stream();

    if (op.n_ids > 1) {
        const int n_warps = std::min(MAX_WARPS, MAX_IDS / op.n_ids);
        const int n_bytes = n_warps * WARP_SIZE * op.n_ids * sizeof(float);
        ggml_cuda_kernel_launch(move_kernel, { dim3(4 * n_sm), dim3(n_warps * WARP_SIZE), n_bytes, stream }, op);
    }
    switch (op.size) {
        case  16: launch< 16>(op, n_sm, stream); break;
        case  32: launch< 32>(op, n_sm, stream); break;
        case  64: launch< 64>(op, n_sm, stream); break;
        case 128: launch<128>(op, n_sm, stream); break;
        default: GGML_ABORT("a delta net of heads of %d", op.size);
    }
    if (op.keep) {
        constexpr int n_threads = 256;
        const int     n         = op.pend_size() + 2 * op.n_heads;
        const dim3    grid((n + n_threads - 1) / n_threads, op.n_tokens, op.n_seqs);
        ggml_cuda_kernel_launch(store_kernel, { grid, dim3(n_threads), 0, stream }, op);
    }
}
