#include "pyllama_shim.h"

#include "llama-mtp.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

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

} // namespace

void pyllama_log_discard(ggml_log_level, const char *, void *) {}

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

llama_token pyllama_sample(llama_sampler * chain, llama_context * ctx, int32_t row) {
    return guarded(nullptr, 0,
            [&] { return llama_sampler_sample(chain, ctx, row); },
            [](int32_t) { return (llama_token) LLAMA_TOKEN_NULL; });
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
