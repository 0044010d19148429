#pragma once

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// What prompts need besides products. Each computes dst and returns true, or returns false and has done nothing.

// On by default, and for large-batch.h, too. For measuring; not between the planning of a graph and its end.
void ggml_cpu_set_large_batch(bool value);
bool ggml_cpu_large_batch(void);

// SSM_CONV.
bool ggml_compute_forward_large_batch_conv(const struct ggml_compute_params * params, struct ggml_tensor * dst);
// CONCAT of rows with rows that are transposed: what is convolved.
bool ggml_compute_forward_large_batch_concat(const struct ggml_compute_params * params, struct ggml_tensor * dst);
// Both, and SILU of what is convolved, of many tokens: the bits of all three, of which only dst's are stored.
bool ggml_compute_forward_large_batch_conv_silu(const struct ggml_compute_params * params, const struct ggml_tensor * concat, struct ggml_tensor * dst);
// MUL of rows with a number for each.
bool ggml_compute_forward_large_batch_mul(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// GATED_DELTA_NET, bit for bit what upstream's gives.
bool ggml_compute_forward_large_batch_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// FLASH_ATTN_EXT of 9 query rows and more, or of more than 16 query heads per KV head, without masks for each head: the bits that
// few-rows-attention.h gives fewer rows.
bool ggml_compute_forward_large_batch_attention(const struct ggml_compute_params * params, struct ggml_tensor * dst);
size_t ggml_large_batch_attention_wdata_size(int n_tasks, const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
