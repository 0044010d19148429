// The functions of llama-mtp.h that upstream's variant lacks. Here they return false, 0, -1 or NULL.
#include "llama-mtp.h"

bool          llama_set_hidden_tap(llama_context *, llama_hidden_tap tap) { return tap == LLAMA_HIDDEN_TAP_NONE; }
const float * llama_get_hidden_rows(llama_context *, int32_t, int32_t) { return nullptr; }

void llama_mtp_set_slice(llama_context *, bool) {}
bool llama_mtp_limit_grammar(double) { return false; }

bool llama_mtp_set_block_input(llama_context *, llama_hidden_tap) { return false; }

void        llama_mtp_set_greedy(llama_context *, bool) {}
llama_token llama_mtp_get_greedy_ith(llama_context *, int32_t) { return LLAMA_TOKEN_NULL; }
void        llama_mtp_set_candidates(llama_context *, int32_t) {}
int32_t     llama_mtp_get_candidates_ith(llama_context *, int32_t, const llama_token **, const float **) { return 0; }
uint64_t    llama_mtp_get_output_bytes(const llama_context *) { return 0; }
bool        llama_mtp_set_draft_head(llama_context *, int32_t, const void *, size_t, const llama_token *, int32_t) { return false; }
bool        llama_mtp_replace_draft_rows(llama_context *, int32_t, const int32_t *, const llama_token *, const void *, size_t) { return false; }
int32_t     llama_mtp_use_model_draft_head(llama_context *, const llama_token **) { return 0; }
int32_t     llama_mtp_draft_and_decode(llama_context *, const llama_token *, const llama_seq_id *, int32_t, int32_t, llama_token *) { return -1; }
bool        llama_mtp_can_draft_and_decode(llama_context *, int32_t, int32_t) { return false; }
int32_t     llama_mtp_draft(llama_context *, const llama_token *, const llama_seq_id *, int32_t, int32_t, int32_t, const float *, const float *, llama_token *) { return -1; }
const float * llama_mtp_get_draft_logits(const llama_context *, int32_t * n) { *n = 0; return nullptr; }
void        llama_mtp_set_draft_window(llama_context *, int32_t) {}
llama_model * llama_mtp_load_model(const char *, const char *, uint32_t, const llama_mtp_tensor *, size_t, llama_model_params) { return nullptr; }
bool        llama_mtp_reserve(llama_context *, int32_t, int32_t) { return false; }
llama_mtp_checkpoints * llama_mtp_checkpoints_init(llama_context *, int32_t) { return nullptr; }
void        llama_mtp_checkpoints_free(llama_mtp_checkpoints *) {}
size_t      llama_mtp_checkpoints_take(llama_mtp_checkpoints *, int32_t, llama_seq_id) { return 0; }
bool        llama_mtp_checkpoints_get(llama_mtp_checkpoints *, int32_t, uint8_t *, size_t) { return false; }
size_t      llama_mtp_checkpoints_size(const llama_mtp_checkpoints *, bool, ggml_backend_dev_t) { return 0; }
uint64_t    llama_mtp_get_n_graphs_built(const llama_context *) { return 0; }
