#pragma once

// Slices: the last layer, the final norm and the LM head run for output rows only, unless a tap needs every row.

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Off: the last layer and the final norm run for every row, and the LM head for output rows. A row's logits then have the bits
// that they have with a tap, which needs every row. Default: on.
LLAMA_API void llama_mtp_set_slice(struct llama_context * ctx, bool value);

#ifdef __cplusplus
}
#endif
