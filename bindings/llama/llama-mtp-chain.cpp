// The graph of a chain: an MTP block in the trunk's context drafts several tokens.

#include "llama-graph.h"

#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"
#include "llama-mtp-head.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

// What the steps of a chain take of the batch, one after the other: its positions section by section, where its K goes,
// where its V goes. I32, where the cache has I64: few backends copy those.
class llm_graph_input_mtp_chain : public llm_graph_input_i {
public:
    // attn: what the graph of the whole batch would have; it comes before this one among the inputs
    llm_graph_input_mtp_chain(
            ggml_context * ctx, const llm_graph_input_attn_kv & attn, const llama_ubatch & ubatch, int64_t n_steps, int64_t n_pos,
            const llama_mtp_given & given, const ggml_tensor * tok_embd) :
        given(given), tok_embd(tok_embd), attn(attn), n_steps(n_steps), n_pos(n_pos), n(ubatch.n_tokens/n_steps) {
        const ggml_init_params params = {
            /*.mem_size   =*/ 2*ggml_tensor_overhead(),
            /*.mem_buffer =*/ nullptr,
            /*.no_alloc   =*/ true,
        };
        ctx_host.reset(ggml_init(params));
        k_idxs = attn.mctx->build_input_k_idxs(ctx_host.get(), ubatch);
        v_idxs = attn.mctx->build_input_v_idxs(ctx_host.get(), ubatch);
        buf_host.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_host.get(), ggml_backend_cpu_buffer_type()));
        if (!buf_host) {
            throw std::bad_alloc();
        }
        n_v = n*(v_idxs->ne[0]/k_idxs->ne[0]);  // a transposed V cache has an index for every value

        data = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_PAD(n*N_SECTIONS + n + n_v + n, ALIGNED), n_steps);
        ggml_set_input(data);
        ggml_set_name(data, "mtp_chain_inp");

        if (tok_embd) {
            embd = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, tok_embd->ne[0], n);
            ggml_set_input(embd);
            ggml_set_name(embd, "mtp_chain_embd");
            return;
        }
        tokens = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
        ggml_set_input(tokens);
        ggml_set_name(tokens, "mtp_chain_tokens");
    }

    void set_input(const llama_ubatch * ubatch) override {
        if (given.n_window > 0) {
            attn.mctx->set_input_mtp_window(attn.self_kq_mask, ubatch, given.n_window);
        }
        attn.mctx->set_input_k_idxs(k_idxs, ubatch);
        attn.mctx->set_input_v_idxs(v_idxs, ubatch);

        std::vector<int32_t> all(ggml_nelements(data), 0);
        for (int64_t i = 0; i < n_steps; ++i) {
            int32_t * dst = all.data() + i*data->ne[0];
            for (int64_t s = 0; s < N_SECTIONS - 1; ++s) {
                dst = std::copy_n(ubatch->pos + i*n, n, dst);
            }
            dst += n;  // the last section of text is 0
            dst = copy_idxs(k_idxs, i*n,   n,   dst);
            dst = copy_idxs(v_idxs, i*n_v, n_v, dst);
            std::copy_n(given.carry_rows.begin(), n, dst);
        }
        ggml_backend_tensor_set(data, all.data(), 0, ggml_nbytes(data));
        if (embd) {
            set_embd(ubatch->token);
        } else if (tokens->buffer) {
            ggml_backend_tensor_set(tokens, ubatch->token, 0, ggml_nbytes(tokens));
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        return n*n_steps == params.ubatch.n_tokens;
    }

    // The parts of a step in `all`, which is `data` or a copy of it.
    ggml_tensor * pos   (ggml_context * ctx, ggml_tensor * all, int64_t i) const { return part(ctx, all, i, 0, n*n_pos); }
    ggml_tensor * k_part(ggml_context * ctx, ggml_tensor * all, int64_t i) const { return part(ctx, all, i, n*N_SECTIONS, n); }
    ggml_tensor * v_part(ggml_context * ctx, ggml_tensor * all, int64_t i) const { return part(ctx, all, i, n*N_SECTIONS + n, n_v); }
    ggml_tensor * carry (ggml_context * ctx, ggml_tensor * all)            const { return part(ctx, all, 0, n*N_SECTIONS + n + n_v, n); }

    static constexpr int64_t N_SECTIONS = 4;
    static constexpr int64_t ALIGNED    = 64;  // 256 bytes: where Vulkan takes positions at least

    const llama_mtp_given & given;

    ggml_tensor * data   = nullptr;  // I32 [n*N_SECTIONS + n + n_v + n and padding, n_steps]
    ggml_tensor * tokens = nullptr;  // I32 [n]: the newest ones, or
    ggml_tensor * embd   = nullptr;  // F32 [n_embd, n]: their embeddings, which the host looks up

private:
    void set_embd(const llama_token * ids) {
        const auto * type = ggml_get_type_traits(tok_embd->type);
        const int64_t n_embd = tok_embd->ne[0];

        std::vector<float> rows(n*n_embd);
        for (int64_t i = 0; i < n; ++i) {
            const char * row = (const char *) tok_embd->data + ids[i]*tok_embd->nb[1];
            if (type->to_float) {
                type->to_float(row, rows.data() + i*n_embd, n_embd);
            } else {
                std::copy_n((const float *) row, n_embd, rows.data() + i*n_embd);
            }
        }
        ggml_backend_tensor_set(embd, rows.data(), 0, ggml_nbytes(embd));
    }

    static ggml_tensor * part(ggml_context * ctx, ggml_tensor * all, int64_t i, int64_t first, int64_t n) {
        return ggml_view_1d(ctx, all, n, i*all->nb[1] + first*all->nb[0]);
    }

    static int32_t * copy_idxs(const ggml_tensor * src, int64_t first, int64_t n, int32_t * dst) {
        const int64_t * idxs = (const int64_t *) src->data + first;
        return std::transform(idxs, idxs + n, dst, [](int64_t idx) {
            GGML_ASSERT(idx <= INT32_MAX);
            return (int32_t) idx;
        });
    }

    const ggml_tensor * tok_embd;  // in host memory, for a chain on a device; NULL: elsewhere

    const llm_graph_input_attn_kv & attn;

    const int64_t n_steps;
    const int64_t n_pos;  // sections that the model takes: N_SECTIONS, or the first
    const int64_t n;      // tokens of a step
    int64_t       n_v;

    ggml_context_ptr        ctx_host;
    ggml_backend_buffer_ptr buf_host;
    ggml_tensor *           k_idxs;  // as the cache has them
    ggml_tensor *           v_idxs;
};

// What makes the largest logit a draw from all of them (the Gumbel-max trick).
class llm_graph_input_mtp_noise : public llm_graph_input_i {
public:
    llm_graph_input_mtp_noise(ggml_context * ctx, int64_t n_rows, int64_t n, int64_t n_steps, const llama_mtp_given & given) : given(given) {
        noise = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_rows, n, n_steps);
        scale = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n);
        ggml_set_input(noise);
        ggml_set_input(scale);
    }

    void set_input(const llama_ubatch * /*ubatch*/) override {
        ggml_backend_tensor_set(noise, given.noise, 0, ggml_nbytes(noise));
        ggml_backend_tensor_set(scale, given.scale, 0, ggml_nbytes(scale));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return noise->ne[1]*noise->ne[2] == params.ubatch.n_tokens;
    }

    ggml_tensor * apply(ggml_context * ctx, ggml_tensor * logits, int64_t i) const {
        return ggml_add(ctx, ggml_mul(ctx, logits, scale),
                ggml_view_2d(ctx, noise, noise->ne[0], noise->ne[1], noise->nb[1], i*noise->nb[2]));
    }

private:
    const llama_mtp_given & given;

    ggml_tensor * noise;
    ggml_tensor * scale;
};

// A token to go on with, whatever came out.
static void token_or_first(ggml_tensor * dst, int ith, int /*nth*/, void * /*userdata*/) {
    for (int64_t i = 0; ith == 0 && i < ggml_nelements(dst); ++i) {
        ((int32_t *) dst->data)[i] = std::max(0, ((const int32_t *) dst->src[0]->data)[i]);
    }
}

// What the steps left, one after the other: a read for each of them would be a wait of its own.
static void join(ggml_context * ctx, ggml_cgraph * gf, std::vector<ggml_tensor *> & parts) {
    ggml_tensor * all = nullptr;
    for (ggml_tensor * part : parts) {
        part = ggml_reshape_1d(ctx, part, ggml_nelements(part));
        all  = all ? ggml_concat(ctx, all, part, 0) : part;
    }
    if (parts.size() > 1) {
        ggml_set_output(all);
        ggml_build_forward_expand(gf, all);
        parts = { all };
    }
}

// What follows as a batch of the trunk, sequence by sequence: the newest token and the drafts.
static void keep_embd(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * kept, ggml_tensor * embd, int64_t i, int64_t n_steps) {
    ggml_tensor * rows = ggml_view_2d(ctx, kept, kept->ne[0], embd->ne[1], (n_steps + 1)*kept->nb[1], i*kept->nb[1]);
    ggml_build_forward_expand(gf, ggml_cpy(ctx, embd, rows));
}

ggml_tensor * llm_graph_context::build_mtp_kept_embd() const {
    if (n_tokens != cparams.mtp.n_kept + ubatch.n_seqs_unq) {
        throw std::runtime_error("a pass behind a chain takes all of its tokens at once");
    }
    ggml_tensor * cur = ggml_view_2d(ctx0, cparams.mtp.kept, n_embd, n_tokens, cparams.mtp.kept->nb[1], 0);
    cb(cur, "inp_embd", -1);
    res->t_inp_embd = cur;
    ggml_build_forward_expand(gf, cur);
    return cur;
}

static void keep_ids(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * kept, ggml_tensor * ids, int64_t first) {
    ggml_build_forward_expand(gf, ggml_cpy(ctx, ids, ggml_view_1d(ctx, kept, ids->ne[0], first*kept->nb[0])));
}

// What the pass picks goes behind the drafts of the chain, and is read with them.
void llm_graph_context::build_mtp_kept_ids() const {
    int64_t n = cparams.mtp.n_kept;
    for (ggml_tensor * ids : res->t_greedy) {
        keep_ids(ctx0, gf, cparams.mtp.kept_ids, ids, n);
        n += ids->ne[0];
    }
    res->t_greedy = { ggml_view_1d(ctx0, cparams.mtp.kept_ids, n, 0) };
    ggml_build_forward_expand(gf, res->t_greedy[0]);
}

// Steps of an MTP block: the first one takes the newest tokens and the carry, each of the others what the one before drafted
// and the rows that it left.
void llm_graph_context::build_mtp_chain(ggml_tensor * tok_embd_w, const mtp_step & step) const {
    const int64_t n_steps = cparams.mtp.chain;
    const int64_t n       = n_tokens/n_steps;

    const bool on_host = !cparams.mtp.indices_on_cpu && tok_embd_w->buffer && ggml_backend_buffer_is_host(tok_embd_w->buffer);

    const auto * attn = build_attn_inp_kv();
    auto       * inp  = (llm_graph_input_mtp_chain *) res->add_input(std::make_unique<llm_graph_input_mtp_chain>(
            ctx0, *attn, ubatch, n_steps, hparams.n_pos_per_embd(), *cparams.mtp.given, on_host ? tok_embd_w : nullptr));

    ggml_tensor * data = inp->data;
    ggml_tensor * mask = attn->self_kq_mask_cnv;

    if (!cparams.mtp.indices_on_cpu) {  // a view of an input is copied to the device by itself: copy the whole, once
        data = ggml_cont(ctx0, data);
        mask = ggml_cont(ctx0, mask);
    }

    ggml_tensor * tok_embd = on_host ? inp->embd : ggml_get_rows(ctx0, tok_embd_w, inp->tokens);
    ggml_tensor * h        = ggml_get_rows(ctx0, cparams.mtp.carry, inp->carry(ctx0, data));

    if (cparams.mtp.keep) {
        keep_embd(ctx0, gf, cparams.mtp.kept, tok_embd, 0, n_steps);
    }

    const llm_graph_input_mtp_noise * noise = nullptr;

    for (int64_t i = 0; i < n_steps; ++i) {
        llm_graph_input_attn_kv attn_step(hparams, cparams, attn->mctx);
        attn_step.self_k_idxs      = inp->k_part(ctx0, data, i);
        attn_step.self_v_idxs      = inp->v_part(ctx0, data, i);
        attn_step.self_kq_mask_cnv = ggml_view_2d(ctx0, mask, mask->ne[0], n, mask->nb[1], i*n*mask->nb[1]);
        attn_step.self_k_rot       = attn->self_k_rot;
        attn_step.self_v_rot       = attn->self_v_rot;

        step(tok_embd, h, inp->pos(ctx0, data, i), &attn_step);

        ggml_tensor * logits = res->t_logits;
        if (cparams.mtp.drawn) {
            if (!noise) {
                noise = (const llm_graph_input_mtp_noise *) res->add_input(std::make_unique<llm_graph_input_mtp_noise>(
                        ctx0, logits->ne[0], n, n_steps, *cparams.mtp.given));
            }
            ggml_set_output(logits);
            res->t_best_logits.push_back(logits);
            logits = noise->apply(ctx0, logits, i);
        }
        ggml_tensor * column = nullptr;
        ggml_tensor * tokens = build_mtp_argmax(logits, &column);
        ggml_set_output(tokens);
        ggml_build_forward_expand(gf, tokens);
        res->t_greedy.push_back(tokens);
        build_mtp_candidates(res->t_logits);

        const auto * head = cparams.mtp.draft_head();
        const bool   own  = head && head->embd;

        ggml_tensor * next = own || !head ? column : tokens;
        if (cparams.mtp.indices_on_cpu) {
            next = ggml_custom_4d(ctx0, GGML_TYPE_I32, n, 1, 1, 1, &tokens, 1, token_or_first, 1, nullptr);
            cb(next, "mtp_chain_token", -1);
        }
        tok_embd = ggml_get_rows(ctx0, own ? head->embd : tok_embd_w, next);
        h        = res->t_hidden[cparams.mtp.block_input];
        if (cparams.mtp.keep) {
            keep_embd(ctx0, gf, cparams.mtp.kept, tok_embd, i + 1, n_steps);
            keep_ids(ctx0, gf, cparams.mtp.kept_ids, tokens, i*n);
        }
    }
    if (!cparams.mtp.indices_on_cpu && !cparams.mtp.keep) {
        for (auto * parts : { &res->t_greedy, &res->t_best, &res->t_best_logits }) {
            join(ctx0, gf, *parts);
        }
    }
}
