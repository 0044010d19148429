// Inputs of graphs of a few tokens: one upload for all of them.

#include "llama-mtp-inputs.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <new>
#include <vector>

static bool is_input(const ggml_tensor * t) {
    return t && (t->flags & GGML_TENSOR_FLAG_INPUT) && t->op == GGML_OP_NONE && !t->buffer && !t->view_src;
}

static bool in_host_memory(const ggml_tensor * t) {
    const auto buffer = !t ? nullptr : t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && ggml_backend_buffer_is_host(buffer);
}

// The inputs of a graph that no other backend reads.
static std::vector<ggml_tensor *> inputs_of(ggml_cgraph * gf, ggml_backend_t backend) {
    std::vector<ggml_tensor *> inputs, others;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (std::none_of(node->src, node->src + GGML_MAX_SRC, is_input)) {
            continue;
        }
        const bool elsewhere = std::any_of(node->src, node->src + GGML_MAX_SRC, in_host_memory) || !ggml_backend_supports_op(backend, node);
        auto &     readers   = elsewhere ? others : inputs;
        std::copy_if(node->src, node->src + GGML_MAX_SRC, std::back_inserter(readers), is_input);
    }
    std::vector<ggml_tensor *> alone;
    for (ggml_tensor * t : inputs) {
        const auto has = [t](const auto & list) { return std::find(list.begin(), list.end(), t) != list.end(); };
        if (!has(others) && !has(alone)) {
            alone.push_back(t);
        }
    }
    return alone;
}

void llama_mtp_inputs::take(ggml_cgraph * gf, ggml_backend_t device, bool no_alloc) {
    constexpr size_t alignment = 256;  // where Vulkan takes positions at least

    const auto inputs = inputs_of(gf, device);
    size_t size = 0;
    for (const ggml_tensor * t : inputs) {
        size += GGML_PAD(ggml_nbytes(t), alignment);
    }
    all     = nullptr;
    backend = device;
    if (inputs.empty()) {
        return;
    }
    if (!on_device || capacity < size) {
        ggml_backend_synchronize(backend);

        auto * host = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
        on_host  .reset(ggml_backend_buft_alloc_buffer(host ? host : ggml_backend_cpu_buffer_type(), no_alloc ? 0 : size));
        on_device.reset(ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(backend), no_alloc ? 0 : size));
        if (!on_host || !on_device) {
            on_device.reset();
            throw std::bad_alloc();
        }
        capacity = size;
    }
    const ggml_init_params params = {
        /*.mem_size   =*/ (inputs.size() + 1)*ggml_tensor_overhead(),
        /*.mem_buffer =*/ nullptr,
        /*.no_alloc   =*/ true,
    };
    ctx.reset(ggml_init(params));
    if (!ctx) {
        throw std::bad_alloc();
    }
    const auto place = [no_alloc](ggml_tensor * t, const ggml_backend_buffer_ptr & buffer, size_t offset) {
        if (no_alloc) {
            t->buffer = buffer.get(); // so that the scheduler counts no memory for it
        } else {
            ggml_backend_tensor_alloc(buffer.get(), t, (char *) ggml_backend_buffer_get_base(buffer.get()) + offset);
        }
    };
    all = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, size);
    place(all, on_device, 0);

    std::map<ggml_tensor *, ggml_tensor *> copies;
    size_t offset = 0;
    for (ggml_tensor * t : inputs) {
        ggml_tensor * copy = copies[t] = ggml_dup_tensor(ctx.get(), t);
        ggml_set_name(copy, t->name);
        place(t,    on_host,   offset);
        place(copy, on_device, offset);
        offset += GGML_PAD(ggml_nbytes(t), alignment);
    }
    const auto replace = [&](ggml_tensor *& t) {
        const auto it = copies.find(t);
        t = it == copies.end() ? t : it->second;
    };
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        std::for_each(node->src, node->src + GGML_MAX_SRC, replace);
        replace(node->view_src);
    }
}

void llama_mtp_inputs::upload(uint64_t n_waits) {
    if (all) {
        ggml_backend_tensor_set_async(backend, all, ggml_backend_buffer_get_base(on_host.get()), 0, ggml_nbytes(all));
        last_upload = n_waits;
    }
}

void llama_mtp_inputs::add_sizes(std::map<ggml_backend_buffer_type_t, size_t> & sizes) const {
    if (on_device) {
        for (const auto & buffer : { on_host.get(), on_device.get() }) {
            sizes[ggml_backend_buffer_get_type(buffer)] += capacity;
        }
    }
}

// The device that has all layers, and the memory; NULL: there is none.
static ggml_backend_t device_of_all(const llama_model & model, const llama_cparams & cparams, const std::vector<ggml_backend_t> & backends) {
    ggml_backend_dev_t dev = model.dev_output();
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU || !cparams.offload_kqv || cparams.pipeline_parallel ||
            model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return nullptr;
    }
    for (uint32_t il = 0; il < model.hparams.n_layer_all; ++il) {
        if (model.dev_layer(il) != dev) {
            return nullptr;
        }
    }
    const auto it = std::find_if(backends.begin(), backends.end(), [dev](auto b) { return ggml_backend_get_device(b) == dev; });
    return it == backends.end() ? nullptr : *it;
}

// A graph was built: take its inputs, if it is one of a few tokens. Returns whether there was memory.
bool llama_context::mtp_take_inputs(llm_graph_result & res) {
    const auto device = mtp_at_prompt() ? nullptr : device_of_all(model, cparams, backend_ptrs);
    if (device) {
        try {
            res.mtp_inputs.take(res.get_gf(), device, model.hparams.no_alloc);
        } catch (const std::bad_alloc &) {
            return false;
        }
    }
    return true;
}

void llama_context::mtp_set_inputs(llm_graph_result & res, const llama_ubatch & ubatch) {
    if (res.mtp_inputs.uploading(mtp_n_waits)) {
        synchronize();
    }
    res.set_inputs(&ubatch);
    res.mtp_inputs.upload(mtp_n_waits);
}
