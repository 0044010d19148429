#pragma once

#include "ggml-cpp.h"

#include "llama-arch.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_model;

// Whether the graphs of an architecture are made for what is here.
bool llm_arch_supports_mtp_tap(llm_arch arch);

// The hidden rows of the last batch of a context, in the memory of the device that computes them. The graph writes them
// with ggml_set_rows(), as it writes K and V.
struct llama_mtp_tap {
    // throws std::bad_alloc
    llama_mtp_tap(const llama_model & model, uint32_t n_batch, uint32_t n_ids = 0);

    // A batch of n_tokens follows. 0: none, or one without rows.
    void begin_batch(uint32_t n_tokens);

    // The graph that is about to run writes the row of token i.
    void will_write(int32_t i);

    bool   has_row(int32_t i) const { return i >= 0 && (size_t) i < written.size() && written[i]; }
    size_t n_tokens() const { return written.size(); }

    // Rows [first, first + n) for the host; the context has been synchronized. Memory of the tensor itself where that is
    // host memory, else a copy that the next call overwrites.
    float * host_rows(int32_t first, int32_t n);

    ggml_backend_buffer_type_t buft() const { return ggml_backend_buffer_get_type(buf.get()); }
    size_t                     size() const { return ggml_backend_buffer_get_size(buf.get()); }

    ggml_tensor * rows = nullptr;  // F32 [n_embd_out, n_batch]
    ggml_tensor * ids  = nullptr;  // I32 [n_ids]

private:
    ggml_backend_dev_t dev = nullptr;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    std::vector<bool>  written;  // by batch index
    std::vector<float> copy;
};
