#pragma once

#include <algorithm>
#include <cstdint>

// What a cell of recurrent memory knows of its newest tokens, besides its state.
struct llama_mtp_history {
    uint32_t n_back = 0;  // tokens before pos to which it can go back
    uint32_t n_pend = 0;  // tokens that are pending: its s has not taken them in yet
    uint32_t n_conv = 0;  // inputs that its convolutions have had

    // of these, what the graph at hand takes in, and what was before it; and by how many tokens its sequence went back
    uint32_t n_pend0     = 0;
    uint32_t n_conv0     = 0;
    uint32_t n_rollback0 = 0;

    void reset() { *this = {}; }

    // The graph at hand begins, without the tokens by which the sequence went back.
    void stage(uint32_t n_rollback) {
        n_rollback0 = n_rollback;

        n_pend0 = n_pend - std::min(n_pend, n_rollback);
        n_conv0 = n_conv - std::min(n_conv, n_rollback);
    }
    // It has tokens of this cell, the last of which are pending then.
    void take(uint32_t n_tokens, uint32_t n_pending) {
        n_back = 0;
        n_pend = n_pending;
        n_conv = n_conv0 + n_tokens;
    }
    // It has none, and brings its newest state to another cell, without those before.
    void move() {
        n_back = 0;
        n_pend = n_pend0;
        n_conv = n_conv0;
    }
};
