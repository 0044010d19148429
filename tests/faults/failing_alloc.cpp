// Allocations of C++ and of ggml's buffers that fail on demand, for LD_PRELOAD.
#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <new>

namespace {

thread_local long left    = -1;  // allocations until one fails; below 0: none does
thread_local long counted = 0;

bool fails() {
    ++counted;
    return left >= 0 && left-- == 0;
}

void * allocate(std::size_t n) {
    void * p = fails() ? nullptr : std::malloc(n ? n : 1);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

} // namespace

// The allocation after the next n of this thread fails; n < 0: none. Returns how many there were since the last call.
extern "C" long fail_after(long n) {
    const long before = counted;
    counted = 0;
    left    = n;
    return before;
}

void * operator new  (std::size_t n) { return allocate(n); }
void * operator new[](std::size_t n) { return allocate(n); }

void operator delete  (void * p) noexcept { std::free(p); }
void operator delete[](void * p) noexcept { std::free(p); }
void operator delete  (void * p, std::size_t) noexcept { std::free(p); }
void operator delete[](void * p, std::size_t) noexcept { std::free(p); }

extern "C" int posix_memalign(void ** p, std::size_t alignment, std::size_t n) {
    using function = int (*)(void **, std::size_t, std::size_t);
    static const auto real = reinterpret_cast<function>(dlsym(RTLD_NEXT, "posix_memalign"));
    return fails() ? ENOMEM : real(p, alignment, n);
}
