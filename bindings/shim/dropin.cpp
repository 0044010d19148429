// libllama.so, for programs that know nothing of this package, such as llama-cpp-python with LLAMA_CPP_LIB_PATH.
//
// It stands in for a link to libllama.so.0, because a wheel holds no links: dlsym() also searches the libraries that a
// library needs, and finds the functions of libllama.so.0. When it is loaded, it loads the backends. Such programs load
// none, because usual builds of llama.cpp have them linked in.
//
// Such programs also bring declarations of their own. Those of llama-cpp-python 0.3.36 are of an older llama.cpp, whose
// llama_context_params, which is passed by value, lacks a field. The functions that take or return it are defined here, with
// the older struct, and are found first. All other structs that it passes are the same; where they were not, this file would
// not compile. Programs that are linked against libllama.so.0 (llama-server) never come here. The shim is not used here either: its own
// calls of these functions, which pass today's struct, would be found here first.
#include "cpu_switches.h"
#include "ggml-backend.h"
#include "llama.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

// llama_context_params of llama-cpp-python 0.3.36: up to type_v, and from abort_callback on, as today's.
struct older_context_params {
    char begin[offsetof(llama_context_params, moe_cache_size)];
    char end[sizeof(llama_context_params) - offsetof(llama_context_params, abort_callback)];
};

#define SAME(condition) static_assert(condition, "not as in llama-cpp-python 0.3.36: the drop-in library must convert it")
SAME(sizeof(void *) != 8 || sizeof(older_context_params) == 160);
SAME(sizeof(void *) != 8 || offsetof(older_context_params, end) == 112);
SAME(offsetof(llama_context_params, moe_cache_size) + sizeof(size_t) == offsetof(llama_context_params, abort_callback));
SAME(sizeof(void *) != 8 || sizeof(llama_model_params) == 80);
SAME(sizeof(void *) != 8 || sizeof(llama_model_quantize_params) == 64);
SAME(sizeof(void *) != 8 || sizeof(llama_batch) == 56);
SAME(sizeof(llama_token_data) == 12 && sizeof(llama_sampler_chain_params) == 1);
SAME(sizeof(void *) != 8 || sizeof(llama_perf_context_data) == 48);

// The function of libllama.so.0 that one of this file stands before.
template <typename function>
function * behind(const char * name) {
    static void * const library = dlopen(PYLLAMA_LIBLLAMA, RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<function *>(dlsym(library, name));
}

llama_context_params newest() {
    return behind<llama_context_params()>("llama_context_default_params")();
}

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

void log_discard(ggml_log_level, const char *, void *) {}

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
    ggml_log_set(log_discard, nullptr);
    const std::string folder = own_folder();
    for (const std::string & place : { folder, folder + "/.." }) {
        if (!has_cpu()) {
            ggml_backend_load_all_from_path(place.c_str());
        }
    }
    ggml_log_set(callback, user_data);
    // Both variants share one ggml. In upstream's variant, our changes to it are off (see native.py, _start).
    set_cpu_changes(PYLLAMA_HAS_PATCHES);
}

// What a caller passes whose struct is another one, with one of its values at the place of another.
bool is_of_another_version(const llama_context_params & params) {
    const char * flags = reinterpret_cast<const char *>(&params) + offsetof(llama_context_params, embeddings);
    for (size_t i = 0; i <= offsetof(llama_context_params, kv_unified) - offsetof(llama_context_params, embeddings); ++i) {
        if (flags[i] != 0 && flags[i] != 1) {
            return true;
        }
    }
    return (params.samplers == nullptr) != (params.n_samplers == 0);
}

} // namespace

// The compiler's prefix of C names: none in ELF, _ in Mach-O.
#define STRING_OF(name)  #name
#define STRING(name)     STRING_OF(name)
#define DROPIN(name) __asm__(STRING(__USER_LABEL_PREFIX__) #name) __attribute__((visibility("default")))

extern "C" {

older_context_params dropin_default_params(void) DROPIN(llama_context_default_params);
older_context_params dropin_default_params(void) {
    const llama_context_params params = newest();
    older_context_params older;
    memcpy(older.begin, &params, sizeof(older.begin));
    memcpy(older.end, &params.abort_callback, sizeof(older.end));
    return older;
}

llama_context * dropin_init(llama_model * model, older_context_params older) DROPIN(llama_init_from_model);
llama_context * dropin_init(llama_model * model, older_context_params older) {
    llama_context_params params = newest();  // for the field that the older struct lacks
    memcpy(&params, older.begin, sizeof(older.begin));
    memcpy(&params.abort_callback, older.end, sizeof(older.end));
    if (is_of_another_version(params)) {
        fprintf(stderr, "this libllama.so is for programs that were written for the llama.cpp of llama-cpp-python 0.3.36, "
                "whose llama_context_params has other fields: use that release, or link against libllama.so.0\n");
        return nullptr;
    }
    return behind<decltype(llama_init_from_model)>("llama_init_from_model")(model, params);
}

llama_context * dropin_new_context(llama_model * model, older_context_params older) DROPIN(llama_new_context_with_model);
llama_context * dropin_new_context(llama_model * model, older_context_params older) {
    return dropin_init(model, older);
}

} // extern "C"
