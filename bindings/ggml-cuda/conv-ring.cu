// Convolutions of a few tokens: see conv-ring.cuh.

#include "conv-ring.cuh"

#include "delta-net-rows.cuh"

#include <algorithm>

namespace {

constexpr int SIZE       = 4; // of the convolution
constexpr int MAX_TOKENS = 16;
constexpr int MAX_SEQS   = 8;

struct conv_ring {
    ggml_tensor * x, * ring, * read, * written, * kernel, * out;
    int           n_nodes; // after the first one
    int           n_kept;  // inputs of a sequence that are stored, the last ones
};

struct conv_ring_args {
    const float *   x, * kernel;
    const int32_t * read, * written;
    float *         ring, * out;
    int             n_channels, n_tokens, n_seqs, n_kept;
};

// F32 or I32
static bool is_plain(const ggml_tensor * t, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    return t->type == type && ggml_is_contiguous(t) && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == ne2 && t->ne[3] == 1;
}

static const ggml_tensor * memory_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

static bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    const char * begin_a = (const char *) a->data, * begin_b = (const char *) b->data;
    return begin_a < begin_b + ggml_nbytes(b) && begin_b < begin_a + ggml_nbytes(a);
}

static bool match(const ggml_cgraph * cgraph, int first, conv_ring & found) {
    constexpr ggml_op ops[] = { GGML_OP_GET_ROWS, GGML_OP_SET_ROWS, GGML_OP_CONCAT, GGML_OP_SSM_CONV, GGML_OP_UNARY };
    constexpr int     n_ops = sizeof(ops) / sizeof(ops[0]);

    ggml_tensor * nodes[n_ops];
    int end = pyllama_cuda_trial() ? first : cgraph->n_nodes;
    for (int n = 0; n < n_ops; ++end) {
        if (end == cgraph->n_nodes) {
            return false;
        }
        ggml_tensor * node = cgraph->nodes[end];
        if (node->op == ops[n]) {
            nodes[n++] = node;
        } else if (n == 0 || (node->op != GGML_OP_RESHAPE && node->op != GGML_OP_TRANSPOSE && node->op != GGML_OP_VIEW)) {
            return false;
        }
    }
    ggml_tensor * get = nodes[0], * set = nodes[1], * concat = nodes[2], * conv = nodes[3], * silu = nodes[4];
    ggml_tensor * before = concat->src[0], * now = concat->src[1]; // transposed

    if (ggml_get_unary_op(silu) != GGML_UNARY_OP_SILU || silu->src[0] != conv || conv->src[0] != concat || ggml_get_op_params_i32(concat, 0) != 0 ||
            before->op != GGML_OP_TRANSPOSE || before->src[0]->op != GGML_OP_RESHAPE || before->src[0]->src[0] != get || now->op != GGML_OP_TRANSPOSE) {
        return false;
    }
    found = { now->src[0], get->src[0], get->src[1], set->src[1], conv->src[1], silu, end - first - 1, 0 };

    // what is not computed is read by nobody else
    for (const ggml_tensor * t : { get, before->src[0], before, concat, conv }) {
        const int at = std::find(cgraph->nodes + first, cgraph->nodes + end, t) - cgraph->nodes;
        if (at == end || ggml_node_get_use_count(cgraph, at) != 1 || (t->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return false;
        }
    }
    const ggml_tensor * x = found.x, * kept = set->src[0];
    const int64_t n_channels = x->ne[0], n_tokens = x->ne[1], n_seqs = x->ne[2], n_kept = found.written->ne[0] / n_seqs;
    found.n_kept = n_kept;

    const size_t x_offs = x->view_src ? x->view_offs : 0, kept_offs = kept->view_src ? kept->view_offs : 0;
    return n_tokens <= MAX_TOKENS && n_seqs <= MAX_SEQS && n_kept <= n_tokens && (n_seqs == 1 || n_kept == n_tokens) &&
           is_plain(x, GGML_TYPE_F32, n_channels, n_tokens, n_seqs) && is_plain(silu, GGML_TYPE_F32, n_channels, n_tokens, n_seqs) &&
           is_plain(found.ring, GGML_TYPE_F32, n_channels, found.ring->ne[1], 1) && set->src[2] == found.ring &&
           is_plain(found.read, GGML_TYPE_I32, (SIZE - 1) * n_seqs, 1, 1) && is_plain(found.written, GGML_TYPE_I32, n_kept * n_seqs, 1, 1) &&
           is_plain(before->src[0], GGML_TYPE_F32, n_channels, SIZE - 1, n_seqs) && is_plain(found.kernel, GGML_TYPE_F32, SIZE, n_channels, 1) &&
           is_plain(kept, GGML_TYPE_F32, n_channels, n_kept * n_seqs, 1) && memory_of(kept) == memory_of(x) &&
           kept_offs == x_offs + (n_tokens - n_kept) * x->nb[1] && memory_of(x) != memory_of(found.ring);
}

// A thread has a channel of all sequences: it reads their rows before it writes one, whichever they are.
static __global__ void conv_ring_kernel(const conv_ring_args a) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= a.n_channels) {
        return;
    }
    float kernel[SIZE], inputs[MAX_SEQS][SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
        kernel[j] = a.kernel[channel * SIZE + j];
    }
#pragma unroll
    for (int seq = 0; seq < MAX_SEQS; ++seq) {
#pragma unroll
        for (int j = 0; j < SIZE - 1; ++j) {
            inputs[seq][j] = seq < a.n_seqs ? a.ring[(int64_t) a.read[seq * (SIZE - 1) + j] * a.n_channels + channel] : 0.0f;
        }
    }
#pragma unroll
    for (int seq = 0; seq < MAX_SEQS; ++seq) {
        for (int token = 0; seq < a.n_seqs && token < a.n_tokens; ++token) {
            const int64_t at   = ((int64_t) seq * a.n_tokens + token) * a.n_channels + channel;
            const int     kept = token - (a.n_tokens - a.n_kept);

            inputs[seq][SIZE - 1] = a.x[at];
            if (kept >= 0) {
                a.ring[(int64_t) a.written[seq * a.n_kept + kept] * a.n_channels + channel] = inputs[seq][SIZE - 1];
            }
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                sum += inputs[seq][j] * kernel[j];
            }
            a.out[at] = sum / (1.0f + expf(-sum));
#pragma unroll
            for (int j = 0; j < SIZE - 1; ++j) {
                inputs[seq][j] = inputs[seq][j + 1];
            }
        }
    }
}

}  // namespace

int ggml_cuda_try_conv_ring(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i) {
    conv_ring c;
    if (!match(cgraph, i, c) || overlap(c.out, c.read) || overlap(c.out, c.written) || (overlap(c.out, c.x) && c.out->data != c.x->data)) {
        return 0;
    }
    const conv_ring_args args = {
        (const float *) c.x->data, (const float *) c.kernel->data, (const int32_t *) c.read->data, (const int32_t *) c.written->data,
        (float *) c.ring->data, (float *) c.out->data, (int) c.x->ne[0], (int) c.x->ne[1], (int) c.x->ne[2], c.n_kept,
    };
    constexpr int n_threads = 128;
    ggml_cuda_kernel_launch(conv_ring_kernel, { dim3((args.n_channels + n_threads - 1) / n_threads), dim3(n_threads), 0, ctx.stream() }, args);
    return c.n_nodes;
}

void ggml_cuda_plan_conv_ring(ggml_cgraph * cgraph, int i, ggml_backend_graph_optimize_params * params) {
    conv_ring c;
    if (match(cgraph, i, c)) {
        params->add_alloc_dep(params->user_data, c.x, c.out);
    }
}
