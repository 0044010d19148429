#pragma once

#include "ggml-cpp.h"

#include "llama-arch.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_model;

// Whether the graphs of an architecture have a hidden-state tap.
bool llm_arch_has_hidden_tap(llm_arch arch);

// Allocate the tensors of ctx, zeroed, in the memory of the device that computes the output layer. Throws std::bad_alloc.
ggml_backend_buffer_ptr llama_alloc_at_output(const llama_model & model, ggml_context * ctx);

// The hidden rows of the last batch of a context. The graph writes them with ggml_set_rows(), as it writes K and V.
struct llama_tap_rows {
    llama_tap_rows(const llama_model & model, uint32_t n_batch);  // throws std::bad_alloc

    // A batch of n_tokens follows. 0: none, or one without rows.
    void begin_batch(uint32_t n_tokens) { written.assign(n_tokens, false); }

    // The graph that is about to run writes the row of token i.
    void will_write(int32_t i) {
        if ((size_t) i < written.size()) {
            written[i] = true;
        }
    }

    // Whether tokens first to first + n - 1 have rows.
    bool has(int32_t first, int32_t n) const;

    // Those rows, on the host; the context has been synchronized. Memory of the tensor itself where that is host memory,
    // else a copy that the next call overwrites.
    const float * on_host(int32_t first, int32_t n);

    ggml_tensor * data = nullptr;  // F32 [n_embd_out, n_batch]

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

private:
    std::vector<bool>  written;  // by batch index
    std::vector<float> copy;
};
