#include "llama-mtp-grammar.h"
#include "llama-mtp.h"

#include <ctime>
#include <stdexcept>

static thread_local struct {
    int64_t  end_ns = INT64_MAX; // of the thread's own time
    uint32_t n_steps;
    bool     reached;
} limit;

static int64_t computed_ns() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return 1000000000ll*time.tv_sec + time.tv_nsec;
}

bool llama_mtp_limit_grammar(double seconds) {
    const bool reached = limit.reached;
    limit = { seconds > 0 ? computed_ns() + int64_t(1e9*seconds) : INT64_MAX, 0, false };
    return reached;
}

void llama_grammar_step() {
    if (++limit.n_steps % 64 == 0 && limit.end_ns < INT64_MAX && computed_ns() > limit.end_ns) {
        limit.reached = true;
        throw std::runtime_error("the grammar computes for too long");
    }
}
