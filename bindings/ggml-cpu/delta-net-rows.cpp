// GATED_DELTA_NET_ROWS: see ggml.h. The order of what each thread does is the same for all ids, so barriers meet.

#include "delta-net-rows.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 256; // floats of a cell that are moved at once

// a row of floats for each cell
struct cells_of {
    float * data;
    int64_t size;
};

struct delta_net_rows {
    const ggml_tensor * k, * v, * g, * beta, * states, * pend, * gates, * ids;
    int64_t first, n_max, n_seqs, n_ids, n_heads_p;
    bool    keep;

    explicit delta_net_rows(const ggml_tensor * dst) :
        k(dst->src[1]), v(dst->src[2]), g(dst->src[3]), beta(dst->src[4]), states(dst->src[5]), pend(dst->src[6]), gates(dst->src[7]), ids(dst->src[8]),
        first(ggml_get_op_params_i32(dst, 0)), n_max(ggml_get_op_params_i32(dst, 1)), n_seqs(v->ne[3]), n_ids(ids->ne[0] - (pend ? n_seqs : 0)),
        n_heads_p(pend ? pend->ne[0] / v->ne[0] - v->ne[1] : 0), keep(ggml_get_op_params_i32(dst, 2)) {}

    const int32_t * id() const { return (const int32_t *) ids->data; }

    float * kv_row  (int64_t cell, int64_t token) const { return (float *) pend ->data + (cell * n_max + token) * pend ->ne[0]; }
    float * gate_row(int64_t cell, int64_t token) const { return (float *) gates->data + (cell * n_max + token) * gates->ne[0]; }
    float * beta_row(int64_t cell, int64_t token) const { return gate_row(cell, token) + pend->ne[1] * gates->ne[0]; }

    // heads of tokens of cells, from `data` on
    ggml_tensor pending(float * data, int64_t size, int64_t n_heads, const ggml_tensor * all) const {
        ggml_tensor t = {};
        t.type = GGML_TYPE_F32;
        t.data = data;
        const int64_t ne[] = { size, n_heads, n_max, n_seqs };
        const size_t  nb[] = { sizeof(float), size * sizeof(float), all->nb[1], n_max * all->nb[1] };
        std::copy_n(ne, 4, t.ne);
        std::copy_n(nb, 4, t.nb);
        return t;
    }
};

void share(const ggml_compute_params * params, int64_t n, int64_t & begin, int64_t & end) {
    begin = n *  params->ith      / params->nth;
    end   = n * (params->ith + 1) / params->nth;
}

// All cells take what those of `ids` have; each thread its part of all.
void move_cells(const ggml_compute_params * params, const delta_net_rows & op, cells_of cells, float * memory) {
    int64_t begin, end;
    share(params, cells.size, begin, end);
    for (int64_t at = begin; at < end; at += BLOCK) {
        const size_t n_bytes = std::min(BLOCK, end - at) * sizeof(float);
        for (int64_t i = 0; i < op.n_ids; ++i) {
            memcpy(memory + i * BLOCK, cells.data + op.id()[i] * cells.size + at, n_bytes);
        }
        for (int64_t i = 0; i < op.n_ids; ++i) {
            memcpy(cells.data + (op.first + i) * cells.size + at, memory + i * BLOCK, n_bytes);
        }
    }
}

// a head's state through n tokens, as in upstream's GATED_DELTA_NET
void steps(const ggml_delta_net_tokens & d, int64_t head, int64_t seq, int64_t n, float * state, float * delta) {
    const int64_t size  = d.size();
    const float   scale = 1.0f / sqrtf((float) size);
    for (int64_t token = 0; token < n; ++token) {
        const float * q = d.row(d.q, head, token, seq), * k = d.row(d.k, head, token, seq), * v = d.row(d.v, head, token, seq);
        const float   beta = *d.row(d.beta, head, token, seq);
        ggml_vec_scale_f32(size * size, state, expf(*d.row(d.g, head, token, seq)));
        for (int64_t j = 0; j < size; ++j) {
            float sum = 0.0f;
            ggml_vec_dot_f32(size, &sum, 0, state + j * size, 0, k, 0, 1);
            delta[j] = (v[j] - sum) * beta;
        }
        for (int64_t j = 0; j < size; ++j) {
            ggml_vec_mad_f32(size, state + j * size, k, delta[j]);
        }
        for (int64_t j = 0; d.out != nullptr && j < size; ++j) {
            float sum = 0.0f;
            ggml_vec_dot_f32(size, &sum, 0, state + j * size, 0, q, 0, 1);
            d.out_row(head, token, seq)[j] = sum * scale;
        }
    }
}

void steps(const ggml_compute_params * params, const ggml_delta_net_rows & rows, float * memory) {
    const int64_t size = rows.tokens.size(), n_heads = rows.tokens.n_heads();
    int64_t begin, end;
    share(params, n_heads * rows.tokens.n_seqs(), begin, end);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i % n_heads, seq = i / n_heads;
        float * state = rows.states.end + seq * rows.states.end_stride + head * size * size;
        if (rows.n_before) {
            steps(rows.before, head, seq, rows.n_before[seq], state, memory);
        }
        if (rows.states.n_snaps == 0) {
            state = (float *) memcpy(memory + size, state, size * size * sizeof(float));
        }
        steps(rows.tokens, head, seq, rows.tokens.n_tokens(), state, memory);
    }
}

// the tokens at hand are pending
void store(const ggml_compute_params * params, const delta_net_rows & op, const ggml_delta_net_tokens & d) {
    const int64_t size = d.size(), n_tokens = d.n_tokens();
    int64_t begin, end;
    share(params, op.n_seqs * n_tokens * d.n_heads(), begin, end);
    for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i % d.n_heads(), token = i / d.n_heads() % n_tokens, seq = i / d.n_heads() / n_tokens, cell = op.first + seq;
        float * kv = op.kv_row(cell, token);
        if (head < op.n_heads_p) {
            memcpy(kv + head * size, d.row(d.k, head, token, seq), size * sizeof(float));
        }
        memcpy(kv + (op.n_heads_p + head) * size, d.row(d.v, head, token, seq), size * sizeof(float));
        op.gate_row(cell, token)[head] = *d.row(d.g,    head, token, seq);
        op.beta_row(cell, token)[head] = *d.row(d.beta, head, token, seq);
    }
}

int64_t floats_of_thread(const delta_net_rows & op) {
    const int64_t size = op.v->ne[0];
    return std::max(op.n_ids * BLOCK, size + size * size) + CACHE_LINE_SIZE_F32;
}

} // namespace

size_t ggml_gated_delta_net_rows_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const delta_net_rows op(dst);
    return n_tasks * floats_of_thread(op) * sizeof(float);
}

void ggml_compute_forward_gated_delta_net_rows(const ggml_compute_params * params, ggml_tensor * dst) {
    const delta_net_rows op(dst);
    const int64_t size = op.v->ne[0], n_heads = op.v->ne[1], state = op.states->ne[0];
    float * memory = (float *) params->wdata + params->ith * floats_of_thread(op);

    bool moved = false;
    for (int64_t i = 0; i < op.n_ids; ++i) {
        GGML_ASSERT(op.id()[i] >= 0 && op.id()[i] < op.states->ne[1]);
        moved = moved || op.id()[i] != op.first + i;
    }
    if (moved) {
        move_cells(params, op, { (float *) op.states->data, state }, memory);
        if (op.pend) {
            move_cells(params, op, { op.kv_row(0, 0),   op.n_max * op.pend->ne[0]  }, memory);
            move_cells(params, op, { op.gate_row(0, 0), op.n_max * op.gates->ne[0] }, memory);
            move_cells(params, op, { op.beta_row(0, 0), op.n_max * op.gates->ne[0] }, memory);
        }
        ggml_barrier(params->threadpool);
    }

    float * own = (float *) op.states->data + op.first * state;
    ggml_delta_net_rows rows = { { own, state, own, state, 0, !op.keep }, {}, nullptr, { dst->src[0], op.k, op.v, op.g, op.beta, (float *) dst->data } };
    ggml_tensor k, v, g, beta;
    if (op.pend) {
        k    = op.pending(op.kv_row  (op.first, 0),                       size, op.n_heads_p, op.pend);
        v    = op.pending(op.kv_row  (op.first, 0) + op.n_heads_p * size, size, n_heads,      op.pend);
        g    = op.pending(op.gate_row(op.first, 0),                       1,    n_heads,      op.gates);
        beta = op.pending(op.beta_row(op.first, 0),                       1,    n_heads,      op.gates);
        rows.before   = { &k, &k, &v, &g, &beta };
        rows.n_before = op.id() + op.n_ids;
        for (int64_t seq = 0; seq < op.n_seqs; ++seq) {
            GGML_ASSERT(rows.n_before[seq] >= 0 && rows.n_before[seq] <= op.n_max);
        }
    }
    if (!ggml_delta_net_steps(params, rows)) {
        steps(params, rows, memory);
    }
    if (op.keep) {
        ggml_barrier(params->threadpool); // heads share k
        store(params, op, rows.tokens);
    }
}
