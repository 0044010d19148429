// the C API of our patches; see llama/llama-mtp.h. What waits for a computation, or allocates, is called through the shim.
struct llama_mtp_memory { size_t model; size_t context; size_t compute; };
void    llama_mtp_set_embeddings_nextn    (struct llama_context * ctx, bool value, bool masked);
void    llama_mtp_set_layer_offset        (struct llama_context * ctx, int32_t offset);
struct llama_mtp_tensor { const char * name; const char * from; };
// not in the upstream variant, where they return false, 0, -1 or NULL (shim/mtp_absent.cpp)
enum llama_hidden_tap {
    LLAMA_HIDDEN_TAP_NONE = ..., LLAMA_HIDDEN_TAP_POST_NORM = ..., LLAMA_HIDDEN_TAP_PRE_NORM = ..., ...
};
void    llama_mtp_set_slice  (struct llama_context * ctx, bool value);
bool    llama_mtp_set_block_input(struct llama_context * ctx, enum llama_hidden_tap input);
void     llama_mtp_set_greedy      (struct llama_context * ctx, bool value);
uint64_t llama_mtp_get_output_bytes(const struct llama_context * ctx);
void     llama_mtp_set_candidates    (struct llama_context * ctx, int32_t n);
const float * llama_mtp_get_draft_logits(const struct llama_context * ctx, int32_t * n);
void    llama_mtp_set_draft_window(struct llama_context * ctx, int32_t n_window);
struct llama_mtp_checkpoints;
void    llama_mtp_checkpoints_free(struct llama_mtp_checkpoints * checkpoints);
size_t  llama_mtp_checkpoints_size(const struct llama_mtp_checkpoints * checkpoints, bool all, ggml_backend_dev_t dev);
uint64_t llama_mtp_get_n_graphs_built(const struct llama_context * ctx);
