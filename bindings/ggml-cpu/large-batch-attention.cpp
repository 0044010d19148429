// FLASH_ATTN_EXT of 9 query rows and more, as prompts have it, or of more than 16 query heads per KV head: tiles of K and V of every
// type become shorts once for all rows and heads, and are multiplied as integers. x86 with AVX2 or AVX-512.
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
constexpr int64_t MAX_HEADS = 128;             // query heads per KV head

static_assert(TILES * TILE % LONG == 0, "no stretch is in two chunks");

struct attention : attention_op {
    explicit attention(const ggml_tensor * dst) : attention_op(dst) {}

    int64_t n_cells()   const { return k->ne[1]; }
    int64_t n_streams() const { return k->ne[3]; }
    bool    handles() const {
        return ggml_cpu_large_batch() && !is_of_few() && n_heads <= MAX_HEADS && supported(LANES);
    }
};

// What a thread computes with: a block of queries, and a tile of cells. Pairs are two shorts.
struct state {
    // of the block
    int32_t * queries;  // panel after panel: [size_k / 2][lanes]
    float   * values;   // panel after panel: [size_v][lanes], what is summed up
    float   * qscale_q; // of each query, with the scale of the scores: number = qscale * short
    float   * max;
    float   * sum;

    // of the tile
    number * keys;     // [TILE][size_k]
    float  * qscale_k; // [TILE]
    number * pairs_v;  // step after step, two cells each: as store_values() has them
    float  * qscale_v; // [TILE]

    // of the thread
    float   * part, * part_max, * part_sum; // of the block, as above: of a stretch
    rows_of * rows;    // of K or V
    float   * floats;  // of a row of a type without a way of its own
    number  * rest;    // [TILE] such rows
    float   * scores;  // [TILE][lanes]
    int32_t * weights; // [TILE / 2][lanes]
    float   * bias;    // [TILE][lanes]

    void alloc_scratch(const attention & a, memory & m) {
        const int64_t size = std::max(a.size_k, a.size_v);
        part     = m.alloc<float>(BLOCK * a.size_v);
        part_max = m.alloc<float>(BLOCK);
        part_sum = m.alloc<float>(BLOCK);
        rows     = m.alloc<rows_of>(1);
        floats   = m.alloc<float>(size);
        rest     = m.alloc<number>(TILE * size);
        scores   = m.alloc<float>(TILE * PANEL);
        weights  = m.alloc<int32_t>(TILE / 2 * PANEL);
        bias     = m.alloc<float>(TILE * PANEL);
    }
};

// Which cells of a tile any row of a group sees, and which of those have numbers that are none: what sees them learns of it by their
// bias.
struct tile_cells {
    int      n;
    uint64_t bad;
    uint16_t cells[TILE];
};

// What all threads have.
struct shared {
    sample_cells * samples; // [stream][row]
    uint64_t * seen;     // [tile][part]: the cells that any row of the group sees
    bool     * overlaps; // [thread]: parts of a tile are seen at one place
    float    * balances; // [KV head][size_k], of the group
    bool     * balanced; // [KV head]

    // two chunks, of which one is unpacked while the other is computed with: [2][KV head][TILES]
    number     * keys;
    float      * qscale_k;
    number     * pairs_v;
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
        samples  = m.alloc<sample_cells>(a.n_streams() * a.n_rows);
        seen     = m.alloc<uint64_t>(a.n_tiles() * a.n_parts);
        overlaps = m.alloc<bool>(GGML_MAX_N_THREADS);
        balances = m.alloc<float>(n_kv_heads * a.size_k);
        balanced = m.alloc<bool>(n_kv_heads);
        keys     = m.alloc<number>(n_unpacked * TILE * a.size_k);
        qscale_k = m.alloc<float>(n_unpacked * TILE);
        pairs_v  = m.alloc<number>(n_unpacked * TILE * a.size_v);
        qscale_v = m.alloc<float>(n_unpacked * TILE);
        cells    = m.alloc<tile_cells>(n_unpacked);
        queries  = m.alloc<int32_t>(n_queries * a.size_k / 2);
        values   = m.alloc<float>(n_queries * a.size_v);
        qscale_q = m.alloc<float>(n_queries);
        max      = m.alloc<float>(n_queries);
        sum      = m.alloc<float>(n_queries);
    }

    const float * balance(const attention & a, int64_t kv_head) const { return balanced[kv_head] ? balances + kv_head * a.size_k : nullptr; }

    // the tile that is unpacked i-th of a chunk
    int64_t at(const attention & a, int64_t chunk, int64_t kv_head, int64_t i) const { return (chunk % 2 * a.k->ne[2] + kv_head) * TILES + i; }

    void bind_tile(const attention & a, int64_t at, state & t) const {
        t.keys     = keys     + at * TILE * a.size_k;
        t.qscale_k = qscale_k + at * TILE;
        t.pairs_v  = pairs_v  + at * TILE * a.size_v;
        t.qscale_v = qscale_v + at * TILE;
    }

    void bind_queries(const attention & a, int64_t first, state & t) const {
        t.queries  = queries + first * a.size_k / 2;
        t.values   = values  + first * a.size_v;
        t.qscale_q = qscale_q + first;
        t.max      = max     + first;
        t.sum      = sum     + first;
    }
};

// ---- a panel of queries and a tile of cells

// Scores become weights, in pairs of cells, as weights_to_numbers() of few-rows-attention-simd.h makes them.
template <int V>
FR_INLINE merging softmax_tile(const state & t, int n, vec most, float * max, float * sum, int v) {
    const vec here = FR(max_ps)(FR(set1_ps)(-FLT_MAX), most); // where nothing is seen, exp(-inf - here) is zero
    vec largest = FR(set1_ps)(LEAST), bad = FR(setzero_ps)();
    ivec total = FR(set1_epi32)(0), products = total;
    for (int c = 0; c < n; ++c) {
        float * s = t.scores + (c * V + v) * LANES;
        const vec w = ggml_v_expf(FR(sub_ps)(FR(loadu_ps)(s), here));
        const vec x = FR(mul_ps)(w, FR(set1_ps)(t.qscale_v[c]));
        FR(storeu_ps)(s, x);
        total   = FR(add_epi32)(total, parts_of(w, FR(set1_ps)(PARTS)));
        largest = FR(max_ps)(x, largest);
        bad     = FR(fmadd_ps)(x, FR(setzero_ps)(), bad);
    }
    const vec parts = FR(div_ps)(FR(set1_ps)(PARTS), largest);
    for (int c = 0; c < n; ++c) {
        products = FR(add_epi32)(products, parts_of(FR(loadu_ps)(t.scores + (c * V + v) * LANES), parts));
    }
    vec factor, product;
    scale_weights(largest, products, factor, product);
    for (int c = 0; c < n; c += 2) {
        const float * s = t.scores + (c * V + v) * LANES;
        const ivec low  = parts_of(FR(loadu_ps)(s), factor);
        const ivec high = c + 1 < n ? parts_of(FR(loadu_ps)(s + V * LANES), factor) : low ^ low;
        store_shorts(pair_of(low, high), (number *) (t.weights + (c / 2 * V + v) * LANES));
    }
    vec so_far = FR(loadu_ps)(max), sum_so_far = FR(loadu_ps)(sum);
    merging m = merge_sums(so_far, sum_so_far, here, FR(fmadd_ps)(FR(cvtepi32_ps)(total), FR(set1_ps)(1.0f / PARTS), bad));
    FR(storeu_ps)(max, so_far);
    FR(storeu_ps)(sum, sum_so_far);
    m.more = FR(mul_ps)(product, m.more);
    return m;
}

// one panel of queries, from the first one on, and a tile of n cells
template <int V> void attend(const attention & a, const state & t, int64_t first, int n, bool biased) {
    const int64_t pairs = a.size_k / 2, segment = segment_of(a.size_k) / 2;
    const int32_t * keys = (const int32_t *) t.keys, * pairs_v = (const int32_t *) t.pairs_v;
    vec most[V], qscale_q[V];
    merging m[V];
    FR_UNROLL for (int v = 0; v < V; ++v) {
        most[v]     = FR(set1_ps)(-INFINITY);
        qscale_q[v] = FR(loadu_ps)(t.qscale_q + first + v * LANES);
    }
    ivec sums[PARTNERS][V];
    vec products[PARTNERS][V];
    for (int c = 0; c < n; c += PARTNERS) {
        for (int64_t p = 0; p < pairs; p += segment) {
            multiply<V>(t.queries + first * pairs + p * V * LANES, std::min(segment, pairs - p), keys + c * pairs + p, 1, pairs, sums);
            FR_UNROLL for (int i = 0; i < PARTNERS * V; ++i) {
                const vec more = FR(cvtepi32_ps)(sums[i / V][i % V]);
                products[i / V][i % V] = p == 0 ? more : FR(add_ps)(products[i / V][i % V], more);
            }
        }
        for (int s = 0; s < PARTNERS && c + s < n; ++s) {
            FR_UNROLL for (int v = 0; v < V; ++v) {
                const int64_t at = ((c + s) * V + v) * LANES;
                const vec product = products[s][v], factor = FR(mul_ps)(qscale_q[v], FR(set1_ps)(t.qscale_k[c + s]));
                if (a.softcap == 0.0f) {
                    FR(storeu_ps)(t.scores + at, FR(fmadd_ps)(product, factor, biased ? FR(loadu_ps)(t.bias + at) : FR(setzero_ps)()));
                } else {
                    FR(storeu_ps)(t.scores + at, FR(mul_ps)(product, factor));
                    cap_scores<LANES>(a.softcap, t.scores + at, t.bias + at);
                }
                most[v] = FR(max_ps)(most[v], FR(loadu_ps)(t.scores + at));
            }
        }
    }
    for (int v = 0; v < V; ++v) {
        m[v] = softmax_tile<V>(t, n, most[v], t.part_max + first + v * LANES, t.part_sum + first + v * LANES, v);
    }
    float * values = t.part + first * a.size_v;
    for (int64_t d = 0; d < a.size_v; d += PARTNERS) {
        multiply<V>(t.weights, (n + 1) / 2, pairs_v + d / CHUNK * CHUNK * TILE / 2 + d % CHUNK, CHUNK, 1, sums);
        for (int s = 0; s < PARTNERS; ++s) {
            FR_UNROLL for (int v = 0; v < V; ++v) {
                float * value = values + ((d + s) * V + v) * LANES;
                FR(storeu_ps)(value, m[v].add(FR(loadu_ps)(value), FR(cvtepi32_ps)(sums[s][v])));
            }
        }
    }
}

// ---- a block of queries of a group of rows: rows, one after another, with all heads of a KV head

struct block {
    int64_t stream, kv_head, from, first, n_queries; // the group's first row, and the block's first query, of the group's

    int64_t panels_end() const { return GGML_PAD(n_queries, LANES); }
    int64_t width(int64_t first) const { return std::min<int64_t>(PANEL, panels_end() - first); } // of the panel that begins there
};

// f(i, row, head) for the queries of a panel
template <typename F> void queries_of(const attention & a, const block & b, int64_t first, F f) {
    for (int64_t i = 0; i < b.width(first) && first + i < b.n_queries; ++i) {
        const int64_t query = b.first + first + i;
        f(i, b.from + query / a.n_heads, b.kv_head * a.n_heads + query % a.n_heads);
    }
}

void prepare_queries(const attention & a, const block & b, const state & t, const float * balance) {
    const int64_t DK = a.DK(), n = b.panels_end();
    memset(t.queries, 0, n * a.size_k * sizeof(number));
    memset(t.values,  0, n * a.size_v * sizeof(float));
    memset(t.sum,     0, n * sizeof(float));
    memset(t.qscale_q, 0, n * sizeof(float));
    std::fill(t.max, t.max + n, -INFINITY);
    for (int64_t first = 0; first < n; first += PANEL) {
        const int64_t width = b.width(first);
        queries_of(a, b, first, [&](int64_t i, int64_t row, int64_t head) {
            const float * q = (const float *) ((const char *) a.q->data + row * a.q->nb[1] + head * a.q->nb[2] + b.stream * a.q->nb[3]);
            for (int64_t d = 0; d < DK; ++d) {
                t.floats[d] = balance ? q[d] / balance[d] : q[d];
            }
            std::fill(t.floats + DK, t.floats + a.size_k, 0.0f);
            number shorts[MAX_SIZE];
            t.qscale_q[first + i] = a.scale * to_shorts(t.floats, a.size_k, true, shorts);
            for (int64_t p = 0; p < a.size_k / 2; ++p) {
                memcpy(t.queries + first * a.size_k / 2 + p * width + i, shorts + 2 * p, sizeof(int32_t));
            }
        });
    }
}

// The cells of a tile that any row sees become shorts.
void unpack_tile(const attention & a, int64_t stream, int64_t kv_head, const state & t, const float * balance, int64_t begin, const uint64_t * seen, tile_cells & found) {
    fetcher none(a.k, nullptr, 0);
    uint64_t left[MAX_PARTS];
    std::copy_n(seen, a.n_parts, left);
    const int n = take_cells(left, a.n_parts, found.cells);
    found.n   = n;
    found.bad = 0;
    const auto copy_scales = [&](float * qscale) {
        for (int i = 0; i < n; ++i) {
            const bool bad = !std::isfinite(t.rows->qscale[i]);
            qscale[i] = bad ? 0.0f : t.rows->qscale[i];
            found.bad |= uint64_t(bad) << i;
        }
    };
    t.rows->load(a.k, cell_of(a.k, stream, kv_head, begin), found.cells, n, true, balance, t.floats, t.rest, none);
    store_keys(*t.rows, n, a.size_k, t.keys, none);
    copy_scales(t.qscale_k);
    t.rows->load(a.v, cell_of(a.v, stream, kv_head, begin), found.cells, n, false, nullptr, t.floats, t.rest, none);
    for (int64_t d = 0; d < a.size_v; d += STEP) {
        store_values(*t.rows, n, d, t.pairs_v + d * TILE);
    }
    copy_scales(t.qscale_v);
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
            const float factor = a.last_factor(head, t.max[first + i], t.sum[first + i]);
            const float * values = t.values + first * a.size_v + i;
            float * out = (float *) ((char *) dst->data + head * dst->nb[1] + row * dst->nb[2] + b.stream * dst->nb[3]);
            for (int64_t d = 0; d < a.DV(); ++d) {
                out[d] = values[d * width] * factor;
            }
        });
    }
}

// what a block has summed up in a stretch goes to the sums of those before
template <int V> void merge_stretch(const attention & a, const state & t, int64_t first) {
    merging m[V];
    FR_UNROLL for (int v = 0; v < V; ++v) {
        const int64_t at = first + v * LANES;
        vec max = FR(loadu_ps)(t.max + at), sum = FR(loadu_ps)(t.sum + at);
        m[v] = merge_sums(max, sum, FR(loadu_ps)(t.part_max + at), FR(loadu_ps)(t.part_sum + at));
        FR(storeu_ps)(t.max + at, max);
        FR(storeu_ps)(t.sum + at, sum);
    }
    float * values = t.values + first * a.size_v, * part = t.part + first * a.size_v;
    for (int64_t d = 0; d < a.size_v * V * LANES; d += V * LANES) {
        FR_UNROLL for (int v = 0; v < V; ++v) {
            const int64_t at = d + v * LANES;
            FR(storeu_ps)(values + at, m[v].add(FR(loadu_ps)(values + at), FR(loadu_ps)(part + at)));
        }
    }
}

// a block and the tiles of a chunk
void compute_block(const attention & a, const block & b, const shared & all, int64_t chunk, state t) {
    static constexpr decltype(&attend<1>)        attend_panel[]  = { attend<1>, attend<2>, attend<VECTORS> };
    static constexpr decltype(&merge_stretch<1>) merge_panel[]   = { merge_stretch<1>, merge_stretch<2>, merge_stretch<VECTORS> };

    const int64_t first_row = b.from + b.first / a.n_heads, end_row = b.from + (b.first + b.n_queries - 1) / a.n_heads + 1;
    const int64_t n = b.panels_end(), end = std::min(a.n_tiles(), (chunk + 1) * TILES);
    bool summed = false; // anything of the stretch
    for (int64_t tile = chunk * TILES; tile < end; ++tile) {
        const int64_t next = (tile + 1) * TILE;
        bool any = false, biased = false;
        for (int64_t row = first_row; row < end_row; ++row) {
            for (int64_t part = 0; part < a.n_parts; ++part) {
                const visibility s = visibility_of(a, b.stream, row, tile, part);
                any    |= s.cells != 0;
                biased |= s.biased || s.cells != all.seen[tile * a.n_parts + part];
            }
        }
        if (any) {
            if (!summed) {
                memset(t.part,     0, n * a.size_v * sizeof(float));
                memset(t.part_sum, 0, n * sizeof(float));
                std::fill(t.part_max, t.part_max + n, -INFINITY);
                summed = true;
            }
            const int64_t at = all.at(a, chunk, b.kv_head, tile % TILES);
            const tile_cells & found = all.cells[at];
            all.bind_tile(a, at, t);
            biased |= found.bad != 0;
            for (int64_t first = 0; first < b.n_queries; first += PANEL) {
                if (biased || a.softcap != 0.0f) {
                    add_masks(a, b, t, first, a.first_cell(tile), found);
                }
                attend_panel[b.width(first) / LANES - 1](a, t, first, found.n, biased);
            }
        }
        if (summed && (tile + 1 == end || next % (next <= FAR ? STRETCH : LONG) == 0)) {
            for (int64_t first = 0; first < b.n_queries; first += PANEL) {
                merge_panel[b.width(first) / LANES - 1](a, t, first);
            }
            summed = false;
        }
    }
}

// the cells of tiles [begin, end) that any of some rows sees; returns whether parts of a tile are seen at one place
bool find_visible_cells(const attention & a, int64_t stream, int64_t from, int64_t until, int64_t begin, int64_t end, uint64_t * seen) {
    bool overlap = false;
    for (int64_t tile = begin; tile < end; ++tile) {
        uint64_t places = 0;
        for (int64_t part = 0; part < a.n_parts; ++part) {
            uint64_t cells = 0;
            for (int64_t row = from; row < until; ++row) {
                cells |= visibility_of(a, stream, row, tile, part).cells;
            }
            seen[tile * a.n_parts + part] = cells;
            overlap |= (places & cells) != 0;
            places  |= cells;
        }
    }
    return overlap;
}

// Whether a row sees the newest cell of the row before: so it does within a sequence.
bool continues(const attention & a, int64_t stream, int64_t row) {
    for (int64_t tile = a.n_tiles() - 1; tile >= 0; --tile) {
        uint64_t newest = 0;
        int64_t  of     = 0;
        for (int64_t part = 0; part < a.n_parts; ++part) {
            const uint64_t cells = visibility_of(a, stream, row - 1, tile, part).cells;
            of     = cells > newest ? part : of;
            newest = std::max(cells, newest);
        }
        if (newest) {
            return visibility_of(a, stream, row, tile, of).cells >> (63 - __builtin_clzll(newest)) & 1;
        }
    }
    return true;
}

// The rows of a group have the same balance of channels, are of one sequence, and there is memory for them.
int64_t rows_of_group(const attention & a) {
    return std::max<int64_t>(1, std::min<int64_t>(a.n_rows, MEMORY / (a.q->ne[2] * (a.size_k * sizeof(number) + a.size_v * sizeof(float)))));
}

int64_t group_end(const attention & a, const sample_cells * samples, int64_t from) {
    const int64_t end = std::min(a.n_rows, from + rows_of_group(a));
    return std::find_if(samples + from + 1, samples + end, [&](const sample_cells & s) { return !s.continues || !(s == samples[from]); }) - samples;
}

// How the queries of a group are shared out: in blocks, four and more for each thread, of as many as share a tile well. What a row
// becomes does not depend on it.
struct sharing {
    int64_t stream, from, n_kv_heads, n_queries, size, n_items; // queries of a KV head, and of a block

    sharing(const attention & a, int64_t stream, int64_t from, int64_t until, int n_threads) :
        stream(stream), from(from), n_kv_heads(a.k->ne[2]), n_queries((until - from) * a.n_heads) {
        size    = std::min<int64_t>(BLOCK, GGML_PAD(n_queries * n_kv_heads / (4 * n_threads) + 1, LANES));
        n_items = (n_queries + size - 1) / size * n_kv_heads;
    }
    block at(int64_t item) const {
        const int64_t first = item / n_kv_heads * size;
        return { stream, item % n_kv_heads, from, first, std::min(size, n_queries - first) };
    }
};

// of all blocks of a group, with what fills their last vectors
int64_t most_queries(const attention & a) { return (rows_of_group(a) * a.n_heads + BLOCK) * a.k->ne[2]; }

bool is_seen(uint64_t cells) { return cells != 0; }

void unpack_chunk(const attention & a, int64_t stream, int64_t chunk, const shared & all, state t, int ith, int nth) {
    const int64_t n_kv_heads = a.k->ne[2], first = chunk * TILES;
    const int64_t n = std::min(TILES, a.n_tiles() - first) * n_kv_heads;
    for (int64_t i = ith; i < n; i += nth) {
        const int64_t kv_head = i % n_kv_heads, tile = first + i / n_kv_heads;
        const int64_t at = all.at(a, chunk, kv_head, i / n_kv_heads);
        const uint64_t * seen = all.seen + tile * a.n_parts;
        if (std::any_of(seen, seen + a.n_parts, is_seen)) {
            all.bind_tile(a, at, t);
            unpack_tile(a, stream, kv_head, t, all.balance(a, kv_head), a.first_cell(tile), seen, all.cells[at]);
        }
    }
}

// a group of rows, by all threads
void compute_group(const ggml_compute_params * params, attention a, const shared & all, int64_t stream, int64_t from, int64_t until, state t, ggml_tensor * dst) {
    const int ith = params->ith, nth = params->nth;
    const sharing parts(a, stream, from, until, nth);
    const int64_t n_items = parts.n_items, n_kv_heads = a.k->ne[2];

    const auto bind = [&](int64_t item) {
        all.bind_queries(a, item * parts.size, t);
        return parts.at(item);
    };
    all.overlaps[ith] = find_visible_cells(a, stream, from, until, a.n_tiles() * ith / nth, a.n_tiles() * (ith + 1) / nth, all.seen);
    const sample_cells & sample = all.samples[stream * a.n_rows + from];
    for (int64_t i = ith; i < n_kv_heads; i += nth) {
        all.balanced[i] = sample.n && balance_channels(a, stream, i, sample, t.floats, all.balances + i * a.size_k);
    }
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, 0);
    }
    ggml_barrier(params->threadpool);

    for (int64_t item = ith; item < n_items; item += nth) {
        const block b = bind(item);
        prepare_queries(a, b, t, all.balance(a, b.kv_head));
    }
    if (std::find(all.overlaps, all.overlaps + nth, true) != all.overlaps + nth) {
        a.n_parts = 1; // the cells have no order of positions: theirs will do
    }
    const int64_t n_tiles = a.n_tiles(), of_chunk = TILES * a.n_parts;
    uint64_t * const end_seen = all.seen + n_tiles * a.n_parts;
    const int64_t first_chunk = (std::find_if(all.seen, end_seen, is_seen) - all.seen) / of_chunk;
    int64_t end_chunk = (n_tiles + TILES - 1) / TILES;
    while (end_chunk > first_chunk && std::none_of(all.seen + (end_chunk - 1) * of_chunk, std::min(all.seen + end_chunk * of_chunk, end_seen), is_seen)) {
        --end_chunk;
    }
    unpack_chunk(a, stream, first_chunk, all, t, ith, nth);

    // Threads draw numbers: of a block, and of the chunk that it is computed with; nobody is more than a chunk ahead.
    for (int64_t chunk = first_chunk - 1; chunk < end_chunk;) {
        const int64_t drawn = ggml_threadpool_chunk_add(params->threadpool, 1);
        for (const int64_t next = std::min(end_chunk, first_chunk + drawn / n_items); chunk < next;) {
            ++chunk;
            ggml_barrier(params->threadpool);
            if (chunk + 1 < end_chunk) {
                unpack_chunk(a, stream, chunk + 1, all, t, ith, nth);
            }
        }
        if (chunk < end_chunk) {
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
    shared(a, most_queries(a), all);
    return 64 + n_tasks * one.size + all.size;
}

bool ggml_compute_forward_large_batch_attention(const ggml_compute_params * params, ggml_tensor * dst) {
    const attention a(dst);
    if (params->use_ref || !a.handles()) {
        return false;
    }
    const int ith = params->ith, nth = params->nth;

    memory rest = { (char *) GGML_PAD((uintptr_t) params->wdata, 64) }, one = { nullptr };
    const shared all(a, most_queries(a), rest);
    state().alloc_scratch(a, one);
    memory mine = { rest.base + rest.size + ith * one.size };
    state t;
    t.alloc_scratch(a, mine);

    for (int64_t i = ith; i < a.n_streams() * a.n_rows; i += nth) {
        const int64_t stream = i / a.n_rows, row = i % a.n_rows;
        all.samples[i] = sample_of(a, stream, row);
        all.samples[i].continues = a.n_parts == 1 || row == 0 || continues(a, stream, row);
    }
    ggml_barrier(params->threadpool);
    for (int64_t stream = 0; stream < a.n_streams(); ++stream) {
        for (int64_t from = 0, until; from < a.n_rows; from = until) {
            until = group_end(a, all.samples + stream * a.n_rows, from);
            compute_group(params, a, all, stream, from, until, t, dst);
        }
    }
    return true;
}

#else

bool ggml_compute_forward_large_batch_attention(const ggml_compute_params *, ggml_tensor *) { return false; }
size_t ggml_large_batch_attention_wdata_size(int, const ggml_tensor *)                      { return 0; }

#endif
