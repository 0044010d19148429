// context: caches, memory, state. What waits for a computation, or allocates, is called through the shim.
struct llama_context;
typedef struct llama_memory_i * llama_memory_t;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
typedef bool (*ggml_abort_callback)(void * data);
typedef bool (*ggml_backend_sched_eval_callback)(struct ggml_tensor * t, bool ask, void * user_data);
enum llama_context_type    { LLAMA_CONTEXT_TYPE_DEFAULT = ..., LLAMA_CONTEXT_TYPE_MTP = ..., LLAMA_CONTEXT_TYPE_WITH_MTP = ..., ... };
enum llama_rope_scaling_type {
    LLAMA_ROPE_SCALING_TYPE_NONE = ..., LLAMA_ROPE_SCALING_TYPE_LINEAR = ..., LLAMA_ROPE_SCALING_TYPE_YARN = ..., ...
};
enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO = ..., LLAMA_FLASH_ATTN_TYPE_DISABLED = ..., LLAMA_FLASH_ATTN_TYPE_ENABLED = ..., ... };

struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t  n_threads;
    int32_t  n_threads_batch;
    enum llama_context_type    ctx_type;
    enum llama_rope_scaling_type rope_scaling_type;
    enum llama_flash_attn_type flash_attn_type;
    float    rope_freq_base;
    float    rope_freq_scale;
    float    yarn_ext_factor;
    float    yarn_attn_factor;
    float    yarn_beta_fast;
    float    yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    enum ggml_type type_k;
    enum ggml_type type_v;
    ggml_backend_sched_eval_callback cb_eval;
    void * cb_eval_user_data;
    ggml_abort_callback abort_callback;
    void * abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool kv_unified;
    struct llama_context * ctx_other;
    size_t moe_cache_size;
    ...;
};
struct llama_context_params llama_context_default_params(void);
uint32_t llama_n_ctx     (const struct llama_context * ctx);
uint32_t llama_n_batch   (const struct llama_context * ctx);
uint32_t llama_n_ubatch  (const struct llama_context * ctx);
uint32_t llama_n_rs_seq  (const struct llama_context * ctx);
int32_t  llama_n_threads (struct llama_context * ctx);
void     llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);

llama_memory_t llama_get_memory(const struct llama_context * ctx);
bool      llama_memory_seq_rm     (llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);  // for tests
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);

#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY ...
#define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ...

struct llama_batch_ext;
void llama_batch_ext_free(struct llama_batch_ext * batch);
