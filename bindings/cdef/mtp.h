// the C API of patch 2
struct llama_mtp_memory { size_t model; size_t context; size_t compute; };
void    llama_mtp_set_embeddings_nextn    (struct llama_context * ctx, bool value, bool masked);
float * llama_mtp_get_embeddings_nextn    (struct llama_context * ctx);
float * llama_mtp_get_embeddings_nextn_ith(struct llama_context * ctx, int32_t i);
void    llama_mtp_set_layer_offset        (struct llama_context * ctx, int32_t offset);
struct llama_context * llama_mtp_get_ctx_other(struct llama_context * ctx);
struct llama_mtp_memory llama_mtp_get_memory(const struct llama_context * ctx);
