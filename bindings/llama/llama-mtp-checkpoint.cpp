// Checkpoints of recurrent states that stay on the device of the state; see llama-mtp.h.

#include "llama-mtp.h"

#include "llama-context.h"
#include "llama-io.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama-mtp-guard.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

constexpr uint32_t STATE_MAGIC = 0xaf143cd8; // of llama_state_seq_get_data_ext()

// A part of a state, in the order of its bytes: on the host, or the beginning of a tensor.
struct state_part {
    std::vector<uint8_t> bytes;
    ggml_tensor *        copy = nullptr;
    size_t               size = 0;
    std::vector<int32_t> rows; // of a ring of inputs: those of the state, which are transposed on the host
};

// Writes the parts of a state to the host.
struct host_writer : llama_io_write_i {
    host_writer(uint8_t * dst, size_t size) : dst(dst), end(dst + size) {}

    uint8_t * next(size_t size) {
        if (size > size_t(end - dst)) {
            throw std::runtime_error("a state is larger than the room for it");
        }
        return (dst += size) - size;
    }
    void write(const void * src, size_t size) override {
        memcpy(next(size), src, size);
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        ggml_backend_tensor_get(tensor, next(size), offset, size);
    }
    size_t n_bytes() override { return 0; }

    uint8_t *       dst;
    uint8_t * const end;
};

} // namespace

// Room for a state: a tensor for that of each layer.
struct llama_mtp_checkpoint_slot {
    std::map<const ggml_tensor *, ggml_tensor *>          copies; // by the tensor of the context's memory
    std::map<ggml_backend_dev_t, ggml_backend_event_ptr> events; // behind the copies; none where devices have no events
    std::vector<state_part>                               parts;
};

struct llama_mtp_checkpoints {
    llama_mtp_checkpoints(llama_context * ctx, const llama_memory_recurrent & memory, int32_t n);

    size_t take(int32_t i, llama_seq_id seq_id);
    void   get (int32_t i, uint8_t * dst, size_t size);

    ggml_backend_t backend_of(const ggml_tensor * tensor) const;

    llama_context * ctx;

    std::vector<llama_mtp_checkpoint_slot>       slots;
    std::map<ggml_backend_buffer_type_t, size_t> sizes;

    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> contexts;
    std::vector<ggml_backend_buffer_ptr>                   buffers;
};

namespace {

// Copies the tensors of a state to those of a slot, behind what their devices compute.
struct slot_writer : llama_io_write_i {
    slot_writer(const llama_mtp_checkpoints & owner, llama_mtp_checkpoint_slot & slot) : owner(owner), slot(slot) {
        const ggml_init_params params = { 2*slot.copies.size()*ggml_tensor_overhead(), nullptr, true };
        views.reset(ggml_init(params));
        if (!views) {
            throw std::bad_alloc();
        }
    }

    void write(const void * src, size_t size) override {
        if (slot.parts.empty() || slot.parts.back().copy) {
            slot.parts.emplace_back();
        }
        auto & bytes = slot.parts.back().bytes;
        bytes.insert(bytes.end(), (const uint8_t *) src, (const uint8_t *) src + size);
        n_written += size;
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        add(tensor, offset, size);
        n_written += size;
    }

    // one copy of all that lies between the rows, but for the last row of all: zeros
    void write_transposed(ggml_tensor * tensor, const std::vector<int32_t> & rows) override {
        const int32_t zeros = tensor->ne[1] - 1;

        int32_t begin = zeros, end = 0;
        for (const int32_t row : rows) {
            begin = std::min(begin, row);
            end   = std::max(end, row < zeros ? row + 1 : 0);
        }
        state_part & part = add(tensor, begin*tensor->nb[1], std::max(end - begin, 0)*tensor->nb[1]);
        for (const int32_t row : rows) {
            part.rows.push_back(row < zeros ? row - begin : part.copy->ne[1] - 1);
        }
        n_written += rows.size()*tensor->nb[1];
    }

    size_t n_bytes() override { return n_written; }

private:
    state_part & add(ggml_tensor * tensor, size_t offset, size_t size) {
        ggml_tensor * copy = slot.copies.at(tensor);
        if (size > ggml_nbytes(copy)) {
            throw std::runtime_error("a state of several cells");
        }
        if (size > 0) {
            const int64_t n = size/ggml_element_size(tensor);

            ggml_tensor * from = ggml_view_1d(views.get(), tensor, n, offset);
            ggml_tensor * to   = ggml_view_1d(views.get(), copy,   n, 0);
            ggml_backend_view_init(from);
            ggml_backend_view_init(to);

            ggml_backend_t backend = owner.backend_of(tensor);
            ggml_backend_tensor_copy_async(backend, backend, from, to);
        }
        slot.parts.push_back({ {}, copy, size, {} });
        return slot.parts.back();
    }

    const llama_mtp_checkpoints & owner;
    llama_mtp_checkpoint_slot   & slot;
    ggml_context_ptr              views;
    size_t                        n_written = 0;
};

} // namespace

llama_mtp_checkpoints::llama_mtp_checkpoints(llama_context * ctx, const llama_memory_recurrent & memory, int32_t n) :
    ctx(ctx), slots(n) {
    const auto add = [&](const ggml_tensor * tensor, int64_t n_rows) {
        if (!tensor) {
            return;
        }
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(tensor->buffer);

        auto & made = contexts[buft];
        if (!made) {
            const ggml_init_params params = { 3*n*memory.r_l.size()*ggml_tensor_overhead(), nullptr, true };
            made.reset(ggml_init(params));
            if (!made) {
                throw std::bad_alloc();
            }
        }
        for (auto & slot : slots) {
            slot.copies[tensor] = ggml_new_tensor_2d(made.get(), tensor->type, tensor->ne[0], n_rows);
            slot.events[ggml_backend_buft_get_device(buft)];
        }
    };
    const bool rings = memory.n_pend_max() > 0;
    for (size_t il = 0; il < memory.r_l.size(); ++il) {
        add(memory.r_l[il], rings ? memory.n_conv_max() + 1 : 1); // the last row: zeros
        add(memory.s_l[il], 1);
        add(memory.p_l[il], 1);
    }
    for (auto & [buft, made] : contexts) {
        sizes[buft] = ggml_backend_alloc_ctx_tensors_from_buft_size(made.get(), buft);
        if (ctx->get_model().hparams.no_alloc) {
            continue;
        }
        buffers.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(made.get(), buft));
        if (!buffers.back()) {
            throw std::bad_alloc();
        }
    }
    for (auto & slot : slots) {
        for (auto & [dev, event] : slot.events) {
            event.reset(ggml_backend_event_new(dev));
        }
    }
}

ggml_backend_t llama_mtp_checkpoints::backend_of(const ggml_tensor * tensor) const {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    const int n = ggml_backend_sched_get_n_backends(ctx->get_sched());
    for (int i = 0; dev && i < n; ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(ctx->get_sched(), i);
        if (ggml_backend_get_device(backend) == dev) {
            return backend;
        }
    }
    return ggml_backend_sched_get_backend(ctx->get_sched(), n - 1); // the CPU, whose buffers name no device
}

size_t llama_mtp_checkpoints::take(int32_t i, llama_seq_id seq_id) {
    auto & slot   = slots.at(i);
    auto & memory = *ctx->get_memory();
    slot.parts.clear();
    if (memory.settle(seq_id)) { // as before states are saved
        ctx->memory_update(false);
        if (memory.settle(seq_id)) {
            throw std::runtime_error("a state could not be brought up to date, which it is before it is kept");
        }
    }
    slot_writer io(*this, slot);
    io.write(&STATE_MAGIC, sizeof(STATE_MAGIC));
    io.write(&seq_id, sizeof(seq_id));
    memory.state_write(io, seq_id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);

    for (int j = 0; j < ggml_backend_sched_get_n_backends(ctx->get_sched()); ++j) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(ctx->get_sched(), j);
        const auto     found   = slot.events.find(ggml_backend_get_device(backend));
        if (found != slot.events.end() && found->second) {
            ggml_backend_event_record(found->second.get(), backend);
        } else if (found != slot.events.end()) {
            ggml_backend_synchronize(backend);
        }
    }
    return io.n_bytes();
}

void llama_mtp_checkpoints::get(int32_t i, uint8_t * dst, size_t size) {
    const auto & slot = slots.at(i);
    for (const auto & [dev, event] : slot.events) {
        if (event) {
            ggml_backend_event_synchronize(event.get());
        }
    }
    host_writer io(dst, size);
    for (const auto & part : slot.parts) {
        if (!part.copy) {
            io.write(part.bytes.data(), part.bytes.size());
        } else if (part.rows.empty()) {
            io.write_tensor(part.copy, 0, part.size);
        } else {
            io.write_transposed(part.copy, part.rows);
        }
    }
}

llama_mtp_checkpoints * llama_mtp_checkpoints_init(llama_context * ctx, int32_t n) {
    return llama_mtp_guard<llama_mtp_checkpoints *>(__func__, nullptr, [&]() -> llama_mtp_checkpoints * {
        const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(ctx->get_memory());
        return hybrid ? new llama_mtp_checkpoints(ctx, *hybrid->get_mem_recr(), n) : nullptr;
    });
}

void llama_mtp_checkpoints_free(llama_mtp_checkpoints * checkpoints) {
    delete checkpoints;
}

size_t llama_mtp_checkpoints_take(llama_mtp_checkpoints * checkpoints, int32_t i, llama_seq_id seq_id) {
    return llama_mtp_guard<size_t>(__func__, 0, [&] { return checkpoints->take(i, seq_id); });
}

bool llama_mtp_checkpoints_get(llama_mtp_checkpoints * checkpoints, int32_t i, uint8_t * dst, size_t size) {
    return llama_mtp_guard(__func__, false, [&] {
        checkpoints->get(i, dst, size);
        return true;
    });
}

size_t llama_mtp_checkpoints_size(const llama_mtp_checkpoints * checkpoints, bool all, ggml_backend_dev_t dev) {
    size_t sum = 0;
    for (const auto & [buft, size] : checkpoints->sizes) {
        ggml_backend_dev_t owner = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);
        sum += all || owner == dev ? size : 0;
    }
    return sum;
}
