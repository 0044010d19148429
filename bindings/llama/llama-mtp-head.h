#pragma once

#include "ggml-cpp.h"
#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_model;

// How many rows the LM heads of a file have.
struct llama_mtp_n_rows {
    int64_t output;
    int64_t own;  // of the MTP block
};

// A draft head: an LM head of an MTP block over a part of the vocabulary, in place of the block's whole one. Tensors that are
// allocated here are in the memory of the device that computes the output layer.
struct llama_mtp_head {
    // Rows that a caller gives. Throws std::bad_alloc.
    llama_mtp_head(const llama_model & model, ggml_type type, const void * rows, const llama_token * ids, int32_t n_rows);

    // A tensor of the model, where it is. Throws std::bad_alloc.
    llama_mtp_head(const llama_model & model, ggml_tensor * w, ggml_tensor * scale, std::vector<llama_token> tokens);

    // Whether slots can get rows of other tokens: slots and tokens exist, none is there twice, and no token keeps another row.
    bool can_replace(int32_t n, const int32_t * slots, const llama_token * tokens) const;
    void replace(const llama_model & model, int32_t n, const int32_t * slots, const llama_token * tokens, const void * rows);

    ggml_backend_buffer_type_t buft() const { return ggml_backend_buffer_get_type(buf.get()); }
    size_t                     size() const { return ggml_backend_buffer_get_size(buf.get()); }

    const uint64_t id;  // tells heads apart: a new head may have the address of an old one

    const int64_t n_vocab;  // of the model

    std::vector<llama_token> tokens;  // the token of each row
    bool ascending = true;            // whether tokens ascend

    ggml_tensor * w        = nullptr;  // [n_embd, n_rows]
    ggml_tensor * replaces = nullptr;  // the block's whole LM head
    ggml_tensor * scale    = nullptr;  // of w; NULL: none
    ggml_tensor * ids      = nullptr;  // I32 [1, n_rows]: tokens, for graphs
    ggml_tensor * embd     = nullptr;  // [n_embd, n_rows]: the tokens' embeddings; NULL: graphs take them from model.tok_embd_mtp

private:
    std::vector<bool> has_row;  // of each token of the vocabulary

    void make_tensors(const llama_model & model);
    void allocate(const llama_model & model);

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
};
