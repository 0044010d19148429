// Preloaded before libggml-base and the shim: has waits, allocations, and the main thread of a computation fail when told.

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <new>

extern "C" {

int failing_waits;        // waits for a computation end as ggml's assertions do
int failing_allocations;  // C++ finds no memory
int failing_buffers;      // a device ends as ggml's assertions do when memory is asked for
int failing_computation;  // an assertion on the thread that began a computation, while others compute

void ggml_backend_sched_synchronize(ggml_backend_sched_t sched) {
    if (failing_waits) {
        ggml_abort(__FILE__, __LINE__, "the device has failed");
    }
    reinterpret_cast<void (*)(ggml_backend_sched_t)>(dlsym(RTLD_NEXT, "ggml_backend_sched_synchronize"))(sched);
}

struct ggml_backend_buffer * ggml_backend_alloc_ctx_tensors_from_buft(struct ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    if (failing_buffers) {
        ggml_abort(__FILE__, __LINE__, "the device has failed");
    }
    using function = struct ggml_backend_buffer * (*)(struct ggml_context *, ggml_backend_buffer_type_t);
    return reinterpret_cast<function>(dlsym(RTLD_NEXT, "ggml_backend_alloc_ctx_tensors_from_buft"))(ctx, buft);
}

// What the shim gives to a context as its abort callback: ggml asks it between nodes.
bool pyllama_abort_poll(void *) {
    if (failing_computation) {
        ggml_abort(__FILE__, __LINE__, "an assertion on the main thread");
    }
    return false;
}

} // extern "C"

namespace {

thread_local long left    = -1;  // allocations until one fails; below 0: none does
thread_local long counted = 0;

bool no_memory() {
    ++counted;
    return failing_allocations || (left >= 0 && left-- == 0);
}

} // namespace

// The allocation after the next n of this thread fails; n < 0: none. Returns how many there were since the last call.
extern "C" long fail_after(long n) {
    const long before = counted;
    counted = 0;
    left    = n;
    return before;
}

extern "C" int posix_memalign(void ** p, std::size_t alignment, std::size_t n) {  // of ggml's buffers
    using function = int (*)(void **, std::size_t, std::size_t);
    static const auto real = reinterpret_cast<function>(dlsym(RTLD_NEXT, "posix_memalign"));
    return left >= 0 && no_memory() ? ENOMEM : real(p, alignment, n);
}

void * operator new(std::size_t size) {
    if (void * found = no_memory() ? nullptr : std::malloc(size ? size : 1)) {
        return found;
    }
    throw std::bad_alloc();
}

void operator delete(void * what) noexcept { std::free(what); }
void operator delete(void * what, std::size_t) noexcept { std::free(what); }
