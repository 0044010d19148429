// libllama.so, for programs that know nothing of this package, such as llama-cpp-python with LLAMA_CPP_LIB_PATH.
//
// It stands in for a link to libllama.so.0, because a wheel holds no links. It has no functions of its own: dlsym() also
// searches the libraries that a library needs, and finds those of libllama.so.0. When it is loaded, it loads the backends.
// Such programs load none, because usual builds of llama.cpp have them linked in.
#include "ggml-backend.h"
#include "pyllama_shim.h"

#include <dlfcn.h>

#include <string>

namespace {

// The folder of this library; ".": the loader was given a bare name.
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

// Runs after the constructors of the libraries that this one needs. ggml's log is off meanwhile: a program does not expect
// a line on stderr for each backend.
__attribute__((constructor)) void load_backends() {
    if (has_cpu()) {
        return;  // the bindings of this package, in the same process, have done all this
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
    // Both variants share one ggml. In upstream's variant, our changes to it are off (see native.py, _start).
    pyllama_set_cpu_changes(PYLLAMA_HAS_PATCHES);
}

} // namespace
