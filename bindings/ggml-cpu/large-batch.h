#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// Matrix products with many columns, as prompts have them, and products of experts for as many tokens. Whatever the type,
// weights become bytes in one layout, a tile of rows at a time, and are multiplied with all columns from there.

// Computes dst, a MUL_MAT or MUL_MAT_ID, and returns true; or returns false, and has done nothing.
bool ggml_compute_forward_large_batch(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of the work buffer that it needs for dst, 0 if it does not compute it.
size_t ggml_large_batch_wdata_size(int n_tasks, const struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
