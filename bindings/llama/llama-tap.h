#pragma once

// The hidden-state tap: what an MTP block takes as input, the hidden row of every token.

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

enum llama_hidden_tap {
    LLAMA_HIDDEN_TAP_NONE      = 0,  // no rows (default)
    LLAMA_HIDDEN_TAP_POST_NORM = 1,  // after the final norm: what the blocks of Qwen3-Next, Qwen3.5 and Qwen3.6 take
    LLAMA_HIDDEN_TAP_PRE_NORM  = 2,  // before it
};

// Where the next decodes take the rows. A switch of its own: it does not turn on embeddings, and makes no token an output.
// A decode stores the row of every token, by token index, in the memory of the device that computes it. Exceptions, where
// only output rows are computed, and stored: a context with llama_set_embeddings_nextn(masked), and the MTP block of
// Qwen3-Next in a context of type LLAMA_CONTEXT_TYPE_MTP. There the rows are the states of the block.
// False: the graph of the architecture has no tap (those of qwen35, qwen35moe and qwen3next have), or there is no memory.
LLAMA_API bool llama_set_hidden_tap(struct llama_context * ctx, enum llama_hidden_tap tap);

// The rows of tokens first to first + n - 1 of the last batch, on the host: [n, n_embd_out], f32. Waits for the computation.
// Valid until the next call on ctx. NULL: one of these tokens has no row.
LLAMA_API const float * llama_get_hidden_rows(struct llama_context * ctx, int32_t first, int32_t n);

#ifdef __cplusplus
}
#endif
