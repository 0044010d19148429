// Compares attention of a few rows, delta nets, convolutions and what is convolved with sums of doubles, and rows and
// tokens together with each alone; prints a line for each: its name, the largest error, whether all bits were the same.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "few-rows-attention.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "large-batch-ops.h"
#include "one_thread.h"
#include "ops.h"
#include "quants.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

typedef std::vector<float> floats;
static std::mt19937 dice(7);

// of ggml-cpu.c
extern "C" void ggml_cpu_fp16_to_fp32(const ggml_fp16_t * x, float * y, int64_t n) { ggml_fp16_to_fp32_row(x, y, n); }
extern "C" void ggml_cpu_bf16_to_fp32(const ggml_bf16_t * x, float * y, int64_t n) { ggml_bf16_to_fp32_row(x, y, n); }

static floats numbers(int64_t n, float least = -1, float most = 1) {
    std::uniform_real_distribution<float> even(least, most);
    floats x(n);
    std::generate(x.begin(), x.end(), [&] { return even(dice); });
    return x;
}

static void run(size_t n_bytes, bool (*compute)(const ggml_compute_params *, ggml_tensor *), ggml_tensor & dst) {
    std::vector<char> memory(n_bytes + 64, (char) 0xFF); // what is not written is no number
    ggml_compute_params params = {};
    params.nth   = 1;
    params.wdata = memory.data();
    params.wsize = memory.size();
    if (!compute(&params, &dst)) {
        fprintf(stderr, "not computed\n");
        exit(2);
    }
}

struct verdict {
    double error = 0;
    bool   same  = true;

    // relative to what the terms of a sum add up to without their signs
    void compare(float value, double sum, double size) { error = std::max(error, std::isfinite(value) ? fabs(value - sum) / (size + 1e-30) : INFINITY); }
    void compare(const float * a, const float * b, size_t n) { same = same && !memcmp(a, b, n * sizeof(float)); }
    void print(const char * name) const { printf("%s %.2e %s\n", name, error, same ? "same" : "different"); }
};

// ---- attention

struct attention {
    ggml_type type;
    int64_t   dk, dv, n_kv_heads, n_heads, n_rows, n_cells; // heads: for each KV head
    float     max_bias, softcap;
    bool      sinks;
};

struct inputs {
    floats            q, k, v, sinks;   // q: [row, head, dk]; k, v: [cell, KV head, size]
    std::vector<char> packed_k, packed_v;
    std::vector<ggml_fp16_t> mask;      // [row, cell]
};

static std::vector<char> packed(ggml_type type, floats & x, int64_t row) {
    std::vector<char> out(x.size() / row * ggml_row_size(type, row));
    if (type == GGML_TYPE_F32) {
        memcpy(out.data(), x.data(), out.size());
    } else {
        ggml_quantize_chunk(type, x.data(), out.data(), 0, x.size() / row, row, nullptr);
        ggml_get_type_traits(type)->to_float(out.data(), x.data(), x.size());
    }
    return out;
}

static inputs made(const attention & a) {
    inputs in = { numbers(a.n_rows * a.n_kv_heads * a.n_heads * a.dk, -4, 4), numbers(a.n_cells * a.n_kv_heads * a.dk), numbers(a.n_cells * a.n_kv_heads * a.dv),
                  numbers(a.n_kv_heads * a.n_heads), {}, {}, std::vector<ggml_fp16_t>(a.n_rows * a.n_cells) };
    in.packed_k = packed(a.type, in.k, a.dk), in.packed_v = packed(a.type, in.v, a.dv);
    for (int64_t row = 0; row < a.n_rows; ++row) {
        for (int64_t c = 0; c < a.n_cells; ++c) { // later cells are hidden, and some others; rows 2 and 5 have biases
            const bool hidden = c > a.n_cells - a.n_rows + row || (row % 3 == 1 && c % 7 == 3);
            in.mask[row * a.n_cells + c] = hidden ? 0xFC00 : row % 3 == 2 ? ggml_fp32_to_fp16(-0.25f * (c % 5)) : 0;
        }
    }
    return in;
}

// [row, head, dv] of rows [first, first + n), which see the first n_cells
static floats attended(const attention & a, inputs & in, int64_t first, int64_t n, int64_t n_cells) {
    const int64_t heads = a.n_kv_heads * a.n_heads;
    const auto part = [&](ggml_type type, void * data, int64_t size, int64_t n1, int64_t n2) { // [n1, n2, size], dimensions 1 and 2 exchanged
        ggml_tensor t = matrix(type, data, size, n2, n1);
        std::swap(t.ne[1], t.ne[2]), std::swap(t.nb[1], t.nb[2]);
        return t;
    };
    floats out(n * heads * a.dv, NAN);
    ggml_tensor q = part(GGML_TYPE_F32, &in.q[first * heads * a.dk], a.dk, n, heads);
    ggml_tensor k = part(a.type, in.packed_k.data(), a.dk, n_cells, a.n_kv_heads), v = part(a.type, in.packed_v.data(), a.dv, n_cells, a.n_kv_heads);
    ggml_tensor mask = matrix(GGML_TYPE_F16, &in.mask[first * a.n_cells], n_cells, n), sinks = matrix(GGML_TYPE_F32, in.sinks.data(), heads, 1);
    mask.nb[1] = a.n_cells * sizeof(ggml_fp16_t);
    ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), a.dv, heads, n);
    const float params[] = { 1 / sqrtf((float) a.dk), a.max_bias, a.softcap };
    memcpy(dst.op_params, params, sizeof(params));
    dst.src[0] = &q, dst.src[1] = &k, dst.src[2] = &v, dst.src[3] = &mask, dst.src[4] = a.sinks ? &sinks : nullptr;
    run(ggml_few_rows_attention_work_size(&dst, 1), ggml_compute_forward_few_rows_attention, dst);
    return out;
}

static void check_row(const attention & a, const inputs & in, int64_t row, const float * out, verdict & all) {
    const int64_t heads = a.n_kv_heads * a.n_heads, n_log2 = int64_t(1) << (int64_t) log2((double) heads);
    for (int64_t h = 0; h < heads; ++h) {
        const double slope = a.max_bias == 0 ? 1 : h < n_log2 ? pow(2, -a.max_bias / n_log2 * (h + 1)) : pow(2, -a.max_bias / 2 / n_log2 * (2 * (h - n_log2) + 1));
        std::vector<double> weights(a.n_cells), sum(a.dv), size(a.dv);
        double all_weights = a.sinks ? exp((double) in.sinks[h]) : 0;
        for (int64_t c = 0; c < a.n_cells; ++c) {
            double s = 0;
            for (int64_t d = 0; d < a.dk; ++d) {
                s += (double) in.q[(row * heads + h) * a.dk + d] * in.k[(c * a.n_kv_heads + h / a.n_heads) * a.dk + d];
            }
            s /= sqrt((double) a.dk);
            s = a.softcap == 0 ? s : a.softcap * tanh(s / a.softcap);
            weights[c] = exp(s + slope * ggml_fp16_to_fp32(in.mask[row * a.n_cells + c]));
            all_weights += weights[c];
        }
        for (int64_t d = 0; d < a.dv; ++d) {
            double sum = 0, size = 0;
            for (int64_t c = 0; c < a.n_cells; ++c) {
                const double term = weights[c] / all_weights * in.v[(c * a.n_kv_heads + h / a.n_heads) * a.dv + d];
                sum += term, size += fabs(term);
            }
            all.compare(out[h * a.dv + d], sum, size);
        }
    }
}

static void check(const attention & a, verdict & all) {
    inputs in = made(a);
    const int64_t width = a.n_kv_heads * a.n_heads * a.dv;
    const floats together = attended(a, in, 0, a.n_rows, a.n_cells);
    for (int64_t row = 0; row < a.n_rows; ++row) {
        check_row(a, in, row, &together[row * width], all);
        all.compare(&together[row * width], attended(a, in, row, 1, a.n_cells).data(), width);
        const int64_t seen = a.n_cells - a.n_rows + row + 1; // the rest is hidden
        all.compare(&together[row * width], attended(a, in, row, 1, seen).data(), width);
    }
}

static void attentions(const char * name, ggml_type type) {
    verdict all;
    const int64_t odd = ggml_blck_size(type) == 1 ? 20 : 96; // no multiple of 4 vectors
    for (int64_t n_cells : { 9, 65 }) {
        for (int64_t n_rows : { 1, 2, 8 }) {
            check({ type, 64, odd, 2, 3, n_rows, n_cells, 0, 0, false }, all);
        }
    }
    check({ type, odd, 64, 1, 5, 7, 300, 0, 0, true }, all);
    check({ type, 32, 32, 1, 1, 2, 4700, 0, 0, false }, all);
    check({ type, 256, 256, 1, 4, 4, 70, 8, 5, true }, all);
    all.print(name);
}

// ---- delta nets

struct net {
    int64_t size, n_tokens;
    floats  q, k, v, g, beta, state; // [sequence, token, head, ...]; q and k have 2 heads of 4

    net(int64_t size, int64_t n_tokens) :
        size(size), n_tokens(n_tokens), q(numbers(2 * n_tokens * 2 * size)), k(numbers(q.size())), v(numbers(2 * n_tokens * 4 * size)), g(numbers(2 * n_tokens * 4, -2, 0)),
        beta(numbers(g.size(), 0, 1)), state(numbers(2 * 4 * size * size)) {
        for (float & x : k) {
            x /= sqrtf(size / 3.f); // of length 1
        }
    }

    // tokens [first, first + n) of both sequences: outputs, then n_states states, the last one first; `begin`: the state
    floats through(int64_t first, int64_t n, int n_states, floats & begin) {
        const auto part = [&](floats & x, int64_t width, int64_t heads) {
            ggml_tensor t = matrix(GGML_TYPE_F32, &x[first * heads * width], width, heads, n);
            t.ne[3] = 2, t.nb[3] = n_tokens * t.nb[2];
            return t;
        };
        const int64_t n_out = 2 * n * 4 * size;
        floats out(n_out + n_states * begin.size(), NAN);
        ggml_tensor parts[] = { part(q, size, 2), part(k, size, 2), part(v, size, 4), part(g, 1, 4), part(beta, 1, 4), matrix(GGML_TYPE_F32, begin.data(), size, size, 4) };
        parts[5].ne[3] = 2;
        ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), size * 4, out.size() / size / 4);
        memcpy(dst.op_params, &n_states, sizeof(n_states));
        for (int i = 0; i < 6; ++i) {
            dst.src[i] = &parts[i];
        }
        run(0, ggml_compute_forward_large_batch_delta_net, dst);
        return out;
    }
};

static void delta_net(int64_t size, int64_t n_tokens, verdict & all) {
    net net(size, n_tokens);
    const floats found = net.through(0, n_tokens, (int) n_tokens, net.state);
    const int64_t n_out = net.v.size(), n_state = net.state.size();
    std::vector<double> state(net.state.begin(), net.state.end());
    floats alone = net.state, upstream = net.state;
    for (int64_t t = 0; t < n_tokens; ++t) {
        const float * kept = &found[n_out + (n_tokens - 1 - t) * n_state];
        for (int64_t i = 0; i < 2 * 4 * size; ++i) { // sequence, head, column
            const int64_t seq = i / size / 4, head = i / size % 4, at = (seq * n_tokens + t) * 4 + head;
            const float * q = &net.q[((seq * n_tokens + t) * 2 + head % 2) * size], * k = &net.k[((seq * n_tokens + t) * 2 + head % 2) * size];
            double * s = &state[i * size], sk = 0, sq = 0;
            for (int64_t j = 0; j < size; ++j) {
                sk += (s[j] *= exp((double) net.g[at])) * k[j];
            }
            for (int64_t j = 0; j < size; ++j) {
                s[j] += k[j] * net.beta[at] * (net.v[at * size + i % size] - sk);
                sq += s[j] * q[j] / sqrt((double) size);
                all.compare(kept[i * size + j], s[j], 1);
            }
            const float out = found[at * size + i % size];
            all.compare(out, sq, 1);
#ifndef __ARM_FEATURE_SVE // with which upstream sums up in another order
            float * column = &upstream[i * size], sum;
            ggml_vec_scale_f32(size, column, expf(net.g[at]));
            ggml_vec_dot_f32(size, &sum, 0, column, 0, k, 0, 1);
            ggml_vec_mad_f32(size, column, k, (net.v[at * size + i % size] - sum) * net.beta[at]);
            ggml_vec_dot_f32(size, &sum, 0, column, 0, q, 0, 1);
            sum *= 1 / sqrtf((float) size);
            all.compare(&out, &sum, 1);
            all.compare(&kept[i * size], column, size);
#endif
        }
        const floats one = net.through(t, 1, 1, alone);
        alone.assign(one.begin() + 2 * 4 * size, one.end());
        all.compare(alone.data(), kept, n_state);
        for (int64_t seq = 0; seq < 2; ++seq) {
            all.compare(&one[seq * 4 * size], &found[(seq * n_tokens + t) * 4 * size], 4 * size);
        }
    }
}

// ---- the rest

// 12 channels: 3 numbers that are there and those of the tokens, which come transposed, times 4 weights
static void convolution(int64_t n_tokens, verdict & all) {
    floats before = numbers(12 * 3), tokens = numbers(n_tokens * 12), weights = numbers(12 * 4), joined(12 * (3 + n_tokens)), out(n_tokens * 12, NAN);
    ggml_tensor a = matrix(GGML_TYPE_F32, before.data(), 3, 12), b = matrix(GGML_TYPE_F32, tokens.data(), 12, n_tokens);
    std::swap(b.ne[0], b.ne[1]), std::swap(b.nb[0], b.nb[1]);
    ggml_tensor x = matrix(GGML_TYPE_F32, joined.data(), 3 + n_tokens, 12), c = matrix(GGML_TYPE_F32, weights.data(), 4, 12);
    ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), 12, n_tokens);
    x.src[0] = &a, x.src[1] = &b, dst.src[0] = &x, dst.src[1] = &c;
    floats right;
    for (int channel = 0; channel < 12; ++channel) {
        right.insert(right.end(), &before[channel * 3], &before[channel * 3] + 3);
        for (int64_t t = 0; t < n_tokens; ++t) {
            right.push_back(tokens[t * 12 + channel]);
        }
    }
    if (n_tokens == 1 || n_tokens >= 16) { // others are upstream's
        run(0, ggml_compute_forward_large_batch_concat, x);
        all.compare(joined.data(), right.data(), right.size());
    }
    joined = right, x.data = joined.data();
    run(0, ggml_compute_forward_large_batch_conv, dst);
    for (int64_t i = 0; i < n_tokens * 12; ++i) {
        double sum = 0, size = 0;
        for (int w = 0; w < 4; ++w) {
            const double term = (double) right[i % 12 * (3 + n_tokens) + i / 12 + w] * weights[i % 12 * 4 + w];
            sum += term, size += fabs(term);
        }
        all.compare(out[i], sum, size);
    }
}

static void factors(verdict & all) {
    floats rows = numbers(7 * 33), each = numbers(7), out(rows.size(), NAN);
    ggml_tensor a = matrix(GGML_TYPE_F32, rows.data(), 33, 7), b = matrix(GGML_TYPE_F32, each.data(), 1, 7), dst = matrix(GGML_TYPE_F32, out.data(), 33, 7);
    dst.src[0] = &a, dst.src[1] = &b;
    run(0, ggml_compute_forward_large_batch_mul, dst);
    for (int i = 0; i < 7 * 33; ++i) {
        const float right = rows[i] * each[i / 33];
        all.compare(&right, &out[i], 1);
    }
}

int main() {
    attentions("F16", GGML_TYPE_F16);
    attentions("Q8_0", GGML_TYPE_Q8_0);
    verdict nets, rest;
    for (int64_t size : { 16, 128 }) {
        for (int64_t n_tokens : { 1, 3, 15, 16, 37 }) {
            delta_net(size, n_tokens, nets);
        }
    }
    for (int64_t n_tokens : { 1, 2, 3, 7, 15, 16, 17, 37 }) {
        convolution(n_tokens, rest);
    }
    factors(rest);
    nets.print("delta_nets");
    rest.print("convolutions");
}
