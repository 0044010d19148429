// samplers: libllama's own, in a chain, made and used through the shim
struct llama_sampler;
typedef struct llama_logit_bias { llama_token token; float bias; } llama_logit_bias;
void llama_sampler_free(struct llama_sampler * smpl);
