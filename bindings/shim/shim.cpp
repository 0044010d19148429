#include "pyllama_shim.h"

#include "llama-mtp.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

void say(char * message, size_t n_message, const char * text) {
    if (message && n_message > 0) {
        snprintf(message, n_message, "%s", text);
    }
}

// Runs `body`; on an exception writes the reason and returns what `failed` makes of the code.
template <typename Body, typename Failed>
auto guarded(char * message, size_t n_message, Body body, Failed failed) -> decltype(body()) {
    say(message, n_message, "");
    try {
        return body();
    } catch (const std::bad_alloc &) {
        say(message, n_message, "out of memory");
        return failed(PYLLAMA_OUT_OF_MEMORY);
    } catch (const std::exception & err) {
        say(message, n_message, err.what());
        return failed(PYLLAMA_EXCEPTION);
    } catch (...) {
        say(message, n_message, "unknown C++ exception");
        return failed(PYLLAMA_EXCEPTION);
    }
}

// Adds entry i; false when llama_batch_ext refuses it.
bool add_entry(llama_batch_ext * batch, const pyllama_batch & e, int32_t i) {
    const int32_t idx = llama_batch_ext_add_token(batch, e.seq_id[i], e.token[i]);
    if (idx < 0 || !llama_batch_ext_set_pos(batch, idx, &e.pos[i])) {
        return false;
    }
    if (e.hidden) {
        const llama_embd row = { e.hidden + (size_t) i * e.n_embd, 1, (size_t) e.n_embd };
        // Upstream hands the MTP hidden state over in the embedding slot of a token
        // (common/speculative.cpp, draft-mtp); set_embd_state() is not implemented yet.
        if (!llama_batch_ext_set_embd_token(batch, idx, row)) {
            return false;
        }
    }
    return llama_batch_ext_set_output_logits(batch, idx, e.output[i] != 0);
}

// The row's candidates (llama_mtp_set_candidates), or all tokens, with their logits; the next call on this thread
// overwrites them. Throws where the row has neither.
llama_token_data_array row_candidates(llama_context * ctx, int32_t row) {
    static thread_local std::vector<llama_token_data> data;
    const llama_token * ids    = nullptr;
    const float       * logits = nullptr;
    const int32_t n_candidates = llama_mtp_get_candidates_ith(ctx, row, &ids, &logits);

    if (n_candidates == 0 && !(logits = llama_get_logits_ith(ctx, row))) {
        throw std::invalid_argument("the row has no logits");
    }
    data.resize(n_candidates ? n_candidates : llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
    for (size_t i = 0; i < data.size(); ++i) {
        data[i] = { n_candidates ? ids[i] : (llama_token) i, logits[i], 0.0f };
    }
    if (n_candidates) {  // as the sampler of the k best leaves them
        std::sort(data.begin(), data.end(), [](const llama_token_data & a, const llama_token_data & b) {
            return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
        });
    }
    return { data.data(), data.size(), -1, n_candidates > 0 };
}

} // namespace

void pyllama_log_discard(ggml_log_level, const char *, void *) {}

bool pyllama_set_small_batch(bool value) {
    bool known = false;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        void * set = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), "ggml_cpu_set_small_batch");
        if (set) {
            reinterpret_cast<void (*)(bool)>(set)(value);
            known = true;
        }
    }
    return known;
}

llama_model * pyllama_model_load(const char * path, llama_model_params params, char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_model_load_from_file(path, params); },
            [](int32_t) { return (llama_model *) nullptr; });
}

llama_context * pyllama_context_init(
        llama_model * model, llama_context_params params, char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_init_from_model(model, params); },
            [](int32_t) { return (llama_context *) nullptr; });
}

int32_t pyllama_tokenize(
        const llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special, char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_tokenize(vocab, text, n_text, tokens, n_tokens_max, add_special, parse_special); },
            [](int32_t) { return INT32_MIN; });
}

int32_t pyllama_decode(
        llama_context * ctx, llama_batch_ext * batch, const pyllama_batch * entries, char * message, size_t n_message) {
    return guarded(message, n_message, [&]() -> int32_t {
        llama_batch_ext_clear(batch);
        for (int32_t i = 0; i < entries->n_tokens; ++i) {
            if (!add_entry(batch, *entries, i)) {
                char text[128];
                snprintf(text, sizeof(text), "entry %d (token %d, sequence %d, position %d) was refused",
                        i, entries->token[i], entries->seq_id[i], entries->pos[i]);
                say(message, n_message, text);
                return PYLLAMA_BATCH_REFUSED;
            }
        }
        if (entries->hidden_row && !llama_mtp_set_hidden_rows(
                ctx, entries->hidden_ctx, entries->hidden_row, (size_t) entries->n_tokens)) {
            say(message, n_message, "the hidden rows were refused");
            return PYLLAMA_BATCH_REFUSED;
        }
        if (entries->n_chain > 0 && !llama_mtp_set_chain(ctx, entries->n_chain)) {
            say(message, n_message, "the chain was refused");
            return PYLLAMA_BATCH_REFUSED;
        }
        return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    }, [](int32_t code) { return code; });
}

size_t pyllama_state_seq_get(
        llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_state_seq_get_data_ext(ctx, dst, size, seq_id, flags); },
            [](int32_t) { return (size_t) 0; });
}

size_t pyllama_state_seq_set(
        llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_state_seq_set_data_ext(ctx, src, size, seq_id, flags); },
            [](int32_t) { return (size_t) 0; });
}

llama_sampler * pyllama_sampler_init_grammar(
        const llama_vocab * vocab, const char * grammar, char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_sampler_init_grammar(vocab, grammar, "root"); },
            [](int32_t) { return (llama_sampler *) nullptr; });
}

llama_token pyllama_sample(llama_sampler * chain, llama_context * ctx, int32_t row) {
    return guarded(nullptr, 0, [&]() -> llama_token {
        llama_token_data_array candidates = row_candidates(ctx, row);
        llama_sampler_apply(chain, &candidates);
        if (candidates.selected < 0 || candidates.selected >= (int64_t) candidates.size) {
            return PYLLAMA_EXCEPTION;
        }
        const llama_token_data & chosen = candidates.data[candidates.selected];
        if (std::isinf(chosen.logit)) {
            return PYLLAMA_NO_TOKEN;  // a grammar would end the process on it
        }
        llama_sampler_accept(chain, chosen.id);
        return chosen.id;
    }, [](int32_t code) { return code; });
}

int32_t pyllama_distribution(
        llama_sampler * chain, llama_context * ctx, int32_t row, int32_t * ids, float * logits, int32_t capacity) {
    return guarded(nullptr, 0, [&]() -> int32_t {
        llama_token_data_array candidates = row_candidates(ctx, row);
        for (int i = 0; i + 1 < llama_sampler_chain_n(chain); ++i) {
            llama_sampler_apply(llama_sampler_chain_get(chain, i), &candidates);
        }
        if (candidates.size > (size_t) capacity) {
            return PYLLAMA_BATCH_REFUSED;
        }
        for (size_t i = 0; i < candidates.size; ++i) {
            ids[i]    = candidates.data[i].id;
            logits[i] = candidates.data[i].logit;
        }
        return (int32_t) candidates.size;
    }, [](int32_t code) { return code; });
}

bool pyllama_abort_poll(void * p) {
    auto * interrupt = static_cast<pyllama_interrupt *>(p);
    const int64_t now = llama_time_us();
    if (now < interrupt->next_us) {
        return false;
    }
    interrupt->next_us = now + interrupt->period_us;
    return interrupt->poll && interrupt->poll(interrupt->data) != 0;
}

bool pyllama_trace_node(ggml_tensor * node, bool ask, void * p) {
    auto * trace = static_cast<pyllama_trace *>(p);
    if (!ask) {
        return true;  // go on
    }
    if (trace->n < trace->capacity) {
        pyllama_node & entry = trace->node[trace->n];
        snprintf(entry.name, sizeof(entry.name), "%s", node->name);
        snprintf(entry.op,   sizeof(entry.op),   "%s", ggml_op_name(node->op));
        std::copy(node->ne, node->ne + 4, entry.ne);
    }
    ++trace->n;
    return false;  // its data is not asked for
}
