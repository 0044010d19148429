#include "llama-mtp-cells.h"

#include "llama-batch.h"
#include "llama-cparams.h"

#include "ggml.h"

bool llama_cells_rule::place(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & idxs) const {
    std::vector<bool> taken(cells.size());
    const auto take = [&](uint32_t cell) {
        if (cell >= cells.size() || taken[cell]) {
            return false;
        }
        taken[cell] = cells.is_empty(cell) || (n_swa > 0 && cells.seq_count(cell) == 1 &&
            llama_hparams::is_masked_swa(n_swa, swa_type, cells.pos_get(cell), cells.seq_pos_max(cells.seq_get(cell)) + 1));
        return (bool) taken[cell];
    };

    const size_t n_before = idxs.size();
    idxs.resize(n_before + ubatch.n_tokens, cells.size());

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const uint32_t pos = ubatch.pos[i], tile = pos/LLAMA_CELLS_TILE, seq = ubatch.seq_id[i][0];

        for (uint32_t j = 0; j < n_seqs && idxs[n_before + i] == cells.size(); ++j) {
            const uint32_t cell = n_swa > 0 ? pos % cells.size()
                : (tile*n_seqs + (seq + j) % n_seqs)*LLAMA_CELLS_TILE + pos % LLAMA_CELLS_TILE;
            if (take(cell)) {
                idxs[n_before + i] = cell;
            }
        }
    }

    // tokens of an image, which have one position, and what was moved to other positions: where they find room
    uint32_t next = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        while (idxs[n_before + i] == cells.size() && next < cells.size()) {
            if (take(next++)) {
                idxs[n_before + i] = next - 1;
            }
        }
        if (idxs[n_before + i] == cells.size()) {
            idxs.resize(n_before);
            return false;
        }
    }
    return true;
}

void llama_cells_share(ggml_tensor * attention, const llama_cparams & cparams, bool has_window) {
    attention->op_params[5] = cparams.kv_unified && !has_window ? (int32_t) cparams.n_seq_max : 1;
}
