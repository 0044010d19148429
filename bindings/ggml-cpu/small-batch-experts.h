#pragma once

// Which tokens the experts of a MUL_MAT_ID serve: sorted by expert, for small-batch.cpp and large-batch.cpp, so that each expert is
// read once for all of its tokens.

#include "ggml-impl.h"

#include <algorithm>
#include <cassert>

namespace {

// what the experts of a product multiply: rows of src1, and of dst
struct use {
    int32_t id;    // of those that a token uses
    int32_t token;
};

struct plan {
    int32_t * expert; // those that anybody uses
    int32_t * end;    // of the uses of each expert, which are in the order of the experts
    use     * uses;

    plan(void * memory, const ggml_tensor * dst) {
        expert = (int32_t *) memory + 1; // behind the number of experts in use
        end    = expert + dst->src[0]->ne[2];
        uses   = (use *) GGML_PAD((uintptr_t) (end + dst->src[0]->ne[2]), sizeof(use));
    }
    static size_t size(const ggml_tensor * dst) {
        return (2 + 2 * dst->src[0]->ne[2]) * sizeof(int32_t) + ggml_nelements(dst->src[2]) * sizeof(use);
    }
};

// Sorts by expert; tokens in their order. Returns the number of experts in use.
int32_t sort_by_expert(const ggml_tensor * ids, int64_t n_all_experts, plan & p) {
    const auto expert_of = [&](int64_t id, int64_t token) {
        return *(const int32_t *) ((const char *) ids->data + token * ids->nb[1] + id * ids->nb[0]);
    };
    std::fill(p.end, p.end + n_all_experts, 0);
    for (int64_t token = 0; token < ids->ne[1]; ++token) {
        for (int64_t id = 0; id < ids->ne[0]; ++id) {
            const int32_t e = expert_of(id, token);
            assert(e >= 0 && e < n_all_experts);
            p.end[e]++;
        }
    }
    int32_t n = 0, sum = 0;
    for (int32_t e = 0; e < n_all_experts; ++e) {
        if (p.end[e]) {
            p.expert[n++] = e;
        }
        sum += p.end[e];
        p.end[e] = sum - p.end[e]; // where its uses begin, and below where they end
    }
    for (int64_t token = 0; token < ids->ne[1]; ++token) {
        for (int64_t id = 0; id < ids->ne[0]; ++id) {
            p.uses[p.end[expert_of(id, token)]++] = { (int32_t) id, (int32_t) token };
        }
    }
    return n;
}

} // namespace
