#pragma once

#include "ggml.h"

#include <cstdint>
#include <functional>
#include <vector>

class llama_memory_recurrent_context;

// Arrays of indices that share an input, so that one copy brings them to a device. A line for each says where its view goes,
// how long it is, and what is in it; or that somebody else fills it.
class llama_mtp_ids {
public:
    using value = std::function<int32_t(const llama_memory_recurrent_context & mctx, int64_t i)>;

    void add(ggml_tensor *& view, int64_t n, value of = nullptr) { parts.push_back({ &view, n, std::move(of) }); }

    // I32, the input; all of it is copied at once, where it does not stay on the host
    ggml_tensor * build(ggml_context * ctx, bool on_host) {
        int64_t n = 0;
        for (const auto & part : parts) {
            n += part.n;
        }
        input = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
        ggml_set_input(input);

        ggml_tensor * all = on_host ? input : ggml_cont(ctx, input);
        n = 0;
        for (const auto & part : parts) {
            *part.view = ggml_view_1d(ctx, all, part.n, n*all->nb[0]);
            n += part.n;
        }
        return input;
    }

    void set(const llama_memory_recurrent_context & mctx) const {
        int32_t * data = input ? (int32_t *) input->data : nullptr;
        for (const auto & part : parts) {
            for (int64_t i = 0; part.of && i < part.n; ++i) {
                data[i] = part.of(mctx, i);
            }
            data += part.n;
        }
    }

private:
    struct part {
        ggml_tensor ** view;
        int64_t        n;
        value          of;
    };

    std::vector<part> parts;
    ggml_tensor *     input = nullptr;
};
