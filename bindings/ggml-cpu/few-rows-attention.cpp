// FLASH_ATTN_EXT of 1 to 8 query rows (flash decoding): stretches of the context are computed by all threads, with a maximum, a sum
// and a weighted sum of values each, and merged in their order. K and V of every type; x86 with AVX2 or AVX-512, 64-bit ARM.
// Called by ggml_compute_forward_flash_attn_ext() (ops.cpp); ggml_graph_plan() (ggml-cpu.c) asks for its work size.

// GCC 12 warns of its own header wherever an AVX-512 function of it is inlined
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "few-rows-attention.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "vec.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

static std::atomic<bool> few_rows_attention { true };

void ggml_cpu_set_few_rows_attention(bool value) {
    few_rows_attention = value;
}

#if defined(__GNUC__) && (defined(__aarch64__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)))

#if defined(__aarch64__)
#include "few-rows-attention-neon.h"
#else
#include "few-rows-attention-simd.h"
#endif

namespace {

constexpr int64_t WINDOW = 64; // stretches, of all streams, whose results are in memory until they are merged

int64_t stretch_begin(int64_t i) {
    return i * STRETCH <= FAR ? i * STRETCH : FAR + (i - FAR / STRETCH) * LONG;
}

int64_t count_stretches(int64_t n_cells) {
    return n_cells <= FAR ? (n_cells + STRETCH - 1) / STRETCH : FAR / STRETCH + (n_cells - FAR + LONG - 1) / LONG;
}

// Stretches of a stream that are computed before they are merged: the memory of their results does not grow with the context.
// As many as threads share evenly; the order of merging, and so the result, is the same for any number.
int64_t window_of(int64_t n_streams, int n_threads) {
    return std::max<int64_t>(1, n_threads * std::max<int64_t>(4, WINDOW / n_threads) / n_streams);
}

// Of that many threads, or fewer: there may be fewer than were asked for.
int64_t largest_window(int64_t n_streams, int n_threads) {
    return std::max<int64_t>(1, std::max<int64_t>(4 * n_threads, WINDOW) / n_streams);
}

struct attention : attention_op {
    explicit attention(const ggml_tensor * dst) : attention_op(dst) {}

    int64_t n_stretches()  const { return count_stretches(n_tiles() * TILE); }
    int64_t partial_size() const { return size_v + 16; } // floats: the value that is summed up, maximum, sum
    int64_t n_queries()    const { return q->ne[1] * q->ne[2] * q->ne[3]; }
    int64_t index(int64_t stream, int64_t head, int64_t row) const { return (stream * q->ne[2] + head) * n_rows + row; } // of a query
};

// The cells that say how a row's channels are balanced, and this balance.
struct start {
    sample_cells  sample;
    const float * balance; // nullptr: nothing is to be balanced
};

// What all threads have.
struct shared {
    start  * starts;   // [stream][KV head][row]
    float  * balances; // [stream][KV head][row][size_k]
    number * queries;  // [query][size_k]
    float  * qscales;  // [query], of its numbers, with the scale of the scores
    float  * states;   // [query][2]: maximum and sum of the windows before
    float  * partials; // [query][stretch of the window][partial_size]

    int64_t n_slots; // stretches of a window

    shared(const attention & a, int64_t window, memory & m) : n_slots(std::min(window, a.n_stretches())) {
        starts   = m.alloc<start>(a.k->ne[3] * a.k->ne[2] * a.n_rows);
        balances = m.alloc<float>(a.k->ne[3] * a.k->ne[2] * a.n_rows * a.size_k);
        queries  = m.alloc<number>(a.n_queries() * a.size_k);
        qscales  = m.alloc<float>(a.n_queries());
        states   = m.alloc<float>(a.n_queries() * 2);
        partials = m.alloc<float>(a.n_queries() * n_slots * a.partial_size());
    }
};

// What a thread has.
struct scratch {
    rows_of * rows;     // of K or V
    float   * floats;   // of a row of a type without a way of its own
    number  * rest;     // [TILE] such rows
    number  * keys;     // [BLOCK][size_k]
    number  * values;   // [TILE][STEP]
    float   * qscale_k; // [TILE]
    float   * scores;   // [query][TILE]
    number  * weights;  // [query][TILE]
    uint64_t * seen;    // [row][part], of a tile
    bool    * biased;   // [row]

    scratch(const attention & a, memory & m) {
        const int64_t n = GGML_PAD(a.n_rows * a.n_heads, SIDE), size = std::max(a.size_k, a.size_v);
        rows     = m.alloc<rows_of>(1);
        floats   = m.alloc<float>(size);
        rest     = m.alloc<number>(TILE * size);
        keys     = m.alloc<number>(BLOCK * a.size_k);
        values   = m.alloc<number>(TILE * STEP);
        qscale_k = m.alloc<float>(TILE);
        scores   = m.alloc<float>(n * TILE);
        weights  = m.alloc<number>(n * TILE);
        seen     = m.alloc<uint64_t>(a.n_rows * a.n_parts);
        biased   = m.alloc<bool>(a.n_rows);
    }
};

// Query rows that see the same cells of a tile, and have the same balance, with all heads of the KV head.
struct group {
    int                 n = 0; // queries
    const float *       balance;
    const number *      q     [FEW_SHARED * FEW_HEADS + SIDE];
    float               qscale[FEW_SHARED * FEW_HEADS];
    value_sum           sums  [FEW_SHARED * FEW_HEADS];
    const ggml_fp16_t * mask  [FEW_SHARED * FEW_HEADS]; // of the tile, nullptr: of zeros
    float               slope [FEW_SHARED * FEW_HEADS];
    uint16_t            cells [TILE];                   // that they see, counted from the tile's first
    int                 n_cells = 0;
};

FR_INLINE float first_of(vec x) {
    float lanes[LANES];
    FR(storeu_ps)(lanes, x);
    return lanes[0];
}

// The scores of a query become weights.
void softmax_tile(const attention & a, group & g, int i, const scratch & t) {
    value_sum & sums  = g.sums[i];
    float     * state = sums.value + a.size_v; // maximum, sum
    float     * s     = t.scores + i * TILE;
    const int   n     = g.n_cells;
    const int   full  = GGML_PAD(n, CHUNK);

    float bias[TILE] = {};
    for (int c = 0; c < n && g.mask[i]; ++c) {
        bias[c] = g.slope[i] * GGML_CPU_FP16_TO_FP32(g.mask[i][g.cells[c]]);
    }
    for (int c = 0; c < full; c += LANES) {
        const vec factor = FR(mul_ps)(FR(set1_ps)(g.qscale[i]), FR(loadu_ps)(t.qscale_k + c));
        if (a.softcap == 0.0f) {
            FR(storeu_ps)(s + c, FR(fmadd_ps)(FR(loadu_ps)(s + c), factor, FR(loadu_ps)(bias + c)));
        } else {
            FR(storeu_ps)(s + c, FR(mul_ps)(FR(loadu_ps)(s + c), factor));
            cap_scores<LANES>(a.softcap, s + c, bias + c);
        }
    }
    std::fill(s + n, s + full, -INFINITY);

    vec most = FR(set1_ps)(-FLT_MAX);
    for (int c = 0; c < full; c += LANES) {
        most = FR(max_ps)(FR(loadu_ps)(s + c), most);
    }
    const float here  = max_of(most);
    const float total = weights_to_numbers(s, t.rows->qscale, full, here, t.weights + i * TILE, sums.qscale);

    vec max = FR(set1_ps)(state[0]), sum = FR(set1_ps)(state[1]);
    const merging m = merge_sums(max, sum, FR(set1_ps)(here), FR(set1_ps)(total));
    sums.shrink  = first_of(m.before);
    sums.qscale *= first_of(m.more);
    state[0]     = first_of(max);
    state[1]     = first_of(sum);
}

// a chunk of the values of n queries
template <int N = MOST> void add_values(const value_sum * q, int n, int64_t d, const number * values, int n_cells) {
    if (n == N) {
        add_values<N>(q, d, values, n_cells);
    } else if constexpr (N > 1) {
        add_values<N - 1>(q, n, d, values, n_cells);
    }
}

// one group of rows and one tile
void attend(const attention & a, group & g, const char * k, const char * v, fetcher & fetch_v, fetcher & fetch_k, const scratch & t) {
    const int padded = GGML_PAD(g.n, SIDE);
    for (int i = g.n; i < padded; ++i) {
        g.q[i] = g.q[0];
    }
    for (int c = 0; c < g.n_cells; c += BLOCK) {
        const int n = std::min(BLOCK, g.n_cells - c);
        t.rows->load(a.k, k, g.cells + c, n, true, g.balance, t.floats, t.rest, fetch_v);
        store_keys(*t.rows, n, a.size_k, t.keys, fetch_v);
        std::copy(t.rows->qscale, t.rows->qscale + n, t.qscale_k + c);
        for (int i = 0; i < padded; i += SIDE) {
            for (int j = 0; j < n; j += 4) {
                fetch_v.lines(4);
                multiply_keys(g.q + i, t.keys + j * a.size_k, a.size_k, t.scores + i * TILE + c + j);
            }
        }
    }
    t.rows->load(a.v, v, g.cells, g.n_cells, false, nullptr, t.floats, t.rest, fetch_k);
    std::fill(t.qscale_k + g.n_cells, t.qscale_k + TILE, 0.0f);
    std::fill(t.rows->qscale + g.n_cells, t.rows->qscale + TILE, 0.0f);
    for (int i = 0; i < g.n; ++i) {
        fetch_k.lines(8);
        softmax_tile(a, g, i, t);
    }
    for (int64_t d = 0; d < a.size_v; d += STEP) {
        fetch_k.lines(16);
        store_values(*t.rows, g.n_cells, d, t.values);
        for (int j = 0; j < STEP; j += CHUNK) {
            for (int i = 0; i < g.n; i += MOST) {
                fetch_k.lines(12);
                add_values<>(g.sums + i, std::min(g.n - i, MOST), d + j, t.values + j * TILE, g.n_cells);
            }
        }
    }
}

float * partial(const attention & a, const shared & all, int64_t query, int64_t stretch) {
    return all.partials + (query * all.n_slots + stretch % all.n_slots) * a.partial_size();
}

// a tile of one KV head; keys of a tile that comes next are fetched
void compute_tile(const attention & a, const shared & all, int64_t stream, int64_t stretch, int64_t kv_head, int64_t tile, int64_t next_head, int64_t next_tile, const scratch & t) {
    const int64_t n = a.n_parts, n_cells = a.k->ne[1], first_cell = a.first_cell(tile);
    const start * starts = all.starts + (stream * a.k->ne[2] + kv_head) * a.n_rows;
    for (int64_t row = 0; row < a.n_rows; ++row) {
        t.biased[row] = false;
        for (int64_t part = 0; part < n; ++part) {
            const visibility s = visibility_of(a, stream, row, tile, part);
            t.seen[row * n + part] = s.cells;
            t.biased[row] |= s.biased;
        }
    }
    uint64_t cells[MAX_PARTS], rest[MAX_PARTS];
    for (int64_t first = 0; first < a.n_rows;) {
        group g;
        std::copy_n(t.seen + first * n, n, cells);
        std::copy_n(cells, n, rest);
        g.n_cells = take_cells(rest, n, g.cells);
        if (g.n_cells == 0) {
            ++first;
            continue;
        }
        g.balance = starts[first].balance;
        for (int64_t row = first; row < a.n_rows; ++row) {
            if (starts[row].balance != g.balance || !std::equal(cells, cells + n, t.seen + row * n)) {
                continue;
            }
            std::copy_n(rest, n, t.seen + row * n);
            for (int64_t h = kv_head * a.n_heads; h < (kv_head + 1) * a.n_heads; ++h, ++g.n) {
                const int64_t query = a.index(stream, h, row);
                g.q     [g.n] = all.queries + query * a.size_k;
                g.qscale[g.n] = all.qscales[query];
                g.sums  [g.n] = { partial(a, all, query, stretch), t.weights + g.n * TILE, 1.0f, 0.0f };
                g.mask  [g.n] = t.biased[row] ? a.mask_of(stream, row) + first_cell : nullptr;
                g.slope [g.n] = a.slope(h);
            }
        }
        const int64_t part = g.cells[0] / TILE * TILE, next = a.first_cell(next_tile) + part;
        fetcher fetch_v(a.v, cell_of(a.v, stream, kv_head, first_cell + part), (int) std::min(TILE, n_cells - first_cell - part));
        fetcher fetch_k(a.k, cell_of(a.k, stream, next_head, next), (int) std::max<int64_t>(0, std::min(TILE, n_cells - next)));
        attend(a, g, cell_of(a.k, stream, kv_head, first_cell), cell_of(a.v, stream, kv_head, first_cell), fetch_v, fetch_k, t);
    }
}

// one stretch of KV heads [first, end): what every query sums up there
void compute_item(const attention & a, const shared & all, int64_t stream, int64_t stretch, int64_t first_head, int64_t end_head, const scratch & t) {
    const int64_t begin = stretch_begin(stretch) / TILE;
    const int64_t end   = std::min(stretch_begin(stretch + 1) / TILE, a.n_tiles());

    for (int64_t h = first_head * a.n_heads; h < end_head * a.n_heads; ++h) {
        for (int64_t row = 0; row < a.n_rows; ++row) {
            float * value = partial(a, all, a.index(stream, h, row), stretch);
            memset(value, 0, a.partial_size() * sizeof(float));
            value[a.size_v] = -INFINITY;
        }
    }
    for (int64_t tile = begin; tile < end; ++tile) {
        for (int64_t kv_head = first_head; kv_head < end_head; ++kv_head) {
            const bool    is_last   = kv_head + 1 == end_head;
            const int64_t next_head = is_last ? first_head : kv_head + 1, next_tile = is_last ? tile + 1 : tile;
            compute_tile(a, all, stream, stretch, kv_head, tile, next_head, next_tile, t);
        }
    }
}

// of all rows, and the heads of a KV head
void prepare_queries(const attention & a, const shared & all, int64_t stream, int64_t kv_head, const scratch & t) {
    const int64_t first = (stream * a.k->ne[2] + kv_head) * a.n_rows;
    for (int64_t row = 0; row < a.n_rows; ++row) {
        start & s = all.starts[first + row];
        s = { BALANCED ? sample_of(a, stream, row) : sample_cells(), nullptr };
        const start * alike = std::find_if(all.starts + first, &s, [&](const start & o) { return o.sample == s.sample; });
        float * balance = all.balances + (first + row) * a.size_k;
        if (alike != &s) {
            s.balance = alike->balance;
        } else if (s.sample.n && balance_channels(a, stream, kv_head, s.sample, t.floats, balance)) {
            s.balance = balance;
        }
        for (int64_t head = kv_head * a.n_heads; head < (kv_head + 1) * a.n_heads; ++head) {
            const float * q = (const float *) ((const char *) a.q->data + row * a.q->nb[1] + head * a.q->nb[2] + stream * a.q->nb[3]);
            const int64_t query = a.index(stream, head, row);
            memcpy(t.floats, q, a.DK() * sizeof(float));
            for (int64_t d = 0; d < a.DK() && s.balance; ++d) {
                t.floats[d] /= s.balance[d];
            }
            std::fill(t.floats + a.DK(), t.floats + a.size_k, 0.0f);
            all.qscales[query] = a.scale * to_shorts(t.floats, a.size_k, true, all.queries + query * a.size_k);
        }
    }
}

// What a query has summed up in the stretches of a window is added, in their order, to what it has in those before.
void merge(const attention & a, const shared & all, ggml_tensor * dst, int64_t stream, int64_t head, int64_t row, int64_t begin, int64_t end) {
    const int64_t DV = a.DV(), query = a.index(stream, head, row);
    float * out = (float *) ((char *) dst->data + head * dst->nb[1] + row * dst->nb[2] + stream * dst->nb[3]);
    float * so_far = all.states + 2 * query;
    if (begin == 0) {
        so_far[0] = -INFINITY;
        so_far[1] = 0.0f;
        memset(out, 0, DV * sizeof(float));
    }
    vec max = FR(set1_ps)(so_far[0]), sum = FR(set1_ps)(so_far[1]);
    for (int64_t i = begin; i < end; ++i) {
        const float * part  = partial(a, all, query, i);
        const float * state = part + a.size_v;
        if (state[1] == 0.0f) {
            continue; // it sees nothing of this stretch
        }
        const merging m = merge_sums(max, sum, FR(set1_ps)(state[0]), FR(set1_ps)(state[1]));
        for (int64_t d = 0; d < DV; d += LANES) {
            FR(storeu_ps)(out + d, m.add(FR(loadu_ps)(out + d), FR(loadu_ps)(part + d)));
        }
    }
    so_far[0] = first_of(max);
    so_far[1] = first_of(sum);
    if (end < a.n_stretches()) {
        return;
    }
    const float factor = a.last_factor(head, so_far[0], so_far[1]);
    for (int64_t d = 0; d < DV; ++d) {
        out[d] *= factor;
    }
}

bool handles(const ggml_tensor * dst) {
    const attention a(dst);
    return few_rows_attention && a.is_of_few() && a.supported(LANES);
}

} // namespace

size_t ggml_few_rows_attention_work_size(const ggml_tensor * dst, int n_threads) {
    if (!handles(dst)) {
        return 0;
    }
    const attention a(dst);
    memory all = { nullptr }, one = { nullptr };
    shared(a, largest_window(a.k->ne[3], n_threads), all);
    scratch(a, one);
    return 64 + all.size + n_threads * one.size;
}

bool ggml_compute_forward_few_rows_attention(const ggml_compute_params * params, ggml_tensor * dst) {
    if (params->use_ref || !handles(dst)) {
        return false;
    }
    const attention a(dst);
    memory rest = { (char *) GGML_PAD((uintptr_t) params->wdata, 64) }, one = { nullptr };
    const int64_t window = window_of(a.k->ne[3], params->nth);
    const shared all(a, window, rest);
    scratch(a, one);
    memory mine = { rest.base + rest.size + params->ith * one.size };
    const scratch t(a, mine);

    const int64_t n_heads = a.q->ne[2], n_kv_heads = a.k->ne[2], n_streams = a.k->ne[3];
    for (int64_t i = params->ith; i < n_kv_heads * n_streams; i += params->nth) {
        prepare_queries(a, all, i / n_kv_heads, i % n_kv_heads, t);
    }
    for (int64_t begin = 0; begin < a.n_stretches(); begin += window) {
        const int64_t end = std::min(begin + window, a.n_stretches());
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);

        // The long ones first. The KV heads of a cell lie beside each other in memory: a thread takes all, where there are
        // stretches enough for the others.
        const int64_t n_parts    = (end - begin) * n_streams;
        const int64_t n_together = n_parts >= 4 * params->nth ? n_kv_heads : 1;
        const int64_t n_items    = n_parts * (n_kv_heads / n_together);
        for (int64_t i = params->ith; i < n_items; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t left = n_items - 1 - i;
            const int64_t part = left / (n_kv_heads / n_together), head = left % (n_kv_heads / n_together) * n_together;
            compute_item(a, all, part % n_streams, begin + part / n_streams, head, head + n_together, t);
        }
        ggml_barrier(params->threadpool);

        for (int64_t i = params->ith; i < a.n_queries(); i += params->nth) {
            merge(a, all, dst, i / n_heads / a.n_rows, i % n_heads, i / n_heads % a.n_rows, begin, end);
        }
    }
    return true;
}

#else

bool ggml_compute_forward_few_rows_attention(const ggml_compute_params *, ggml_tensor *) {
    return false;
}

size_t ggml_few_rows_attention_work_size(const ggml_tensor *, int) {
    return 0;
}

#endif
