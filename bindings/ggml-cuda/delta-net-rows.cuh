#pragma once

#include "common.cuh"

// GATED_DELTA_NET_ROWS: see ggml.h. Two kernels at most, and a third one if several cells can have moved.
void ggml_cuda_op_gated_delta_net_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_supports_gated_delta_net_rows(const ggml_tensor * dst);

// Whether PYLLAMA_MTP_TRIAL asks for what has not been measured on a GPU yet: bench/README.md, "On a GPU".
bool pyllama_cuda_trial();
