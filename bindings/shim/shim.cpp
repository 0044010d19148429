#include "pyllama_shim.h"

#include "cpu_switches.h"
#include "llama-mtp.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <regex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#else
#include <dlfcn.h>
#include <execinfo.h>
#endif

namespace {

// In a process with a limit, a guarded call begins only if this much address space is free. So a large allocation fails
// first, which is checked, before a small one, which often is not.
constexpr size_t RESERVE = 8u << 20;

// A failed assertion, or a failed allocation that ggml gives up on.
struct aborted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A call that was not begun.
struct refused : std::runtime_error {
    int32_t code;
    refused(int32_t code, const char * why) : std::runtime_error(why), code(code) {}
};

thread_local int guards      = 0;  // guarded calls on this thread
thread_local bool gave_up    = false;  // an assertion of ggml has failed in the innermost one
thread_local int n_computing = 0;  // threads that the innermost one computes graphs with; 0: not known

std::atomic<int64_t> give_up_at{INT64_MAX};  // see pyllama_give_up_waiting()

// Never freed: a thread may wait for a worker while the process ends.
auto & silence_mutex    = *new std::mutex;
auto & silence_limits_s = *new std::map<std::string, uint32_t>;  // by worker; see pyllama_limit_silence()

struct guard {
    guard()  { ++guards; n_computing = 0; gave_up = false; llama_mtp_get_failure(nullptr); }
    ~guard() { --guards; }
};

// Whether other threads compute the same graph as this one, and wait for it at the next barrier.
bool computes_with_others() {
#ifdef _OPENMP
    return omp_in_parallel();
#else
    if (n_computing == 1) {
        return false;
    }
    void * frames[64];
    const int n_frames = backtrace(frames, 64);
    for (int i = 0; i < n_frames; ++i) {
        Dl_info info = {};
        if (dladdr(frames[i], &info) && info.dli_sname && strcmp(info.dli_sname, "ggml_graph_compute") == 0) {
            return true;
        }
    }
    return n_frames == 64;
#endif
}

// ggml calls this before it ends the process. If this thread is in a guarded call, the exception ends that call instead.
// An exception must not leave a computation of several threads: the others would wait for ever. The process then ends, as
// it does for an assertion on one of those, which have no such call.
void on_abort(const char * message) {
    if (guards > 0 && !computes_with_others()) {
        gave_up = true;
        throw aborted(message);
    }
    fprintf(stderr, "%s\n", message);
}

// Throws if the address space is limited and less than RESERVE is left.
void require_room() {
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return;
    }
    void * room = mmap(nullptr, RESERVE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        throw refused(PYLLAMA_NO_ROOM, "out of memory: the limit of the address space is reached");
    }
    munmap(room, RESERVE);
}

// Called before graphs are computed. Makes the OpenMP threads for the next computation on this thread, or throws. The OpenMP runtime itself ends the process
// when it gets no thread, and in a forked process it waits for ever for the parent's threads.
void require_threads(int n_threads) {
    n_computing = n_threads;
#ifdef _OPENMP
    static thread_local int   n_ready = 1;
    static thread_local pid_t owner   = 0;

    if (n_threads <= 1) {
        return;
    }
    if (n_ready > 1 && owner != getpid()) {
        throw refused(PYLLAMA_FORKED, "this process was forked from one that had computed with several threads, and "
                "lacks them");
    }
    if (n_threads <= n_ready) {
        return;
    }
    std::vector<std::thread> trial;
    trial.reserve(n_threads);
    try {
        for (int i = 1; i < n_threads; ++i) {
            trial.emplace_back([] { usleep(1000); });  // all at once; the C library keeps their stacks for OpenMP
        }
    } catch (const std::system_error &) {
        for (auto & thread : trial) {
            thread.join();
        }
        throw refused(PYLLAMA_NO_ROOM, "no memory for the stacks of more threads, or a limit on their number");
    }
    for (auto & thread : trial) {
        thread.join();
    }
    #pragma omp parallel num_threads(n_threads)
    {
        #pragma omp barrier
    }
    n_ready = n_threads;
    owner   = getpid();
#endif
}

void say(char * message, size_t n_message, const char * text) {
    if (message && n_message > 0) {
        snprintf(message, n_message, "%s", text);
    }
}

// Runs `body`; on an exception, writes the reason and returns what `failed` makes of the code.
template <typename Body, typename Failed>
auto guarded(char * message, size_t n_message, Body body, Failed failed) -> decltype(body()) {
    say(message, n_message, "");
    try {
        const guard here;
        require_room();
        auto result = body();
        bool out_of_memory = false;
        if (const char * why = llama_mtp_get_failure(&out_of_memory)) {  // caught in a function of llama-mtp.h
            say(message, n_message, why);
            return failed(gave_up ? PYLLAMA_ABORTED : out_of_memory ? PYLLAMA_OUT_OF_MEMORY : PYLLAMA_EXCEPTION);
        }
        return result;
    } catch (const refused & err) {
        say(message, n_message, err.what());
        return failed(err.code);
    } catch (const aborted & err) {
        say(message, n_message, err.what());
        return failed(PYLLAMA_ABORTED);
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

// The same for a body whose result is a truth value, or 0 or above; on an exception, returns the code.
template <typename Body>
int32_t guarded_code(char * message, size_t n_message, Body body) {
    return guarded(message, n_message, [&]() -> int32_t { return body(); }, [](int32_t code) { return code; });
}

// The same; on an exception, returns NULL or 0.
template <typename Body>
auto guarded_or_null(char * message, size_t n_message, Body body) -> decltype(body()) {
    return guarded(message, n_message, body, [](int32_t) { return decltype(body()) {}; });
}

// The same for samplers, of which one may be a grammar.
template <typename Body>
int32_t guarded_samplers(Body body) {
    llama_mtp_limit_grammar(PYLLAMA_GRAMMAR_S);
    const int32_t code = guarded_code(nullptr, 0, body);
    return llama_mtp_limit_grammar(0) ? PYLLAMA_TOO_SLOW : code;
}

// Adds entry i; false: llama_batch_ext refuses it.
bool add_entry(llama_batch_ext * batch, const pyllama_batch & e, int32_t i) {
    const llama_embd embd = { e.embd ? e.embd + (size_t) i * e.n_embd_inp : nullptr, 1, (size_t) e.n_embd_inp };
    const int32_t idx = e.embd ? llama_batch_ext_add_embd(batch, e.seq_id[i], embd)
                               : llama_batch_ext_add_token(batch, e.seq_id[i], e.token[i]);
    if (idx < 0 || !llama_batch_ext_set_pos(batch, idx, &e.pos[(size_t) i * (e.embd ? e.n_pos : 1)])) {
        return false;
    }
    if (e.hidden) {
        const llama_embd row = { e.hidden + (size_t) i * e.n_embd, 1, (size_t) e.n_embd };
        if (!llama_batch_ext_set_embd_state(batch, idx, row)) {
            return false;
        }
    }
    return llama_batch_ext_set_output_logits(batch, idx, e.output[i] != 0);
}

// Tokens with their logits, for samplers; without ids, tokens 0 to n - 1. The next call on this thread overwrites them.
llama_token_data_array row_candidates(const int32_t * ids, const float * logits, int32_t n) {
    static thread_local std::vector<llama_token_data> data;
    data.resize(n);
    for (int32_t i = 0; i < n; ++i) {
        data[i] = { ids ? ids[i] : i, logits[i], 0.0f };
    }
    if (ids) {  // in the order that the top-k sampler leaves
        std::sort(data.begin(), data.end(), [](const llama_token_data & a, const llama_token_data & b) {
            return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
        });
    }
    return { data.data(), data.size(), -1, ids != nullptr };
}

} // namespace

void pyllama_catch_aborts(void) { ggml_set_abort_callback(on_abort); }

void pyllama_log_discard(ggml_log_level, const char *, void *) {}

bool pyllama_set_cpu_switch(const char * name, bool value) { return set_cpu_switch(name, value); }

void pyllama_set_cpu_changes(bool value) { set_cpu_changes(value); }

bool pyllama_few_columns(int32_t type) {
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        void * ask = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), "ggml_cpu_small_batch_type");
        if (ask && reinterpret_cast<bool (*)(int32_t)>(ask)(type)) {
            return true;
        }
    }
    return false;
}

llama_model * pyllama_model_load(
        const char * path, const char * path_head, uint32_t n_layer_nextn, const llama_mtp_tensor * tensors,
        size_t n_tensors, llama_model_params params, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] {
        return path_head ? llama_mtp_load_model(path, path_head, n_layer_nextn, tensors, n_tensors, params)
                         : llama_model_load_from_file(path, params);
    });
}

llama_context * pyllama_context_init(
        llama_model * model, llama_context_params params, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_init_from_model(model, params); });
}

llama_adapter_lora * pyllama_adapter_lora_init(
        llama_model * model, const char * path, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_adapter_lora_init(model, path); });
}

void pyllama_context_free(llama_context * ctx) {
    llama_free(ctx);
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

int32_t pyllama_guarded(int32_t (*body)(void *), void * data, int32_t n_threads, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { require_threads(n_threads); return body(data); });
}

int32_t pyllama_regex_search(const char * pattern, const char * text, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return std::regex_search(text, std::regex(pattern)); });
}

int32_t pyllama_tokenize(
        const llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special, char * message, size_t n_message) {
    return guarded(message, n_message,
            [&] { return llama_tokenize(vocab, text, n_text, tokens, n_tokens_max, add_special, parse_special); },
            [](int32_t) { return INT32_MIN; });
}

int32_t pyllama_tokenize_forced(
        const llama_vocab * vocab, const char * text, int32_t n_text, llama_token * tokens, int32_t n_tokens_max,
        bool add_special, bool parse_special) {
    const int32_t n = pyllama_tokenize(
            vocab, text, n_text, tokens, n_tokens_max, add_special, parse_special, nullptr, 0);
    return n == INT32_MIN ? 0 : n;
}

int32_t pyllama_decode(
        llama_context * ctx, llama_batch_ext * batch, const pyllama_batch * entries, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&]() -> int32_t {
        require_threads(std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx)));
        llama_batch_ext_clear(batch);
        for (int32_t i = 0; i < entries->n_tokens; ++i) {
            if (!add_entry(batch, *entries, i)) {
                char text[128];
                snprintf(text, sizeof(text), "entry %d (token %d, sequence %d, position %d) was refused",
                        i, entries->embd ? -1 : entries->token[i], entries->seq_id[i],
                        entries->pos[(size_t) i * (entries->embd ? entries->n_pos : 1)]);
                say(message, n_message, text);
                return PYLLAMA_BATCH_REFUSED;
            }
        }
        return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    });
}

llama_batch_ext * pyllama_batch_ext_init(llama_context * ctx, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_batch_ext_init(ctx); });
}

int32_t pyllama_synchronize(llama_context * ctx, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { llama_synchronize(ctx); return 0; });
}

int32_t pyllama_memory_clear(llama_context * ctx, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { llama_memory_clear(llama_get_memory(ctx), true); return 0; });
}

int32_t pyllama_memory_seq_cp(
        llama_context * ctx, llama_seq_id from, llama_seq_id to, llama_pos p1, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { llama_memory_seq_cp(llama_get_memory(ctx), from, to, 0, p1); return 0; });
}

int32_t pyllama_memory_seq_rm(
        llama_context * ctx, llama_seq_id seq_id, llama_pos p0, llama_pos p1, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_memory_seq_rm(llama_get_memory(ctx), seq_id, p0, p1); });
}

int32_t pyllama_set_hidden_tap(llama_context * ctx, int32_t tap, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_set_hidden_tap(ctx, (llama_hidden_tap) tap); });
}

int32_t pyllama_set_adapters_lora(
        llama_context * ctx, llama_adapter_lora ** adapters, size_t n_adapters, float * scales,
        char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_set_adapters_lora(ctx, adapters, n_adapters, scales); });
}

int32_t pyllama_mtp_get_memory(
        const llama_context * ctx, bool all, ggml_backend_dev_t dev, llama_mtp_memory * memory,
        char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] {
        *memory = all ? llama_mtp_get_memory(ctx) : llama_mtp_get_memory_of(ctx, dev);
        return 0;
    });
}

int32_t pyllama_get_logits(llama_context * ctx, int32_t row, const float ** logits, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { *logits = llama_get_logits_ith(ctx, row); return 0; });
}

int32_t pyllama_get_hidden_rows(
        llama_context * ctx, int32_t first, int32_t n, const float ** rows, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { *rows = llama_get_hidden_rows(ctx, first, n); return 0; });
}

int32_t pyllama_mtp_get_embeddings_nextn(llama_context * ctx, const float ** rows, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { *rows = llama_mtp_get_embeddings_nextn(ctx); return 0; });
}

int32_t pyllama_mtp_get_greedy(llama_context * ctx, int32_t row, int32_t * token, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { *token = llama_mtp_get_greedy_ith(ctx, row); return 0; });
}

int32_t pyllama_mtp_get_candidates(
        llama_context * ctx, int32_t row, const int32_t ** ids, const float ** logits, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_mtp_get_candidates_ith(ctx, row, ids, logits); });
}

int32_t pyllama_mtp_set_draft_head(
        llama_context * ctx, int32_t type, const void * rows, size_t n_bytes, const int32_t * ids, int32_t n_rows,
        char * message, size_t n_message) {
    return guarded_code(message, n_message,
            [&] { return llama_mtp_set_draft_head(ctx, type, rows, n_bytes, ids, n_rows); });
}

int32_t pyllama_mtp_replace_draft_rows(
        llama_context * ctx, int32_t n, const int32_t * slots, const int32_t * ids, const void * rows, size_t n_bytes,
        char * message, size_t n_message) {
    return guarded_code(message, n_message,
            [&] { return llama_mtp_replace_draft_rows(ctx, n, slots, ids, rows, n_bytes); });
}

int32_t pyllama_mtp_use_model_draft_head(
        llama_context * ctx, const int32_t ** ids, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_mtp_use_model_draft_head(ctx, ids); });
}

int32_t pyllama_mtp_draft(
        llama_context * ctx, const int32_t * tokens, const int32_t * seqs, int32_t n_seqs, int32_t n_steps,
        int32_t n_candidates, const float * noise, const float * scale, int32_t * drafts, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] {
        require_threads(std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx)));
        return llama_mtp_draft(ctx, tokens, seqs, n_seqs, n_steps, n_candidates, noise, scale, drafts);
    });
}

int32_t pyllama_mtp_draft_and_decode(
        llama_context * ctx, const int32_t * tokens, const int32_t * seqs, int32_t n_seqs, int32_t n_steps, int32_t * drafts,
        char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] {
        require_threads(std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx)));
        return llama_mtp_draft_and_decode(ctx, tokens, seqs, n_seqs, n_steps, drafts);
    });
}

int32_t pyllama_mtp_can_draft_and_decode(llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_mtp_can_draft_and_decode(ctx, n_seqs, n_steps); });
}

int32_t pyllama_mtp_reserve(llama_context * ctx, int32_t n_seqs, int32_t n_steps, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_mtp_reserve(ctx, n_seqs, n_steps); });
}

llama_mtp_checkpoints * pyllama_mtp_checkpoints_init(llama_context * ctx, int32_t n, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_mtp_checkpoints_init(ctx, n); });
}

size_t pyllama_mtp_checkpoints_take(
        llama_mtp_checkpoints * checkpoints, int32_t i, int32_t seq_id, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_mtp_checkpoints_take(checkpoints, i, seq_id); });
}

int32_t pyllama_mtp_checkpoints_get(
        llama_mtp_checkpoints * checkpoints, int32_t i, uint8_t * dst, size_t size, char * message, size_t n_message) {
    return guarded_code(message, n_message, [&] { return llama_mtp_checkpoints_get(checkpoints, i, dst, size); });
}

ggml_backend_buffer_t pyllama_host_memory(size_t size, bool on_gpu, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&]() -> ggml_backend_buffer_t {
        ggml_backend_buffer_type_t type = nullptr;
        for (size_t i = 0; on_gpu && !type && i < ggml_backend_dev_count(); ++i) {
            type = ggml_backend_dev_host_buffer_type(ggml_backend_dev_get(i));
        }
        return ggml_backend_buft_alloc_buffer(type ? type : ggml_backend_cpu_buffer_type(), size);
    });
}

size_t pyllama_state_seq_get_size(
        llama_context * ctx, llama_seq_id seq_id, uint32_t flags, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_state_seq_get_size_ext(ctx, seq_id, flags); });
}

size_t pyllama_state_seq_get(
        llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message) {
    return guarded_or_null(message, n_message,
            [&] { return llama_state_seq_get_data_ext(ctx, dst, size, seq_id, flags); });
}

size_t pyllama_state_seq_set(
        llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, uint32_t flags,
        char * message, size_t n_message) {
    return guarded_or_null(message, n_message,
            [&] { return llama_state_seq_set_data_ext(ctx, src, size, seq_id, flags); });
}

llama_sampler * pyllama_sampler_init_grammar(
        const llama_vocab * vocab, const char * grammar, char * message, size_t n_message) {
    return guarded_or_null(message, n_message, [&] { return llama_sampler_init_grammar(vocab, grammar, "root"); });
}

#define SAMPLER(name, parameters, arguments) \
    llama_sampler * pyllama_sampler_##name parameters { \
        return guarded_or_null(nullptr, 0, [&] { return llama_sampler_##name arguments; }); \
    }

SAMPLER(chain_init, (), (llama_sampler_chain_default_params()))
SAMPLER(init_greedy, (), ())
SAMPLER(init_dist, (uint32_t seed), (seed))
SAMPLER(init_top_k, (int32_t k), (k))
SAMPLER(init_top_p, (float p, size_t min_keep), (p, min_keep))
SAMPLER(init_min_p, (float p, size_t min_keep), (p, min_keep))
SAMPLER(init_temp, (float t), (t))
SAMPLER(init_typical, (float p, size_t min_keep), (p, min_keep))
SAMPLER(init_top_n_sigma, (float n), (n))
SAMPLER(init_xtc, (float p, float t, size_t min_keep, uint32_t seed), (p, t, min_keep, seed))
SAMPLER(init_dry,
        (const llama_vocab * vocab, float multiplier, float base, int32_t allowed_length, int32_t penalty_last_n,
         const char ** breakers, size_t n_breakers),
        (vocab, multiplier, base, allowed_length, penalty_last_n, breakers, n_breakers))
SAMPLER(init_penalties, (int32_t n_vocab, int32_t last_n, float repeat, float frequency, float presence),
        (n_vocab, last_n, repeat, frequency, presence))
SAMPLER(init_logit_bias, (int32_t n_vocab, int32_t n_biases, const llama_logit_bias * biases), (n_vocab, n_biases, biases))

int32_t pyllama_sampler_chain_add(llama_sampler * chain, llama_sampler * sampler) {
    if (!sampler) {
        return PYLLAMA_OUT_OF_MEMORY;
    }
    const int32_t code = guarded_code(nullptr, 0, [&] { llama_sampler_chain_add(chain, sampler); return 0; });
    if (code < 0) {
        llama_sampler_free(sampler);
    }
    return code;
}

int32_t pyllama_sampler_accept(llama_sampler * sampler, llama_token token) {
    return guarded_samplers([&] { llama_sampler_accept(sampler, token); return 0; });
}

llama_token pyllama_sample(llama_sampler * chain, const int32_t * row_ids, const float * row_logits, int32_t n) {
    return guarded_samplers([&]() -> llama_token {
        llama_token_data_array candidates = row_candidates(row_ids, row_logits, n);
        llama_sampler_apply(chain, &candidates);
        if (candidates.selected < 0 || candidates.selected >= (int64_t) candidates.size) {
            return PYLLAMA_EXCEPTION;
        }
        const llama_token_data & chosen = candidates.data[candidates.selected];
        if (std::isinf(chosen.logit)) {
            return PYLLAMA_NO_TOKEN;  // a grammar that is told of it would end the process
        }
        llama_sampler_accept(chain, chosen.id);
        return chosen.id;
    });
}

int32_t pyllama_distribution(
        llama_sampler * chain, const int32_t * row_ids, const float * row_logits, int32_t n,
        int32_t * ids, float * logits, int32_t capacity) {
    return guarded_samplers([&]() -> int32_t {
        llama_token_data_array candidates = row_candidates(row_ids, row_logits, n);
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
    });
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

bool pyllama_device_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *free = *total = 0;
    try {
        const guard here;  // with however little memory
        ggml_backend_dev_memory(device, free, total);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

bool pyllama_device_has_attention(
        ggml_backend_dev_t device, pyllama_attention shape, ggml_type type_k, ggml_type type_v) {
    constexpr int64_t n_rows = 4, n_cells = 256;

    ggml_context * ctx = ggml_init({ 8*ggml_tensor_overhead(), nullptr, true });
    if (!ctx) {
        return false;
    }
    ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, shape.k, n_rows,  shape.n_head);
    ggml_tensor * k    = ggml_new_tensor_3d(ctx, type_k,        shape.k, n_cells, shape.n_head_kv);
    ggml_tensor * v    = ggml_new_tensor_3d(ctx, type_v,        shape.v, n_cells, shape.n_head_kv);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_cells, n_rows);
    const bool has = ggml_backend_dev_supports_op(device, ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f, 0.0f, 0.0f));
    ggml_free(ctx);
    return has;
}

const char * pyllama_wait_poll(const char * worker, int64_t silent_us, void * p) {
    const auto poll = reinterpret_cast<int (*)(void *)>(p);
    if (llama_time_us() >= give_up_at || (poll && guards > 0 && poll(nullptr) != 0)) {
        return "given up before it answered";
    }
    const std::lock_guard<std::mutex> lock(silence_mutex);
    const auto limit_s = silence_limits_s.find(worker);
    if (limit_s == silence_limits_s.end() || limit_s->second == 0 || silent_us < int64_t(1e6)*limit_s->second) {
        return nullptr;
    }
    thread_local char reason[64];
    snprintf(reason, sizeof(reason), "no answer in %u s", limit_s->second);
    return reason;
}

void pyllama_limit_silence(const char * worker, uint32_t seconds) {
    const std::lock_guard<std::mutex> lock(silence_mutex);
    silence_limits_s[worker] = seconds;
}

void pyllama_give_up_waiting(double seconds) {
    give_up_at = seconds < 1e9 ? llama_time_us() + (int64_t) (1e6 * seconds) : INT64_MAX;
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
    return false;  // do not fetch its data
}
