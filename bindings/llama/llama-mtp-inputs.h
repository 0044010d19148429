#pragma once

#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <map>

// The inputs of a graph in one piece, in host memory and on the device that computes the graph: one upload for all of them.
struct llama_mtp_inputs {
    // Take the inputs that the device alone reads, before memory is allocated for the graph: they are in host memory, and the
    // nodes read copies on the device. Waits for the device where earlier memory is too small. no_alloc: only to count memory.
    // throws std::bad_alloc
    void take(ggml_cgraph * gf, ggml_backend_t backend, bool no_alloc);

    // The graph is gone; the memory stays for the next one.
    void clear() { all = nullptr; }

    // Upload what was set, behind what the device computes. n_waits: how often the device has been waited for so far.
    void upload(uint64_t n_waits);

    // Whether an upload may still read the host's memory.
    bool uploading(uint64_t n_waits) const { return last_upload == n_waits; }

    void add_sizes(std::map<ggml_backend_buffer_type_t, size_t> & sizes) const;

private:
    ggml_backend_t backend     = nullptr;
    uint64_t       last_upload = UINT64_MAX;  // n_waits then
    size_t         capacity    = 0;           // bytes, here and there

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr on_host;
    ggml_backend_buffer_ptr on_device;
    ggml_tensor *           all = nullptr;  // I8, on the device; NULL: no inputs
};
