// Preloaded before libggml-base and the shim: has waits, allocations, and the main thread of a computation fail when told.

#include "ggml-backend.h"

#include <dlfcn.h>

#include <cstdlib>
#include <new>

extern "C" {

int failing_waits;        // waits for a computation end as ggml's assertions do
int failing_allocations;  // C++ finds no memory
int failing_computation;  // an assertion on the thread that began a computation, while others compute

void ggml_backend_sched_synchronize(ggml_backend_sched_t sched) {
    if (failing_waits) {
        ggml_abort(__FILE__, __LINE__, "the device has failed");
    }
    reinterpret_cast<void (*)(ggml_backend_sched_t)>(dlsym(RTLD_NEXT, "ggml_backend_sched_synchronize"))(sched);
}

// What the shim gives to a context as its abort callback: ggml asks it between nodes.
bool pyllama_abort_poll(void *) {
    if (failing_computation) {
        ggml_abort(__FILE__, __LINE__, "an assertion on the main thread");
    }
    return false;
}

} // extern "C"

void * operator new(std::size_t size) {
    if (void * found = failing_allocations ? nullptr : std::malloc(size ? size : 1)) {
        return found;
    }
    throw std::bad_alloc();
}

void operator delete(void * what) noexcept { std::free(what); }
void operator delete(void * what, std::size_t) noexcept { std::free(what); }
