#pragma once

struct llama_model_loader;

// Give a loader the tensors of the other file that this thread loads a model with, if it does; throws.
void llama_mtp_add_head(llama_model_loader & ml);
