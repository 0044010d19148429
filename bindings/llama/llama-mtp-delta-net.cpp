// What delta nets do where tokens can be pending, or where an operator reads states where they are kept.

#include "models/models.h"

#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama-mtp-pending.h"

#include "ggml-cpp.h"

bool llama_has_delta_rows(const llama_model & model, const llama_memory_i * memory) {
    const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory);
    if (!ggml_gated_delta_net_rows || !hybrid || !llm_arch_has_pending_states(model.arch) ||
            model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return false;
    }
    const auto & mem = *hybrid->get_mem_recr();
    const int64_t S = model.hparams.ssm_d_state, H = model.hparams.ssm_dt_rank;

    bool all = mem.n_pend_max() > 0 || mem.n_rs_seq == 0;
    for (size_t il = 0; all && il < mem.s_l.size(); ++il) {
        if (!mem.s_l[il]) {
            continue;
        }
        ggml_context_ptr ctx { ggml_init({ 16*ggml_tensor_overhead(), nullptr, true }) };

        ggml_tensor * v   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, S, H);
        ggml_tensor * g   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 1, H);
        ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, mem.n_pend_max() > 0 ? 2 : 1);
        all = ggml_backend_dev_supports_op(model.dev_layer(il), ggml_gated_delta_net_rows(ctx.get(), v, v, v, g, g,
                mem.s_l[il], mem.pend_l[il], mem.gates_l[il], ids, 0, mem.n_pend_max(), false));
    }
    return all;
}

// The indices of recurrent layers where tokens can be pending.
void llm_graph_context::build_mtp_ids(llm_graph_input_rs & inp) const {
    using context = llama_memory_recurrent_context;

    const context & mem = *inp.mctx;

    inp.delta_rows = cparams.mtp.delta_rows && cparams.fused_gdn_ar && cparams.fused_gdn_ch;
    if (mem.get_n_pend_max() == 0) {
        return;
    }
    const int64_t n_rs = mem.get_n_rs(), n_seqs = ubatch.n_seqs, n_seq_tokens = ubatch.n_seq_tokens;
    const int64_t n_state = mem.get_n_conv_state(); // inputs of a convolution

    // inputs that may be read again: those of the last state, or of all to which a sequence can go back
    const int64_t n_new = mem.get_n_states(n_seq_tokens) > 1 ? n_seq_tokens : std::min(n_seq_tokens, n_state);

    inp.n_pend = mem.get_n_pend();

    inp.ids.add(inp.s_snapshots, n_rs); // set_input() fills it
    inp.ids.add(inp.s_cells, n_rs + (inp.delta_rows ? n_seqs : 0), [n_rs](const context & m, int64_t i) {
        return i < n_rs ? m.s_cell(i) : m.n_pend_of(i - n_rs);
    });
    if (!inp.delta_rows && inp.n_pend > 0) {
        const int64_t n = inp.n_pend, n_rows = n*n_seqs, n_part = mem.get_n_gate_part(n_rows);
        inp.ids.add(inp.pend_rows, n_rows, [n](const context & m, int64_t i) { return m.pend_row(i/n, i%n); });
        inp.ids.add(inp.gate_rows, mem.get_n_gate_rows(n_rows), [n, n_rows, n_part](const context & m, int64_t i) {
            const int64_t row = i % n_part, n_all = m.get_n_pend_rows();
            return i/n_part*n_all + (row < n_rows ? m.pend_row(row/n, row%n) : n_all - 1);
        });
    }
    inp.ids.add(inp.conv_rows, n_state*n_seqs, [n_state](const context & m, int64_t i) { return m.conv_row(i/n_state, i%n_state); });
    inp.ids.add(inp.conv_new,  n_new*n_seqs,   [n_new]  (const context & m, int64_t i) { return m.conv_row_new(i/n_new, i%n_new, n_new); });
    if (mem.get_conv_moved()) {
        inp.ids.add(inp.conv_moved, n_state*n_seqs, [n_state](const context & m, int64_t i) { return m.conv_row_moved(i/n_state, i%n_state); });
    }
    inp.s_copy = inp.ids.build(ctx0, cparams.mtp.indices_on_cpu);
    ggml_set_name(inp.s_copy, "rs_s_copy");

    inp.s_copy_main = ggml_view_1d(ctx0, inp.s_snapshots, n_seqs, 0);
    inp.s_copy_tail = ggml_view_1d(ctx0, inp.s_snapshots, n_rs - 1, inp.s_copy->nb[0]);
}

ggml_tensor * llm_graph_input_rs::rows_of(const ggml_tensor * s) const {
    return !s_cells ? s_copy : s->ne[1] > mctx->get_size() ? s_snapshots : s_cells;
}

bool llm_graph_input_rs::can_reuse_ids(const llama_memory_recurrent_context & mem) const {
    return (s_snapshots ? s_snapshots : s_copy)->ne[0] == mem.get_n_rs() &&
           (!conv_rows || (conv_moved != nullptr) == mem.get_conv_moved()) &&
           (!conv_rows || delta_rows || n_pend == mem.get_n_pend());
}

// Where the operator reads states where they are kept, the state of new sequences is all there is to do before.
ggml_tensor * llm_build_delta_net_base::build_rs(llm_graph_input_rs * inp, ggml_tensor * s, int32_t state_size, int32_t n_seqs) const {
    const auto & mem = *inp->mctx;

    bool is_state = false;
    for (int il = 0; inp->delta_rows && il < (int) hparams.n_layer(); ++il) {
        is_state = is_state || mem.get_s_l(il) == s;
    }
    if (!is_state) {
        return llm_graph_context::build_rs(inp, s, state_size, n_seqs);
    }
    if (mem.get_rs_z() >= 0) {
        ggml_build_forward_expand(gf, ggml_scale_inplace(ctx0, ggml_view_1d(ctx0, s, s->ne[0], mem.get_rs_z()*s->nb[1]), 0));
    }
    return ggml_view_2d(ctx0, s, s->ne[0], n_seqs, s->nb[1], mem.get_head()*s->nb[1]);
}

// Other sequences' tokens move with their states, see build_rs(); where they go, others may have been. n rows of each
// cell, from row `begin` on
void llm_build_delta_net_base::move_rows_of_cells(llm_graph_input_rs * inp, ggml_tensor * all, int64_t begin, int64_t n) {
    const auto *  mctx    = inp->mctx;
    const int64_t n_moved = mctx->get_n_rs() - ubatch.n_seqs;
    if (n_moved == 0) {
        return;
    }
    const auto cells = [&](int64_t n_cells, int64_t first) {
        return ggml_view_2d(ctx0, all, all->ne[0]*n, n_cells, all->nb[1]*n, (begin + first*n)*all->nb[1]);
    };
    ggml_tensor * ids   = ggml_view_1d(ctx0, inp->s_cells, n_moved, ubatch.n_seqs*inp->s_cells->nb[0]);
    ggml_tensor * moved = ggml_get_rows(ctx0, cells(mctx->get_size(), 0), ids);
    ggml_build_forward_expand(gf, ggml_cpy(ctx0, moved, cells(n_moved, mctx->get_head() + ubatch.n_seqs)));
}

// Where tokens can be pending: the input of a convolution, F32 [n_seq_tokens + size - 1, channels, n_seqs], of x, F32 [channels,
// n_seq_tokens, n_seqs]. A state is the inputs before those at hand, which are kept in their turn.
ggml_tensor * llm_build_delta_net_base::build_pending_conv(
        llm_graph_input_rs * inp,
        ggml_tensor *        all,
        ggml_tensor *        x,
        int64_t              size,
        int64_t              channels,
        int                  il) {
    const int64_t n_seqs = ubatch.n_seqs;

    if (inp->pend_rows) {
        gather_gates(inp, il); // first of all, or they would lie between larger tensors, to the end of the graph
    }
    ggml_build_forward_expand(gf, x); // so that the nodes of the convolution follow each other: CUDA has a kernel for them all
    ggml_tensor * states = ggml_get_rows(ctx0, all, inp->conv_rows);
    cb(states, "conv_states", il);
    ggml_build_forward_expand(gf, states); // before others are stored there

    move_rows_of_cells(inp, all, 0, inp->mctx->get_n_conv_max());

    if (inp->conv_moved) {
        ggml_build_forward_expand(gf, ggml_set_rows(ctx0, all, states, inp->conv_moved));
    }
    const int64_t n_kept = inp->conv_new->ne[0]/n_seqs; // of a sequence
    ggml_tensor * kept = n_kept == x->ne[1] ? x :
        ggml_view_3d(ctx0, x, channels, n_kept, n_seqs, x->nb[1], x->nb[2], (x->ne[1] - n_kept)*x->nb[1]);
    kept = ggml_is_contiguous(kept) ? ggml_reshape_2d(ctx0, kept, channels, n_kept*n_seqs) : ggml_cont_2d(ctx0, kept, channels, n_kept*n_seqs);
    ggml_build_forward_expand(gf, ggml_set_rows(ctx0, all, kept, inp->conv_new));

    states = ggml_reshape_3d(ctx0, states, channels, size - 1, n_seqs);

    ggml_tensor * conv_input = ggml_concat(ctx0, ggml_transpose(ctx0, states), ggml_transpose(ctx0, x), 0);
    cb(conv_input, "conv_input", il);
    ggml_build_forward_expand(gf, conv_input); // x need not be kept for longer

    return conv_input;
}

// Gates and betas of tokens that are pending, of this layer and all others that share a tensor of them, at once.
ggml_tensor * llm_build_delta_net_base::gather_gates(llm_graph_input_rs * inp, int il) {
    ggml_tensor *  all      = inp->mctx->get_gates_l(il)->view_src;
    ggml_tensor *& gathered = inp->gates[all];
    if (!gathered) {
        const int64_t n = llama_gate_rows(inp->pend_rows->ne[0], hparams)*all->ne[1]/inp->mctx->get_n_pend_rows();
        gathered = ggml_get_rows(ctx0, all, ggml_view_1d(ctx0, inp->gate_rows, n, 0));
        ggml_build_forward_expand(gf, gathered);
    }
    return gathered;
}

// The tokens that are pending are taken in, as many as stayed; then those at hand go through the states. If some of these may
// be taken back, they are pending now, and the states are left as they were before them.
ggml_tensor * llm_build_delta_net_base::build_kept_attn(
        llm_graph_input_rs * inp,
        ggml_tensor *        ssm_states_all,
        ggml_tensor *        q,
        ggml_tensor *        k,
        ggml_tensor *        v,
        ggml_tensor *        g,
        ggml_tensor *        b,
        ggml_tensor *        s,
        int                  il) {
    const auto * mctx   = inp->mctx;
    const auto   head   = mctx->get_head();
    const auto   n_max  = mctx->get_n_pend_max();

    const int64_t n_seqs   = s->ne[3];
    const int64_t n_tokens = q->ne[2]; // of a sequence

    const bool          keep  = n_max > 0 && mctx->get_n_states(n_tokens) > 1;
    const llm_fused_op  fused = n_tokens > 1 ? LLM_FUSED_OP_GDN_CH : LLM_FUSED_OP_GDN_AR;

    ggml_tensor * pend  = mctx->get_pend_l(il);
    ggml_tensor * gates = mctx->get_gates_l(il);

    if (inp->delta_rows) {
        ggml_tensor * output = ggml_gated_delta_net_rows(ctx0, q, k, v, g, b, ssm_states_all, pend, gates,
                n_max > 0 ? inp->s_cells : inp->s_copy, head, n_max, keep);
        res->add_fused_node({fused, output, il});
        cb(output, "attn_output", il);
        return output;
    }

    const auto keep_states = [&](ggml_tensor * states) {
        ggml_tensor * kept = ggml_cpy(ctx0, states,
                ggml_view_2d(ctx0, ssm_states_all, ssm_states_all->ne[0], n_seqs, ssm_states_all->nb[1], head*ssm_states_all->nb[1]));
        ggml_build_forward_expand(gf, kept);
        return ggml_reshape_4d(ctx0, kept, s->ne[0], s->ne[1], s->ne[2], n_seqs);
    };

    if (inp->pend_rows) {
        const size_t first_gate = gates->view_offs/ggml_nbytes(gates)*2*mctx->get_n_gate_part(inp->pend_rows->ne[0]);
        s = keep_states(llama_take_in_pending(ctx0, arch, hparams, pend, inp->pend_rows, gather_gates(inp, il), first_gate, s));
        cb(s, "state_taken_in", il);
    } else if (keep) {
        s = keep_states(s);
    }

    move_rows_of_cells(inp, pend,  0, n_max);
    move_rows_of_cells(inp, gates, 0, n_max);
    move_rows_of_cells(inp, gates, mctx->get_n_pend_rows(), n_max);

    if (!keep) {
        const auto [output, states] = build_delta_net(q, k, v, g, b, s, il);
        keep_states(states);
        cb(output, "attn_output", il);
        return output;
    }
    ggml_tensor * out = ggml_gated_delta_net(ctx0, q, k, v, g, b, s, 1);
    res->add_fused_node({fused, out, il});

    ggml_tensor * output = ggml_view_4d(ctx0, out, v->ne[0], v->ne[1], n_tokens, n_seqs, ggml_row_size(out->type, v->ne[0]),
            ggml_row_size(out->type, v->ne[0]*v->ne[1]), ggml_row_size(out->type, v->ne[0]*v->ne[1]*n_tokens), 0);
    llama_store_pending(ctx0, gf, pend, gates, k, v, g, b, n_tokens, n_max, head*n_max);
    cb(output, "attn_output", il);
    return output;
}
