#pragma once

#include "llama-model.h"
#include "llama-tap-rows.h"

#include <new>

// What a chain leaves for the pass behind it, in the memory of the device that computes both.
struct llama_mtp_kept {
    // throws std::bad_alloc
    llama_mtp_kept(const llama_model & model, uint32_t n_max) {
        ctx.reset(ggml_init({ /*.mem_size =*/ 2*ggml_tensor_overhead(), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true }));
        if (!ctx) {
            throw std::bad_alloc();
        }
        rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, model.hparams.n_embd_out(), n_max);
        ids  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2*n_max);
        ggml_set_name(rows, "mtp_kept_embd");
        ggml_set_name(ids,  "mtp_kept_ids");

        buf = llama_alloc_at_output(model, ctx.get());
    }

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    ggml_tensor * rows;  // F32 [n_embd_out, n_max]: embeddings of tokens
    ggml_tensor * ids;   // I32 [2*n_max]: drafts, and the best tokens of the pass
};
