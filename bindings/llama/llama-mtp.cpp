#include "llama-mtp.h"

#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>

void llama_mtp_set_embeddings_nextn(llama_context * ctx, bool value, bool masked) {
    llama_set_embeddings_nextn(ctx, value, masked);
}

float * llama_mtp_get_embeddings_nextn(llama_context * ctx) {
    return llama_get_embeddings_nextn(ctx);
}

float * llama_mtp_get_embeddings_nextn_ith(llama_context * ctx, int32_t i) {
    return llama_get_embeddings_nextn_ith(ctx, i);
}

void llama_mtp_set_layer_offset(llama_context * ctx, int32_t offset) {
    llama_set_nextn_layer_offset(ctx, offset);
}

llama_context * llama_mtp_get_ctx_other(llama_context * ctx) {
    return llama_get_ctx_other(ctx);
}

// The device whose memory it is; NULL: the host's.
static ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);

    return dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU ? nullptr : dev;
}

// What the CPU backend needs beside the graph's buffers: the largest work buffer of any node that no device computes.
void llama_context::mtp_count_work(ggml_cgraph * gf) {
    ggml_backend_reg_t reg  = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_cpu));
    const auto         size = (size_t (*)(ggml_tensor *, int)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_work_size");
    const auto on_device = [](const ggml_tensor * src) {
        const ggml_tensor * owner = src && src->view_src ? src->view_src : src;
        return owner && owner->buffer && device_of(ggml_backend_buffer_get_type(owner->buffer));
    };
    for (int i = 0; size && i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (std::none_of(std::begin(node->src), std::end(node->src), on_device)) {
            mtp_work_size = std::max(mtp_work_size, size(node, std::max(cparams.n_threads, cparams.n_threads_batch)));
        }
    }
}

template <typename Wanted>
static llama_mtp_memory sum_of(const llama_context * ctx, Wanted wanted) {
    llama_mtp_memory sum = { 0, 0, 0 };
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        if (wanted(buft)) {
            sum.model   += bytes.model;
            sum.context += bytes.context;
            sum.compute += bytes.compute;
        }
    }
    sum.compute += wanted(ggml_backend_cpu_buffer_type()) ? ctx->mtp_get_work_size() : 0;
    for (const llama_adapter_lora * lora : llama_get_model(ctx)->loras) {  // which llama.cpp does not count
        for (const ggml_backend_buffer_ptr & buf : lora->bufs) {
            sum.model += wanted(ggml_backend_buffer_get_type(buf.get())) ? ggml_backend_buffer_get_size(buf.get()) : 0;
        }
    }
    return sum;
}

llama_mtp_memory llama_mtp_get_memory(const llama_context * ctx) {
    return sum_of(ctx, [](ggml_backend_buffer_type_t) { return true; });
}

llama_mtp_memory llama_mtp_get_memory_of(const llama_context * ctx, ggml_backend_dev_t dev) {
    return sum_of(ctx, [dev](ggml_backend_buffer_type_t buft) { return device_of(buft) == dev; });
}
