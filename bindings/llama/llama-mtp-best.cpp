// The best tokens of output rows, picked where their logits are.

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-model.h"
#include "llama-mtp-guard.h"
#include "llama-mtp-head.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

// The first of the largest values of x, -1 if one of them is NaN. Lane by lane, so that compilers vectorize it.
static int32_t first_max(const float * x, int64_t n) {
    constexpr int n_lanes = 16;

    float   best[n_lanes];
    int32_t nan [n_lanes] = { 0 };
    std::fill(best, best + n_lanes, -INFINITY);

    int64_t i = 0;
    for (; i + n_lanes <= n; i += n_lanes) {
        for (int l = 0; l < n_lanes; ++l) {
            const float v = x[i + l];
            best[l]  = v > best[l] ? v : best[l];
            nan [l] |= v != v;
        }
    }
    for (; i < n; ++i) {
        best[0]  = x[i] > best[0] ? x[i] : best[0];
        nan [0] |= x[i] != x[i];
    }
    if (std::any_of(nan, nan + n_lanes, [](int32_t v) { return v != 0; })) {
        return -1;
    }
    return std::find(x, x + n - 1, *std::max_element(best, best + n_lanes)) - x;
}

// userdata: the draft head, in host memory; NULL: the vocabulary is whole
static void argmax_rows(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const ggml_tensor * src  = dst->src[0];
    const auto        * head = (const llama_mtp_head *) userdata;

    for (int64_t i = ith; i < src->ne[1]; i += nth) {
        const float * x   = (const float *) ((const char *) src->data + i*src->nb[1]);
        const float * end = x + src->ne[0];

        int32_t best = first_max(x, src->ne[0]);
        if (head && best >= 0) {
            const int32_t * ids   = (const int32_t *) head->ids->data;
            const float   * equal = x + best;

            best = ids[best];
            while (!head->ascending && (equal = std::find(equal + 1, end, *equal)) != end) {
                best = std::min(best, ids[equal - x]);
            }
        }
        ((int32_t *) dst->data)[i] = best;
    }
}

// I32 [n_rows]: the token for which each row of logits, F32 [n_vocab, n_rows], is largest; -1 (on a CPU): the row holds a
// NaN. ggml_argmax() of the CPU backend is scalar and runs on one thread: 248,320 logits take it as long as 1 % of a
// decode of a small model.
// column: receives the column of it, where that is not the CPU's work: one that there is, whatever the row holds.
ggml_tensor * llm_graph_context::build_mtp_argmax(ggml_tensor * logits, ggml_tensor ** column) const {
    const auto * head = cparams.mtp.draft_head();

    ggml_tensor * cur;
    if (cparams.mtp.indices_on_cpu) {
        cur = ggml_custom_4d(ctx0, GGML_TYPE_I32, logits->ne[1], 1, 1, 1, &logits, 1, argmax_rows, GGML_N_TASKS_MAX,
                const_cast<llama_mtp_head *>(head));
    } else {
        cur = ggml_argmax(ctx0, logits);
        if (head || column) {  // ggml_argmax() of CUDA gives -1 where there are only NaNs
            ggml_tensor * safe = ggml_clamp(ctx0, ggml_cast(ctx0, cur, GGML_TYPE_F32), 0.0f, logits->ne[0] - 1);
            safe = ggml_cast(ctx0, safe, GGML_TYPE_I32);
            if (head) {
                cur = ggml_reshape_1d(ctx0, ggml_get_rows(ctx0, head->ids, safe), logits->ne[1]);
            }
            if (column) {
                *column = safe;
            }
        }
    }
    cb(cur, "mtp_argmax", -1);
    return cur;
}

// The k largest values of each row, the largest first, of equals the first one first. Most values are below the k-th by far.
static void top_rows(ggml_tensor * dst, int ith, int nth, void * /*userdata*/) {
    constexpr int64_t n_block = 64;

    const ggml_tensor * src = dst->src[0];
    const int64_t n = src->ne[0];
    const int64_t k = dst->ne[0];

    using entry = std::pair<float, int32_t>;
    const auto better = [](const entry & a, const entry & b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<entry> top(k);  // a heap, the worst one first

    for (int64_t row = ith; row < src->ne[1]; row += nth) {
        const float * x = (const float *) ((const char *) src->data + row*src->nb[1]);

        for (int64_t i = 0; i < k; ++i) {
            top[i] = { x[i] == x[i] ? x[i] : -INFINITY, (int32_t) i };
        }
        std::make_heap(top.begin(), top.end(), better);

        for (int64_t begin = k; begin < n; begin += n_block) {
            const int64_t end = std::min(begin + n_block, n);

            bool any = false;
            for (int64_t i = begin; i < end; ++i) {
                any |= x[i] > top[0].first;
            }
            for (int64_t i = begin; any && i < end; ++i) {
                if (x[i] > top[0].first) {
                    std::pop_heap(top.begin(), top.end(), better);
                    top.back() = { x[i], (int32_t) i };
                    std::push_heap(top.begin(), top.end(), better);
                }
            }
        }
        std::sort_heap(top.begin(), top.end(), better);

        int32_t * ids = (int32_t *) ((char *) dst->data + row*dst->nb[1]);
        std::transform(top.begin(), top.end(), ids, [](const entry & e) { return e.second; });
    }
}

// The best tokens of each row of logits, F32 [n_vocab, n_rows], with their logits.
void llm_graph_context::build_mtp_candidates(ggml_tensor * logits) const {
    const auto * head = cparams.mtp.draft_head();

    const int64_t n_rows = logits->ne[1];
    const int64_t k      = std::min<int64_t>(cparams.mtp.n_best(), logits->ne[0]);
    if (k < 1) {
        return;
    }

    ggml_tensor * ids = cparams.mtp.indices_on_cpu
        ? ggml_custom_4d(ctx0, GGML_TYPE_I32, k, n_rows, 1, 1, &logits, 1, top_rows, GGML_N_TASKS_MAX, nullptr)
        : ggml_cont(ctx0, ggml_top_k(ctx0, logits, k));
    cb(ids, "mtp_top_k", -1);

    ggml_tensor * values = ggml_get_rows(ctx0, ggml_reshape_3d(ctx0, logits, 1, logits->ne[0], n_rows), ids);
    if (head) {
        ids = ggml_get_rows(ctx0, head->ids, ggml_reshape_1d(ctx0, ids, k*n_rows));
    }
    for (ggml_tensor * cur : { ids, values }) {
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);
    }
    res->t_best.push_back(ids);
    res->t_best_logits.push_back(values);
}

// The best tokens of all output rows, unless the graph has them already.
void llm_graph_context::build_mtp_greedy() const {
    if (cparams.mtp.greedy && res->t_logits && n_outputs > 0 && res->t_greedy.empty()) {
        ggml_tensor * cur = build_mtp_argmax(res->t_logits);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);
        res->t_greedy = { cur };
        build_mtp_candidates(res->t_logits);
    }
    if (cparams.mtp.n_kept > 0) {
        build_mtp_kept_ids();
    }
}

void llama_context::set_mtp_greedy(bool value) {
    cparams.mtp.greedy = value;
}

void llama_context::set_mtp_candidates(int32_t n) {
    cparams.mtp.n_candidates = std::clamp<int32_t>(n, 0, model.vocab.n_tokens());
}

// A batch follows. 0: the last one has failed.
void llama_context::mtp_begin_batch(uint32_t n_tokens, uint32_t n_outputs) {
    mtp_greedy_ids.assign(n_tokens, -1);
    mtp_n_kept = cparams.mtp.n_kept;
    if ((cparams.mtp.greedy || mtp_n_kept > 0) && mtp_greedy.size() < n_tokens + mtp_n_kept) {
        synchronize();  // a copy into it may be on its way
        mtp_greedy.resize(n_tokens + mtp_n_kept);
    }
    mtp_n_greedy = 0;

    const size_t n_candidates = cparams.mtp.greedy ? (size_t) cparams.mtp.n_candidates*n_outputs : 0;
    if (mtp_candidates.size() < n_candidates) {
        synchronize();
        mtp_candidates       .resize(n_candidates);
        mtp_candidates_logits.resize(n_candidates);
    }
    mtp_n_candidates = 0;
}

// Enqueue the copy of the candidates of a ubatch, which come after those of n_greedy rows.
void llama_context::mtp_get_candidates(const llm_graph_result & res) {
    size_t n_prev = (size_t) mtp_n_greedy*mtp_n_candidates;
    for (size_t i = 0; i < res.t_best.size(); ++i) {
        ggml_tensor * ids    = res.t_best[i];
        ggml_tensor * logits = res.t_best_logits[i];

        const size_t n = ggml_nelements(ids);
        mtp_n_candidates = logits->ne[1];
        GGML_ASSERT(n_prev + n <= mtp_candidates.size());

        ggml_backend_tensor_get_async(
                ggml_backend_sched_get_tensor_backend(sched.get(), ids), ids, mtp_candidates.data() + n_prev, 0, ggml_nbytes(ids));
        ggml_backend_tensor_get_async(
                ggml_backend_sched_get_tensor_backend(sched.get(), logits), logits, mtp_candidates_logits.data() + n_prev, 0,
                ggml_nbytes(logits));
        mtp_n_bytes_out += ggml_nbytes(ids) + ggml_nbytes(logits);
        n_prev += n;
    }
}

int32_t llama_context::mtp_get_candidates_ith(int32_t i, const llama_token ** ids, const float ** logits) {
    if (i < 0 || (size_t) i >= mtp_greedy_ids.size() || mtp_greedy_ids[i] < 0) {
        return 0;
    }
    mtp_wait();
    *ids    = mtp_candidates       .data() + (size_t) mtp_greedy_ids[i]*mtp_n_candidates;
    *logits = mtp_candidates_logits.data() + (size_t) mtp_greedy_ids[i]*mtp_n_candidates;
    return mtp_n_candidates;
}

// Enqueue the copy of the best tokens of a ubatch, behind drafts that were kept.
void llama_context::mtp_get_greedy(const llm_graph_result & res, const llama_ubatch & ubatch) {
    if (res.t_greedy.empty()) {
        return;
    }

    mtp_get_candidates(res);

    mtp_pending = true;
    int32_t n_prev = mtp_n_greedy;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        if (cparams.mtp.greedy && ubatch.output[i]) {
            mtp_greedy_ids[ubatch.data->batch_idxs[i]] = mtp_n_greedy++;
        }
    }

    for (auto * t : res.t_greedy) {
        ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched.get(), t);

        ggml_backend_tensor_get_async(backend, t, mtp_greedy.data() + n_prev, 0, ggml_nbytes(t));
        mtp_n_bytes_out += ggml_nbytes(t);
        n_prev += t->ne[0];
    }
    GGML_ASSERT(n_prev == mtp_n_kept + mtp_n_greedy);
}

// Wait until the host has what was copied, once.
void llama_context::mtp_wait() {
    if (mtp_pending) {
        synchronize();
    }
}

llama_token llama_context::mtp_get_greedy_ith(int32_t i) {
    if (i < 0 || (size_t) i >= mtp_greedy_ids.size() || mtp_greedy_ids[i] < 0) {
        return LLAMA_TOKEN_NULL;
    }
    mtp_wait();
    return mtp_greedy[mtp_n_kept + mtp_greedy_ids[i]];
}

void llama_mtp_set_greedy(llama_context * ctx, bool value) {
    ctx->set_mtp_greedy(value);
}

llama_token llama_mtp_get_greedy_ith(llama_context * ctx, int32_t i) {
    return llama_mtp_guard(__func__, LLAMA_TOKEN_NULL, [&] { return ctx->mtp_get_greedy_ith(i); });
}

void llama_mtp_set_candidates(llama_context * ctx, int32_t n) {
    ctx->set_mtp_candidates(n);
}

int32_t llama_mtp_get_candidates_ith(llama_context * ctx, int32_t i, const llama_token ** ids, const float ** logits) {
    return llama_mtp_guard(__func__, -1, [&] { return ctx->mtp_get_candidates_ith(i, ids, logits); });
}

uint64_t llama_mtp_get_output_bytes(const llama_context * ctx) {
    return ctx->mtp_get_output_bytes();
}
