// libllama.so: what programs load that know nothing of this package (llama-cpp-python with LLAMA_CPP_LIB_PATH).
//
// It has no functions of its own: who asks it for one is given that of libllama.so.0, which it needs (dlsym() searches
// a library together with all that it needs). It stands in for a link, which a wheel cannot hold. And as soon as it is
// loaded, it loads the backends. In a usual build they are linked in, so such programs do not think of loading any.
#include "ggml-backend.h"
#include "pyllama_shim.h"

#include <dlfcn.h>

#include <string>

namespace {

// The folder of this library; "." if the loader was given a bare name.
std::string own_folder() {
    Dl_info info = {};
    if (!dladdr(reinterpret_cast<void *>(&own_folder), &info) || !info.dli_fname) {
        return ".";
    }
    const std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

bool has_cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr;
}

// Runs after the constructors of all that this library needs. What ggml logs meanwhile, a line for each backend on
// stderr, is not what a program expects of an import.
__attribute__((constructor)) void load_backends() {
    if (has_cpu()) {
        return;  // the bindings of this package, in the same process, have done it, and have set what follows
    }
    ggml_log_callback callback  = nullptr;
    void            * user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    ggml_log_set(pyllama_log_discard, nullptr);
    const std::string folder = own_folder();
    for (const std::string & place : { folder, folder + "/.." }) {
        if (!has_cpu()) {
            ggml_backend_load_all_from_path(place.c_str());
        }
    }
    ggml_log_set(callback, user_data);
    // ggml is one for both variants; upstream's is to be what upstream wrote (see native.py, _start).
    pyllama_set_cpu_changes(PYLLAMA_HAS_PATCHES);
}

} // namespace
