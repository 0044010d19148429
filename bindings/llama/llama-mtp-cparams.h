#pragma once

#include <cstdint>
#include <vector>

struct ggml_tensor;
struct llama_mtp_head;
struct llama_mtp_tap;

// What a chain of drafts is given, besides its batch.
struct llama_mtp_given {
    std::vector<int32_t> carry_rows;  // where each sequence has its row of the carry

    int32_t n_window = 0;             // last tokens that drafts attend to, besides the first ones; 0: all

    const float * noise = nullptr;    // added to logits, [n_steps, n_seqs, rows of the LM head], if drafts are drawn,
    const float * scale = nullptr;    // after they were multiplied, [n_seqs]
};

// What of multi-token prediction decides the topology of a graph.
struct llama_mtp_cparams {
    bool need_embd_pre_norm = false;  // the graph stores hidden rows in `tap`
    bool tap_pre_norm       = false;  // those before the final norm, not after it

    bool slice = true;                // compute nothing for rows that nobody asked for

    bool greedy = false;              // of an output row nothing but its best token is wanted
    bool greedy_on_cpu = false;       // and its logits are in host memory

    bool indices_on_cpu = false;      // of recurrent states: they need not be copied to a device
    bool delta_rows     = false;      // delta nets are GATED_DELTA_NET_ROWS, wherever their states are

    int32_t n_candidates = 0;         // best tokens that come with their logits, too

    int32_t chain = 0;                // of the batch at hand: steps that an MTP block takes in one graph, if more than 0

    bool in_trunk = false;            // the trunk's graph writes K and V of an MTP block, its memory keeps them

    const llama_mtp_head * head = nullptr;  // of an MTP block, in place of its own
    uint64_t               head_id = 0;

    // what the graph at hand has, if it drafts
    const llama_mtp_head * draft_head() const { return in_trunk && chain == 0 ? nullptr : head; }

    bool drawn = false;               // a chain draws its drafts

    ggml_tensor * kept     = nullptr; // F32 [n_embd, tokens]: where a chain leaves the embeddings of what is verified behind it,
    ggml_tensor * kept_ids = nullptr; // I32: and its drafts, with what the pass over them picks behind them
    bool    keep   = false;           // the chain at hand does
    int32_t n_kept = 0;               // drafts of a chain, whose embeddings the trunk takes instead of its tokens'

    ggml_tensor *           carry = nullptr;  // of the memory, if in_trunk
    const llama_mtp_given * given = nullptr;  // of the chain at hand

    // whether the trunk's last layer runs for rows that are no output rows
    bool all_rows() const { return need_embd_pre_norm || in_trunk || !slice; }

    llama_mtp_tap * tap = nullptr;    // the context's own, for as long as the context lives

    bool operator==(const llama_mtp_cparams & other) const {
        return need_embd_pre_norm == other.need_embd_pre_norm &&
               tap_pre_norm       == other.tap_pre_norm &&
               slice              == other.slice &&
               greedy             == other.greedy &&
               n_candidates       == other.n_candidates &&
               chain              == other.chain &&
               drawn              == other.drawn &&
               keep               == other.keep &&
               n_kept             == other.n_kept &&
               head_id            == other.head_id;
    }
};
