#include "llama-mtp.h"

#include "llama-adapter.h"
#include "llama-ext.h"
#include "llama-mtp-guard.h"
#include "llama-model.h"

#include <cstdio>

static thread_local struct {
    bool noted         = false;
    bool out_of_memory = false;
    char why[256];
} failure;

void llama_mtp_note_failure(const char * why, bool out_of_memory) noexcept {
    failure.noted         = true;
    failure.out_of_memory = out_of_memory;
    snprintf(failure.why, sizeof(failure.why), "%s", why);
}

const char * llama_mtp_get_failure(bool * out_of_memory) {
    if (!failure.noted) {
        return nullptr;
    }
    failure.noted = false;
    if (out_of_memory) {
        *out_of_memory = failure.out_of_memory;
    }
    return failure.why;
}

void llama_mtp_set_embeddings_nextn(llama_context * ctx, bool value, bool masked) {
    llama_set_embeddings_nextn(ctx, value, masked);
}

float * llama_mtp_get_embeddings_nextn(llama_context * ctx) {
    return llama_mtp_guard<float *>(__func__, nullptr, [&] { return llama_get_embeddings_nextn(ctx); });
}

float * llama_mtp_get_embeddings_nextn_ith(llama_context * ctx, int32_t i) {
    return llama_mtp_guard<float *>(__func__, nullptr, [&] { return llama_get_embeddings_nextn_ith(ctx, i); });
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

template <typename Wanted>
static llama_mtp_memory sum_of(const char * func, const llama_context * ctx, Wanted wanted) {
    return llama_mtp_guard(func, llama_mtp_memory { 0, 0, 0 }, [&] {
        llama_mtp_memory sum = { 0, 0, 0 };
        for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
            if (wanted(buft)) {
                sum.model   += bytes.model;
                sum.context += bytes.context;
                sum.compute += bytes.compute;
            }
        }
        for (const llama_adapter_lora * lora : llama_get_model(ctx)->loras) {  // which llama.cpp does not count
            for (const ggml_backend_buffer_ptr & buf : lora->bufs) {
                sum.model += wanted(ggml_backend_buffer_get_type(buf.get())) ? ggml_backend_buffer_get_size(buf.get()) : 0;
            }
        }
        return sum;
    });
}

llama_mtp_memory llama_mtp_get_memory(const llama_context * ctx) {
    return sum_of(__func__, ctx, [](ggml_backend_buffer_type_t) { return true; });
}

llama_mtp_memory llama_mtp_get_memory_of(const llama_context * ctx, ggml_backend_dev_t dev) {
    return sum_of(__func__, ctx, [dev](ggml_backend_buffer_type_t buft) { return device_of(buft) == dev; });
}
