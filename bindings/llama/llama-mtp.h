#pragma once

// C API of multi-token prediction (MTP).
//
// llama.cpp exports these functions from src/llama-ext.h with C++ linkage, where "breaking changes and
// C++ are allowed": a binding written in C, Python or Rust would have to name mangled symbols. Here each
// has a C name: the upstream name with the prefix llama_mtp_ instead of llama_.
// These have no behaviour of their own; those further down have.

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

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
// The hidden-state tap (need_embd_pre_norm): what an MTP block takes as input
//
// A switch of its own: it does not turn on embeddings, and does not make rows output rows. Rows are stored by token
// index, for every token of the batch, whatever the number of outputs (unless llama_mtp_set_embeddings_nextn() with
// masked == true has the trunk compute output rows only). They stay in the memory of the device that computes them.
// On an MTP context they are the states of the block itself: of output rows, or of every row if slices are off.
//

enum llama_mtp_tap_point {
    LLAMA_MTP_TAP_POST_NORM = 0,  // after the final norm: Qwen3-Next, Qwen3.5 and Qwen3.6
    LLAMA_MTP_TAP_PRE_NORM  = 1,  // before it
};

// Turn the tap on or off. False if the graph of the architecture has none (qwen35, qwen35moe and qwen3next have), or if
// there is no memory for it. The point takes effect with the next decode; default: LLAMA_MTP_TAP_POST_NORM.
LLAMA_API bool llama_set_embeddings_pre_norm      (struct llama_context * ctx, bool value);
LLAMA_API bool llama_get_need_embd_pre_norm       (const struct llama_context * ctx);
LLAMA_API void llama_set_embeddings_pre_norm_point(struct llama_context * ctx, enum llama_mtp_tap_point point);

// Rows of the last batch on the host, in batch order: [n_tokens, n_embd_out], f32; waits for the computation.
// Valid until the next call on ctx. NULL if the tap was off; the row of a token that has none is undefined.
LLAMA_API float * llama_get_embeddings_pre_norm    (struct llama_context * ctx);

// The row of token i of the last batch. NULL if it has none.
LLAMA_API float * llama_get_embeddings_pre_norm_ith(struct llama_context * ctx, int32_t i);

//
// Slices: nothing is computed for a row that nobody asked for (default: on)
//
// Off: the trunk's last layer and its final norm run for every row.
// The LM head itself runs for output rows only in either case.
//
LLAMA_API void llama_mtp_set_slice(struct llama_context * ctx, bool value);

//
// Greedy tokens: the token with the largest logit of every output row is picked where the logits are; they are not copied
// to the host (default: off)
//
// Of equals the first one on a CPU; elsewhere what ggml_argmax() takes. While this is on llama_get_logits() has nothing.
//
LLAMA_API void llama_mtp_set_greedy(struct llama_context * ctx, bool value);

// The token of entry i of the last batch; waits for the computation. LLAMA_TOKEN_NULL: it was no output row, or, on a
// CPU, its logits hold a NaN.
LLAMA_API llama_token llama_mtp_get_greedy_ith(struct llama_context * ctx, int32_t i);

//
// Draft head: an LM head over a part of the vocabulary, in place of the MTP block's own (default: none)
//
// rows: n_rows rows of n_embd values of a ggml_type, row after row as in a GGUF file: those of the model's LM head that
// belong to ids, in ascending order. Copied. What is drafted are tokens of the full vocabulary again: greedy tokens are
// mapped to ids, while logits have n_rows columns (of the n_vocab that their buffer has room for); those of a context of
// nothing but the MTP blocks (LLAMA_CONTEXT_TYPE_MTP) have n_vocab, minus infinity where there is no row.
// False: no context that drafts, MTP blocks with LM heads of their own each, a number that is no type, ids that are no tokens
// or do not ascend, a size that does not fit, or no memory; the context then is as it was. n_rows == 0: the block's own head.
//
LLAMA_API bool llama_mtp_set_draft_head(
        struct llama_context * ctx, int32_t type, const void * rows, size_t n_bytes,
        const llama_token * ids, int32_t n_rows);

// Write other rows over some of a head that was set, where they are: slots[i] (0 to n_rows of the head - 1, none twice) is
// then the row of token ids[i], which must have no other row. rows: n rows of the head's type. The order of tokens is then
// no longer ascending: of equal logits the smallest token is the greedy one where a CPU chooses it, and the first row of
// them on other devices, which is as good a draft.
// False: no head that was set, a size that does not fit, a slot or an id that does not exist or is there twice, an id that has
// a row in another slot; the head then is as it was.
//
LLAMA_API bool llama_mtp_replace_draft_rows(
        struct llama_context * ctx, int32_t n, const int32_t * slots, const llama_token * ids,
        const void * rows, size_t n_bytes);

// A file may have a draft head itself: an LM head of the MTP block (blk.N.nextn.shared_head_head, or, in a file of nothing
// but the block, output) with fewer rows than the vocabulary, and a tensor d2t, I32 or I64 [n_rows]: the token of each row,
// in any order, none twice. An MTP context starts with it, and spreads its logits over the whole vocabulary, minus infinity
// where there is no row. After this call it is a draft head like one that is set: logits have n_rows columns. The rows for
// llama_mtp_set_draft_head() are then those of the model's LM head, and n_rows == 0 is the start again.
// Returns n_rows, and in ids the token of each row, valid for as long as the model. 0: no MTP context of such a model.
//
LLAMA_API int32_t llama_mtp_use_model_draft_head(struct llama_context * ctx, const llama_token ** ids);

//
// An MTP block in a file of its own, as convert_hf_to_gguf.py --mtp writes it, beside a file of the trunk
//
// The model is that of path_model (of one that is split, the first file), less some tensors, with some of path_head under
// the names of a file that has all. Its metadata are those of path_model but for the number of blocks. NULL: not loaded.
//
struct llama_mtp_tensor {
    const char * name;  // in the model
    const char * from;  // in path_head; NULL: the model is without it
};

LLAMA_API struct llama_model * llama_mtp_load_model(
        const char * path_model, const char * path_head, uint32_t n_layer_nextn,
        const struct llama_mtp_tensor * tensors, size_t n_tensors, struct llama_model_params params);

//
// Candidates: besides the greedy token of every output row its n best tokens come to the host, with their logits: what
// sampling among the best ones needs, or the probability of the best one (default: 0)
//
// With greedy tokens off, it has no effect. The choice among equals is open.
//
LLAMA_API void llama_mtp_set_candidates(struct llama_context * ctx, int32_t n);

// Those of entry i of the last batch, in no order; waits for the computation. Returns how many: as many as were asked for,
// or all that a draft head has; 0 if the entry was no output row. They are valid until the next decode.
LLAMA_API int32_t llama_mtp_get_candidates_ith(
        struct llama_context * ctx, int32_t i, const llama_token ** ids, const float ** logits);

//
// The MTP block in the trunk's context: a context of the type LLAMA_CONTEXT_TYPE_WITH_MTP
//
// Its cache has the block's layer, its recurrent states have one more, the carry: the hidden row of the last token of each
// sequence. Every decode writes K and V of the block for all its tokens, each of its embedding and of the row before its own.
// So the block is always in step with the trunk, whatever happens to the memory: what llama_memory_*() and llama_state_*()
// do they do to it as well. Logits are those of any other context. Models of qwen35, qwen35moe and qwen3next with one block.
//

// n_steps drafts for each of n_seqs sequences in one graph: each sequence has decoded something, and tokens[s] follows, which
// was not decoded. drafts: [n_steps, n_seqs]: the best tokens of the first step, sequence by sequence, then those of the
// second, which takes the first one's, and so on. n_candidates: with the logits of so many best tokens of each.
// noise, [n_steps, n_seqs, rows of the LM head], or NULL: drafts are the largest of logits*scale[s] + noise. With noise of the
// standard Gumbel distribution and scale 1/temperature they are drawn from what the head predicts; with 0 and 1 they are the best.
// n_candidates must be 0 then. Waits for the computation.
// Leaves the memory and the outputs of the last decode as they are. Returns what llama_decode() does; -1: no context of this
// type, sequences whose caches are not unified, an empty sequence, one that is there twice, or no token.
LLAMA_API int32_t llama_mtp_draft(
        struct llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, llama_token * drafts);

// Of the last call: logits of the candidates of all drafts, [n_steps, n_seqs, candidates], or, if they were drawn, all logits,
// [n_steps, n_seqs, rows of the LM head]; n: how many in all.
LLAMA_API const float * llama_mtp_get_draft_logits(const struct llama_context * ctx, int32_t * n);

// A window for the attention of drafts: they attend to the first 64 positions and the last n_window, their own among them
// (default: 0, to all). At long contexts drafts read less; what is verified attends to all.
LLAMA_API void llama_mtp_set_draft_window(struct llama_context * ctx, int32_t n_window);

// A whole round: as llama_mtp_draft(), and then as llama_decode() of each sequence's token and its drafts, sequence by
// sequence, all of them outputs. The pass is begun behind the drafts, which do not come to the host in between, and are in
// `drafts` when it is done. n_steps: as many as the memory can go back, n_rs_seq, at most.
// The other function says whether there are such rounds: not where the trunk's embeddings are none that drafts look up (an
// adapter changes them, or the block has its own), and where the pass takes more than n_ubatch tokens.
LLAMA_API int32_t llama_mtp_draft_and_decode(
        struct llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        llama_token * drafts);
LLAMA_API bool llama_mtp_can_draft_and_decode(struct llama_context * ctx, int32_t n_seqs, int32_t n_steps);

// Allocate what rounds of n_steps drafts for n_seqs sequences need (0: plain steps), so that nothing is left to be
// allocated later.
LLAMA_API bool llama_mtp_reserve(struct llama_context * ctx, int32_t n_seqs, int32_t n_steps);

// Graphs that were built so far: one that has the shape of an earlier one of its kind is found again.
LLAMA_API uint64_t llama_mtp_get_n_graphs_built(const struct llama_context * ctx);

// Bytes of logits and greedy tokens that decodes have copied out of their graphs so far.
LLAMA_API uint64_t llama_mtp_get_output_bytes(const struct llama_context * ctx);

// Bytes allocated for a context, summed over buffer types.
struct llama_mtp_memory {
    size_t model;    // weights
    size_t context;  // KV cache, recurrent state and its rollback snapshots, rows of the tap
    size_t compute;  // graph buffers
};

LLAMA_API struct llama_mtp_memory llama_mtp_get_memory(const struct llama_context * ctx);

// The same, of one device's memory; NULL: of the host's. What a model without memory (no_alloc) would take counts too.
LLAMA_API struct llama_mtp_memory llama_mtp_get_memory_of(const struct llama_context * ctx, ggml_backend_dev_t dev);

#ifdef __cplusplus
}
#endif
