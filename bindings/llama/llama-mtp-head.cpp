// Draft heads: LM heads of an MTP block over a part of the vocabulary.

#include "llama-mtp-head.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "llama-model-loader.h"
#include "llama-mtp-guard.h"
#include "llama-tap-rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <set>
#include <stdexcept>
#include <utility>

static uint64_t next_id() {
    static std::atomic<uint64_t> id { 0 };
    return ++id;
}

// Whether graphs can look up rows of w on the device of the output layer. False for the CPU, which reads w where it is.
static bool can_gather(const llama_model & model, const ggml_tensor * w) {
    ggml_backend_dev_t dev = model.dev_output();
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return false;
    }
    const ggml_init_params params = {
        /*.mem_size   =*/ 3*ggml_tensor_overhead(),
        /*.mem_buffer =*/ nullptr,
        /*.no_alloc   =*/ true,
    };
    ggml_context_ptr ctx { ggml_init(params) };
    if (!ctx) {
        throw std::bad_alloc();
    }
    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), w->type, w->ne[0], w->ne[1]);
    ggml_tensor * ids  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1);

    return ggml_backend_dev_supports_op(dev, ggml_get_rows(ctx.get(), rows, ids));
}

static ggml_tensor * lm_head(const llama_model & model, int il) {
    ggml_tensor * own = model.layers[il].nextn.shared_head_head;
    return own ? own : model.output;
}

// Whether one draft head can replace the LM heads of all MTP blocks: they share one, and it is over all tokens.
static bool has_one_lm_head(const llama_model & model) {
    bool ok = model.hparams.n_layer_nextn > 0 && !model.mtp_head;
    for (uint32_t i = 1; ok && i < model.hparams.n_layer_nextn; ++i) {
        ok = lm_head(model, model.hparams.n_layer() + i) == lm_head(model, model.hparams.n_layer());
    }
    return ok;
}

void llama_mtp_head::make_tensors(const llama_model & model) {
    has_row.resize(n_vocab);
    for (llama_token id : tokens) {
        has_row[id] = true;
    }
    const ggml_init_params params = {
        /*.mem_size   =*/ 3*ggml_tensor_overhead(),
        /*.mem_buffer =*/ nullptr,
        /*.no_alloc   =*/ true,
    };
    ctx.reset(ggml_init(params));
    if (!ctx) {
        throw std::bad_alloc();
    }
    ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, tokens.size());
    ggml_set_name(ids, "mtp_draft_head_ids");
    replaces = lm_head(model, model.hparams.n_layer());

    // The host has the embeddings of an untied model. Where a device can look them up, it gets those of the head's tokens.
    const bool block_has_embd = model.layers[model.hparams.n_layer()].nextn.embed_tokens;
    if (!block_has_embd && model.tok_embd_mtp == model.tok_embd && can_gather(model, model.tok_embd)) {
        embd = ggml_new_tensor_2d(ctx.get(), model.tok_embd->type, model.tok_embd->ne[0], tokens.size());
        ggml_set_name(embd, "mtp_draft_head_embd");
    }
}

void llama_mtp_head::allocate(const llama_model & model) {
    buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(model.dev_output())));
    if (!buf) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    ggml_backend_tensor_set(ids, tokens.data(), 0, ggml_nbytes(ids));

    if (embd && !model.hparams.no_alloc) {
        const size_t n_row = embd->nb[1];
        std::vector<char> rows(ggml_nbytes(embd));
        for (size_t i = 0; i < tokens.size(); ++i) {
            ggml_backend_tensor_get(model.tok_embd, rows.data() + i*n_row, tokens[i]*n_row, n_row);
        }
        ggml_backend_tensor_set(embd, rows.data(), 0, rows.size());
    }
}

llama_mtp_head::llama_mtp_head(
        const llama_model & model, ggml_type type, const void * rows, const llama_token * ids, int32_t n_rows) :
    id(next_id()), n_vocab(model.vocab.n_tokens()), tokens(ids, ids + n_rows) {
    // the rows are of the whole LM head, also where the file has a draft head itself
    const auto & nextn = model.layers[model.hparams.n_layer()].nextn;
    scale = nextn.shared_head_head && !model.mtp_head ? nextn.shared_head_head_s : model.output_s;

    make_tensors(model);
    w = ggml_new_tensor_2d(ctx.get(), type, model.hparams.n_embd, n_rows);
    ggml_set_name(w, "mtp_draft_head");

    allocate(model);
    ggml_backend_tensor_set(w, rows, 0, ggml_nbytes(w));
}

llama_mtp_head::llama_mtp_head(
        const llama_model & model, ggml_tensor * w, ggml_tensor * scale, std::vector<llama_token> tokens) :
    id(next_id()), n_vocab(model.vocab.n_tokens()), tokens(std::move(tokens)), w(w), scale(scale) {
    ascending = std::is_sorted(this->tokens.begin(), this->tokens.end());

    make_tensors(model);
    allocate(model);
}

// A tensor `d2t` has the token of each row of a trimmed LM head: of the MTP block's own, or, in a file of the block alone, of the
// file's only one. Returns the rows of both.
llama_mtp_n_rows llama_model_base::create_tensor_mtp_d2t(llama_model_loader & ml, const nextn_flags_t & nf) {
    const int64_t n_vocab = vocab.n_tokens();

    const auto * meta = ml.get_tensor_meta(tn(LLM_TENSOR_D2T).str().c_str());
    if (!meta) {
        return { n_vocab, n_vocab };
    }
    if (meta->type != GGML_TYPE_I32 && meta->type != GGML_TYPE_I64) {
        throw std::runtime_error(format("d2t has type %s, it must be i32 or i64", ggml_type_name(meta->type)));
    }
    const bool own    = ml.get_tensor_meta(tn(LLM_TENSOR_NEXTN_SHARED_HEAD_HEAD, "weight", hparams.n_layer()).str().c_str());
    const bool output = ml.get_tensor_meta(tn(LLM_TENSOR_OUTPUT, "weight").str().c_str());
    if (!own && !(nf.trunk == TENSOR_NOT_REQUIRED && output)) {
        throw std::runtime_error("d2t says which tokens the LM head of an MTP block is over, but the file has no such head");
    }
    d2t = create_tensor(tn(LLM_TENSOR_D2T), { meta->ne[0] }, nf.mtp);
    return { own ? n_vocab : meta->ne[0], own ? meta->ne[0] : n_vocab };
}

// Make the draft head of a file that has one. Throws where `d2t` is not what graphs rely on.
void llama_model_base::load_mtp_head() {
    const bool tied = output && output != tok_embd && !strcmp(ggml_get_name(output), ggml_get_name(tok_embd));
    tok_embd_mtp = tied && can_gather(*this, output) ? output : tok_embd;

    if (!d2t || hparams.no_alloc || !llm_arch_has_hidden_tap(arch)) {
        return;
    }
    const int64_t n_rows = d2t->ne[0];

    std::vector<char> data(ggml_nbytes(d2t));
    ggml_backend_tensor_get(d2t, data.data(), 0, data.size());

    std::vector<llama_token> tokens(n_rows);
    std::vector<bool>        seen(vocab.n_tokens());
    for (int64_t i = 0; i < n_rows; ++i) {
        const int64_t token = d2t->type == GGML_TYPE_I64 ? ((const int64_t *) data.data())[i] : ((const int32_t *) data.data())[i];
        if (token < 0 || token >= (int64_t) seen.size()) {
            throw std::runtime_error(format("d2t: row %lld is token %lld of a vocabulary of %zu",
                        (long long) i, (long long) token, seen.size()));
        }
        if (seen[token]) {
            throw std::runtime_error(format("d2t: token %lld has two rows", (long long) token));
        }
        seen[token] = true;
        tokens[i]   = token;
    }

    const auto & nextn = layers[hparams.n_layer()].nextn;
    mtp_head = nextn.shared_head_head
        ? std::make_unique<llama_mtp_head>(*this, nextn.shared_head_head, nextn.shared_head_head_s, std::move(tokens))
        : std::make_unique<llama_mtp_head>(*this, output,                 output_s,                 std::move(tokens));
}

bool llama_mtp_head::can_replace(int32_t n, const int32_t * slots, const llama_token * tokens) const {
    std::set<int32_t>     seen;
    std::set<llama_token> removed, added;
    for (int32_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= w->ne[1] || tokens[i] < 0 || tokens[i] >= n_vocab) {
            return false;
        }
        if (!seen.insert(slots[i]).second || !added.insert(tokens[i]).second) {
            return false;
        }
        removed.insert(this->tokens[slots[i]]);
    }
    return std::none_of(added.begin(), added.end(), [&](llama_token id) { return has_row[id] && !removed.count(id); });
}

void llama_mtp_head::replace(
        const llama_model & model, int32_t n, const int32_t * slots, const llama_token * tokens, const void * rows) {
    ascending = ascending && n == 0;

    std::vector<char> row(embd ? embd->nb[1] : 0);

    for (int32_t i = 0; i < n; ++i) {
        has_row[this->tokens[slots[i]]] = false;
    }
    for (int32_t i = 0; i < n; ++i) {
        has_row[tokens[i]] = true;
        ggml_backend_tensor_set(w,   (const char *) rows + i*w->nb[1], slots[i]*w->nb[1],   w->nb[1]);
        ggml_backend_tensor_set(ids, &tokens[i],                       slots[i]*ids->nb[1], sizeof(llama_token));
        this->tokens[slots[i]] = tokens[i];
        if (embd) {
            ggml_backend_tensor_get(model.tok_embd, row.data(), tokens[i]*row.size(), row.size());
            ggml_backend_tensor_set(embd,           row.data(), slots[i]*row.size(),  row.size());
        }
    }
}

// The logits of a draft head, F32 [n_rows, n_outputs], spread over the whole vocabulary as in eagle3.cpp.
static ggml_tensor * spread(ggml_context * ctx0, ggml_tensor * cur, const llama_mtp_head * head) {
    const int64_t n_rows = cur->ne[0];
    const int64_t n      = cur->ne[1];

    ggml_tensor * logits = ggml_fill(ctx0, ggml_new_tensor_3d(ctx0, GGML_TYPE_F32, 1, head->n_vocab, n), -INFINITY);
    logits = ggml_set_rows(ctx0, logits,
            ggml_reshape_3d(ctx0, cur, 1, n_rows, n), ggml_reshape_1d(ctx0, head->ids, n_rows));
    return ggml_reshape_2d(ctx0, logits, head->n_vocab, n);
}

// Logits of the draft head at hand. A context of the MTP block alone, which copies them to the host, has rows of n_vocab for
// them, so there they are spread.
ggml_tensor * llm_graph_context::build_mtp_draft_head(ggml_tensor * cur) const {
    const auto * head = cparams.mtp.draft_head();

    ggml_tensor * inp = cur;

    cur = ggml_mul_mat(ctx0, head->w, inp);
    cur = head->scale ? ggml_mul(ctx0, cur, head->scale) : cur;

    for (const auto & [adapter, adapter_scale] : *loras) {
        const llama_adapter_lora_weight * lw = adapter->get_weight(head->replaces);
        if (lw && lw->b->ne[1] == head->n_vocab) {
            ggml_tensor * b  = ggml_get_rows(ctx0, lw->b, ggml_reshape_1d(ctx0, head->ids, head->w->ne[1]));
            ggml_tensor * ab = ggml_mul_mat(ctx0, b, ggml_mul_mat(ctx0, lw->a, inp));

            cur = ggml_add(ctx0, cur, ggml_scale(ctx0, ab, lw->get_scale(adapter->alpha, adapter_scale)));
        }
    }

    const bool copied = !cparams.mtp.in_trunk && !cparams.mtp.greedy && cur->ne[1] > 0;
    return copied ? spread(ctx0, cur, head) : cur;
}

// The logits `cur` of the block's LM head over the whole vocabulary. head: the file's draft head, which then is that LM head,
// or NULL. Where a draft head is at hand, they stay as they are.
ggml_tensor * llm_graph_context::build_mtp_d2t(ggml_tensor * cur, const llama_mtp_head * head) const {
    return cparams.mtp.draft_head() || !head ? cur : spread(ctx0, cur, head);
}

bool llama_context::set_mtp_draft_head(
        int32_t type_id, const void * rows, size_t n_bytes, const llama_token * ids, int32_t n_rows) {
    const int64_t   n_embd = model.hparams.n_embd;
    const ggml_type type   = type_id >= 0 && type_id < GGML_TYPE_COUNT ? (ggml_type) type_id : GGML_TYPE_COUNT;

    std::unique_ptr<llama_mtp_head> head;
    if (n_rows > 0) {
        const bool block_alone = cparams.ctx_type == LLAMA_CONTEXT_TYPE_MTP && has_one_lm_head(model);

        bool ok = (cparams.mtp.in_trunk || block_alone) && type != GGML_TYPE_COUNT && ggml_blck_size(type) > 0 &&
            n_embd % ggml_blck_size(type) == 0 && ggml_row_size(type, n_embd)*n_rows == n_bytes;
        for (int32_t i = 0; ok && i < n_rows; ++i) {
            ok = ids[i] > (i > 0 ? ids[i - 1] : -1) && ids[i] < (llama_token) model.vocab.n_tokens();
        }
        if (!ok) {
            LLAMA_LOG_ERROR("%s: a draft head is rows of n_embd values for ascending tokens, for a context with an MTP block\n", __func__);
            return false;
        }
        try {
            head = std::make_unique<llama_mtp_head>(model, type, rows, ids, n_rows);
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: no memory for a draft head of %d rows: %s\n", __func__, n_rows, err.what());
            return false;
        }
    }

    const auto * at_hand = head.get();
    mtp_set_head(std::move(head), at_hand);
    return true;
}

// owned: the context frees it. head: the one that drafts come from: `owned`, the model's, or NULL, the whole LM head.
void llama_context::mtp_set_head(std::unique_ptr<llama_mtp_head> owned, const llama_mtp_head * head) {
    synchronize();  // graphs may use the head before
    mtp_head = std::move(owned);
    sched_need_reserve = true;

    cparams.mtp.head    = head;
    cparams.mtp.head_id = head ? head->id : 0;
}

int32_t llama_context::use_mtp_model_draft_head(const llama_token ** ids) {
    const auto * head = model.mtp_head.get();
    if (!head || !cparams.mtp.in_trunk) {
        LLAMA_LOG_ERROR("%s: no context with the MTP block of a file that has a draft head\n", __func__);
        return 0;
    }
    mtp_set_head(nullptr, head);
    *ids = head->tokens.data();
    return head->tokens.size();
}

bool llama_context::replace_mtp_draft_rows(
        int32_t n, const int32_t * slots, const llama_token * ids, const void * rows, size_t n_bytes) {
    if (!mtp_head || n < 0 || n*mtp_head->w->nb[1] != n_bytes || !mtp_head->can_replace(n, slots, ids)) {
        LLAMA_LOG_ERROR("%s: rows of a draft head that was set are replaced, by rows of its type for tokens without one\n", __func__);
        return false;
    }
    synchronize();  // graphs that read them
    mtp_head->replace(model, n, slots, ids, rows);
    return true;
}

bool llama_mtp_set_draft_head(
        llama_context * ctx, int32_t type, const void * rows, size_t n_bytes, const llama_token * ids, int32_t n_rows) {
    return llama_mtp_guard(__func__, false, [&] { return ctx->set_mtp_draft_head(type, rows, n_bytes, ids, n_rows); });
}

bool llama_mtp_replace_draft_rows(
        llama_context * ctx, int32_t n, const int32_t * slots, const llama_token * ids, const void * rows, size_t n_bytes) {
    return llama_mtp_guard(__func__, false, [&] { return ctx->replace_mtp_draft_rows(n, slots, ids, rows, n_bytes); });
}

int32_t llama_mtp_use_model_draft_head(llama_context * ctx, const llama_token ** ids) {
    return llama_mtp_guard(__func__, 0, [&] { return ctx->use_mtp_model_draft_head(ids); });
}
