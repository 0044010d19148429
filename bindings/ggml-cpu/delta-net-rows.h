#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// GATED_DELTA_NET_ROWS; its tokens and states as in GATED_DELTA_NET, bit for bit.
void ggml_compute_forward_gated_delta_net_rows(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t ggml_gated_delta_net_rows_wdata_size(int n_tasks, const struct ggml_tensor * dst);

#ifdef __cplusplus
}

// Tokens of a delta net, [S, heads or 1, n_tokens, n_seqs] each.
struct ggml_delta_net_tokens {
    const ggml_tensor * q, * k, * v, * g, * beta;

    float * out = nullptr; // [S, H, n_tokens, n_seqs]; NULL: nobody reads what they give

    int64_t size()     const { return v->ne[0]; }
    int64_t n_heads()  const { return v->ne[1]; }
    int64_t n_tokens() const { return v->ne[2]; }
    int64_t n_seqs()   const { return v->ne[3]; }

    const float * row(const ggml_tensor * t, int64_t head, int64_t token, int64_t seq) const {
        return (const float *) ((const char *) t->data + head % t->ne[1] * t->nb[1] + token * t->nb[2] + seq / (n_seqs() / t->ne[3]) * t->nb[3]);
    }
    float * out_row(int64_t head, int64_t token, int64_t seq) const {
        return out + ((seq * n_tokens() + token) * n_heads() + head) * size();
    }
};

// States, [S, S, H] each, that tokens begin with and those that they leave, the last n_snaps of each sequence, the newest
// first. Strides in floats.
struct ggml_delta_net_states {
    const float * begin;
    int64_t       begin_stride;
    float *       end;
    int64_t       end_stride;
    int64_t       snap_stride;
    int64_t       n_snaps;
};

// A GATED_DELTA_NET_ROWS after its cells have moved: states begin and end in the same place.
struct ggml_delta_net_rows {
    ggml_delta_net_states states;
    ggml_delta_net_tokens before;   // of which sequence i takes in n_before[i]
    const int32_t *       n_before; // NULL: none, nor `before`
    ggml_delta_net_tokens tokens;
};

// By vectors, in large-batch-ops.cpp; bit for bit what upstream's gives, however many tokens there are. False: nothing was done.
bool ggml_delta_net_steps(const ggml_compute_params * params, const ggml_delta_net_rows & rows);
#endif
