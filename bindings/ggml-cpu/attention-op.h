#pragma once

// The parameters of a FLASH_ATTN_EXT, what its masks show, and rows of K and V as floats: for few-rows-attention.cpp and
// large-batch-attention.cpp, on all CPUs.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#define FR_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define FR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define FR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

// A row becomes the same whatever is computed beside it, in either file. What it sees is cut at fixed cells: into tiles, and these
// are summed up in stretches, which are merged in their order.
constexpr int64_t TILE     = 64;  // cells whose scores are known before their values are summed
constexpr int64_t STRETCH  = 256; // cells of a stretch ...
constexpr int64_t LONG     = 512; // ... from FAR on
constexpr int64_t FAR      = 4096;
constexpr int     STEP     = 32;   // numbers of a row of values that are taken together
constexpr int64_t MAX_SIZE = 1024; // of a head
constexpr int64_t FEW_ROWS   = 8;  // most rows, and query heads per KV head, of few-rows-attention.cpp: what has more of either is
constexpr int64_t FEW_HEADS  = 16; // large-batch-attention.cpp's ...
constexpr int64_t FEW_SHARED = 32; // ... but where sequences share cells, rows of several are better there
constexpr int64_t MAX_PARTS  = 256;

struct attention_op {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;

    int64_t n_rows;  // per stream
    int64_t n_heads; // query heads per KV head
    int64_t n_parts; // of a tile: sequences that share the cells, [tile][part][TILE] (see llama-mtp-cells.h in bindings/llama)
    int64_t size_k, size_v; // of a row, in whole steps

    float scale;
    float max_bias;
    float softcap;

    explicit attention_op(const ggml_tensor * dst) :
        q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), mask(dst->src[3]), sinks(dst->src[4]), n_rows(q->ne[1]), n_heads(q->ne[2] / k->ne[2]),
        n_parts(std::min<int64_t>(std::max(dst->op_params[5], 1), MAX_PARTS)),
        size_k(GGML_PAD(k->ne[0], STEP)), size_v(GGML_PAD(v->ne[0], STEP)) {
        memcpy(&scale,    (const float *) dst->op_params + 0, sizeof(float));
        memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(float));
        memcpy(&softcap,  (const float *) dst->op_params + 2, sizeof(float));
        if (softcap != 0.0f) {
            scale /= softcap;
        }
    }

    int64_t DK() const { return k->ne[0]; }
    int64_t DV() const { return v->ne[0]; }

    // Nothing here may depend on the number of rows or of cells: a row would change its bits.
    bool supported(int lanes) const {
        const auto readable = [](const ggml_tensor * t) {
            return (t->type == GGML_TYPE_F32 || ggml_get_type_traits(t->type)->to_float) && t->nb[0] == ggml_type_size(t->type);
        };
        return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && readable(k) && readable(v) &&
               k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] && q->ne[3] == k->ne[3] && q->ne[2] % k->ne[2] == 0 &&
               (!mask || mask->ne[2] == 1) && DK() % lanes == 0 && DV() % lanes == 0 && DK() <= MAX_SIZE && DV() <= MAX_SIZE;
    }

    bool is_of_few() const { return n_rows <= (n_parts > 1 ? FEW_SHARED : FEW_ROWS) && n_heads <= FEW_HEADS; }

    int64_t n_tiles() const { return (k->ne[1] + n_parts * TILE - 1) / (n_parts * TILE); }
    int64_t first_cell(int64_t tile, int64_t part = 0) const { return (tile * n_parts + part) * TILE; }

    const ggml_fp16_t * mask_of(int64_t stream, int64_t row) const {
        return mask ? (const ggml_fp16_t *) ((const char *) mask->data + row * mask->nb[1] + (stream % mask->ne[3]) * mask->nb[3]) : nullptr;
    }

    float slope(int64_t head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int64_t n_log2 = int64_t(1) << (int64_t) floor(log2((double) q->ne[2]));
        return head < n_log2 ? powf(powf(2.0f, -max_bias / n_log2), head + 1)
                             : powf(powf(2.0f, -max_bias / 2.0f / n_log2), 2 * (head - n_log2) + 1);
    }

    // what makes a mean of a weighted sum
    float last_factor(int64_t head, float max, float sum) const {
        float factor = 1.0f;
        if (sinks) {
            const float sink = ((const float *) sinks->data)[head], top = std::max(max, sink);
            factor = expf(max - top);
            sum    = fmaf(sum, factor, expf(sink - top));
        }
        return sum == 0.0f ? 0.0f : factor / sum;
    }
};

// what a row sees of a tile of n cells: a bit for each cell
struct visibility {
    uint64_t cells;
    bool     biased; // not all of their masks are zero
};

inline visibility visibility_of(const ggml_fp16_t * mask, int n) {
    const uint64_t all = n == TILE ? ~uint64_t(0) : (uint64_t(1) << n) - 1;
    if (!mask) {
        return { all, false };
    }
    uint16_t any = 0, shown = 0;
    for (int c = 0; c < n; ++c) {
        any   |= mask[c];
        shown |= mask[c] ^ 0xFC00; // -INFINITY
    }
    if (!any || !shown) { // most tiles: quickly
        return { any ? 0 : all, false };
    }
    visibility s = { 0, false };
    for (int c = 0; c < n; ++c) {
        const bool seen = mask[c] != 0xFC00;
        s.cells  |= uint64_t(seen) << c;
        s.biased |= seen && mask[c] != 0;
    }
    return s;
}

inline visibility visibility_of(const attention_op & a, int64_t stream, int64_t row, int64_t tile, int64_t part) {
    const ggml_fp16_t * mask = a.mask_of(stream, row);
    const int64_t c = a.first_cell(tile, part);
    return visibility_of(mask ? mask + c : nullptr, (int) std::max<int64_t>(0, std::min(TILE, a.k->ne[1] - c)));
}

// Takes from what is seen of a tile's parts a cell of each place, and no more: part * TILE + place, in the order of places, which is
// that of positions. Returns their number.
inline int take_cells(uint64_t * seen, int64_t n_parts, uint16_t * cells) {
    uint64_t places = 0;
    uint8_t  part_of[TILE];
    for (int64_t part = 0; part < n_parts; ++part) {
        const uint64_t more = seen[part] & ~places;
        seen[part] &= places;
        places     |= more;
        for (uint64_t left = more; left; left &= left - 1) {
            part_of[__builtin_ctzll(left)] = (uint8_t) part;
        }
    }
    int n = 0;
    for (uint64_t left = places; left; left &= left - 1) {
        const int place = __builtin_ctzll(left);
        cells[n++] = (uint16_t) (part_of[place] * TILE + place);
    }
    return n;
}

inline void unpack_q8_0(const block_q8_0 * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n / QK8_0; ++i) {
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d);
        for (int j = 0; j < QK8_0; ++j) {
            y[i*QK8_0 + j] = d * x[i].qs[j];
        }
    }
}

inline void unpack_q4_0(const block_q4_0 * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n / QK4_0; ++i) {
        const float d = GGML_CPU_FP16_TO_FP32(x[i].d);
        for (int j = 0; j < QK4_0 / 2; ++j) {
            y[i*QK4_0 + j]             = d * (int8_t) ((x[i].qs[j] & 0x0F) - 8);
            y[i*QK4_0 + j + QK4_0 / 2] = d * (int8_t) ((x[i].qs[j] >>   4) - 8);
        }
    }
}

// the row of K or V of a cell
inline const char * cell_of(const ggml_tensor * t, int64_t stream, int64_t kv_head, int64_t cell) {
    return (const char *) t->data + cell * t->nb[1] + kv_head * t->nb[2] + stream * t->nb[3];
}

// n numbers of a row of K or V
inline void unpack(ggml_type type, const void * x, float * y, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:  memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_F16:  ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) x, y, n); break;
        case GGML_TYPE_Q8_0: unpack_q8_0((const block_q8_0 *) x, y, n); break;
        case GGML_TYPE_Q4_0: unpack_q4_0((const block_q4_0 *) x, y, n); break;
        default:             ggml_get_type_traits(type)->to_float(x, y, n);
    }
}

// A channel of K that is far larger than the others would leave them few bits of a short: half of what it has too much, in bits,
// is moved to the queries. Some cells say so, which depend on what a row sees alone: the first of the first tile of which it sees
// these, so that most rows of a window have the same ones; or else the first that it sees of a tile of which it sees as many.
constexpr int SAMPLE = 16;

struct sample_cells {
    int     n = 0; // SAMPLE; or 0, if a row sees too few: nothing is moved
    int32_t cells[SAMPLE];
    bool    continues = true; // the row before is of the same sequence

    bool operator==(const sample_cells & o) const { return n == o.n && std::equal(cells, cells + n, o.cells); }
};

inline sample_cells sample_of(const attention_op & a, int64_t stream, int64_t row) {
    sample_cells s;
    for (int64_t tile = 0; tile < a.n_tiles(); ++tile) {
        uint64_t seen[MAX_PARTS], places = 0;
        for (int64_t part = 0; part < a.n_parts; ++part) {
            seen[part] = visibility_of(a, stream, row, tile, part).cells;
            places    |= seen[part];
        }
        const uint64_t first = (1 << SAMPLE) - 1;
        const bool     last  = (places & first) == first;
        if (last || (s.n == 0 && __builtin_popcountll(places) >= SAMPLE)) {
            uint16_t cells[TILE];
            take_cells(seen, a.n_parts, cells);
            s.n = SAMPLE;
            std::transform(cells, cells + SAMPLE, s.cells, [&](uint16_t c) { return (int32_t) a.first_cell(tile) + c; });
        }
        if (last) {
            break;
        }
    }
    return s;
}

// What keys are multiplied by, and queries divided by: powers of two, which change scores by rounding only. One for a block of
// bytes. Returns whether any is not 1.
inline bool balance_channels(const attention_op & a, int64_t stream, int64_t kv_head, const sample_cells & s, float * floats, float * factors) {
    const int64_t n = a.DK(), together = a.k->type == GGML_TYPE_Q8_0 ? QK8_0 : 1;
    std::fill(factors, factors + a.size_k, 0.0f);
    for (int i = 0; i < s.n; ++i) {
        unpack(a.k->type, cell_of(a.k, stream, kv_head, s.cells[i]), floats, n);
        for (int64_t d = 0; d < n; ++d) {
            const float x = fabsf(floats[d]);
            factors[d] = x > factors[d] && x <= FLT_MAX ? x : factors[d];
        }
    }
    float mean = 0.0f;
    for (int64_t d = 0; d < n; ++d) {
        mean += factors[d] / n;
    }
    const float unit = mean > FLT_MIN ? 1.0f / mean : 0.0f;
    bool any = false;
    for (int64_t d = 0; d < a.size_k; d += together) {
        const float excess = *std::max_element(factors + d, factors + d + together) * unit;
        int32_t bits;
        memcpy(&bits, &excess, sizeof(bits));
        const int32_t power = std::max((bits >> 23) - 127, 0);
        std::fill(factors + d, factors + d + together, 1.0f / (1 << (power + 1) / 2));
        any |= power > 0;
    }
    return any;
}

// Scores, which are divided by the cap: at most the cap, and a bias. Those of a vector, or of several.
template <int N> inline void cap_scores(float cap, float * s, const float * bias) {
    for (int i = 0; i < N; ++i) {
        s[i] = fmaf(cap, tanhf(s[i]), bias[i]);
    }
}

// arrays one after another, on cache lines; or their size, where there is no memory yet
struct memory {
    char * base;
    size_t size = 0;

    template <typename T> T * alloc(int64_t n) {
        T * p = base ? (T *) (base + size) : nullptr;
        size += GGML_PAD(n * sizeof(T), 64);
        return p;
    }
};

// Rows of K or V that are fetched from memory while others are computed with. Not many at a time: what computes would wait for
// its numbers behind them.
struct fetcher {
    const char * row;
    size_t       stride;
    int          left; // rows
    int64_t      line = 0, size;

    fetcher(const ggml_tensor * t, const char * row, int left) : row(row), stride(t->nb[1]), left(left), size(ggml_row_size(t->type, t->ne[0])) {}

    void lines(int n) {
        for (; n > 0 && left > 0; --n) {
            __builtin_prefetch(row + line, 0, 2);
            if ((line += 64) >= size) {
                line = 0;
                row += stride;
                --left;
            }
        }
    }
};

} // namespace
