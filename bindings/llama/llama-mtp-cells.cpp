#include "llama-mtp-cells.h"

#include "llama-batch.h"
#include "llama-cparams.h"

#include "ggml.h"

bool llama_cells_rule::place(const llama_kv_cells & cells, const llama_ubatch & ubatch, std::vector<uint32_t> & idxs) const {
    const size_t n_before = idxs.size();

    std::vector<bool> taken(cells.size());
    const auto is_free = [&](uint32_t cell) {
        if (cell >= cells.size()) {
            return false;
        }
        if (cells.is_empty(cell)) {
            return true;
        }
        return n_swa > 0 && cells.seq_count(cell) == 1 &&
            llama_hparams::is_masked_swa(n_swa, swa_type, cells.pos_get(cell), cells.seq_pos_max(cells.seq_get(cell)) + 1);
    };

    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const uint32_t pos = ubatch.pos[i], tile = pos/LLAMA_CELLS_TILE, seq = ubatch.seq_id[i][0];

        bool found = false;
        for (uint32_t j = 0; j < n_seqs && !found; ++j) {
            const uint32_t cell = n_swa > 0 ? pos % cells.size()
                : (tile*n_seqs + (seq + j) % n_seqs)*LLAMA_CELLS_TILE + pos % LLAMA_CELLS_TILE;
            found = is_free(cell) && !taken[cell];
            if (found) {
                taken[cell] = true;
                idxs.push_back(cell);
            }
        }
        if (!found) {
            idxs.resize(n_before);
            return false;
        }
    }
    return true;
}

void llama_cells_share(ggml_tensor * attention, const llama_cparams & cparams) {
    attention->op_params[5] = cparams.kv_unified ? (int32_t) cparams.n_seq_max : 1;
}
