// Drafting in the trunk's context: the chain, and the graphs of a few tokens that a round finds again.

#include "llama-context.h"

#include "llama-batch.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>

// Runs a function at the end of a scope, also where an exception ends it.
template <typename F>
struct scope_guard {
    explicit scope_guard(F leave) : leave(std::move(leave)) {}
    ~scope_guard() { leave(); }

    scope_guard(const scope_guard &) = delete;
    scope_guard & operator=(const scope_guard &) = delete;

    F leave;
};

static llama_memory_hybrid * hybrid(llama_memory_i * memory) {
    return static_cast<llama_memory_hybrid *>(memory);
}

// The graphs at hand are put away, those of this shape are taken up.
void llama_context::mtp_select_shape(mtp_shape shape) {
    constexpr uint32_t n_tokens_max = 64;  // of a shape of its own, but for chains
    constexpr size_t   n_shapes_max = 48;

    if (!cparams.mtp.in_trunk) {
        return;
    }
    if (shape.n_steps == 0 && (shape.n_tokens > n_tokens_max || shape.n_outputs < shape.n_tokens)) {
        shape = {};  // of a prompt
    }
    if (shape == mtp_at_hand) {
        return;
    }
    if (mtp_pool.empty()) {  // what was reserved last is the trunk's
        // and a prompt's, which has no nodes for tokens that may be taken back
        mtp_max_nodes = 2*ggml_graph_n_nodes(gf_res_reserve->get_gf()) + model.n_tensors() + 16*model.hparams.n_layer() + 3*cparams.n_rs_seq;
        mtp_lent      = backend_buf_exp_size;
    }

    // what may fail comes before the first change
    auto taken = mtp_pool.find(shape);
    if (taken == mtp_pool.end()) {
        // nodes of the trunk and as many tensors that are none; the block's, with adapters, come once for each step
        size_t n_step = 128;
        for (const auto & [adapter, _] : *loras) {
            n_step += 6*adapter->ab_map.size();
        }
        const size_t max_nodes = mtp_max_nodes + (shape.n_steps + 1)*n_step;

        mtp_graphs_of_shape fresh;
        fresh.sched.reset(ggml_backend_sched_new(backend_ptrs.data(), backend_buft.data(), backend_ptrs.size(), max_nodes,
                false, cparams.op_offload));
        if (!fresh.sched) {
            throw std::bad_alloc();
        }
        ggml_backend_sched_set_copy_callback(fresh.sched.get(), sched_copy_experts, this);
        if (!cparams.pipeline_parallel) {
            const auto trunk = mtp_pool.find({});
            ggml_backend_sched_borrow(fresh.sched.get(), (trunk == mtp_pool.end() ? sched : trunk->second.sched).get());
        }
        fresh.prev[1].reset(new llm_graph_result(max_nodes));  // with outputs
        taken = mtp_pool.emplace(shape, std::move(fresh)).first;
    }
    const auto away = mtp_pool.try_emplace(mtp_at_hand).first;

    away->second.sched     = std::move(sched);
    away->second.prev      = std::move(gf_res_prev);
    away->second.active    = gf_res_prev_active;
    away->second.last_used = ++mtp_n_selected;

    sched              = std::move(taken->second.sched);
    gf_res_prev        = std::move(taken->second.prev);
    gf_res_prev_active = taken->second.active;
    mtp_pool.erase(taken);
    mtp_at_hand = shape;

    if (mtp_pool.size() > n_shapes_max) {
        const auto unused = std::min_element(mtp_pool.begin(), mtp_pool.end(), [](const auto & a, const auto & b) {
            const bool a_kept = a.first == mtp_shape{};
            const bool b_kept = b.first == mtp_shape{};
            return a_kept != b_kept ? b_kept : a.second.last_used < b.second.last_used;
        });
        ggml_backend_sched_synchronize(unused->second.sched.get());
        mtp_pool.erase(unused);
    }
}

// Before all graphs are reserved anew; nothing is being computed.
void llama_context::mtp_clear_pool() {
    mtp_pool.clear();
    mtp_at_hand = {};
}

bool llama_context::mtp_reserve(uint32_t n_seqs, uint32_t n_steps) {
    if (!cparams.mtp.in_trunk || n_seqs < 1 || n_seqs > cparams.n_seq_max) {
        return false;
    }
    sched_reserve();

    const bool no_alloc = model.hparams.no_alloc;
    const auto trunk    = memory->init_full();
    const auto block    = hybrid(memory.get())->get_mem_attn()->init_full();

    bool ok = true;
    const auto reserve = [&](uint32_t steps, uint32_t n_tokens) {
        std::vector<size_t> sizes(backend_ptrs.size());

        if (steps > 0) {
            mtp_prepare_draft(steps, 0);
        }
        mtp_select_shape({ steps, n_tokens, n_seqs, n_tokens, steps > 0 ? cparams.mtp.keep : cparams.mtp.n_kept > 0 });
        const auto swap = [this, pooled = !(mtp_at_hand == mtp_shape{})] {
            if (pooled) {
                std::swap(gf_res_reserve, gf_res_prev[1]);  // which has room for the graph
            }
        };
        swap();
        const scope_guard swap_back(swap);
        ok = ok && graph_reserve(n_tokens, n_seqs, n_tokens, steps > 0 ? block.get() : trunk.get(), no_alloc,
                no_alloc ? sizes.data() : nullptr);
        for (size_t i = 0; i < sizes.size(); ++i) {
            const bool borrowed = !cparams.pipeline_parallel && sizes[i] <= mtp_lent[i];
            backend_buf_exp_size[i] += borrowed ? 0 : sizes[i];
        }
    };
    // on a device, where it gains something, a pass behind a chain, too; of several sequences these are more shapes than are kept
    const bool at_once = n_steps > 0 && cparams.n_seq_max == 1 && !cparams.mtp.indices_on_cpu && mtp_can_keep(n_steps + 1);
    {
        const scope_guard options([this, before = cparams.mtp] { cparams.mtp = before; });

        const auto both = [&](uint32_t steps, uint32_t n_tokens) {
            reserve(steps, n_tokens);
            if (at_once) {
                cparams.mtp.keep   = steps > 0;
                cparams.mtp.n_kept = steps > 0 ? 0 : n_steps;
                reserve(steps, n_tokens);
                cparams.mtp.keep   = false;
                cparams.mtp.n_kept = 0;
            }
        };
        both(0, n_seqs*(n_steps + 1));
        if (n_steps > 0) {
            both(n_steps, n_seqs*n_steps);
        }
    }
    mtp_select_shape({});
    return ok;
}

// What graphs of chains look at; nothing else may make a difference between them.
void llama_context::mtp_prepare_draft(int32_t n_steps, int32_t n_candidates) {
    cparams.mtp.chain              = n_steps;
    cparams.mtp.carry              = hybrid(memory.get())->get_mem_recr()->carry;
    cparams.mtp.given              = &mtp_given;
    cparams.mtp.drawn              = mtp_given.noise != nullptr;
    cparams.mtp.need_embd_pre_norm = false;
    set_mtp_greedy(true);
    set_mtp_candidates(n_candidates);
}

// A batch of the steps, one after the other: the next position of every sequence, then the one after it, and so on.
static llama_ubatch chain_of(
        const llama_kv_cache & kv, const llama_token * tokens, const llama_seq_id * seqs, uint32_t n_seqs, uint32_t n_steps) {
    const uint32_t n = n_seqs*n_steps;

    auto data = std::make_shared<llama_ubatch::data_t>();
    data->seq_id_unq.assign(seqs, seqs + n_seqs);
    data->seq_idx   .assign(LLAMA_MAX_SEQ, -1);
    for (uint32_t s = 0; s < n_seqs; ++s) {
        data->seq_idx[seqs[s]] = s;
    }
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t s = i % n_seqs;
        data->token     .push_back(tokens[s]);
        data->pos       .push_back(kv.seq_pos_max(seqs[s]) + 1 + i/n_seqs);
        data->n_seq_id  .push_back(1);
        data->seq_id    .push_back(&data->seq_id_unq[s]);
        data->output    .push_back(1);
        data->batch_idxs.push_back(i);
    }
    return {
        /*.b_equal_seqs =*/ false,
        /*.n_tokens     =*/ n,
        /*.n_seq_tokens =*/ 1,
        /*.n_seqs       =*/ n,
        /*.n_seqs_unq   =*/ n_seqs,
        /*.n_pos        =*/ 1,
        /*.token        =*/ data->token.data(),
        /*.embd         =*/ nullptr,
        /*.embd_state   =*/ nullptr,
        /*.pos          =*/ data->pos.data(),
        /*.n_seq_id     =*/ data->n_seq_id.data(),
        /*.seq_id       =*/ data->seq_id.data(),
        /*.seq_id_unq   =*/ data->seq_id_unq.data(),
        /*.seq_idx      =*/ data->seq_idx.data(),
        /*.output       =*/ data->output.data(),
        /*.type         =*/ nullptr,
        /*.decision_order =*/ nullptr,
        /*.data         =*/ data,
    };
}

int32_t llama_context::mtp_draft(
        const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps, int32_t n_candidates,
        const float * noise, const float * scale, llama_token * drafts) {
    const bool one_stream = cparams.kv_unified || cparams.n_seq_max == 1;
    if (!cparams.mtp.in_trunk || !one_stream || n_seqs < 1 || n_steps < 1) {
        LLAMA_LOG_ERROR("%s: no drafts of %d steps for %d sequences here\n", __func__, n_steps, n_seqs);
        return -1;
    }
    auto * kv = hybrid(memory.get())->get_mem_attn();
    auto * rs = hybrid(memory.get())->get_mem_recr();

    mtp_given.carry_rows.clear();
    for (int32_t s = 0; s < n_seqs; ++s) {
        mtp_given.carry_rows.push_back(rs->carry_row(seqs[s]));
        const bool again = std::find(seqs, seqs + s, seqs[s]) != seqs + s;
        if (again || mtp_given.carry_rows.back() < 0 || tokens[s] < 0 || tokens[s] >= (llama_token) model.vocab.n_tokens()) {
            LLAMA_LOG_ERROR("%s: sequence %d is empty, or there twice, or %d is no token\n", __func__, seqs[s], tokens[s]);
            return -1;
        }
    }
    sched_reserve();

    const auto ubatch = chain_of(*kv, tokens, seqs, n_seqs, n_steps);
    const scope_guard restore([&, before = std::make_pair(cparams.mtp, n_outputs)] {
        std::tie(cparams.mtp, n_outputs) = before;
        mtp_given = {};
        for (int32_t s = 0; s < n_seqs; ++s) {
            kv->seq_rm(seqs[s], ubatch.pos[s], -1);
        }
    });
    auto sinfos = kv->prepare({ ubatch });
    if (sinfos.empty()) {
        return 1;
    }
    llama_kv_cache_context mctx(kv, std::move(sinfos), { ubatch });

    mtp_given.n_window = mtp_n_window;
    mtp_given.noise = noise;
    mtp_given.scale = scale;
    mtp_prepare_draft(n_steps, n_candidates);
    n_outputs = ubatch.n_tokens;
    mtp_select_shape({ (uint32_t) n_steps, ubatch.n_tokens, (uint32_t) n_seqs, ubatch.n_tokens, cparams.mtp.keep });

    ggml_status status = GGML_STATUS_FAILED;
    const auto * res = process_ubatch(ubatch, LLM_GRAPH_TYPE_DECODER_MTP, &mctx, status);
    if (res && drafts) {
        mtp_get_drafts(*res, drafts);
    }
    return status == GGML_STATUS_SUCCESS ? 0 : status == GGML_STATUS_ABORTED ? 2 : status == GGML_STATUS_ALLOC_FAILED ? -2 : -3;
}

// What a chain has picked, once it has: waits for it.
void llama_context::mtp_get_drafts(const llm_graph_result & res, llama_token * drafts) {
    const auto get = [&](const std::vector<ggml_tensor *> & parts, auto * dst) {
        for (auto * t : parts) {
            ggml_backend_tensor_get_async(ggml_backend_sched_get_tensor_backend(sched.get(), t), t, dst, 0, ggml_nbytes(t));
            mtp_n_bytes_out += ggml_nbytes(t);
            dst += ggml_nelements(t);
        }
    };
    size_t n_logits = 0;
    for (const auto * t : res.t_best_logits) {
        n_logits += ggml_nelements(t);
    }
    mtp_draft_logits.resize(n_logits);

    get(res.t_greedy,      drafts);
    get(res.t_best_logits, mtp_draft_logits.data());
    synchronize();
}

// Whether the trunk's embeddings are those that a chain looks up, and there is a place to keep those of so many tokens.
bool llama_context::mtp_can_keep(uint32_t n_tokens) {
    const bool one_stream = cparams.kv_unified || cparams.n_seq_max == 1;
    if (!cparams.mtp.in_trunk || !one_stream || n_tokens > cparams.n_ubatch || n_tokens > cparams.n_seq_max*(cparams.n_rs_seq + 1) ||
            model.layers[model.hparams.n_layer()].nextn.embed_tokens || model.hparams.n_embd_inp() != model.hparams.n_embd) {
        return false;
    }
    for (const auto & [adapter, _] : *loras) {
        if (adapter->get_weight(model.tok_embd)) {
            return false;
        }
    }
    if (!mtp_kept) {
        try {
            const uint32_t n_max = cparams.n_seq_max*(cparams.n_rs_seq + 1);
            mtp_kept = std::make_unique<llama_mtp_tap>(model, n_max, 2*n_max);
        } catch (const std::bad_alloc &) {
            return false;
        }
        cparams.mtp.kept     = mtp_kept->rows;
        cparams.mtp.kept_ids = mtp_kept->ids;
    }
    return true;
}

int32_t llama_context::mtp_draft_and_decode(
        const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps, llama_token * drafts) {
    const uint32_t n_rows = n_steps + 1;
    if (n_seqs < 1 || n_steps < 1 || !mtp_can_keep(n_seqs*n_rows)) {
        LLAMA_LOG_ERROR("%s: no pass of %d drafts for %d sequences behind a chain here\n", __func__, n_steps, n_seqs);
        return -1;
    }
    {
        const scope_guard leave([this] { cparams.mtp.keep = false; });
        cparams.mtp.keep = true;

        const int32_t code = mtp_draft(tokens, seqs, n_seqs, n_steps, 0, nullptr, nullptr, nullptr);
        if (code != 0) {
            return code;
        }
    }
    // tokens that nobody looks at stand for the drafts
    std::vector<llama_token> ids;
    std::vector<llama_pos>   pos;
    std::vector<llama_seq_id> seq_of;
    for (int32_t s = 0; s < n_seqs; ++s) {
        const llama_pos first = memory->seq_pos_max(seqs[s]) + 1;
        for (uint32_t i = 0; i < n_rows; ++i) {
            ids   .push_back(tokens[s]);
            pos   .push_back(first + i);
            seq_of.push_back(seqs[s]);
        }
    }
    std::vector<llama_seq_id *> seq_ids;
    for (auto & id : seq_of) {
        seq_ids.push_back(&id);
    }
    std::vector<int32_t> n_seq_id(ids.size(), 1);
    std::vector<int8_t>  outputs (ids.size(), 1);

    const scope_guard leave([this] { cparams.mtp.n_kept = 0; });
    cparams.mtp.n_kept = n_seqs*n_steps;

    llama_batch batch = {};
    batch.n_tokens = ids.size();
    batch.token    = ids.data();
    batch.pos      = pos.data();
    batch.n_seq_id = n_seq_id.data();
    batch.seq_id   = seq_ids.data();
    batch.logits   = outputs.data();

    const int32_t code = decode(batch);
    synchronize();
    if (code != 0) {
        return code;
    }
    std::copy_n(mtp_greedy.begin(), cparams.mtp.n_kept, drafts);
    for (int32_t s = 0; s < n_seqs; ++s) {
        std::vector<llama_token> verified;
        for (int32_t i = 0; i < n_steps; ++i) {
            verified.push_back(drafts[i*n_seqs + s]);
        }
        hybrid(memory.get())->get_mem_attn()->set_tokens(seqs[s], pos[s*n_rows + 1], verified);
    }
    return code;
}

bool llama_mtp_can_draft_and_decode(llama_context * ctx, int32_t n_seqs, int32_t n_steps) {
    return n_seqs > 0 && n_steps > 0 && ctx->mtp_can_keep(n_seqs*(n_steps + 1));
}

int32_t llama_mtp_draft_and_decode(
        llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        llama_token * drafts) {
    return ctx->mtp_draft_and_decode(tokens, seqs, n_seqs, n_steps, drafts);
}

int32_t llama_mtp_draft(
        llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, llama_token * drafts) {
    return ctx->mtp_draft(tokens, seqs, n_seqs, n_steps, n_candidates, noise, scale, drafts);
}

const float * llama_mtp_get_draft_logits(const llama_context * ctx, int32_t * n) {
    return ctx->mtp_get_draft_logits(n);
}

bool llama_mtp_reserve(llama_context * ctx, int32_t n_seqs, int32_t n_steps) {
    return n_seqs > 0 && n_steps >= 0 && ctx->mtp_reserve(n_seqs, n_steps);
}

uint64_t llama_mtp_get_n_graphs_built(const llama_context * ctx) {
    return ctx->mtp_get_n_built();
}
