#pragma once

// Which cells of an attention cache tokens take. The CPU's attention sums up over tiles of LLAMA_CELLS_TILE cells in the order of
// cells; if a position decides what cell a token takes, no sum depends on what else is in the cache, or was.

#include "llama-kv-cells.h"
#include "llama-hparams.h"

#include <algorithm>
#include <vector>

struct ggml_tensor;
struct llama_cparams;
struct llama_ubatch;

constexpr uint32_t LLAMA_CELLS_TILE = 64;

struct llama_cells_rule {
    uint32_t       n_seqs; // that share the cells
    uint32_t       n_swa;  // window of positions, 0: all
    llama_swa_type swa_type;

    // Whether one is needed: else upstream's search gives cells in the order of positions.
    bool needed() const { return (n_seqs > 1) != (n_swa > 0); }

    // Appends the cells of a batch's tokens to `idxs`; false: there is no room, and `idxs` is as it was.
    //
    // Several sequences: tile t of all of them lies together, [t][sequence][LLAMA_CELLS_TILE]. Where another one has taken the place,
    // since sequences can share what they begin with, any free one of the same position will do, then any free one at all.
    // A window: a ring, cell = position modulo the size.
    bool place(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & idxs) const;
};

// Tells an attention over such cells how many sequences share them.
void llama_cells_share(ggml_tensor * attention, const llama_cparams & cparams, bool has_window);

// A row of a mask where all cells in use, [0, n), are of one sequence: it sees them, whatever their positions. `idxs` gets those with
// positions of at least `from`, for a second look one by one. Else, false: nothing is written, and each cell has to be looked at.
template <typename T>
bool llama_cells_mask(const llama_kv_cells & cells, llama_seq_id seq_id, llama_pos from, T * row, int64_t n_kv, T seen, T hidden,
        std::vector<uint32_t> & idxs) {
    const auto & of_seq = cells.seq_pos_get(seq_id);
    if (cells.get_used() != cells.used_max_p1() || cells.get_used() != of_seq.size()) {
        return false;
    }
    std::fill(row, row + of_seq.size(), seen);
    std::fill(row + of_seq.size(), row + n_kv, hidden);
    for (auto it = of_seq.lower_bound({ from, 0 }); it != of_seq.end(); ++it) {
        idxs.push_back(it->second);
    }
    return true;
}
