#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;
struct ggml_tensor;

// Matrix products with a few columns, as the verification of drafted tokens has them, and products of experts for as
// many tokens: every weight is read and unpacked once for up to 8 columns, in the layout that it has in the file.
// Any number of columns is taken, 8 at a time, of one matrix or several; large-batch.cpp comes first and takes many.
// The result of a column does not depend on how many are computed beside it, nor by which of the two, bit for bit.

// Computes dst, a MUL_MAT or MUL_MAT_ID, and returns true; or returns false, and has done nothing.
bool ggml_compute_forward_small_batch(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of the work buffer that it needs for dst, 0 if it does not compute it.
size_t ggml_small_batch_wdata_size(int n_tasks, const struct ggml_tensor * dst);

// Whether the result of a column times a matrix of this type, an enum ggml_type, does not depend on how many are computed
// beside it: here, or, of floats, in llamafile/sgemm.cpp. Such matrices are better not repacked when they are loaded.
bool ggml_cpu_small_batch_type(int32_t type);

// On by default. For measuring; not while a graph is computed.
void ggml_cpu_set_small_batch(bool value);
bool ggml_cpu_small_batch(void);

#ifdef __cplusplus
}
#endif
