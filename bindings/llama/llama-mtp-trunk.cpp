// An MTP block in the trunk's context: its part of the trunk's graph.

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama-mtp.h"
#include "llama-tap-rows.h"

#include <algorithm>

bool llama_context::mtp_fits_trunk(const llama_model & model) {
    return llm_arch_has_hidden_tap(model.arch) && model.hparams.n_layer_nextn == 1 &&
        model.layers[model.hparams.n_layer()].nextn.eh_proj;  // unless it was left out
}

// Store K and V, F32 [n_embd_head, n_head_kv, n_tokens], as build_attn() does, and put nothing else into the graph.
void llm_graph_context::build_mtp_kv_only(llm_graph_input_attn_kv * inp, ggml_tensor * k, ggml_tensor * v, int il) const {
    if (inp->self_k_rot) {
        k = llama_mul_mat_hadamard(ctx0, k, inp->self_k_rot);
    }
    if (inp->self_v_rot) {
        v = llama_mul_mat_hadamard(ctx0, v, inp->self_v_rot);
    }

    // both go to the same cells, unless V is transposed
    const bool same = ggml_nelements(inp->get_v_idxs()) == ggml_nelements(inp->get_k_idxs());

    ggml_build_forward_expand(gf, v);
    ggml_build_forward_expand(gf, k);
    ggml_build_forward_expand(gf, inp->mctx->cpy_k(ctx0, k, inp->get_k_idxs(), il));
    ggml_build_forward_expand(gf, inp->mctx->cpy_v(ctx0, v, same ? inp->get_k_idxs() : inp->get_v_idxs(), il));
}

// The rows before those of the tokens at hand: of each sequence the carry, then all of h, F32 [n_embd, n_tokens], but the last,
// which is carried on, beside those to which the batch can be taken back. F32 [n_embd, n_seq_tokens, n_seqs]
ggml_tensor * llm_graph_context::build_mtp_shift(llm_graph_input_rs * inp, ggml_tensor * h) const {
    const auto * mctx = inp->mctx;

    const int64_t n_seqs       = ubatch.n_seqs;
    const int64_t n_seq_tokens = ubatch.n_seq_tokens;

    ggml_tensor * all   = mctx->get_carry();
    ggml_tensor * carry = ggml_reshape_3d(ctx0, build_rs(inp, all, n_embd, n_seqs), n_embd, 1, n_seqs);

    ggml_tensor * rows = ggml_concat(ctx0, carry, ggml_reshape_3d(ctx0, h, n_embd, n_seq_tokens, n_seqs), 1);
    cb(rows, "mtp_shift", -1);

    const int64_t n_states = mctx->get_n_states(n_seq_tokens);
    for (int64_t i = 0; i < n_states; ++i) {
        ggml_build_forward_expand(gf, ggml_cpy(ctx0,
                ggml_view_2d(ctx0, rows, n_embd, n_seqs, rows->nb[2], (n_seq_tokens - i)*rows->nb[1]),
                ggml_view_2d(ctx0, all,  n_embd, n_seqs, all->nb[1],  (i*mctx->get_size() + mctx->get_head())*all->nb[1])));
    }
    return ggml_view_3d(ctx0, rows, n_embd, n_seq_tokens, n_seqs, rows->nb[1], rows->nb[2], 0);
}

// What an MTP block of qwen35's shape keeps of the tokens at hand: K and V, of their embeddings and the rows before theirs.
void llm_graph_context::build_mtp_trunk(const llama_model & model, llm_graph_input_mem_hybrid * inp, ggml_tensor * inp_pos) const {
    if (!cparams.mtp.in_trunk) {
        return;
    }
    const int    il    = hparams.n_layer();
    const auto & layer = model.layers[il];

    const int64_t n_embd_head = hparams.n_embd_head_k();

    ggml_tensor * embd = layer.nextn.embed_tokens && ubatch.token && !ubatch.is_mixed()
        ? ggml_get_rows(ctx0, layer.nextn.embed_tokens, res->t_inp_tokens)
        : res->t_layer_inp[0];

    ggml_tensor * h = build_mtp_shift(inp->get_recr(), res->t_hidden[cparams.mtp.block_input]);
    h = build_norm(h, layer.nextn.hnorm, nullptr, LLM_NORM_RMS, il);

    ggml_tensor * e = build_norm(embd, layer.nextn.enorm, nullptr, LLM_NORM_RMS, il);

    ggml_tensor * cur = ggml_concat(ctx0, e, ggml_reshape_2d(ctx0, h, n_embd, n_tokens), 0);
    cur = build_lora_mm(layer.nextn.eh_proj, cur, layer.nextn.eh_proj_s);
    cur = build_norm(cur, layer.attn_norm, nullptr, LLM_NORM_RMS, il);
    cb(cur, "mtp_attn_norm", il);

    auto [q, k, v] = build_qkv(layer, cur,
            n_embd_head * 2, n_head,
            n_embd_head,     n_head_kv,
            n_embd_head,     n_head_kv,
            il, false);
    GGML_UNUSED(q);  // never gets into the graph

    int sections[4];
    std::copy(std::begin(hparams.rope_sections), std::begin(hparams.rope_sections) + 4, sections);

    k = build_norm(ggml_reshape_3d(ctx0, k, n_embd_head, n_head_kv, n_tokens), layer.attn_k_norm, nullptr, LLM_NORM_RMS, il);
    k = ggml_rope_multi(ctx0, k, inp_pos, nullptr,
            n_rot, sections, rope_type, n_ctx_orig, freq_base, freq_scale,
            ext_factor, attn_factor, beta_fast, beta_slow);
    v = ggml_reshape_3d(ctx0, v, n_embd_head, n_head_kv, n_tokens);

    build_mtp_kv_only(inp->get_attn(), k, v, il);
}

bool llama_context::set_mtp_block_input(llama_hidden_tap input) {
    if (!cparams.mtp.in_trunk || input == LLAMA_HIDDEN_TAP_NONE) {
        LLAMA_LOG_ERROR("%s: no context with an MTP block, or no hidden row\n", __func__);
        return false;
    }
    // carries that were computed are rows of the other kind
    for (uint32_t s = 0; input != cparams.mtp.block_input && s < cparams.n_seq_max; ++s) {
        if (memory->seq_pos_max(s) >= 0) {
            LLAMA_LOG_ERROR("%s: sequence %u has tokens\n", __func__, s);
            return false;
        }
    }
    cparams.mtp.block_input = input;

    auto * hybrid = static_cast<llama_memory_hybrid *>(memory.get());
    hybrid->get_mem_recr()->carry_point = input == LLAMA_HIDDEN_TAP_PRE_NORM;
    return true;
}

bool llama_mtp_set_block_input(llama_context * ctx, llama_hidden_tap input) {
    return ctx->set_mtp_block_input(input);
}
