#include "llama-mtp-pending.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <numeric>
#include <vector>

namespace {

int64_t n_heads_k(llm_arch arch, const llama_hparams & hparams) {
    return arch == LLM_ARCH_QWEN3NEXT ? hparams.ssm_dt_rank : hparams.ssm_n_group; // that one repeats them
}

}  // namespace

bool llm_arch_has_pending_states(llm_arch arch) {
    return arch == LLM_ARCH_QWEN3NEXT || arch == LLM_ARCH_QWEN35 || arch == LLM_ARCH_QWEN35MOE;
}

uint32_t llama_pending_size(llm_arch arch, const llama_hparams & hparams) {
    return hparams.ssm_d_state*(n_heads_k(arch, hparams) + hparams.ssm_dt_rank);
}

int64_t llama_gate_rows(int64_t n, const llama_hparams & hparams) {
    const int64_t step = 64/std::gcd<int64_t>(64, hparams.ssm_dt_rank);
    return (n + step - 1)/step*step;
}

ggml_tensor * llama_take_in_pending(ggml_context * ctx, llm_arch arch, const llama_hparams & hparams,
        ggml_tensor * pend, ggml_tensor * rows, ggml_tensor * gates, size_t first, ggml_tensor * s) {
    const int64_t size   = hparams.ssm_d_state, heads_k = n_heads_k(arch, hparams), heads = hparams.ssm_dt_rank;
    const int64_t n_seqs = s->ne[3];
    const int64_t n      = rows->ne[0]/n_seqs;

    ggml_tensor * kv = ggml_get_rows(ctx, pend, rows);

    ggml_tensor * k = ggml_view_4d(ctx, kv, size, heads_k, n, n_seqs, size*sizeof(float), kv->nb[1], kv->nb[1]*n, 0);
    ggml_tensor * v = ggml_view_4d(ctx, kv, size, heads,   n, n_seqs, size*sizeof(float), kv->nb[1], kv->nb[1]*n, size*heads_k*sizeof(float));

    const auto part = [&](size_t row) {
        return ggml_view_4d(ctx, gates, 1, heads, n, n_seqs, sizeof(float), gates->nb[1], gates->nb[1]*n, row*gates->nb[1]);
    };
    ggml_tensor * out = ggml_gated_delta_net(ctx, k, k, v, part(first), part(first + llama_gate_rows(n*n_seqs, hparams)), s, 1);

    const int64_t n_embd_s = size*size*heads;
    return ggml_view_2d(ctx, out, n_embd_s, n_seqs, n_embd_s*sizeof(float), ggml_nelements(v)*sizeof(float));
}

void llama_store_pending(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * pend, ggml_tensor * gates,
        ggml_tensor * k, ggml_tensor * v, ggml_tensor * gate, ggml_tensor * beta, int64_t n, int64_t n_max, int64_t first) {
    const auto store = [&](ggml_tensor * t, ggml_tensor * to, int64_t row, int64_t at) {
        ggml_tensor * last = ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, t->ne[3], t->nb[1], t->nb[2], t->nb[3], (t->ne[2] - n)*t->nb[2]);
        ggml_build_forward_expand(gf, ggml_cpy(ctx, last, ggml_view_4d(ctx, to, t->ne[0], t->ne[1], n, t->ne[3],
                t->ne[0]*sizeof(float), to->nb[1], n_max*to->nb[1], row*to->nb[1] + at*sizeof(float))));
    };
    // k the first of them, where all are repeated one after another
    ggml_tensor * few = k;
    const int64_t heads_k = pend->ne[0]/k->ne[0] - v->ne[1];
    if (heads_k != k->ne[1]) {
        few = ggml_view_4d(ctx, k, k->ne[0], heads_k, k->ne[2], k->ne[3], k->nb[1], k->nb[2], k->nb[3], 0);
    }
    store(few,  pend,  first, 0);
    store(v,    pend,  first, k->ne[0]*heads_k);
    store(gate, gates, first, 0);
    store(beta, gates, first + gates->ne[1]/2, 0);
}

// A graph that takes in the n_pend0 tokens which are pending for a cell.
bool llama_context::mtp_take_in_pending(const llama_memory_recurrent & mem, uint32_t cell) {
    const auto & hparams = model.hparams;
    const int64_t n = mem.cells[cell].past.n_pend0, S = hparams.ssm_d_state, H = hparams.ssm_dt_rank;
    const int64_t n_gates = llama_gate_rows(n, hparams);

    ggml_backend_sched_reset(sched.get());
    auto * res = get_gf_res_reserve();
    res->reset();
    ggml_context * ctx = res->get_ctx();

    ggml_tensor * rows      = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, cparams.mtp.delta_rows ? 2 : n);
    ggml_tensor * gate_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_gates + n);
    ggml_set_input(rows);
    ggml_set_input(gate_rows);
    for (size_t il = 0; il < mem.pend_l.size(); ++il) {
        if (mem.pend_l[il] == nullptr) {
            continue;
        }
        ggml_tensor * s     = mem.s_l[il];
        if (cparams.mtp.delta_rows) { // the last token is at hand, those before it are pending
            ggml_tensor * pend = mem.pend_l[il], * gates = mem.gates_l[il];
            const int64_t H_p  = pend->ne[0]/S - H, row = cell*mem.n_pend_max() + n - 1;

            const auto heads = [&](ggml_tensor * t, int64_t size, int64_t n_heads, int64_t i, int64_t first) {
                return ggml_view_4d(ctx, t, size, n_heads, 1, 1, size*sizeof(float), t->nb[1], t->nb[1], i*t->nb[1] + first*sizeof(float));
            };
            ggml_tensor * k = heads(pend, S, H_p, row, 0);
            ggml_build_forward_expand(res->get_gf(), ggml_gated_delta_net_rows(ctx, k, k, heads(pend, S, H, row, S*H_p),
                    heads(gates, 1, H, row, 0), heads(gates, 1, H, row + mem.n_pend_rows(), 0), s, pend, gates, rows, cell, mem.n_pend_max(), false));
            continue;
        }
        ggml_tensor * begin = ggml_view_4d(ctx, s, S, S, H, 1, S*sizeof(float), S*S*sizeof(float), s->nb[1], cell*s->nb[1]);
        ggml_tensor * end   = llama_take_in_pending(ctx, model.arch, hparams, mem.pend_l[il], rows,
                ggml_get_rows(ctx, mem.gates_l[il], gate_rows), 0, begin);
        ggml_build_forward_expand(res->get_gf(), ggml_cpy(ctx, end, ggml_view_2d(ctx, s, s->ne[0], 1, s->nb[1], cell*s->nb[1])));
    }
    if (!ggml_backend_sched_alloc_graph(sched.get(), res->get_gf())) {
        LLAMA_LOG_ERROR("%s: failed to allocate the graph\n", __func__);
        return false;
    }
    const int32_t first = cell*mem.n_pend_max();
    std::vector<int32_t> ids(n_gates + n, mem.n_pend_rows() - 1);
    std::iota(ids.begin(),           ids.begin() + n, first);
    std::iota(ids.begin() + n_gates, ids.end(),       first + mem.n_pend_rows());
    if (cparams.mtp.delta_rows) {
        const int32_t cell_and_pending[] = { (int32_t) cell, (int32_t) n - 1 };
        ggml_backend_tensor_set(rows, cell_and_pending, 0, sizeof(cell_and_pending));
    } else {
        ggml_backend_tensor_set(rows,      ids.data(), 0, n*sizeof(int32_t));
        ggml_backend_tensor_set(gate_rows, ids.data(), 0, ids.size()*sizeof(int32_t));
    }

    const bool done = graph_compute(res->get_gf(), false) == GGML_STATUS_SUCCESS;
    ggml_backend_sched_synchronize(sched.get());
    return done;
}
