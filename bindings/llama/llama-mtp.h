#pragma once

// C API of multi-token prediction (MTP).
//
// llama.cpp exports the first five of these functions from src/llama-ext.h with C++ linkage. Here each has a C name: the
// upstream name with the prefix llama_mtp_ instead of llama_. All other functions are ours.
//
// Rules for all functions:
// - A context is used by one thread at a time, as in llama.h.
// - No exception leaves a function. If one is caught (no memory, a device that fails), the function logs the reason and
//   returns its failure value: false, 0, NULL, LLAMA_TOKEN_NULL or a code below 0; llama_mtp_get_failure() tells it from
//   an answer that has the same value. What the context's memory holds is then undefined unless the function says otherwise.
// - Functions that return void cannot fail.

#include "llama.h"
#include "llama-slice.h"
#include "llama-tap.h"

#ifdef __cplusplus
extern "C" {
#endif

// The reason, if a call of this thread has caught an exception since the last call of this function; else NULL.
// *out_of_memory (or NULL): whether memory was missing; set only if there is a reason. The text is valid until the next failure.
LLAMA_API const char * llama_mtp_get_failure(bool * out_of_memory);

// The hidden-state tap: rows of n_embd_out floats that an MTP block takes as input.
//   masked == false: one row for every token of the batch, whether or not it is an output row
//   masked == true:  one row for every output row
LLAMA_API void llama_mtp_set_embeddings_nextn(struct llama_context * ctx, bool value, bool masked);

// All rows of the last batch, in batch order: [n_tokens or n_outputs, n_embd_out], f32. NULL while the tap is off.
LLAMA_API float * llama_mtp_get_embeddings_nextn(struct llama_context * ctx);

// The row of token i of the last batch. NULL if there is none.
LLAMA_API float * llama_mtp_get_embeddings_nextn_ith(struct llama_context * ctx, int32_t i);

// Which of several appended MTP blocks the next decode on an MTP context runs. Default 0.
LLAMA_API void llama_mtp_set_layer_offset(struct llama_context * ctx, int32_t offset);

// The context given as llama_context_params.ctx_other, if the model makes use of it, else NULL.
LLAMA_API struct llama_context * llama_mtp_get_ctx_other(struct llama_context * ctx);

//
// Greedy tokens (default: off)
//
// On: the next decodes pick the token with the largest logit of each output row where the logits are. Logits are not
// copied to the host: llama_get_logits() then returns NULL. Of equal logits, a CPU takes the smallest token; other devices
// take what ggml_argmax() takes.
//
LLAMA_API void llama_mtp_set_greedy(struct llama_context * ctx, bool value);

// The greedy token of entry i of the last batch. Waits for the computation.
// LLAMA_TOKEN_NULL: entry i is no output row; or, on a CPU, its logits hold a NaN; or failure.
LLAMA_API llama_token llama_mtp_get_greedy_ith(struct llama_context * ctx, int32_t i);

//
// Candidates (default: 0)
//
// With greedy tokens on, the next decodes also copy the n best tokens of each output row to the host, with their logits.
// n is limited to the size of the vocabulary. Which of equal logits is taken is not defined.
//
LLAMA_API void llama_mtp_set_candidates(struct llama_context * ctx, int32_t n);

// The candidates of entry i of the last batch, in no order. Waits for the computation.
// Returns their number; 0: entry i is no output row, or no candidates were asked for; -1: failure.
// *ids, *logits: [number], valid until the next decode.
LLAMA_API int32_t llama_mtp_get_candidates_ith(
        struct llama_context * ctx, int32_t i, const llama_token ** ids, const float ** logits);

//
// Draft head: an LM head over a part of the vocabulary, which MTP blocks use in place of their own (default: none)
//
// For a context of the type LLAMA_CONTEXT_TYPE_WITH_MTP, or LLAMA_CONTEXT_TYPE_MTP if all MTP blocks share one LM head.
// Drafts are tokens of the full vocabulary, whatever the head. Logits have n_rows columns; in a context of the type
// LLAMA_CONTEXT_TYPE_MTP they have n_vocab columns, with minus infinity for tokens without a row.
//

// Set the draft head. All arrays are copied.
//   type:   a ggml_type
//   rows:   [n_rows] rows of n_embd values of that type, as in a GGUF file: rows of the model's LM head
//   ids:    [n_rows], ascending: the token of each row
//   n_rows: 0 removes the head that was set; other arguments are then not read
// False, with the context as it was: another type of context, an unknown type, ids that are no tokens or do not ascend,
// n_bytes other than n_rows rows have, or failure.
LLAMA_API bool llama_mtp_set_draft_head(
        struct llama_context * ctx, int32_t type, const void * rows, size_t n_bytes,
        const llama_token * ids, int32_t n_rows);

// Write other rows over some rows of a head that was set. Waits for the computation.
//   slots: [n], none twice: rows of the head, 0 to n_rows - 1
//   ids:   [n], none twice: the token of each new row; no other row of the head may have it
//   rows:  [n] rows of the head's type
// Tokens then no longer ascend: of equal logits, a CPU still drafts the smallest token, other devices the first row.
// False, with the head as it was: no head that was set, arguments that break these rules, or failure.
LLAMA_API bool llama_mtp_replace_draft_rows(
        struct llama_context * ctx, int32_t n, const int32_t * slots, const llama_token * ids,
        const void * rows, size_t n_bytes);

// Use the draft head of the model's file. Such a file has an LM head of the MTP block (blk.N.nextn.shared_head_head; in a
// file of the block alone: output) with fewer rows than the vocabulary, and a tensor d2t, I32 or I64 [n_rows]: the token of
// each row, in any order, none twice. A context uses that head from the start, but with logits of n_vocab columns, minus
// infinity for tokens without a row; after this call, logits have n_rows columns. llama_mtp_set_draft_head() with
// n_rows == 0 goes back to the start.
// Returns n_rows; *ids: [n_rows], the token of each row, valid as long as the model. 0: the context is not of the type
// LLAMA_CONTEXT_TYPE_WITH_MTP, the file has no draft head, or failure.
LLAMA_API int32_t llama_mtp_use_model_draft_head(struct llama_context * ctx, const llama_token ** ids);

//
// A model whose MTP block is in a file of its own, as convert_hf_to_gguf.py --mtp writes it
//
struct llama_mtp_tensor {
    const char * name;  // a tensor of the model
    const char * from;  // its name in path_head; NULL: the model does without the tensor
};

// Load the model of path_model (if it is split: of its first file) with these tensors of path_head. Metadata are those of
// path_model, with n_layer_nextn MTP blocks. NULL: failure, or what llama_model_load_from_file() refuses.
LLAMA_API struct llama_model * llama_mtp_load_model(
        const char * path_model, const char * path_head, uint32_t n_layer_nextn,
        const struct llama_mtp_tensor * tensors, size_t n_tensors, struct llama_model_params params);

//
// The MTP block in the trunk's context: a context of the type LLAMA_CONTEXT_TYPE_WITH_MTP
//
// For models of qwen35, qwen35moe and qwen3next with one MTP block. The KV cache has a layer for the block. The recurrent
// states have one more state, the carry: the hidden row of each sequence's last token. Every decode writes K and V of the
// block for all tokens of the batch, each from the token's embedding and the hidden row of the token before. So the block
// is always in step with the trunk, and llama_memory_*() and llama_state_*() treat both as one. Logits are those of any
// other context.
//
// Rollback: what a decode of up to n_rs_seq + 1 tokens of a sequence did to recurrent states stays pending until the next
// decode, and llama_memory_seq_rm() can take back up to n_rs_seq of its tokens. Longer decodes, of prompts, cannot be taken
// back token by token. Writing a state to memory, to a file or to a device settles what is pending:
// llama_memory_seq_rm() then refuses to go back within that decode. Asking for the size of a state settles nothing.
//

// Which hidden rows the block takes (default: LLAMA_HIDDEN_TAP_POST_NORM, with which these models were trained). A state of one
// kind cannot be loaded into a context of the other. False: no context of this type, LLAMA_HIDDEN_TAP_NONE, or a change while
// a sequence has tokens.
LLAMA_API bool llama_mtp_set_block_input(struct llama_context * ctx, enum llama_hidden_tap input);

// Draft n_steps tokens for each of n_seqs sequences, in one graph. Waits for the computation. The memory, and the outputs of
// the last decode, stay as they are, also after a failure.
//   tokens: [n_seqs]: the token that follows each sequence, and is not decoded yet
//   seqs:   [n_seqs], none twice: sequences that have decoded something
//   n_candidates: also get the logits of so many best tokens of each draft; 0 if drafts are drawn
//   noise:  NULL: drafts are the best tokens. Else [n_steps, n_seqs, rows of the LM head]: drafts are the largest of
//           logits*scale[s] + noise. With noise of the standard Gumbel distribution and scale 1/temperature, these are
//           samples of what the head predicts.
//   scale:  [n_seqs]; NULL if noise is NULL
//   drafts: [n_steps, n_seqs], written: the first draft of each sequence, then the second draft of each, and so on
// Returns 0, or
//    1: no room in the KV cache
//    2: the abort callback has ended the computation
//   -1: refused: another type of context, several sequences without kv_unified, an empty sequence, one that is there twice,
//       a number that is no token, or a cache without flash attention of more than 2^31 values in a layer of V
//   -2: no memory for the graph
//   -3: the computation has failed, or failure
LLAMA_API int32_t llama_mtp_draft(
        struct llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, llama_token * drafts);

// Logits of the last llama_mtp_draft(), in host memory, valid until the next one; *n: their number.
// Of candidates, in no order: [n_steps, n_seqs, candidates]. Of drawn drafts: [n_steps, n_seqs, rows of the LM head].
LLAMA_API const float * llama_mtp_get_draft_logits(const struct llama_context * ctx, int32_t * n);

// A window for the attention of drafts: they attend to the first 64 positions and to the last n_window, with their own
// among them (default: 0, all positions). Verification attends to all positions. For CPUs, whose kernels skip hidden cells:
// drafts then read less of a long context. Kernels of GPUs read the whole cache in any case.
LLAMA_API void llama_mtp_set_draft_window(struct llama_context * ctx, int32_t n_window);

// A whole round in one submission: llama_mtp_draft(), then llama_decode() of each sequence's token and its n_steps drafts,
// sequence by sequence, all of them output rows. The drafts do not come to the host in between. Waits for the computation.
// tokens, seqs, drafts and codes: as llama_mtp_draft(). n_steps: at most n_rs_seq.
// -1 also where llama_mtp_can_draft_and_decode() is false.
LLAMA_API int32_t llama_mtp_draft_and_decode(
        struct llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        llama_token * drafts);

// Whether llama_mtp_draft_and_decode() can run such a round. Allocates what it needs. False: n_seqs*(n_steps + 1) tokens do
// not fit into one ubatch; drafts do not look up the trunk's embeddings (an adapter changes them, or the block has its
// own); llama_set_embeddings() is on; or failure.
LLAMA_API bool llama_mtp_can_draft_and_decode(struct llama_context * ctx, int32_t n_seqs, int32_t n_steps);

// Allocate what rounds of n_steps drafts for n_seqs sequences need (n_steps == 0: single tokens), so that such rounds
// allocate nothing later. False: another type of context, n_seqs out of range, no memory, or failure.
LLAMA_API bool llama_mtp_reserve(struct llama_context * ctx, int32_t n_seqs, int32_t n_steps);

//
// Checkpoints that stay on their device
//
// A copy of a sequence's recurrent state is made where the state is, behind what is being computed and without a wait. It
// comes to the host later, while something else is computed.
//
struct llama_mtp_checkpoints;

// Room for n checkpoints. NULL: memory without a recurrent and an attention part, no memory, or failure. Free it before
// the context.
LLAMA_API struct llama_mtp_checkpoints * llama_mtp_checkpoints_init(struct llama_context * ctx, int32_t n);
LLAMA_API void llama_mtp_checkpoints_free(struct llama_mtp_checkpoints * checkpoints);

// Copy the state of a sequence as it is after what was decoded. The sequence cannot go back then, as after
// llama_state_seq_get_data_ext(). Returns the bytes that llama_mtp_checkpoints_get() writes. 0: failure.
LLAMA_API size_t llama_mtp_checkpoints_take(struct llama_mtp_checkpoints * checkpoints, int32_t i, llama_seq_id seq_id);

// What llama_state_seq_get_data_ext() with LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY would have written then. Waits for the copy,
// not for what is computed behind it. False: failure, which leaves the context as it is.
LLAMA_API bool llama_mtp_checkpoints_get(struct llama_mtp_checkpoints * checkpoints, int32_t i, uint8_t * dst, size_t size);

// Bytes in the memory of one device, NULL: in host memory; or of all. A model that was loaded with no_alloc counts as if it
// had memory.
LLAMA_API size_t llama_mtp_checkpoints_size(const struct llama_mtp_checkpoints * checkpoints, bool all, ggml_backend_dev_t dev);

// Grammars in GBNF, whose stacks can become as many as there are ways through a token: from now on, this thread may compute
// for so many seconds for them (0: without a limit), then their functions throw. True: the limit before was reached.
LLAMA_API bool llama_mtp_limit_grammar(double seconds);

// Number of graphs built so far. A graph of the same shape as an earlier one is found again, and not built.
LLAMA_API uint64_t llama_mtp_get_n_graphs_built(const struct llama_context * ctx);

// Bytes of logits, greedy tokens, candidates and drafts that were copied out of graphs so far.
LLAMA_API uint64_t llama_mtp_get_output_bytes(const struct llama_context * ctx);

// Bytes allocated for a context, summed over buffer types.
struct llama_mtp_memory {
    size_t model;    // weights
    size_t context;  // KV cache, recurrent state and its rollback snapshots, rows of the tap
    size_t compute;  // graph buffers, and the work buffer of the CPU backend
};

// All memory of a context and its model. A model that was loaded with no_alloc counts as if it had memory. Failure: zeros.
LLAMA_API struct llama_mtp_memory llama_mtp_get_memory(const struct llama_context * ctx);

// The part in the memory of one device; NULL: in host memory.
LLAMA_API struct llama_mtp_memory llama_mtp_get_memory_of(const struct llama_context * ctx, ggml_backend_dev_t dev);

#ifdef __cplusplus
}
#endif
