// The switch of slices, see llm_graph_context::every_row().

#include "llama-slice.h"

#include "llama-context.h"

void llama_context::set_slice(bool value) {
    sched_need_reserve |= cparams.slice != value;

    cparams.slice = value;
}

void llama_mtp_set_slice(llama_context * ctx, bool value) {
    ctx->set_slice(value);
}
