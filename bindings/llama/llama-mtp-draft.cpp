// Drafting in the trunk's context: the chain, and the graphs of a few tokens that a round finds again.

#include "llama-context.h"

#include "llama-batch.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama-mtp-guard.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

// What graphs do in this scope, besides what they do for each batch.
struct request_scope {
    request_scope(llama_cparams & cparams, const llama_mtp_request & request) : cparams(cparams) { cparams.mtp.request(request); }
    ~request_scope() { cparams.mtp.request({}); }

    llama_cparams & cparams;
};

static llama_memory_hybrid * hybrid(llama_memory_i * memory) {
    return static_cast<llama_memory_hybrid *>(memory);
}

// Take up the graphs of this shape.
void llama_context::mtp_select_shape(llama_graph_shape shape) {
    constexpr uint32_t n_tokens_max = 64;  // of a shape of its own, but for chains
    constexpr size_t   n_slots_max  = 49;

    if (!cparams.mtp.in_trunk) {
        return;
    }
    if (shape.n_steps == 0 && (shape.n_tokens > n_tokens_max || shape.n_outputs < shape.n_tokens)) {
        shape = {};  // of a prompt
    }
    auto & prompt = graph_slots.begin()->second;
    auto   it     = graph_slots.find(shape);
    if (it == graph_slots.end()) {
        if (graph_slots.size() == 1) {  // what was reserved last is the trunk's
            // and a prompt's, which has no nodes for tokens that may be taken back
            mtp_max_nodes = 2*ggml_graph_n_nodes(gf_res_reserve->get_gf()) + model.n_tensors() + 16*model.hparams.n_layer() + 3*cparams.n_rs_seq;
            mtp_lent      = backend_buf_exp_size;
            for (size_t i = 0; i < mtp_lent.size(); ++i) {
                mtp_lent[i] -= ggml_backend_sched_get_inputs_size(sched.get(), backend_ptrs[i]);
            }
        }
        // nodes of the trunk and as many tensors that are none; the block's, with adapters, come once for each step
        size_t n_step = 128;
        for (const auto & [adapter, _] : *loras) {
            n_step += 6*adapter->ab_map.size();
        }
        const size_t max_nodes = mtp_max_nodes + (shape.n_steps + 1)*n_step;

        llama_graph_slot fresh;
        fresh.sched.reset(ggml_backend_sched_new(backend_ptrs.data(), backend_buft.data(), backend_ptrs.size(), max_nodes,
                false, cparams.op_offload));
        ggml_backend_sched_set_copy_callback(fresh.sched.get(), sched_copy_experts, this);
        if (!cparams.pipeline_parallel) {
            ggml_backend_sched_borrow(fresh.sched.get(), prompt.sched.get());
        }
        fresh.prev[1].reset(new llm_graph_result(max_nodes));  // with outputs
        it = graph_slots.emplace(shape, std::move(fresh)).first;
    }
    graph_slot = &it->second;
    graph_slot->last_used = ++mtp_n_selected;

    if (graph_slots.size() > n_slots_max) {
        const auto unused = std::min_element(std::next(graph_slots.begin()), graph_slots.end(),
                [](const auto & a, const auto & b) { return a.second.last_used < b.second.last_used; });
        ggml_backend_sched_synchronize(unused->second.sched.get());
        graph_slots.erase(unused);
    }
}

// Before all graphs are reserved anew; nothing is being computed.
void llama_context::mtp_drop_shapes() {
    graph_slots.erase(std::next(graph_slots.begin()), graph_slots.end());
    graph_slot = &graph_slots.begin()->second;
}

llama_mtp_request llama_context::mtp_chain_request(int32_t n_steps, int32_t n_candidates, bool keep) {
    cparams.mtp.carry = hybrid(memory.get())->get_mem_recr()->carry;

    llama_mtp_request request;
    request.chain              = n_steps;
    request.n_chain_candidates = n_candidates;
    request.keep               = keep;
    request.given              = &mtp_given;
    return request;
}

// What the CPU backend needs beside the graph's buffers: the largest work buffer of any node that no device computes.
void llama_context::mtp_count_work(ggml_cgraph * gf) {
    ggml_backend_reg_t reg  = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_cpu));
    const auto         size = (size_t (*)(ggml_tensor *, int)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_work_size");
    const auto on_device = [](const ggml_tensor * src) {
        const ggml_tensor * owner = src && src->view_src ? src->view_src : src;
        return owner && owner->buffer && !ggml_backend_buffer_is_host(owner->buffer);
    };
    for (int i = 0; size && i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (std::none_of(std::begin(node->src), std::end(node->src), on_device)) {
            mtp_work_size = std::max(mtp_work_size, size(node, std::max(cparams.n_threads, cparams.n_threads_batch)));
        }
    }
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
    const auto reserve = [&](const llama_mtp_request & request, uint32_t n_tokens) {
        std::vector<size_t> sizes(backend_ptrs.size());

        const request_scope scope(cparams, request);
        mtp_select_shape({ (uint32_t) request.chain, n_tokens, n_seqs, n_tokens, request.keep || request.n_kept > 0 });
        ok = ok && graph_reserve(n_tokens, n_seqs, n_tokens, request.chain > 0 ? block.get() : trunk.get(), no_alloc,
                no_alloc ? sizes.data() : nullptr);
        for (size_t i = 0; i < sizes.size(); ++i) {
            const size_t inputs   = ggml_backend_sched_get_inputs_size(sched.get(), backend_ptrs[i]);
            const bool   borrowed = !cparams.pipeline_parallel && sizes[i] - inputs <= mtp_lent[i];
            backend_buf_exp_size[i] += borrowed ? inputs : sizes[i];
        }
    };
    // on a device, where it gains something, a pass behind a chain, too; of several sequences these are more shapes than are kept
    const bool at_once = n_steps > 0 && cparams.n_seq_max == 1 && !cparams.mtp.indices_on_cpu && mtp_can_keep(1, n_steps);

    reserve({}, n_seqs*(n_steps + 1));
    if (at_once) {
        llama_mtp_request pass;
        pass.n_kept = n_steps;
        reserve(pass, n_steps + 1);
    }
    if (n_steps > 0) {
        reserve(mtp_chain_request(n_steps, 0, false), n_seqs*n_steps);
    }
    if (at_once) {
        reserve(mtp_chain_request(n_steps, 0, true), n_steps);
    }
    mtp_select_shape({});
    return ok;
}

// Whether a chain's indices, I32, reach every value of a transposed V cache.
static constexpr bool chain_can_index(uint64_t n_embd_v, uint64_t n_cells) {
    return n_embd_v*n_cells <= (uint64_t) INT32_MAX + 1;
}
static_assert( chain_can_index(1024, 2097152));
static_assert(!chain_can_index(1024, 2097153));
static_assert(!chain_can_index(1u << 31, 1u << 31));

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
        const float * noise, const float * scale, bool keep, llama_token * drafts) {
    const bool one_stream = cparams.kv_unified || cparams.n_seq_max == 1;
    if (!cparams.mtp.in_trunk || !one_stream || n_seqs < 1 || n_steps < 1) {
        LLAMA_LOG_ERROR("%s: no drafts of %d steps for %d sequences here\n", __func__, n_steps, n_seqs);
        return -1;
    }
    auto * kv = hybrid(memory.get())->get_mem_attn();
    auto * rs = hybrid(memory.get())->get_mem_recr();

    if (!cparams.flash_attn && !chain_can_index(model.hparams.n_embd_v_gqa_max(), kv->get_size())) {
        LLAMA_LOG_ERROR("%s: no drafts in a cache of %u cells without flash attention\n", __func__, kv->get_size());
        return -1;
    }
    mtp_given = { {}, mtp_n_window, noise, scale };
    for (int32_t s = 0; s < n_seqs; ++s) {
        mtp_given.carry_rows.push_back(rs->carry_row(seqs[s]));
        const bool again = std::find(seqs, seqs + s, seqs[s]) != seqs + s;
        if (again || mtp_given.carry_rows.back() < 0 || tokens[s] < 0 || tokens[s] >= (llama_token) model.vocab.n_tokens()) {
            LLAMA_LOG_ERROR("%s: sequence %d is empty, or there twice, or %d is no token\n", __func__, seqs[s], tokens[s]);
            return -1;
        }
    }
    sched_reserve();
    memory_update(false);  // K may wait for a shift

    const auto ubatch = chain_of(*kv, tokens, seqs, n_seqs, n_steps);

    // afterwards its cells are free again, and outputs are those of the last decode
    struct restore_scope {
        llama_kv_cache & kv;
        const llama_ubatch & ubatch;
        uint32_t & n_outputs;
        const uint32_t before = n_outputs;

        ~restore_scope() {
            n_outputs = before;
            for (uint32_t s = 0; s < ubatch.n_seqs_unq; ++s) {
                kv.seq_rm(ubatch.seq_id_unq[s], ubatch.pos[s], -1);
            }
        }
    } const restore { *kv, ubatch, n_outputs };

    auto sinfos = kv->prepare({ ubatch });
    if (sinfos.empty()) {
        return 1;
    }
    llama_kv_cache_context mctx(kv, std::move(sinfos), { ubatch });

    auto request = mtp_chain_request(n_steps, std::clamp<int32_t>(n_candidates, 0, model.vocab.n_tokens()), keep);
    request.drawn = noise != nullptr;

    const request_scope scope(cparams, request);
    n_outputs = ubatch.n_tokens;
    mtp_select_shape({ (uint32_t) n_steps, ubatch.n_tokens, (uint32_t) n_seqs, ubatch.n_tokens, keep });

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

// Whether the trunk's embeddings are those that a chain looks up, there is a place to keep those of a pass, and the memory can go
// back by its drafts.
bool llama_context::mtp_can_keep(int32_t n_seqs, int32_t n_steps) {
    if (n_seqs < 1 || (uint32_t) n_seqs > cparams.n_seq_max || n_steps < 1 || (uint32_t) n_steps > cparams.n_rs_seq) {
        return false;
    }
    const bool one_stream = cparams.kv_unified || cparams.n_seq_max == 1;
    if (!cparams.mtp.in_trunk || !one_stream || cparams.embeddings || (uint32_t) n_seqs*(n_steps + 1) > cparams.n_ubatch ||
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
            mtp_kept = std::make_unique<llama_mtp_kept>(model, n_max);
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
    if (!mtp_can_keep(n_seqs, n_steps)) {
        LLAMA_LOG_ERROR("%s: no pass of %d drafts for %d sequences behind a chain here\n", __func__, n_steps, n_seqs);
        return -1;
    }
    if (const int32_t code = mtp_draft(tokens, seqs, n_seqs, n_steps, 0, nullptr, nullptr, /*keep =*/ true, nullptr); code != 0) {
        return code;
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

    llama_mtp_request pass;
    pass.n_kept = n_seqs*n_steps;
    const request_scope scope(cparams, pass);

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
    std::copy_n(mtp_greedy.begin(), pass.n_kept, drafts);
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
    return llama_mtp_guard(__func__, false, [&] { return ctx->mtp_can_keep(n_seqs, n_steps); });
}

int32_t llama_mtp_draft_and_decode(
        llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        llama_token * drafts) {
    return llama_mtp_guard(__func__, -3, [&] { return ctx->mtp_draft_and_decode(tokens, seqs, n_seqs, n_steps, drafts); });
}

int32_t llama_mtp_draft(
        llama_context * ctx, const llama_token * tokens, const llama_seq_id * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, llama_token * drafts) {
    return llama_mtp_guard(__func__, -3,
            [&] { return ctx->mtp_draft(tokens, seqs, n_seqs, n_steps, n_candidates, noise, scale, /*keep =*/ false, drafts); });
}

const float * llama_mtp_get_draft_logits(const llama_context * ctx, int32_t * n) {
    return ctx->mtp_get_draft_logits(n);
}

bool llama_mtp_reserve(llama_context * ctx, int32_t n_seqs, int32_t n_steps) {
    return llama_mtp_guard(__func__, false, [&] { return n_seqs > 0 && n_steps >= 0 && ctx->mtp_reserve(n_seqs, n_steps); });
}

uint64_t llama_mtp_get_n_graphs_built(const llama_context * ctx) {
    return ctx->mtp_get_n_built();
}
