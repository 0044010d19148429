// A window for the attention of drafts: a chain's mask hides what lies between the first tokens and the last ones. The CPU's
// kernels skip hidden cells; those of GPUs do not. (For them: ggml_flash_attn_ext_set_n_kv_max(), which bounds visible cells. An
// image has many cells at one position, so the window would have to count cells.)

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <cmath>

// First tokens that stay visible, for much of the attention goes to them (Xiao et al. 2023, "Efficient Streaming Language
// Models with Attention Sinks"). Four are enough there; the CPU's kernels skip cells in tiles of 64.
static constexpr llama_pos N_FIRST = 64;

template <typename T>
static void hide(T * row, int64_t n_kv, const llama_kv_cells & cells, llama_pos end, T hidden) {
    for (int64_t i = 0; i < n_kv; ++i) {
        if (cells.is_empty(i)) {
            continue;  // hidden anyway
        }
        const llama_pos pos = cells.pos_get(i);
        if (N_FIRST <= pos && pos < end) {
            row[i] = hidden;
        }
    }
}

void llama_kv_cache::set_input_mtp_window(ggml_tensor * mask, const llama_ubatch * ubatch, int32_t n_window) const {
    GGML_ASSERT(mask->ne[3] == 1);  // chains have one stream

    const int64_t n_kv = mask->ne[0];
    for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
        const auto & cells = v_cells[seq_to_stream[ubatch->seq_id[i][0]]];
        const llama_pos end = ubatch->pos[i] - n_window + 1;
        if (end <= N_FIRST) {
            continue;
        }
        if (mask->type == GGML_TYPE_F16) {
            hide((ggml_fp16_t *) mask->data + i*n_kv, n_kv, cells, end, ggml_fp32_to_fp16(-INFINITY));
        } else {
            hide((float *) mask->data + i*n_kv, n_kv, cells, end, -INFINITY);
        }
    }
}

void llama_kv_cache_context::set_input_mtp_window(ggml_tensor * mask, const llama_ubatch * ubatch, int32_t n_window) const {
    kv->set_input_mtp_window(mask, ubatch, n_window);
}

void llama_mtp_set_draft_window(llama_context * ctx, int32_t n_window) {
    ctx->set_mtp_draft_window(n_window);
}
