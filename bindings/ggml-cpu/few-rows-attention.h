#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// FLASH_ATTN_EXT of 1 to 8 query rows, as the verification of a few drafted tokens has them: K and V are read once
// for all rows and for all query heads of a KV head. The bits of a row depend neither on the rows beside it, however many, nor on
// the number of threads, nor on cells that its mask hides.
// Returns true if the attention was computed here.
bool ggml_compute_forward_few_rows_attention(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of the work buffer that it needs, 0 where the attention is not computed here.
size_t ggml_few_rows_attention_work_size(const struct ggml_tensor * dst, int n_threads);

// On by default; not between the planning of a graph and its end. For measuring: upstream's attention rounds otherwise.
void ggml_cpu_set_few_rows_attention(bool value);

#ifdef __cplusplus
}
#endif
