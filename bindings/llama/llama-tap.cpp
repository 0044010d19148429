// The hidden-state tap.

#include "llama-tap.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "llama-mtp-guard.h"
#include "llama-tap-rows.h"

#include <algorithm>
#include <exception>
#include <new>

bool llm_arch_has_hidden_tap(llm_arch arch) {
    return arch == LLM_ARCH_QWEN35 || arch == LLM_ARCH_QWEN35MOE || arch == LLM_ARCH_QWEN3NEXT;
}

ggml_backend_buffer_ptr llama_alloc_at_output(const llama_model & model, ggml_context * ctx) {
    // a model split by tensor has no single device that holds whole rows
    const bool split = model.split_mode() == LLAMA_SPLIT_MODE_TENSOR;
    ggml_backend_dev_t dev = split ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : model.dev_output();

    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_dev_buffer_type(dev)) };
    if (!buf) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_clear(buf.get(), 0);
    return buf;
}

llama_tap_rows::llama_tap_rows(const llama_model & model, uint32_t n_batch) {
    ctx.reset(ggml_init({ /*.mem_size =*/ ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
    if (!ctx) {
        throw std::bad_alloc();
    }
    data = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, model.hparams.n_embd_out(), n_batch);
    ggml_set_name(data, "hidden_rows");

    buf = llama_alloc_at_output(model, ctx.get());
}

bool llama_tap_rows::has(int32_t first, int32_t n) const {
    if (first < 0 || n < 1 || (size_t) first + n > written.size()) {
        return false;
    }
    const auto begin = written.begin() + first;
    return std::find(begin, begin + n, false) == begin + n;
}

const float * llama_tap_rows::on_host(int32_t first, int32_t n) {
    const size_t offset = first*data->nb[1];

    if (ggml_backend_buffer_is_host(buf.get())) {
        return (const float *) ((const char *) data->data + offset);
    }
    copy.resize(n*data->ne[0]);
    ggml_backend_tensor_get(data, copy.data(), offset, n*data->nb[1]);
    return copy.data();
}

// Where the rows of a ubatch go.
class llm_graph_input_hidden_tap : public llm_graph_input_i {
public:
    llm_graph_input_hidden_tap(llama_tap_rows * rows, bool all) : rows(rows), all(all) {}

    void set_input(const llama_ubatch * ubatch) override {
        GGML_ASSERT(ubatch->data && ubatch->data->batch_idxs.size() == ubatch->n_tokens);

        std::vector<int64_t> data;
        data.reserve(ubatch->n_tokens);

        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            if (all || ubatch->output[i]) {
                const int32_t idx = ubatch->data->batch_idxs[i];
                rows->will_write(idx);
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
    llama_tap_rows * rows;
    const bool all;
};

// The hidden rows `cur`, F32 [n_embd_out, n_tokens or n_outputs], are those of this point: store them if the tap is there.
void llm_graph_context::build_hidden_tap(ggml_tensor * cur, llama_hidden_tap point) const {
    res->t_hidden[point] = cur;

    const bool drafts = cparams.mtp.chain > 0;  // in the trunk's context: the trunk's rows stay
    if (cparams.hidden_tap != point || drafts || cur->ne[1] == 0) {
        return;
    }

    // an output in its own right: what follows must not be computed in its buffer
    ggml_set_output(cur);

    auto inp = std::make_unique<llm_graph_input_hidden_tap>(cparams.hidden_rows, cur->ne[1] == n_tokens);

    inp->idxs = ggml_new_tensor_1d(ctx0, GGML_TYPE_I64, cur->ne[1]);
    ggml_set_input(inp->idxs);
    ggml_set_name(inp->idxs, "hidden_tap_idxs");

    ggml_tensor * stored = ggml_set_rows(ctx0, cparams.hidden_rows->data, cur, inp->idxs);
    cb(stored, "hidden_tap_store", -1);
    ggml_build_forward_expand(gf, stored);

    res->add_input(std::move(inp));
}

// A final norm, with the tap before it or after it.
ggml_tensor * llm_graph_context::build_tapped_norm(ggml_tensor * cur, ggml_tensor * weight) const {
    build_hidden_tap(cur, LLAMA_HIDDEN_TAP_PRE_NORM);
    cur = build_norm(cur, weight, nullptr, LLM_NORM_RMS, -1);
    build_hidden_tap(cur, LLAMA_HIDDEN_TAP_POST_NORM);
    return cur;
}

bool llama_context::set_hidden_tap(llama_hidden_tap tap) {
    if (tap != LLAMA_HIDDEN_TAP_NONE && !llm_arch_has_hidden_tap(model.arch)) {
        LLAMA_LOG_ERROR("%s: the graph of %s has no hidden-state tap\n", __func__, model.arch_name().c_str());
        return false;
    }
    cparams.hidden_tap = tap;
    if (tap == LLAMA_HIDDEN_TAP_NONE || hidden_rows) {
        return true;
    }
    try {
        hidden_rows = std::make_unique<llama_tap_rows>(model, cparams.n_batch);
        cparams.hidden_rows = hidden_rows.get();

        sched_need_reserve = true;
        sched_reserve();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: no memory for the hidden rows of %u tokens: %s\n", __func__, cparams.n_batch, err.what());

        cparams.hidden_tap  = LLAMA_HIDDEN_TAP_NONE;
        cparams.hidden_rows = nullptr;
        hidden_rows.reset();

        sched_need_reserve = true;
        return false;
    }
    return true;
}

// A batch follows. 0: the last one has failed.
void llama_context::tap_begin_batch(uint32_t n_tokens) {
    if (hidden_rows) {
        hidden_rows->begin_batch(cparams.hidden_tap != LLAMA_HIDDEN_TAP_NONE ? n_tokens : 0);
    }
}

const float * llama_context::get_hidden_rows(int32_t first, int32_t n) {
    if (!hidden_rows || !hidden_rows->has(first, n)) {
        return nullptr;
    }
    synchronize();
    return hidden_rows->on_host(first, n);
}

bool llama_set_hidden_tap(llama_context * ctx, llama_hidden_tap tap) {
    return llama_mtp_guard(__func__, false, [&] { return ctx->set_hidden_tap(tap); });
}

const float * llama_get_hidden_rows(llama_context * ctx, int32_t first, int32_t n) {
    return llama_mtp_guard<const float *>(__func__, nullptr, [&] { return ctx->get_hidden_rows(first, n); });
}
