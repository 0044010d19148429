// Recurrent memory where tokens can be pending: what is kept of them, and the rows in which it is.

#include "llama-memory-recurrent.h"

#include "llama-context.h"
#include "llama-io.h"
#include "llama-mtp-pending.h"

#include "ggml-backend.h"

#include <algorithm>

int32_t llama_memory_recurrent::carry_row(llama_seq_id seq_id) const {
    const bool known = carry && 0 <= seq_id && (uint32_t) seq_id < std::min(size, n_seq_max);
    const int32_t tail = known ? cells[seq_id].tail : -1;
    if (tail < 0 || cells[tail].src < 0) {
        return -1;
    }
    return rs_idx[seq_id]*size + cells[tail].src;
}

size_t llama_memory_recurrent::size_pend_bytes() const {
    size_t size_pend_bytes = 0;

    for (const auto & pend : { pend_l, gates_l }) {
        for (const ggml_tensor * t : pend) {
            size_pend_bytes += t ? ggml_nbytes(t) : 0;
        }
    }

    return size_pend_bytes;
}

uint32_t llama_memory_recurrent::n_conv_state() const {
    return hparams.ssm_d_conv - 1;
}

// of the state after n_conv inputs
std::vector<int32_t> llama_memory_recurrent::conv_state_rows(uint32_t cell, int64_t n_conv) const {
    std::vector<int32_t> rows;
    for (int64_t i = n_conv - n_conv_state(); i < n_conv; ++i) {
        rows.push_back(conv_row(cell, i));
    }
    return rows;
}

bool llama_memory_recurrent::settle(llama_seq_id seq_id) {
    settling.clear();
    for (uint32_t i = 0; i < size; ++i) {
        if (cells[i].past.n_pend > 0 && !cells[i].is_empty() && (seq_id < 0 || cells[i].has_seq_id(seq_id))) {
            settling.push_back(i);
        }
    }
    return !settling.empty();
}

// What is pending goes into s, cell by cell; their sequences cannot go back then.
bool llama_memory_recurrent::take_in_pending(llama_context * lctx) {
    const auto ids = std::move(settling);
    settling.clear();
    lctx->synchronize();
    for (const uint32_t i : ids) {
        auto & cell = cells[i];
        if (cell.is_empty() || cell.past.n_pend == 0) {
            continue; // removed since, where an earlier update has failed
        }
        cell.past.stage(rs_idx[*cell.seq_id.begin()]);
        cell.past.n_back = 0;
        if (cell.past.n_pend0 > 0 && !lctx->mtp_take_in_pending(*this, i)) {
            return false;
        }
        cell.past.n_pend = 0;
    }
    return true;
}

ggml_tensor * llama_memory_recurrent_context::get_carry() const {
    return mem->carry;
}

ggml_tensor * llama_memory_recurrent_context::get_pend_l(int32_t il) const {
    return mem->pend_l[il];
}

ggml_tensor * llama_memory_recurrent_context::get_gates_l(int32_t il) const {
    return mem->gates_l[il];
}

uint32_t llama_memory_recurrent_context::get_n_pend_max() const {
    return mem->n_pend_max();
}

uint32_t llama_memory_recurrent_context::get_n_pend_rows() const {
    return mem->n_pend_rows();
}

uint32_t llama_memory_recurrent_context::get_n_gate_part(uint32_t n) const {
    return llama_gate_rows(n, mem->hparams);
}

uint32_t llama_memory_recurrent_context::get_n_gate_rows(uint32_t n) const {
    uint32_t n_parts = 0;
    for (const ggml_tensor * gates : mem->gates_l) {
        n_parts = std::max<uint32_t>(n_parts, gates ? 2*gates->view_src->ne[1]/gates->ne[1] : 0);
    }
    return n_parts*get_n_gate_part(n);
}

int32_t llama_memory_recurrent_context::s_cell(int i) const {
    return mem->cells[i + mem->head].src0;
}

uint32_t llama_memory_recurrent_context::get_n_states(uint32_t n_tokens) const {
    return mem->n_states(n_tokens);
}

uint32_t llama_memory_recurrent_context::get_n_pend() const {
    return is_full ? mem->n_pend_max() : mem->n_pend;
}

int32_t llama_memory_recurrent_context::n_pend_of(int i) const {
    return mem->cells[i + mem->head].past.n_pend0;
}

int32_t llama_memory_recurrent_context::pend_row(int i, int j) const {
    const auto & cell = mem->cells[i + mem->head];
    const int32_t n = mem->n_pend_max();
    return (uint32_t) j < cell.past.n_pend0 ? cell.src0*n + j : (int32_t) mem->size*n;
}

uint32_t llama_memory_recurrent_context::get_n_conv_max() const {
    return mem->n_conv_max();
}

uint32_t llama_memory_recurrent_context::get_n_conv_state() const {
    return mem->n_conv_state();
}

int32_t llama_memory_recurrent_context::conv_row(int i, int j) const {
    const auto & cell = mem->cells[i + mem->head];
    return mem->conv_row(cell.src0, (int64_t) cell.past.n_conv0 - mem->n_conv_state() + j);
}

int32_t llama_memory_recurrent_context::conv_row_moved(int i, int j) const {
    return mem->conv_row(i + mem->head, (int64_t) mem->cells[i + mem->head].past.n_conv0 - mem->n_conv_state() + j);
}

bool llama_memory_recurrent_context::get_conv_moved() const {
    return is_full || mem->conv_moved;
}

int32_t llama_memory_recurrent_context::conv_row_new(int i, int j, int n) const {
    return mem->conv_row(i + mem->head, (int64_t) mem->cells[i + mem->head].past.n_conv - n + j);
}

void llama_io_write_i::write_transposed(ggml_tensor * tensor, const std::vector<int32_t> & rows) {
    const size_t n = tensor->ne[0];

    // one copy of all that lies between them, but for the last row of all: zeros
    const int32_t zeros = tensor->ne[1] - 1;

    int32_t begin = zeros, end = 0;
    for (const int32_t row : rows) {
        begin = std::min(begin, row);
        end   = std::max(end, row < zeros ? row + 1 : 0);
    }
    end = std::max(begin, end);
    std::vector<float> all(n*(end - begin));
    std::vector<float> columns(n*rows.size());
    ggml_backend_tensor_get(tensor, all.data(), begin*tensor->nb[1], all.size()*sizeof(float));
    for (size_t j = 0; j < rows.size(); ++j) {
        for (size_t i = 0; i < n && rows[j] < end; ++i) {
            columns[i*rows.size() + j] = all[(rows[j] - begin)*n + i];
        }
    }
    write(columns.data(), columns.size()*sizeof(float));
}

void llama_io_read_i::read_transposed(ggml_tensor * tensor, int32_t first, int32_t n_rows) {
    const size_t n = tensor->ne[0];

    std::vector<float> columns(n*n_rows);
    std::vector<float> rows(n*n_rows);
    read(columns.data(), columns.size()*sizeof(float));
    for (size_t i = 0; i < n; ++i) {
        for (int32_t j = 0; j < n_rows; ++j) {
            rows[j*n + i] = columns[i*n_rows + j];
        }
    }
    ggml_backend_tensor_set(tensor, rows.data(), first*tensor->nb[1], n_rows*tensor->nb[1]);
}

static void skip(llama_io_read_i & io, uint64_t size) {
    uint8_t bytes[4096];
    for (uint64_t n; size > 0; size -= n) {
        n = std::min<uint64_t>(size, sizeof(bytes));
        io.read(bytes, n);
    }
}

void llama_io_read_i::skip_layer(uint32_t n_cells, bool transposed) {
    skip(*this, sizeof(int32_t)); // type
    uint64_t size_row;
    if (transposed) {
        uint32_t dims[2]; // bytes of an element, elements of a row
        read(dims, sizeof(dims));
        size_row = uint64_t(dims[0])*dims[1];
    } else {
        read(&size_row, sizeof(size_row));
    }
    skip(*this, n_cells*size_row);
}

void llama_io_read_i::skip_carry(uint32_t n_cells) {
    skip(*this, sizeof(uint32_t)); // kind of its rows
    uint64_t size_row;
    read(&size_row, sizeof(size_row));
    skip(*this, n_cells*size_row);
}
