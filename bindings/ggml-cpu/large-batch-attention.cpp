// FLASH_ATTN_EXT of 9 query rows and more, as prompts have it: tiles of K and V of every type become shorts once for all rows and
// heads, and are multiplied as integers. x86 with AVX2 or AVX-512.
// Called by ggml_compute_forward_flash_attn_ext() (ops.cpp); ggml_graph_plan() (ggml-cpu.c) asks for its work size.

// GCC 12 warns of its own header wherever an AVX-512 function of it is inlined
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "large-batch-ops.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "vec.h"

#include <algorithm>
#include <cmath>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__GNUC__)

#include "large-batch-attention-simd.h"

namespace {

constexpr int     PANEL     = VECTORS * LANES; // queries that are taken together
constexpr int64_t BLOCK     = 240;             // queries, of rows and heads, that a thread takes together
constexpr int64_t TILES     = 8;               // of a chunk: they are unpacked for all queries of a group of rows
constexpr int64_t MEMORY    = 32 << 20;        // bytes that queries and values of a group take, about
constexpr int64_t MIN_ROWS  = 9;
constexpr int64_t MAX_HEADS = 128;             // query heads per KV head
constexpr int64_t MAX_SIZE  = 1024;            // of a head
constexpr int64_t SAMPLE    = 64;              // cells, about, whose keys are looked at before they are rounded

struct attention : attention_op {
    explicit attention(const ggml_tensor * dst) : attention_op(dst) {}

    int64_t n_cells()   const { return k->ne[1]; }
    int64_t n_tiles()   const { return (n_cells() + TILE - 1) / TILE; }
    int64_t n_streams() const { return k->ne[3]; }
    bool    handles() const {
        return ggml_cpu_large_batch() && n_rows >= MIN_ROWS && supported() && softcap == 0.0f && n_heads <= MAX_HEADS &&
               DK() % LANES == 0 && DV() % LANES == 0 && DK() <= MAX_SIZE && DV() <= MAX_SIZE;
    }
};

// What a thread computes with: a block of queries, and a tile of cells. Pairs are two shorts.
struct state {
    // of the block
    int32_t * queries;  // panel after panel: [DK / 2][lanes]
    float   * values;   // panel after panel: [DV][lanes], what is summed up
    float   * qscale_q; // of each query, with the scale of the scores: number = qscale * short
    float   * max;
    float   * sum;

    // of the tile
    int32_t * keys;     // [TILE][DK / 2]
    float   * qscale_k; // [TILE]
    int32_t * pairs_v;  // [TILE / 2][DV], two cells each
    float   * qscale_v; // [DV]

    // of the thread
    float   * floats;  // [TILE][DK or DV], as they are unpacked
    float   * scores;  // [TILE][lanes]
    int32_t * weights; // [TILE / 2][lanes]
    float   * bias;    // [TILE][lanes]

    void alloc_scratch(const attention & a, memory & m) {
        floats  = m.alloc<float>(TILE * std::max(a.DK(), a.DV()));
        scores  = m.alloc<float>(TILE * PANEL);
        weights = m.alloc<int32_t>(TILE / 2 * PANEL);
        bias    = m.alloc<float>(TILE * PANEL);
    }
};

// Which cells of a tile any row sees, and which of those have numbers that are none: those become zero, and what sees them by
// their bias.
struct tile_cells {
    int      n;
    uint64_t bad;
    uint8_t  cells[TILE];
};

// What all threads have.
struct shared {
    uint64_t * seen;   // [stream][tile]: the cells that any row sees
    float    * shrink; // [stream][KV head][DK]: what keys are multiplied by, and queries divided by; powers of two

    // two chunks, of which one is unpacked while the other is computed with: [2][KV head][TILES]
    int32_t    * keys;
    float      * qscale_k;
    int32_t    * pairs_v;
    float      * qscale_v;
    tile_cells * cells;

    // blocks, [block][KV head]
    int32_t * queries;
    float   * values;
    float   * qscale_q;
    float   * max;
    float   * sum;

    shared(const attention & a, int64_t n_queries, memory & m) {
        const int64_t n_kv_heads = a.k->ne[2], n_unpacked = 2 * n_kv_heads * TILES;
        seen     = m.alloc<uint64_t>(a.n_streams() * a.n_tiles());
        shrink   = m.alloc<float>(a.n_streams() * n_kv_heads * a.DK());
        keys     = m.alloc<int32_t>(n_unpacked * TILE * a.DK() / 2);
        qscale_k = m.alloc<float>(n_unpacked * TILE);
        pairs_v  = m.alloc<int32_t>(n_unpacked * TILE / 2 * a.DV());
        qscale_v = m.alloc<float>(n_unpacked * a.DV());
        cells    = m.alloc<tile_cells>(n_unpacked);
        queries  = m.alloc<int32_t>(n_queries * a.DK() / 2);
        values   = m.alloc<float>(n_queries * a.DV());
        qscale_q = m.alloc<float>(n_queries);
        max      = m.alloc<float>(n_queries);
        sum      = m.alloc<float>(n_queries);
    }

    // the tile that is unpacked i-th of a chunk
    int64_t at(const attention & a, int64_t chunk, int64_t kv_head, int64_t i) const { return (chunk % 2 * a.k->ne[2] + kv_head) * TILES + i; }

    void bind_tile(const attention & a, int64_t at, state & t) const {
        t.keys     = keys    + at * TILE * a.DK() / 2;
        t.qscale_k = qscale_k + at * TILE;
        t.pairs_v  = pairs_v + at * TILE / 2 * a.DV();
        t.qscale_v = qscale_v + at * a.DV();
    }

    void bind_queries(const attention & a, int64_t first, state & t) const {
        t.queries  = queries + first * a.DK() / 2;
        t.values   = values  + first * a.DV();
        t.qscale_q = qscale_q + first;
        t.max      = max     + first;
        t.sum      = sum     + first;
    }
};

// ---- a panel of queries and a tile of cells

// Scores become weights, in pairs of cells. Returns by what the values so far shrink, and the scale of products with weights.
template <int V>
FR_INLINE void softmax_tile(const state & t, int n, vec most, float * max, float * sum, int v, vec & shrink, vec & qscale) {
    const vec lowest = FR(set1_ps)(-FLT_MAX); // where nothing is seen, so that exp(-inf - lowest) is zero
    const vec here   = FR(max_ps)(lowest, most);
    const vec before = FR(loadu_ps)(max);
    const vec top    = FR(max_ps)(lowest, FR(max_ps)(before, most));

    vec squares = FR(setzero_ps)();
    for (int c = 0; c < n; ++c) {
        float * s = t.scores + (c * V + v) * LANES;
        const vec w = ggml_v_expf(FR(sub_ps)(FR(loadu_ps)(s), here));
        FR(storeu_ps)(s, w);
        squares = FR(fmadd_ps)(w, w, squares);
    }
    const vec scale = scale_of(squares);
    ivec total = FR(set1_epi32)(0);
    for (int c = 0; c < n; c += 2) {
        const float * s = t.scores + (c * V + v) * LANES;
        const ivec low  = FR(cvtps_epi32)(FR(mul_ps)(FR(loadu_ps)(s), scale));
        const ivec high = c + 1 < n ? FR(cvtps_epi32)(FR(mul_ps)(FR(loadu_ps)(s + V * LANES), scale)) : low ^ low;
        total = FR(add_epi32)(total, FR(add_epi32)(low, high));
        const ivec two = pair_of(low, high);
        memcpy(t.weights + (c / 2 * V + v) * LANES, &two, sizeof(ivec));
    }
    shrink = ggml_v_expf(FR(sub_ps)(before, top));
    qscale  = FR(div_ps)(ggml_v_expf(FR(sub_ps)(here, top)), scale);
    FR(storeu_ps)(max, FR(max_ps)(before, most));
    FR(storeu_ps)(sum, FR(fmadd_ps)(FR(loadu_ps)(sum), shrink, FR(mul_ps)(FR(cvtepi32_ps)(total), qscale)));
}

// one panel of queries, from the first one on, and a tile of n cells
template <int V> void attend(const attention & a, const state & t, int64_t first, int n, bool biased) {
    const int64_t DK = a.DK(), DV = a.DV();
    vec most[V], shrink[V], qscale[V], qscale_q[V];
    FR_UNROLL for (int v = 0; v < V; ++v) {
        most[v]    = FR(set1_ps)(-INFINITY);
        qscale_q[v] = FR(loadu_ps)(t.qscale_q + first + v * LANES);
    }
    ivec sums[PARTNERS][V];
    for (int c = 0; c < n; c += PARTNERS) {
        multiply<V>(t.queries + first * DK / 2, DK / 2, t.keys + c * DK / 2, 1, DK / 2, sums);
        for (int s = 0; s < PARTNERS && c + s < n; ++s) {
            FR_UNROLL for (int v = 0; v < V; ++v) {
                const int64_t at = ((c + s) * V + v) * LANES;
                vec score = FR(mul_ps)(FR(cvtepi32_ps)(sums[s][v]), FR(mul_ps)(qscale_q[v], FR(set1_ps)(t.qscale_k[c + s])));
                if (biased) {
                    score = FR(add_ps)(score, FR(loadu_ps)(t.bias + at));
                }
                FR(storeu_ps)(t.scores + at, score);
                most[v] = FR(max_ps)(most[v], score);
            }
        }
    }
    for (int v = 0; v < V; ++v) {
        softmax_tile<V>(t, n, most[v], t.max + first + v * LANES, t.sum + first + v * LANES, v, shrink[v], qscale[v]);
    }
    float * values = t.values + first * DV;
    for (int64_t d = 0; d < DV; d += PARTNERS) {
        multiply<V>(t.weights, (n + 1) / 2, t.pairs_v + d, DV, 1, sums);
        for (int s = 0; s < PARTNERS; ++s) {
            FR_UNROLL for (int v = 0; v < V; ++v) {
                float * value = values + ((d + s) * V + v) * LANES;
                const vec more = FR(mul_ps)(FR(cvtepi32_ps)(sums[s][v]), FR(mul_ps)(qscale[v], FR(set1_ps)(t.qscale_v[d + s])));
                FR(storeu_ps)(value, FR(fmadd_ps)(FR(loadu_ps)(value), shrink[v], more));
            }
        }
    }
}

// ---- a block of query rows, with all heads of a KV head

struct block {
    int64_t stream, kv_head, row, n_rows, n_queries;

    int64_t panels_end() const { return GGML_PAD(n_queries, LANES); }
    int64_t width(int64_t first) const { return std::min<int64_t>(PANEL, panels_end() - first); } // of the panel that begins there
};

// f(i, row, head) for the queries of a panel
template <typename F> void queries_of(const attention & a, const block & b, int64_t first, F f) {
    for (int64_t i = 0; i < b.width(first) && first + i < b.n_queries; ++i) {
        f(i, b.row + (first + i) / a.n_heads, b.kv_head * a.n_heads + (first + i) % a.n_heads);
    }
}

// What balances channels, by some of the cells.
void balance(const attention & a, int64_t stream, int64_t kv_head, const uint64_t * seen, float * floats, float * shrink) {
    const int64_t DK = a.DK();
    int64_t n = 0, i = 0;
    for (int64_t tile = 0; tile < a.n_tiles(); ++tile) {
        n += __builtin_popcountll(seen[tile]);
    }
    const int64_t step = std::max<int64_t>(1, n / SAMPLE);
    std::fill(shrink, shrink + DK, 0.0f);
    for (int64_t tile = 0; tile < a.n_tiles(); ++tile) {
        for (uint64_t left = seen[tile]; left; left &= left - 1) {
            if (i++ % step == 0) {
                unpack(a.k->type, cell_of(a.k, stream, kv_head, tile * TILE + __builtin_ctzll(left)), floats, DK);
                update_max_abs(floats, DK, shrink);
            }
        }
    }
    balance(DK, shrink);
}

void prepare_queries(const attention & a, const block & b, const state & t, const float * shrink) {
    const int64_t DK = a.DK(), n = b.panels_end();
    memset(t.queries, 0, n * DK / 2 * sizeof(int32_t));
    memset(t.values,  0, n * a.DV() * sizeof(float));
    memset(t.sum,     0, n * sizeof(float));
    memset(t.qscale_q, 0, n * sizeof(float));
    std::fill(t.max, t.max + n, -INFINITY);
    for (int64_t first = 0; first < n; first += PANEL) {
        const int64_t width = b.width(first);
        queries_of(a, b, first, [&](int64_t i, int64_t row, int64_t head) {
            const float * q = (const float *) ((const char *) a.q->data + row * a.q->nb[1] + head * a.q->nb[2] + b.stream * a.q->nb[3]);
            int32_t pairs[MAX_SIZE / 2];
            for (int64_t d = 0; d < DK; ++d) {
                t.floats[d] = q[d] / shrink[d];
            }
            t.qscale_q[first + i] = a.scale * to_shorts(t.floats, DK, pairs);
            for (int64_t p = 0; p < DK / 2; ++p) {
                t.queries[first * DK / 2 + p * width + i] = pairs[p];
            }
        });
    }
}

// The cells of a tile that any row sees become shorts.
void unpack_tile(const attention & a, int64_t stream, int64_t kv_head, const state & t, const float * shrink, int64_t begin, uint64_t seen, tile_cells & found) {
    const int64_t DK = a.DK(), DV = a.DV();
    int n = 0;
    found.bad = 0;
    for (uint64_t left = seen; left; left &= left - 1) {
        const int64_t c = begin + (found.cells[n] = (uint8_t) __builtin_ctzll(left));
        unpack(a.k->type, cell_of(a.k, stream, kv_head, c), t.floats, DK);
        for (int64_t d = 0; d < DK; ++d) {
            t.floats[d] *= shrink[d];
        }
        t.qscale_k[n] = to_shorts(t.floats, DK, t.keys + n * DK / 2);
        if (!std::isfinite(t.qscale_k[n])) {
            memset(t.keys + n * DK / 2, 0, DK / 2 * sizeof(int32_t));
            t.qscale_k[n] = 0.0f;
            found.bad |= 1ull << n;
        }
        ++n;
    }
    found.n = n;
    for (int i = 0; i < n; ++i) {
        unpack(a.v->type, cell_of(a.v, stream, kv_head, begin + found.cells[i]), t.floats + i * DV, DV);
        if (!all_finite(t.floats + i * DV, DV)) {
            memset(t.floats + i * DV, 0, DV * sizeof(float));
            found.bad |= 1ull << i;
        }
    }
    to_pairs(t.floats, n, DV, t.pairs_v, t.qscale_v);
}

// what masks, and cells that are bad, add to the scores of a panel
void add_masks(const attention & a, const block & b, const state & t, int64_t first, int64_t begin, const tile_cells & found) {
    const int64_t width = b.width(first);
    memset(t.bias, 0, found.n * width * sizeof(float));
    queries_of(a, b, first, [&](int64_t i, int64_t row, int64_t head) {
        const ggml_fp16_t * mask = a.mask_of(b.stream, row);
        const float slope = a.slope(head);
        for (int c = 0; c < found.n; ++c) {
            float & bias = t.bias[c * width + i];
            bias = mask ? slope * GGML_CPU_FP16_TO_FP32(mask[begin + found.cells[c]]) : 0.0f;
            if ((found.bad >> c & 1) && bias != -INFINITY) {
                bias = NAN;
            }
        }
    });
}

void store_values(const attention & a, const block & b, const state & t, ggml_tensor * dst) {
    for (int64_t first = 0; first < b.n_queries; first += PANEL) {
        const int64_t width = b.width(first);
        queries_of(a, b, first, [&](int64_t i, int64_t row, int64_t head) {
            float sum = t.sum[first + i], factor = 1.0f;
            if (a.sinks) {
                const float sink = ((const float *) a.sinks->data)[head], max = std::max(t.max[first + i], sink);
                factor = expf(t.max[first + i] - max);
                sum    = sum * factor + expf(sink - max);
            }
            factor = sum == 0.0f ? 0.0f : factor / sum;
            const float * values = t.values + first * a.DV() + i;
            float * out = (float *) ((char *) dst->data + head * dst->nb[1] + row * dst->nb[2] + b.stream * dst->nb[3]);
            for (int64_t d = 0; d < a.DV(); ++d) {
                out[d] = values[d * width] * factor;
            }
        });
    }
}

// a block and the tiles of a chunk
void compute_block(const attention & a, const block & b, const shared & all, int64_t chunk, state t) {
    const uint64_t * seen = all.seen + b.stream * a.n_tiles();
    const int64_t    end  = std::min(a.n_tiles(), (chunk + 1) * TILES);
    for (int64_t tile = chunk * TILES; tile < end; ++tile) {
        const int64_t begin = tile * TILE;
        bool any = false, biased = false;
        for (int64_t row = b.row; row < b.row + b.n_rows; ++row) {
            const ggml_fp16_t * mask = a.mask_of(b.stream, row);
            const visibility s = visibility_of(mask ? mask + begin : nullptr, (int) std::min(TILE, a.n_cells() - begin));
            any    |= s.cells != 0;
            biased |= s.biased || s.cells != seen[tile];
        }
        if (!any) {
            continue;
        }
        const int64_t at = all.at(a, chunk, b.kv_head, tile % TILES);
        const tile_cells & found = all.cells[at];
        all.bind_tile(a, at, t);
        biased |= found.bad != 0;
        for (int64_t first = 0; first < b.n_queries; first += PANEL) {
            if (biased) {
                add_masks(a, b, t, first, begin, found);
            }
            static constexpr decltype(&attend<1>) attend_panel[] = { attend<1>, attend<2>, attend<VECTORS> };
            attend_panel[b.width(first) / LANES - 1](a, t, first, found.n, biased);
        }
    }
}

// the cells of tiles [begin, end) that any row sees
void find_visible_cells(const attention & a, int64_t stream, int64_t begin, int64_t end, uint64_t * seen) {
    memset(seen + begin, 0, (end - begin) * sizeof(uint64_t));
    for (int64_t row = 0; row < a.n_rows; ++row) {
        const ggml_fp16_t * mask = a.mask_of(stream, row);
        for (int64_t tile = begin; tile < end; ++tile) {
            seen[tile] |= visibility_of(mask ? mask + tile * TILE : nullptr, (int) std::min(TILE, a.n_cells() - tile * TILE)).cells;
        }
    }
}

// How rows are shared out. What a row becomes does not depend on it. A group has as many as there is memory for; its blocks are
// four and more for each thread, of as many rows as share a tile well.
struct sharing {
    int64_t group, rows, n_queries; // rows of a group, and of a block; queries of a block, with what fills the last vector

    sharing(const attention & a, int n_threads) {
        const int64_t n_kv_heads = a.k->ne[2];
        const int64_t row_size   = n_kv_heads * a.n_heads * (a.DK() * sizeof(int16_t) + a.DV() * sizeof(float));
        group     = std::max<int64_t>(1, std::min(a.n_rows, MEMORY / row_size));
        rows      = std::max<int64_t>(1, std::min((group * n_kv_heads + 4 * n_threads - 1) / (4 * n_threads), BLOCK / a.n_heads));
        n_queries = GGML_PAD(rows * a.n_heads, LANES);
    }
    // blocks of n rows, of all KV heads
    int64_t n_items(const attention & a, int64_t n) const { return (n + rows - 1) / rows * a.k->ne[2]; }

    // of the group that begins with row `from`
    int64_t until(const attention & a, int64_t from) const { return std::min(a.n_rows, from + group); }
    block   at   (const attention & a, int64_t stream, int64_t from, int64_t item) const {
        const int64_t row = from + item / a.k->ne[2] * rows, n_rows = std::min(rows, until(a, from) - row);
        return { stream, item % a.k->ne[2], row, n_rows, n_rows * a.n_heads };
    }
};

void unpack_chunk(const attention & a, int64_t stream, int64_t chunk, const shared & all, state t, int ith, int nth) {
    const int64_t n_kv_heads = a.k->ne[2], first = chunk * TILES;
    const int64_t n = std::min(TILES, a.n_tiles() - first) * n_kv_heads;
    for (int64_t i = ith; i < n; i += nth) {
        const int64_t kv_head = i % n_kv_heads, tile = first + i / n_kv_heads;
        const int64_t at = all.at(a, chunk, kv_head, i / n_kv_heads);
        const uint64_t seen = all.seen[stream * a.n_tiles() + tile];
        if (seen != 0) {
            all.bind_tile(a, at, t);
            unpack_tile(a, stream, kv_head, t, all.shrink + (stream * n_kv_heads + kv_head) * a.DK(), tile * TILE, seen, all.cells[at]);
        }
    }
}

// a group of rows, by all threads
void compute_group(const ggml_compute_params * params, const attention & a, const sharing & parts, const shared & all, int64_t stream, int64_t from, state t, ggml_tensor * dst) {
    const int ith = params->ith, nth = params->nth;
    const int64_t n_items  = parts.n_items(a, parts.until(a, from) - from);
    const int64_t n_chunks = (a.n_tiles() + TILES - 1) / TILES;

    const auto bind = [&](int64_t item) {
        all.bind_queries(a, item * parts.n_queries, t);
        return parts.at(a, stream, from, item);
    };
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, 0);
    }
    ggml_barrier(params->threadpool);

    for (int64_t item = ith; item < n_items; item += nth) {
        const block b = bind(item);
        prepare_queries(a, b, t, all.shrink + (stream * a.k->ne[2] + b.kv_head) * a.DK());
    }
    unpack_chunk(a, stream, 0, all, t, ith, nth);

    // Threads draw numbers: of a block, and of the chunk that it is computed with; nobody is more than a chunk ahead.
    for (int64_t chunk = -1; chunk < n_chunks;) {
        const int64_t drawn = ggml_threadpool_chunk_add(params->threadpool, 1);
        for (const int64_t next = std::min(n_chunks, drawn / n_items); chunk < next;) {
            ++chunk;
            ggml_barrier(params->threadpool);
            unpack_chunk(a, stream, chunk + 1, all, t, ith, nth);
        }
        if (chunk < n_chunks) {
            const block b = bind(n_items - 1 - drawn % n_items); // rows that see most come first
            compute_block(a, b, all, chunk, t);
        }
    }
    for (int64_t item = ith; item < n_items; item += nth) {
        const block b = bind(item);
        store_values(a, b, t, dst);
    }
}

} // namespace

size_t ggml_large_batch_attention_wdata_size(int n_tasks, const ggml_tensor * dst) {
    const attention a(dst);
    if (!a.handles()) {
        return 0;
    }
    memory one = { nullptr }, all = { nullptr };
    state().alloc_scratch(a, one);
    int64_t n_queries = 0;
    for (int n = 1; n <= n_tasks; ++n) { // there may be fewer threads than were asked for
        const sharing parts(a, n);
        n_queries = std::max(n_queries, parts.n_items(a, parts.group) * parts.n_queries);
    }
    shared(a, n_queries, all);
    return 64 + n_tasks * one.size + all.size;
}

bool ggml_compute_forward_large_batch_attention(const ggml_compute_params * params, ggml_tensor * dst) {
    const attention a(dst);
    if (params->use_ref || !a.handles()) {
        return false;
    }
    const int ith = params->ith, nth = params->nth;
    const sharing parts(a, nth);

    memory rest = { (char *) GGML_PAD((uintptr_t) params->wdata, 64) }, one = { nullptr };
    const shared all(a, parts.n_items(a, parts.group) * parts.n_queries, rest);
    state().alloc_scratch(a, one);
    memory mine = { rest.base + rest.size + ith * one.size };
    state t;
    t.alloc_scratch(a, mine);

    const int64_t n_tiles = a.n_tiles(), n_kv_heads = a.k->ne[2];
    for (int64_t stream = 0; stream < a.n_streams(); ++stream) {
        find_visible_cells(a, stream, n_tiles * ith / nth, n_tiles * (ith + 1) / nth, all.seen + stream * n_tiles);
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = ith; i < a.n_streams() * n_kv_heads; i += nth) {
        balance(a, i / n_kv_heads, i % n_kv_heads, all.seen + i / n_kv_heads * n_tiles, t.floats, all.shrink + i * a.DK());
    }
    for (int64_t stream = 0; stream < a.n_streams(); ++stream) {
        for (int64_t from = 0; from < a.n_rows; from += parts.group) {
            compute_group(params, a, parts, all, stream, from, t, dst);
        }
    }
    return true;
}

#else

bool ggml_compute_forward_large_batch_attention(const ggml_compute_params *, ggml_tensor *) { return false; }
size_t ggml_large_batch_attention_wdata_size(int, const ggml_tensor *)                      { return 0; }

#endif
