#pragma once

#include "ggml.h"
#include "llama-arch.h"

#include <cstdint>

// Absent where a program brings a ggml of its own: llama-server on our libllama.
#pragma weak ggml_gated_delta_net_rows

struct llama_hparams;
struct llama_memory_i;
struct llama_model;

// What a few tokens do to the states of a delta net is pending until the next batch, which knows how many of them stay. Of a
// token: k and v, in a row of llama_memory_recurrent::pend_l, gate and beta, in rows of gates_l, F32.

// Whether tokens can be pending in the delta nets of an architecture.
bool llm_arch_has_pending_states(llm_arch arch);

// Whether all devices with states of delta nets have GATED_DELTA_NET_ROWS. Otherwise graphs gather states, take tokens in, and
// copy what is kept, in nodes that all devices have.
bool llama_has_delta_rows(const llama_model & model, const llama_memory_i * memory);

// floats of k and v of a token
uint32_t llama_pending_size(llm_arch arch, const llama_hparams & hparams);

// Rows for gates of n tokens: what comes behind them begins where a device can bind it, at a multiple of 256 bytes.
int64_t llama_gate_rows(int64_t n, const llama_hparams & hparams);

// The states s, F32 [S, S, H, n_seqs], after the tokens in `rows` of pend, I32 [n*n_seqs]: n of each sequence, in their order.
// `gates` has their gates from row `first` on, their betas llama_gate_rows() later. Rows of zeros change nothing.
// F32 [S*S*H, n_seqs]
ggml_tensor * llama_take_in_pending(ggml_context * ctx, llm_arch arch, const llama_hparams & hparams,
        ggml_tensor * pend, ggml_tensor * rows, ggml_tensor * gates, size_t first, ggml_tensor * s);

// k, v, gate and beta of the last n tokens of each sequence, [size or 1, heads, n_seq_tokens, n_seqs], go into rows of pend and
// gates, n_max for each sequence, from `first` on.
void llama_store_pending(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * pend, ggml_tensor * gates,
        ggml_tensor * k, ggml_tensor * v, ggml_tensor * gate, ggml_tensor * beta, int64_t n, int64_t n_max, int64_t first);
