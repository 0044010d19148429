#pragma once

#include "llama-tap.h"

#include <cstdint>
#include <tuple>
#include <vector>

struct ggml_tensor;
struct llama_mtp_head;

// Inputs of a chain of drafts, besides its batch.
struct llama_mtp_given {
    std::vector<int32_t> carry_rows;  // where each sequence has its row of the carry

    int32_t n_window = 0;             // last tokens that drafts attend to, besides the first ones; 0: all

    const float * noise = nullptr;    // of drawn drafts: added to logits, [n_steps, n_seqs, rows of the LM head],
    const float * scale = nullptr;    // after these are multiplied, [n_seqs]
};

// Settings of a context.
struct llama_mtp_settings {
    llama_hidden_tap block_input = LLAMA_HIDDEN_TAP_POST_NORM;  // hidden rows that the MTP block takes


    bool    greedy       = false;     // pick the best token of each output row; logits stay where they are
    int32_t n_candidates = 0;         // with greedy: the best tokens with their logits, too

    uint64_t head_id = 0;             // of llama_mtp_places::head

    // fixed when the context is made
    bool in_trunk       = false;      // the trunk's graphs write K and V of an MTP block, whose drafts are chains
    bool indices_on_cpu = false;      // the output layer is on a CPU: logits, and indices of states, are in host memory
    bool delta_rows     = false;      // delta nets are GATED_DELTA_NET_ROWS, wherever their states are
};

// Tensors of a context that its graphs read and write.
struct llama_mtp_places {
    const llama_mtp_head * head     = nullptr;  // in place of an MTP block's own LM head
    ggml_tensor *          carry    = nullptr;  // of the memory, if in_trunk
    ggml_tensor *          kept     = nullptr;  // F32 [n_embd, tokens]: embeddings of what is verified behind a chain
    ggml_tensor *          kept_ids = nullptr;  // I32: the drafts of that chain, then the tokens that the pass picks
};

// What the graph at hand does, besides what it does for each batch.
struct llama_mtp_request {
    int32_t chain              = 0;      // a chain of so many steps, if more than 0
    int32_t n_chain_candidates = 0;      // of each draft: best tokens with their logits
    bool    drawn              = false;  // the chain draws its drafts
    bool    keep               = false;  // the chain keeps its drafts for the pass behind it
    int32_t n_kept             = 0;      // a pass over so many kept drafts, if more than 0

    const llama_mtp_given * given = nullptr;  // of the chain
};

// The part of llama_cparams that is about multi-token prediction.
struct llama_mtp_cparams : llama_mtp_settings, llama_mtp_places, llama_mtp_request {
    // The draft head of the graph at hand; NULL: it has none.
    const llama_mtp_head * draft_head() const { return in_trunk && chain == 0 ? nullptr : head; }

    // Candidates of each output row of the graph at hand.
    int32_t n_best() const { return chain > 0 ? n_chain_candidates : n_candidates; }

    void request(const llama_mtp_request & value) { static_cast<llama_mtp_request &>(*this) = value; }

    // A chain looks at the head and at the block's input; a switch of other settings costs it nothing.
    auto key() const {
        const llama_mtp_settings unused;
        const llama_mtp_settings & s = chain > 0 ? unused : static_cast<const llama_mtp_settings &>(*this);
        return std::make_tuple(s.greedy, s.n_candidates, block_input, head_id,
                chain, n_chain_candidates, drawn, keep, n_kept);
    }

    // Whether graphs have the same topology. A new member on which graphs depend belongs here: see test_graph_reuse.py.
    bool operator==(const llama_mtp_cparams & other) const { return key() == other.key(); }
};
