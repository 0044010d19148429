// Switches of the CPU backends for what our patches change, for the shim and for the drop-in library.
#pragma once

#include "ggml-backend.h"

#include <string>

// See pyllama_set_cpu_switch().
inline bool set_cpu_switch(const char * name, bool value) {
    const std::string function = std::string("ggml_cpu_set_") + name;
    bool known = false;
    for (size_t i = 0; i < ggml_backend_reg_count(); ++i) {
        void * set = ggml_backend_reg_get_proc_address(ggml_backend_reg_get(i), function.c_str());
        if (set) {
            reinterpret_cast<void (*)(bool)>(set)(value);
            known = true;
        }
    }
    return known;
}

inline void set_cpu_changes(bool value) {
    for (const char * name : { "small_batch", "large_batch", "few_rows_attention" }) {
        set_cpu_switch(name, value);
    }
}
