#include "pyllama_vision.h"

#include "mtmd.h"
#include "pyllama_shim.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

// Calls `body` guarded, see pyllama_guarded(); its code, or that of the failure.
template <typename Body>
int32_t guarded(int32_t n_threads, char * message, size_t n_message, Body body) {
    const auto call = [](void * data) -> int32_t { return (*static_cast<Body *>(data))(); };
    return pyllama_guarded(call, &body, n_threads, message, n_message);
}

// mtmd says why in its log, and returns nothing or a code.
void require(bool value, const char * what) {
    if (!value) {
        throw std::runtime_error(what);
    }
}

void set_log(ggml_log_callback callback) { mtmd_log_set(callback, nullptr); }

mtmd_context * init(
        const char * path, const llama_model * model, bool use_gpu, int32_t n_threads, int32_t min_tokens,
        int32_t max_tokens, pyllama_vision_info * info, char * message, size_t n_message) {
    mtmd_context * ctx = nullptr;

    guarded(n_threads, message, n_message, [&]() -> int32_t {
        *info = {};
        const mtmd_caps caps = mtmd_get_cap_from_file(path);
        info->sees  = caps.inp_vision;
        info->hears = caps.inp_audio;
        if (!caps.inp_vision) {
            return 0;
        }
        mtmd_context_params params = mtmd_context_params_default();
        params.use_gpu          = use_gpu;
        params.print_timings    = false;
        params.n_threads        = n_threads;
        params.image_min_tokens = min_tokens;
        params.image_max_tokens = max_tokens;
        params.warmup           = false;  // memory is taken with the first image
        ctx = mtmd_init_from_file(path, model, params);
        if (ctx) {
            info->mrope      = mtmd_decode_use_mrope(ctx);
            info->non_causal = mtmd_decode_use_non_causal(ctx, nullptr);
        }
        return 0;
    });
    return ctx;
}

mtmd_input_chunks * tokenize(
        mtmd_context * ctx, const char * text, size_t n_text, bool add_special, const uint8_t * const * rgb, const uint32_t * width,
        const uint32_t * height, int32_t n_images, char * message, size_t n_message) {
    mtmd::input_chunks_ptr chunks;

    const int32_t code = guarded(1, message, n_message, [&] {
        std::vector<mtmd::bitmap_ptr> owned;
        std::vector<const mtmd_bitmap *> bitmaps;
        for (int32_t i = 0; i < n_images; ++i) {
            owned.emplace_back(mtmd_bitmap_init(width[i], height[i], rgb[i]));
            bitmaps.push_back(owned.back().get());
        }
        const mtmd_input_text input = { text, n_text, add_special, true };
        chunks.reset(mtmd_input_chunks_init());
        const int32_t code = mtmd_tokenize(ctx, chunks.get(), &input, bitmaps.data(), bitmaps.size());
        require(code != 1, "the text has not as many markers as there are images");
        require(code == 0, "an image cannot be prepared");
        return code;
    });
    return code == 0 ? chunks.release() : nullptr;
}

int32_t n_chunks(const mtmd_input_chunks * chunks) { return (int32_t) mtmd_input_chunks_size(chunks); }

pyllama_chunk chunk(const mtmd_input_chunks * chunks, int32_t i) {
    const mtmd_input_chunk * at = mtmd_input_chunks_get(chunks, i);
    pyllama_chunk result = {};

    result.is_image = mtmd_input_chunk_get_type(at) == MTMD_INPUT_CHUNK_TYPE_IMAGE;
    result.n_pos    = mtmd_input_chunk_get_n_pos(at);
    result.n_tokens = (int32_t) mtmd_input_chunk_get_n_tokens(at);
    if (!result.is_image) {
        size_t n = 0;
        result.token = mtmd_input_chunk_get_tokens_text(at, &n);
    }
    return result;
}

int32_t positions(const mtmd_input_chunks * chunks, int32_t i, int32_t * pos, char * message, size_t n_message) {
    return guarded(1, message, n_message, [&]() -> int32_t {
        const mtmd_input_chunk * at = mtmd_input_chunks_get(chunks, i);
        const mtmd_image_tokens * image = mtmd_input_chunk_get_tokens_image(at);
        for (size_t k = 0; k < mtmd_input_chunk_get_n_tokens(at); ++k) {
            const mtmd_decoder_pos p = mtmd_image_tokens_get_decoder_pos(image, 0, k);
            const int32_t row[4] = { (int32_t) p.t, (int32_t) p.y, (int32_t) p.x, (int32_t) p.z };
            memcpy(pos + 4 * k, row, sizeof(row));
        }
        return 0;
    });
}

int32_t encode(
        mtmd_context * ctx, const mtmd_input_chunks * chunks, int32_t i, int32_t n_threads, float * rows, size_t n_rows,
        char * message, size_t n_message) {
    return guarded(n_threads, message, n_message, [&]() -> int32_t {
        require(mtmd_encode_chunk(ctx, mtmd_input_chunks_get(chunks, i)) == 0, "the image encoder has failed");
        memcpy(rows, mtmd_get_output_embd(ctx), n_rows * sizeof(float));
        return 0;
    });
}

const pyllama_vision_api API = {
    set_log, init, mtmd_free, tokenize, n_chunks, chunk, mtmd_input_chunks_free, positions, encode,
};

} // namespace

extern "C" PYLLAMA_API const pyllama_vision_api * pyllama_vision(void);
const pyllama_vision_api * pyllama_vision(void) { return &API; }
