// The shim between Python and libllama, for what Python cannot do:
//   - A C++ exception in C ends the interpreter. So each call that may throw has a twin here, which returns a code and
//     writes the reason. A failed assertion of ggml or llama.cpp within a twin is such an error, too.
//   - One call fills a batch; llama.h takes four calls for each token.
//   - Ctrl-C interrupts a long computation, which runs without the GIL.
//   - The stamp says what libllama was built from.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#define PYLLAMA_API __attribute__((visibility("default")))

struct llama_mtp_memory;  // llama-mtp.h
struct llama_mtp_tensor;
struct llama_mtp_checkpoints;

#ifdef __cplusplus
extern "C" {
#endif

// Error codes. llama_decode() itself returns 0, 1, 2, -1, and codes a little below.
#define PYLLAMA_EXCEPTION     (-1000)  // a C++ exception; the message says which
#define PYLLAMA_OUT_OF_MEMORY (-1001)  // std::bad_alloc
#define PYLLAMA_BATCH_REFUSED (-1002)  // llama_batch_ext refused an entry; the message says which
#define PYLLAMA_NO_TOKEN      (-1003)  // the samplers left no token to choose
#define PYLLAMA_ABORTED       (-1004)  // a failed assertion, or ggml gave up; the message says where and why
#define PYLLAMA_NO_ROOM       (-1005)  // not begun: too little address space, or too few threads
#define PYLLAMA_FORKED        (-1006)  // not begun: this process was forked, and lacks its parent's threads
#define PYLLAMA_TOO_SLOW      (-1007)  // a grammar has computed for PYLLAMA_GRAMMAR_S seconds
#define PYLLAMA_GRAMMAR_S     1

// A JSON object: variant, upstream_commit, series, cpu_features, compiler, cuda. It is a part of libllama (stamp.c.in): the
// bindings read it in the file before they load the library.
PYLLAMA_API const char * pyllama_stamp(void);

// Switches a change that our patches make to the speed of every loaded CPU backend. All are on by default.
// "small_batch": products of a few columns. "few_rows_attention": attention of a few rows.
// "large_batch": products, delta nets and convolutions of prompts. False: no backend has it.
PYLLAMA_API bool pyllama_set_cpu_switch(const char * name, bool value);
// Switches all of them.
PYLLAMA_API void pyllama_set_cpu_changes(bool value);
// Whether, on this CPU, products of a matrix of this ggml_type with a few columns read each weight once. False: no, or
// the backend does not say.
PYLLAMA_API bool pyllama_few_columns(int32_t type);

// From now on, a failed assertion ends the call of this file that runs on its thread, which returns PYLLAMA_ABORTED or
// another sign of failure. While several threads compute a graph, or without such a call, it ends the process, as before.
PYLLAMA_API void pyllama_catch_aborts(void);

// A log callback that drops every line: for the time after Python's logging is gone.
PYLLAMA_API void pyllama_log_discard(enum ggml_log_level level, const char * text, void * user_data);

// Twins of calls of llama.h. On failure the result is NULL, and `message` has the text of the exception; libllama writes
// its own reason to the log. path_head: the file of the MTP head (see llama_mtp_load_model()), or NULL.
PYLLAMA_API struct llama_model * pyllama_model_load(
        const char * path, const char * path_head, uint32_t n_layer_nextn, const struct llama_mtp_tensor * tensors,
        size_t n_tensors, struct llama_model_params params, char * message, size_t n_message);
PYLLAMA_API struct llama_context * pyllama_context_init(
        struct llama_model * model, struct llama_context_params params, char * message, size_t n_message);
// llama_free(), after which freed memory goes back to the system. glibc would keep it, and parts of the next context's
// buffers that nothing uses would take memory.
PYLLAMA_API void pyllama_context_free(struct llama_context * ctx);
PYLLAMA_API struct llama_adapter_lora * pyllama_adapter_lora_init(
        struct llama_model * model, const char * path, char * message, size_t n_message);

// Whether `text` has a part that matches a pattern of tensor_buft_overrides: 1, 0, or a negative code if the pattern is
// not a regular expression.
PYLLAMA_API int32_t pyllama_regex_search(const char * pattern, const char * text, char * message, size_t n_message);

// llama_tokenize(); INT32_MIN on failure.
PYLLAMA_API int32_t pyllama_tokenize(
        const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special, char * message, size_t n_message);
// The same with llama_tokenize()'s parameters, for llguidance, which calls it by its address; no token on failure.
PYLLAMA_API int32_t pyllama_tokenize_forced(
        const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special);

// Calls body(data), which may throw, or fail an assertion, and may compute graphs with n_threads threads. Returns its result,
// or one of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_guarded(
        int32_t (*body)(void * data), void * data, int32_t n_threads, char * message, size_t n_message);

// A batch. All arrays have n_tokens entries. `embd`: NULL, or n_tokens rows of n_embd_inp in place of tokens, of an image;
// `pos` then has n_pos numbers for each row.
struct pyllama_batch {
    int32_t              n_tokens;
    const llama_token  * token;
    const float        * embd;
    int32_t              n_embd_inp;
    const llama_pos    * pos;
    int32_t              n_pos;
    const llama_seq_id * seq_id;
    const int8_t       * output;  // 1: an output row is wanted for this token
    const float        * hidden;  // NULL, or n_tokens rows of n_embd: the hidden state that the MTP block pairs with each token
    int32_t              n_embd;
};

// Fills `batch` and decodes it. Returns a code of llama_decode(), or one of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_decode(
        struct llama_context * ctx, struct llama_batch_ext * batch, const struct pyllama_batch * entries,
        char * message, size_t n_message);

// llama_batch_ext_init(); NULL on failure.
PYLLAMA_API struct llama_batch_ext * pyllama_batch_ext_init(struct llama_context * ctx, char * message, size_t n_message);

// Twins of calls of llama.h and llama-mtp.h that fail when memory runs out, or when a device has failed. They return the
// call's own result (0 if it has none), or a code of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_synchronize(struct llama_context * ctx, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_memory_clear(struct llama_context * ctx, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_memory_seq_cp(
        struct llama_context * ctx, llama_seq_id from, llama_seq_id to, llama_pos p1, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_memory_seq_rm(
        struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_set_hidden_tap(struct llama_context * ctx, int32_t tap, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_set_adapters_lora(
        struct llama_context * ctx, struct llama_adapter_lora ** adapters, size_t n_adapters, float * scales,
        char * message, size_t n_message);
// dev: the device whose memory is meant, NULL: the host's; all: of all devices.
PYLLAMA_API int32_t pyllama_mtp_get_memory(
        const struct llama_context * ctx, bool all, ggml_backend_dev_t dev, struct llama_mtp_memory * memory,
        char * message, size_t n_message);

// What a decode left: these wait for it, and give what llama.h's and llama-mtp.h's functions return in *logits, *rows or
// *token. Twins as above.
PYLLAMA_API int32_t pyllama_get_logits(
        struct llama_context * ctx, int32_t row, const float ** logits, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_get_hidden_rows(
        struct llama_context * ctx, int32_t first, int32_t n, const float ** rows, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_get_embeddings_nextn(
        struct llama_context * ctx, const float ** rows, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_get_greedy(
        struct llama_context * ctx, int32_t row, int32_t * token, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_get_candidates(
        struct llama_context * ctx, int32_t row, const int32_t ** ids, const float ** logits, char * message, size_t n_message);
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
PYLLAMA_API int32_t pyllama_mtp_draft_and_decode(
        struct llama_context * ctx, const int32_t * tokens, const int32_t * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t * drafts, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_can_draft_and_decode(
        struct llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_reserve(
        struct llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message);

// Of llama-mtp.h; NULL, 0 or a code on failure.
PYLLAMA_API struct llama_mtp_checkpoints * pyllama_mtp_checkpoints_init(
        struct llama_context * ctx, int32_t n, char * message, size_t n_message);
PYLLAMA_API size_t pyllama_mtp_checkpoints_take(
        struct llama_mtp_checkpoints * checkpoints, int32_t i, int32_t seq_id, char * message, size_t n_message);
PYLLAMA_API int32_t pyllama_mtp_checkpoints_get(
        struct llama_mtp_checkpoints * checkpoints, int32_t i, uint8_t * dst, size_t size, char * message, size_t n_message);

// Memory of the host, page-locked where there is a GPU and on_gpu is true; NULL: there is none.
PYLLAMA_API ggml_backend_buffer_t pyllama_host_memory(size_t size, bool on_gpu, char * message, size_t n_message);

// llama_state_seq_{get_size,get_data,set_data}_ext(); 0 on failure.
PYLLAMA_API size_t pyllama_state_seq_get_size(
        struct llama_context * ctx, llama_seq_id seq_id, uint32_t flags, char * message, size_t n_message);
PYLLAMA_API size_t pyllama_state_seq_get(
        struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message);
PYLLAMA_API size_t pyllama_state_seq_set(
        struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message);

// llama_sampler_init_grammar() with the root rule `root`; NULL on failure.
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_grammar(
        const struct llama_vocab * vocab, const char * grammar, char * message, size_t n_message);

// Samplers, as of llama.h; NULL on failure.
PYLLAMA_API struct llama_sampler * pyllama_sampler_chain_init(void);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_greedy(void);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_dist(uint32_t seed);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_top_k(int32_t k);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_top_p(float p, size_t min_keep);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_min_p(float p, size_t min_keep);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_temp(float t);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_typical(float p, size_t min_keep);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_top_n_sigma(float n);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_dry(
        const struct llama_vocab * vocab, float multiplier, float base, int32_t allowed_length, int32_t penalty_last_n,
        const char ** breakers, size_t n_breakers);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_penalties(
        int32_t n_vocab, int32_t last_n, float repeat, float frequency, float presence);
PYLLAMA_API struct llama_sampler * pyllama_sampler_init_logit_bias(
        int32_t n_vocab, int32_t n_biases, const llama_logit_bias * biases);
// The chain owns the sampler from now on, and frees it even on failure. NULL, which stands for a failure: none is added.
// Returns 0, or a code of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * sampler);
// llama_sampler_accept(). Returns 0, or a code of PYLLAMA_*.
PYLLAMA_API int32_t pyllama_sampler_accept(struct llama_sampler * sampler, llama_token token);

// Draws a token from a row with the samplers of `chain`, and tells them of it. A row is [n] ids with their logits; without
// ids, the logits of tokens 0 to n - 1. Returns the token, PYLLAMA_NO_TOKEN if the samplers leave none, or another code of
// PYLLAMA_*. (llama_sampler_sample() ends the process if there is none.)
PYLLAMA_API llama_token pyllama_sample(
        struct llama_sampler * chain, const int32_t * row_ids, const float * row_logits, int32_t n);

// The distribution that pyllama_sample() draws from: the row's logits after all samplers but the last, which draws. Fills
// ids and logits, [capacity] each, in the samplers' order; minus infinity is never drawn. Returns their number, or a code
// of PYLLAMA_*: PYLLAMA_BATCH_REFUSED if they do not fit.
PYLLAMA_API int32_t pyllama_distribution(
        struct llama_sampler * chain, const int32_t * row_ids, const float * row_logits, int32_t n,
        int32_t * ids, float * logits, int32_t capacity);

// Interruption: pass pyllama_abort_poll as abort_callback and a pyllama_interrupt as its data. ggml calls it between graph
// nodes, on the thread that called llama_decode(); it calls `poll` at most once in period_us.
struct pyllama_interrupt {
    int  (*poll)(void * data);  // non-zero: stop
    void * data;
    int64_t period_us;
    int64_t next_us;            // private
};
PYLLAMA_API bool pyllama_abort_poll(void * interrupt);

// Pass it to ggml_backend_rpc_set_abort_callback(), which calls it while a thread waits for a worker, with a `poll` as above
// or NULL. Returns why the worker is given up. It calls `poll` only within calls of this file, whose callers look for the
// exception that `poll` may leave.
PYLLAMA_API const char * pyllama_wait_poll(const char * worker, int64_t silent_us, void * poll);
// How long a worker may be silent from now on; 0: for ever.
PYLLAMA_API void pyllama_limit_silence(const char * worker, uint32_t seconds);
// After so many seconds, every thread gives up the worker that it waits for. Infinity: no thread does.
PYLLAMA_API void pyllama_give_up_waiting(double seconds);

// ggml_backend_dev_memory(); with a worker's device, it waits until the worker has finished its work. false: the device
// has failed, and *free and *total are 0.
PYLLAMA_API bool pyllama_device_memory(ggml_backend_dev_t device, size_t * free, size_t * total);

// The shape of attention: sizes of a row of K and of V of a head, numbers of heads of Q and of K and V.
struct pyllama_attention {
    int64_t k;
    int64_t v;
    int64_t n_head;
    int64_t n_head_kv;
};

// Whether a device computes flash attention over caches of these types; elsewhere the CPU does. Also false for no memory.
PYLLAMA_API bool pyllama_device_has_attention(
        ggml_backend_dev_t device, struct pyllama_attention shape, enum ggml_type type_k, enum ggml_type type_v);

// Records the nodes of a decode: pass pyllama_trace_node as cb_eval and a pyllama_trace as its data. Nothing is computed
// differently. `n` goes on counting when `capacity` is reached.
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

#ifdef __cplusplus
}
#endif
