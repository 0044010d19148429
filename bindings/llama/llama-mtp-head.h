#pragma once

#include "ggml-cpp.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_model;

// Rows of the LM heads in a file.
struct llama_mtp_n_rows {
    int64_t output;
    int64_t own;  // of the MTP block
};

// The LM head of an MTP block over a part of the vocabulary. What is allocated here is in the memory of the model's output
// layer.
struct llama_mtp_head {
    // rows that a caller gives; throws std::bad_alloc
    llama_mtp_head(const llama_model & model, ggml_type type, const void * rows, const llama_token * ids, int32_t n_rows);

    // a tensor of the model, where it is; throws std::bad_alloc
    llama_mtp_head(const llama_model & model, ggml_tensor * w, ggml_tensor * scale, std::vector<llama_token> tokens);

    // rows for other tokens in these slots, if they are slots and tokens, none twice, and no token has a row elsewhere
    bool can_replace(int32_t n, const int32_t * slots, const llama_token * tokens) const;
    void replace(const llama_model & model, int32_t n, const int32_t * slots, const llama_token * tokens, const void * rows);

    ggml_backend_buffer_type_t buft() const { return ggml_backend_buffer_get_type(buf.get()); }
    size_t                     size() const { return ggml_backend_buffer_get_size(buf.get()); }

    const uint64_t id;  // addresses are used again, ids are not

    const int64_t n_vocab;  // of the model

    std::vector<llama_token> tokens;  // of each row

    ggml_tensor * w     = nullptr;  // [n_embd, n_rows]
    ggml_tensor * of    = nullptr;  // the LM head of the block, in place of which it is
    ggml_tensor * scale = nullptr;  // of w; NULL: none
    ggml_tensor * ids   = nullptr;  // I32 [1, n_rows]: `tokens`
    ggml_tensor * embd  = nullptr;  // [n_embd, n_rows]: their embeddings; NULL: get them from model.tok_embd_mtp

    bool ascending = true;  // they are

private:
    std::vector<bool> has_row;  // of each token of the vocabulary

    void init(const llama_model & model);
    void alloc(const llama_model & model);

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
};
