// our shim; see shim/pyllama_shim.h
#define PYLLAMA_EXCEPTION ...
#define PYLLAMA_OUT_OF_MEMORY ...
#define PYLLAMA_BATCH_REFUSED ...
#define PYLLAMA_NO_TOKEN ...
#define PYLLAMA_ABORTED ...
#define PYLLAMA_NO_ROOM ...
#define PYLLAMA_FORKED ...
void pyllama_catch_aborts(void);
void pyllama_map_buffers(void);
const char * pyllama_stamp(void);
bool pyllama_set_cpu_switch(const char * name, bool value);
void pyllama_set_cpu_changes(bool value);
bool pyllama_few_columns(int32_t type);
void pyllama_log_discard(enum ggml_log_level level, const char * text, void * user_data);
struct llama_model * pyllama_model_load(
        const char * path, const char * path_head, uint32_t n_layer_nextn, const struct llama_mtp_tensor * tensors,
        size_t n_tensors, struct llama_model_params params, char * message, size_t n_message);
struct llama_context * pyllama_context_init(struct llama_model * model, struct llama_context_params params, char * message, size_t n_message);
struct llama_adapter_lora * pyllama_adapter_lora_init(struct llama_model * model, const char * path, char * message, size_t n_message);
int32_t pyllama_regex_search(const char * pattern, const char * text, char * message, size_t n_message);
int32_t pyllama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special, char * message, size_t n_message);
int32_t pyllama_tokenize_forced(const struct llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
struct llama_batch_ext * pyllama_batch_ext_init(struct llama_context * ctx, char * message, size_t n_message);
int32_t pyllama_synchronize(struct llama_context * ctx, char * message, size_t n_message);
int32_t pyllama_memory_clear(struct llama_context * ctx, char * message, size_t n_message);
int32_t pyllama_memory_seq_rm(struct llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1, char * message, size_t n_message);
int32_t pyllama_set_embeddings_pre_norm(struct llama_context * ctx, bool value, char * message, size_t n_message);
int32_t pyllama_mtp_set_draft_head(struct llama_context * ctx, int32_t type, const void * rows, size_t n_bytes, const int32_t * ids, int32_t n_rows, char * message, size_t n_message);
int32_t pyllama_mtp_replace_draft_rows(struct llama_context * ctx, int32_t n, const int32_t * slots, const int32_t * ids, const void * rows, size_t n_bytes, char * message, size_t n_message);
int32_t pyllama_mtp_use_model_draft_head(struct llama_context * ctx, const int32_t ** ids, char * message, size_t n_message);
int32_t pyllama_mtp_draft(
        struct llama_context * ctx, const int32_t * tokens, const int32_t * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, int32_t * drafts, char * message, size_t n_message);
int32_t pyllama_mtp_reserve(struct llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message);
struct pyllama_batch {
    int32_t n_tokens;
    const llama_token * token;
    const llama_pos * pos;
    const llama_seq_id * seq_id;
    const int8_t * output;
    const float * hidden;
    int32_t n_embd;
};
int32_t pyllama_decode(struct llama_context * ctx, struct llama_batch_ext * batch, const struct pyllama_batch * entries, char * message, size_t n_message);
size_t pyllama_state_seq_get(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, uint32_t flags, char * message, size_t n_message);
size_t pyllama_state_seq_set(struct llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, uint32_t flags, char * message, size_t n_message);
struct llama_sampler * pyllama_sampler_init_grammar(const struct llama_vocab * vocab, const char * grammar, char * message, size_t n_message);
llama_token pyllama_sample(struct llama_sampler * chain, struct llama_context * ctx, int32_t row);
int32_t pyllama_distribution(struct llama_sampler * chain, struct llama_context * ctx, int32_t row, int32_t * ids, float * logits, int32_t capacity);
struct pyllama_interrupt {
    int  (*poll)(void * data);
    void * data;
    int64_t period_us;
    int64_t next_us;
};
bool pyllama_abort_poll(void * interrupt);
bool pyllama_wait_poll(void * interrupt);
void pyllama_give_up_waiting(double seconds);
void pyllama_wait_for_device(ggml_backend_dev_t device);
struct pyllama_node { char name[64]; char op[32]; int64_t ne[4]; };
struct pyllama_trace { struct pyllama_node * node; size_t capacity; size_t n; };
bool pyllama_trace_node(struct ggml_tensor * node, bool ask, void * trace);
struct pyllama_cost { char op[32]; char name[64]; int64_t n; int64_t ns; };
struct pyllama_times { struct pyllama_cost * cost; size_t capacity; size_t n; bool on; int64_t began_ns; };
bool pyllama_time_node(struct ggml_tensor * node, bool ask, void * times);
