#pragma once

#include "ggml-cpp.h"
#include "llama-graph.h"

#include <array>
#include <cstdint>
#include <tuple>

// Graphs of one shape have schedulers, and so buffers, of their own: a round finds all of its graphs again.
struct llama_graph_shape {
    uint32_t n_steps   = 0;      // of a chain
    uint32_t n_tokens  = 0;      // all 0: of a prompt, as reserved; the only shape in a context without a block in the trunk
    uint32_t n_seqs    = 0;
    uint32_t n_outputs = 0;
    bool     kept      = false;  // a pass behind a chain, or that chain

    auto tie() const { return std::tie(n_steps, n_tokens, n_seqs, n_outputs, kept); }

    bool operator< (const llama_graph_shape & other) const { return tie() <  other.tie(); }
};

struct llama_graph_slot {
    ggml_backend_sched_ptr              sched;
    std::array<llm_graph_result_ptr, 2> prev;              // the last graph without outputs, and with
    llm_graph_result *                  active = nullptr;  // the one of them that the scheduler has allocated

    uint64_t last_used = 0;
};

// A member of the slot at hand, under the name that upstream's code has for it.
template <auto member>
struct llama_of_slot {
    llama_graph_slot * const & slot;

    auto & all() const { return slot->*member; }

    // of a pointer that owns
    auto get() const { return all().get(); }
    template <typename T> void reset(T * value) const { all().reset(value); }
    explicit operator bool() const { return bool(all()); }

    // of an array
    auto   begin() const { return all().begin(); }
    auto   end()   const { return all().end(); }
    auto & operator[](size_t i) const { return all()[i]; }

    // of a pointer
    operator llm_graph_result *() const { return all(); }
    void operator=(llm_graph_result * value) const { all() = value; }
};
