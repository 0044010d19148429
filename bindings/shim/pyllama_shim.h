// What stands between Python and libllama, and cannot be written in Python:
//   - no C++ exception crosses into C (it would end the interpreter): each call that may throw has a
//     twin here that returns a code and writes the reason;
//   - within these twins an assertion of ggml or llama.cpp that fails does not end the interpreter either;
//   - a batch is filled in one call instead of four calls per token;
//   - a long computation can be interrupted (Ctrl-C) although it runs without the GIL;
//   - the stamp says what the library beside it was built from.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#define PYLLAMA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Codes below every code of llama_decode(), which returns 0, 1, 2, -1 and some below -1.
#define PYLLAMA_EXCEPTION     (-1000)  // a C++ exception was caught; the message says which
#define PYLLAMA_OUT_OF_MEMORY (-1001)  // std::bad_alloc was caught
#define PYLLAMA_BATCH_REFUSED (-1002)  // llama_batch_ext refused an entry; the message says which
#define PYLLAMA_NO_TOKEN      (-1003)  // the samplers left no token to choose
#define PYLLAMA_ABORTED       (-1004)  // an assertion failed, or ggml gave up; the message says where and why
#define PYLLAMA_NO_ROOM       (-1005)  // too little address space or threads for the call; nothing was begun
#define PYLLAMA_FORKED        (-1006)  // the process lacks the threads of the one that it was forked from

// JSON object: variant, upstream_commit, series, cpu_features, compiler, cuda. Static storage. It is
// compiled into libllama itself (stamp.c), where the bindings read it before they load the library.
PYLLAMA_API const char * pyllama_stamp(void);

// What our patches change in the speed of the CPU backend, in every one that is loaded; all is on by default.
// "small_batch": patch 5's products of a few columns. "few_rows_attention": patch 5's attention of a few rows.
// "direct_states": patch 8's states, written where they are kept. "large_batch": products, delta nets and convolutions
// of prompts, patch 9.
// False: no backend has it.
PYLLAMA_API bool pyllama_set_cpu_switch(const char * name, bool value);
// All of them.
PYLLAMA_API void pyllama_set_cpu_changes(bool value);
// Whether products of a matrix of this ggml_type with a few columns read each weight once on this CPU; false where the
// backend cannot say.
PYLLAMA_API bool pyllama_few_columns(int32_t type);

// From now on, assertions that fail on a thread that is within a call of this file, outside of its parallel regions, make
// the call return PYLLAMA_ABORTED or what it returns on failure. Others still end the process, after their message.
PYLLAMA_API void pyllama_catch_aborts(void);

// From now on, allocations of 4 MiB and more are mappings of their own: what of a graph's buffer is never used takes no
// memory, and what is freed is given back. glibc would put those of up to 32 MiB where others were before.
PYLLAMA_API void pyllama_map_buffers(void);

// A log callback that drops everything, for the time after Python's logging is gone.
PYLLAMA_API void pyllama_log_discard(enum ggml_log_level level, const char * text, void * user_data);

// The calls of llama.h that may throw. On failure the result is NULL and `message` says why, as far as
// the exception told; libllama's own reason goes to its log.
// path_head: with the MTP head in another file, see llama_mtp_load_model(), or NULL.
PYLLAMA_API struct llama_model * pyllama_model_load(
        const char * path, const char * path_head, uint32_t n_layer_nextn, const struct llama_mtp_tensor * tensors,
        size_t n_tensors, struct llama_model_params params, char * message, size_t n_message);
PYLLAMA_API struct llama_context * pyllama_context_init(
        struct llama_model * model, struct llama_context_params params, char * message, size_t n_message);
PYLLAMA_API struct llama_adapter_lora * pyllama_adapter_lora_init(
        struct llama_model * model, const char * path, char * message, size_t n_message);

// Whether a regular expression, as tensor_buft_overrides have them, is found in `text`: 1, 0, or a negative code where it
// is none.
PYLLAMA_API int32_t pyllama_regex_search(const char * pattern, const char * text, char * message, size_t n_message);

// llama_tokenize(); INT32_MIN when an exception was caught.
PYLLAMA_API int32_t pyllama_tokenize(
        const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special, char * message, size_t n_message);
// The same in llama_tokenize()'s form, for llguidance, which calls it by its address: no token when an exception was
// caught.
PYLLAMA_API int32_t pyllama_tokenize_forced(
        const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special);

// The entries of one batch. All arrays have n_tokens entries; the caller keeps them alive during the call.
struct pyllama_batch {
    int32_t              n_tokens;
    const llama_token  * token;
    const llama_pos    * pos;
    const llama_seq_id * seq_id;
    const int8_t       * output;  // 1: an output row is wanted for this token
    const float        * hidden;  // NULL, or n_tokens rows of n_embd: the state an MTP block pairs with the token
    int32_t              n_embd;
};

// Fill `batch` and decode it. Returns a code of llama_decode(), or one of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_decode(
        struct llama_context * ctx, struct llama_batch_ext * batch, const struct pyllama_batch * entries,
        char * message, size_t n_message);

// llama_batch_ext_init(); NULL on failure.
PYLLAMA_API struct llama_batch_ext * pyllama_batch_ext_init(struct llama_context * ctx, char * message, size_t n_message);

// Twins of calls of llama.h and llama-mtp.h that may run out of memory, or find that a device has failed: what those
// return, 0 where they return nothing, or a code of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_synchronize(struct llama_context * ctx, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_memory_clear(struct llama_context * ctx, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_memory_seq_rm(
        struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_set_embeddings_pre_norm(
        struct llama_context * ctx, bool value, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_set_draft_head(
        struct llama_context * ctx, int32_t type, const void * rows, size_t n_bytes, const int32_t * ids,
        int32_t n_rows, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_replace_draft_rows(
        struct llama_context * ctx, int32_t n, const int32_t * slots, const int32_t * ids, const void * rows,
        size_t n_bytes, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_use_model_draft_head(
        struct llama_context * ctx, const int32_t ** ids, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_draft(
        struct llama_context * ctx, const int32_t * tokens, const int32_t * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, int32_t * drafts, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_reserve(
        struct llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message);

// State of one sequence; like llama_state_seq_{get,set}_data_ext, 0 on failure.
PYLLAMA_API size_t pyllama_state_seq_get(
        struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message);
PYLLAMA_API size_t pyllama_state_seq_set(
        struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message);

// llama_sampler_init_grammar() with the root rule `root`; NULL on failure.
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_grammar(
        const struct llama_vocab * vocab, const char * grammar, char * message, size_t n_message);

// A token by the samplers of `chain`, which are told of it; PYLLAMA_NO_TOKEN when they leave none to choose, or another
// code of PYLLAMA_*. Like llama_sampler_sample(), which ends the process where nothing can be chosen.
PYLLAMA_API llama_token pyllama_sample(struct llama_sampler * chain, struct llama_context * ctx, int32_t row);

// What pyllama_sample() would draw from at `row`: the row's logits after every sampler of the chain but the last, which
// draws. Fills ids and logits, [capacity] each; returns how many there are (in the samplers' order, minus infinity: no
// chance), or a code of PYLLAMA_*: PYLLAMA_BATCH_REFUSED where they do not fit.
PYLLAMA_API int32_t pyllama_distribution(
        struct llama_sampler * chain, struct llama_context * ctx, int32_t row,
        int32_t * ids, float * logits, int32_t capacity);

// Interruption: pass pyllama_abort_poll as abort_callback and a pyllama_interrupt as its data. ggml asks
// between graph nodes, on the thread that called llama_decode(); `poll` is asked every period_us at most.
struct pyllama_interrupt {
    int  (*poll)(void * data);  // non-zero: stop
    void * data;
    int64_t period_us;
    int64_t next_us;            // private
};
PYLLAMA_API bool pyllama_abort_poll(void * interrupt);

// The same for ggml_backend_rpc_set_abort_callback(), which asks while a worker is waited for: true gives it up. `poll`
// is asked in guarded calls only, since it may leave something that their callers look for; period_us has no effect.
PYLLAMA_API bool pyllama_wait_poll(void * interrupt);
// From then on, in seconds from now, whatever worker is waited for, on any thread, is given up. Infinity: none is.
PYLLAMA_API void pyllama_give_up_waiting(double seconds);
// Wait until the worker of a device has done all that it was given.
PYLLAMA_API void pyllama_wait_for_device(ggml_backend_dev_t device);

// What a decode computes: pass pyllama_trace_node as cb_eval and a pyllama_trace as its data. It only looks
// at the graph; nothing is computed differently. `n` goes on counting when `capacity` is reached.
struct pyllama_node {
    char    name[64];
    char    op[32];
    int64_t ne[4];
};
struct pyllama_trace {
    struct pyllama_node * node;
    size_t capacity;
    size_t n;
};
PYLLAMA_API bool pyllama_trace_node(struct ggml_tensor * node, bool ask, void * trace);

// What nodes cost, added up: pass pyllama_time_node as cb_eval and a pyllama_times as its data. Where `on`, every node
// that computes anything is computed by itself and timed. `n` goes on counting when `capacity` is reached.
struct pyllama_cost {
    char    op[32];
    char    name[64];  // of the weights, without the layer ("ffn_up.weight"); without weights, of the node ("conv_input")
    int64_t n;         // nodes
    int64_t ns;
};
struct pyllama_times {
    struct pyllama_cost * cost;
    size_t  capacity;
    size_t  n;
    bool    on;
    int64_t began_ns;  // private
};
PYLLAMA_API bool pyllama_time_node(struct ggml_tensor * node, bool ask, void * times);

#ifdef __cplusplus
}
#endif
