// The hidden-state tap, and what is not computed where nobody asked for it.

#include "llama-mtp-tap.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama-mtp.h"

#include <exception>
#include <new>

bool llm_arch_supports_mtp_tap(llm_arch arch) {
    return arch == LLM_ARCH_QWEN35 || arch == LLM_ARCH_QWEN35MOE || arch == LLM_ARCH_QWEN3NEXT;
}

llama_mtp_tap::llama_mtp_tap(const llama_model & model, uint32_t n_batch, uint32_t n_ids) {
    // a model split by tensor has no single device that holds whole rows
    const bool split = model.split_mode() == LLAMA_SPLIT_MODE_TENSOR;
    dev = split ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : model.dev_output();

    const ggml_init_params params = {
        /*.mem_size   =*/ 2*ggml_tensor_overhead(),
        /*.mem_buffer =*/ nullptr,
        /*.no_alloc   =*/ true,
    };
    ctx.reset(ggml_init(params));
    if (!ctx) {
        throw std::bad_alloc();
    }

    rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, model.hparams.n_embd_out(), n_batch);
    ggml_set_name(rows, "mtp_tap");
    if (n_ids > 0) {
        ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n_ids);
        ggml_set_name(ids, "mtp_kept_ids");
    }

    buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_dev_buffer_type(dev)));
    if (!buf) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_clear(buf.get(), 0);
}

void llama_mtp_tap::begin_batch(uint32_t n_tokens) {
    written.assign(n_tokens, false);
}

void llama_mtp_tap::will_write(int32_t i) {
    if ((size_t) i < written.size()) {
        written[i] = true;
    }
}

float * llama_mtp_tap::host_rows(int32_t first, int32_t n) {
    const size_t offset = first*rows->nb[1];

    if (ggml_backend_buffer_is_host(buf.get())) {
        return (float *) ((char *) rows->data + offset);
    }
    copy.resize(n*rows->ne[0]);
    ggml_backend_tensor_get(rows, copy.data(), offset, n*rows->nb[1]);
    return copy.data();
}

// Where in the tap the rows of a ubatch go.
class llm_graph_input_mtp_tap : public llm_graph_input_i {
public:
    llm_graph_input_mtp_tap(llama_mtp_tap * tap, bool all) : tap(tap), all(all) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_ASSERT(ubatch->data && ubatch->data->batch_idxs.size() == ubatch->n_tokens);

        std::vector<int64_t> data;
        data.reserve(ubatch->n_tokens);

        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            if (all || ubatch->output[i]) {
                const int32_t idx = ubatch->data->batch_idxs[i];
                tap->will_write(idx);
                data.push_back(idx);
            }
        }

        GGML_ASSERT(data.size() == (size_t) idxs->ne[0]);
        ggml_backend_tensor_set(idxs, data.data(), 0, ggml_nbytes(idxs));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return idxs->ne[0] == (all ? params.ubatch.n_tokens : params.n_outputs);
    }

    ggml_tensor * idxs = nullptr;  // I64 [n_tokens] or [n_outputs]

private:
    llama_mtp_tap * tap;
    const bool all;
};

// Store the hidden rows `cur`, F32 [n_embd_out, n_tokens or n_outputs], if this is where the tap is.
void llm_graph_context::build_mtp_tap(ggml_tensor * cur, bool pre_norm) const {
    if (cparams.mtp.tap_pre_norm == pre_norm) {
        res->t_mtp_hidden = cur;
    }
    if (cparams.mtp.chain > 0) {
        return;  // they are for the next step, and for nobody else
    }
    if (!cparams.mtp.need_embd_pre_norm || cparams.mtp.tap_pre_norm != pre_norm || cur->ne[1] == 0) {
        return;
    }

    // an output in its own right: what follows must not be computed in its buffer
    ggml_set_output(cur);

    auto inp = std::make_unique<llm_graph_input_mtp_tap>(cparams.mtp.tap, cur->ne[1] == n_tokens);

    inp->idxs = ggml_new_tensor_1d(ctx0, GGML_TYPE_I64, cur->ne[1]);
    ggml_set_input(inp->idxs);
    ggml_set_name(inp->idxs, "mtp_tap_idxs");

    ggml_tensor * stored = ggml_set_rows(ctx0, cparams.mtp.tap->rows, cur, inp->idxs);
    cb(stored, "mtp_tap_store", -1);
    ggml_build_forward_expand(gf, stored);

    res->add_input(std::move(inp));
}

// Whether a trunk that has computed every row for the tap slices to its output rows before the final norm: unless somebody
// wants what follows the norm for every row.
bool llm_graph_context::mtp_slice_norm() const {
    const bool tapped = cparams.mtp.need_embd_pre_norm || cparams.mtp.in_trunk;

    return cparams.mtp.slice && tapped && cparams.mtp.tap_pre_norm && !cparams.embeddings_nextn;
}

// A final norm, of the rows that somebody wants, and the tap before it or after it. inp_out_ids: the output rows, of a trunk.
ggml_tensor * llm_graph_context::build_mtp_final_norm(ggml_tensor * cur, ggml_tensor * weight, ggml_tensor * inp_out_ids) const {
    build_mtp_tap(cur, /*pre_norm =*/ true);
    if (inp_out_ids && mtp_slice_norm()) {
        cur = ggml_get_rows(ctx0, cur, inp_out_ids);
    }
    cur = build_norm(cur, weight, nullptr, LLM_NORM_RMS, -1);
    build_mtp_tap(cur, /*pre_norm =*/ false);
    return cur;
}

// The part of a memory that has recurrent states; NULL: none.
static llama_memory_recurrent * mtp_recurrent(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * iswa = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return iswa->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

bool llama_context::set_embeddings_pre_norm(bool value) {
    if (value && !llm_arch_supports_mtp_tap(model.arch)) {
        LLAMA_LOG_ERROR("%s: the graph of %s has no hidden-state tap\n", __func__, model.arch_name().c_str());
        return false;
    }
    if (value && !mtp_tap) {
        try {
            mtp_tap = std::make_unique<llama_mtp_tap>(model, cparams.n_batch);

            cparams.mtp.tap                = mtp_tap.get();
            cparams.mtp.need_embd_pre_norm = true;

            sched_need_reserve = true;
            sched_reserve();
        } catch (const std::exception & err) {
            LLAMA_LOG_ERROR("%s: no memory for the hidden rows of %u tokens: %s\n", __func__, cparams.n_batch, err.what());

            cparams.mtp.tap                = nullptr;
            cparams.mtp.need_embd_pre_norm = false;
            mtp_tap.reset();

            sched_need_reserve = true;
            return false;
        }
    }
    cparams.mtp.need_embd_pre_norm = value;
    return true;
}

void llama_context::set_embeddings_pre_norm_point(bool pre_norm) {
    cparams.mtp.tap_pre_norm = pre_norm;

    if (cparams.mtp.in_trunk) {
        mtp_recurrent(memory.get())->carry_point = pre_norm ? LLAMA_MTP_TAP_PRE_NORM : LLAMA_MTP_TAP_POST_NORM;
    }
}

void llama_context::set_mtp_slice(bool value) {
    sched_need_reserve |= cparams.mtp.slice != value;

    cparams.mtp.slice = value;
}

// A batch follows. 0: the last one has failed.
void llama_context::mtp_begin_batch(uint32_t n_tokens, uint32_t n_outputs) {
    mtp_greedy_ids.assign(n_tokens, -1);
    mtp_n_kept = cparams.mtp.n_kept;
    if ((cparams.mtp.greedy || mtp_n_kept > 0) && mtp_greedy.size() < n_tokens + mtp_n_kept) {
        synchronize();  // a copy into it may be on its way
        mtp_greedy.resize(n_tokens + mtp_n_kept);
    }
    mtp_n_greedy = 0;

    const size_t n_candidates = cparams.mtp.greedy ? (size_t) cparams.mtp.n_candidates*n_outputs : 0;
    if (mtp_candidates.size() < n_candidates) {
        synchronize();
        mtp_candidates       .resize(n_candidates);
        mtp_candidates_logits.resize(n_candidates);
    }
    mtp_n_candidates = 0;

    if (mtp_tap) {
        mtp_tap->begin_batch(cparams.mtp.need_embd_pre_norm ? n_tokens : 0);
    }
}

float * llama_context::get_embeddings_pre_norm() {
    if (!mtp_tap || mtp_tap->n_tokens() == 0) {
        return nullptr;
    }
    synchronize();
    return mtp_tap->host_rows(0, mtp_tap->n_tokens());
}

float * llama_context::get_embeddings_pre_norm_ith(int32_t i) {
    if (!mtp_tap || !mtp_tap->has_row(i)) {
        return nullptr;
    }
    synchronize();
    return mtp_tap->host_rows(i, 1);
}

bool llama_set_embeddings_pre_norm(llama_context * ctx, bool value) {
    return ctx->set_embeddings_pre_norm(value);
}

bool llama_get_need_embd_pre_norm(const llama_context * ctx) {
    return ctx->get_cparams().mtp.need_embd_pre_norm;
}

void llama_set_embeddings_pre_norm_point(llama_context * ctx, llama_mtp_tap_point point) {
    ctx->set_embeddings_pre_norm_point(point == LLAMA_MTP_TAP_PRE_NORM);
}

float * llama_get_embeddings_pre_norm(llama_context * ctx) {
    return ctx->get_embeddings_pre_norm();
}

float * llama_get_embeddings_pre_norm_ith(llama_context * ctx, int32_t i) {
    return ctx->get_embeddings_pre_norm_ith(i);
}

void llama_mtp_set_slice(llama_context * ctx, bool value) {
    ctx->set_mtp_slice(value);
}
