// Images for a model that sees: libpyllama-vision, which is mtmd (upstream's tools/mtmd) behind calls that never throw.
// It is loaded when the first image comes. One library serves both variants; it binds to the libllama that is loaded.
#pragma once

#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A prompt is cut into chunks: text, and images. `n_pos`: positions that the chunk takes; images of models with M-RoPE take
// fewer than tokens. `token`: n_tokens ids, of text only.
struct pyllama_chunk {
    bool            is_image;
    int32_t         n_tokens;
    int32_t         n_pos;
    const int32_t * token;
};

// What an encoder is. `mrope`: embeddings have four positions each, (t, y, x, 0). `non_causal`: the tokens of an image see
// each other, so an image must be in one graph.
struct pyllama_vision_info {
    bool sees;
    bool hears;
    bool mrope;
    bool non_causal;
};

// The functions. Those that may fail write the reason to `message`, and return NULL, or a code of PYLLAMA_* below 0.
struct pyllama_vision_api {
    void (*set_log)(void (*callback)(enum ggml_log_level level, const char * text, void * user_data));

    // min_tokens and max_tokens of an image: -1 for the file's own limits.
    struct mtmd_context * (*init)(
            const char * path, const struct llama_model * model, bool use_gpu, int32_t n_threads, int32_t min_tokens,
            int32_t max_tokens, struct pyllama_vision_info * info, char * message, size_t n_message);
    void (*free)(struct mtmd_context * ctx);

    // `text` holds a marker (mtmd_default_marker()) for each of n_images images of width[i] * height[i] * 3 bytes of RGB.
    struct mtmd_input_chunks * (*tokenize)(
            struct mtmd_context * ctx, const char * text, size_t n_text, bool add_special, const uint8_t * const * rgb,
            const uint32_t * width, const uint32_t * height, int32_t n_images, char * message, size_t n_message);
    int32_t (*n_chunks)(const struct mtmd_input_chunks * chunks);
    struct pyllama_chunk (*chunk)(const struct mtmd_input_chunks * chunks, int32_t i);
    void (*free_chunks)(struct mtmd_input_chunks * chunks);

    // Positions (t, y, x, 0) of the tokens of image chunk i, from 0: n_tokens times 4 numbers.
    int32_t (*positions)(
            const struct mtmd_input_chunks * chunks, int32_t i, int32_t * pos, char * message, size_t n_message);
    // Embeddings of image chunk i: n_tokens rows of llama_model_n_embd_inp().
    int32_t (*encode)(
            struct mtmd_context * ctx, const struct mtmd_input_chunks * chunks, int32_t i, int32_t n_threads, float * rows,
            size_t n_rows, char * message, size_t n_message);
};

#ifdef __cplusplus
}
#endif
