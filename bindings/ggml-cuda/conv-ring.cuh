#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// A convolution whose inputs before those at hand are rows of a ring, where those at hand are stored: see build_pending_conv() in
// llama-mtp-delta-net.cpp. GET_ROWS, SET_ROWS, CONCAT, SSM_CONV and SILU of a few tokens are one kernel.

// Computes the nodes from i on; returns how many after i are done, 0 if they are no such convolution.
int ggml_cuda_try_conv_ring(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);

// Before memory is given to tensors: what comes of the kernel that begins with node i does not lie where it reads.
void ggml_cuda_plan_conv_ring(ggml_cgraph * cgraph, int i, ggml_backend_graph_optimize_params * params);
