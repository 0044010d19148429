// Compares the products of a few columns with sums of doubles, and columns beside others with columns alone; prints a
// line for each type: its name, the largest error in units of what a row times a column may sum up to, whether all bits
// were the same. Without kernels for a type: "none".

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-impl.h"
#include "one_thread.h"
#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

typedef std::vector<float> floats;
static std::mt19937 dice(7);

// every bit of a block that is no float has any value
template <class B> static void set_scales(B & b) {
    const auto small = [] { return (ggml_half) (0x1C00 + dice() % 0x0800); }; // 0.004 to 0.016
    if constexpr (std::is_same_v<B, block_q4_K> || std::is_same_v<B, block_q5_K>) {
        b.data.data.d = small(), b.data.data.dmin = small();
    } else {
        b.d = small();
    }
}

template <class B> static std::vector<char> weights(int64_t n_blocks) {
    std::vector<char> bytes(n_blocks * sizeof(B));
    std::generate(bytes.begin(), bytes.end(), [] { return (char) dice(); });
    for (int64_t i = 0; i < n_blocks; ++i) {
        set_scales(((B *) bytes.data())[i]);
    }
    return bytes;
}

// some of them small, some zero, some of one sign only
static floats numbers(int64_t k, int64_t n) {
    std::normal_distribution<float> normal;
    floats x(k * n);
    for (size_t i = 0; i < x.size(); ++i) {
        const float value = normal(dice);
        x[i] = i / 64 % 5 == 1 ? 0 : i / 64 % 5 == 2 ? 1e-3f * value : i / 64 % 5 == 3 ? fabsf(value) : value;
    }
    return x;
}

// a column as it is after it was quantized
static floats rounded(const float * x, int64_t k, bool super) {
    floats out(k);
    for (int64_t i = 0; i < k; i += super ? QK_K : QK8_0) {
        block_q8_K wide;
        block_q8_0 narrow;
        if (super) {
            quantize_row_q8_K(x + i, &wide, QK_K);
        } else {
            quantize_row_q8_0(x + i, &narrow, QK8_0);
        }
        for (int q = 0; q < (super ? QK_K : QK8_0); ++q) {
            out[i + q] = super ? wide.d * wide.qs[q] : ggml_fp16_to_fp32(narrow.d) * narrow.qs[q];
        }
    }
    return out;
}

struct verdict {
    double error = 0;
    bool   same  = true;

    void compare(float value, const float * row, const float * column, int64_t k) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < k; ++i) {
            sum  += (double) row[i] * column[i];
            size += fabs((double) row[i] * column[i]);
        }
        error = std::max(error, std::isfinite(value) ? fabs(value - sum) / (size + 1e-30) : INFINITY);
    }
};

template <class B> static void few_columns(ggml_type type, int64_t k, int64_t m, verdict & all) {
    constexpr int64_t MOST = 19;
    std::vector<char> w = weights<B>(m * k / ggml_blck_size(type));
    floats y = numbers(k, MOST), plain(m * k), alone, quantized;
    ggml_get_type_traits(type)->to_float(w.data(), plain.data(), m * k);
    for (int64_t j = 0; j < MOST; ++j) {
        const floats one = product(type, w.data(), &y[j * k], k, m, 1), column = rounded(&y[j * k], k, ggml_blck_size(type) == QK_K);
        for (int64_t r = 0; r < m; ++r) {
            all.compare(one[r], &plain[r * k], column.data(), k);
        }
        alone.insert(alone.end(), one.begin(), one.end());
    }
    for (int64_t n : { 2, 3, 4, 5, 6, 7, 8, 9, 17, (int) MOST }) {
        const floats found = product(type, w.data(), y.data(), k, m, n);
        all.same = all.same && !memcmp(found.data(), alone.data(), found.size() * sizeof(float));
    }
}

// 5 experts, 9 tokens that use 2 each: one expert serves nobody, one all of them
template <class B> static void experts(ggml_type type, int64_t k, int64_t m, verdict & all) {
    constexpr int64_t EXPERTS = 5, TOKENS = 9, USED = 2;
    std::vector<char> w = weights<B>(EXPERTS * m * k / ggml_blck_size(type));
    floats y = numbers(k, TOKENS), out(m * USED * TOKENS, NAN);
    std::vector<int32_t> ids;
    for (int t = 0; t < TOKENS; ++t) {
        ids.insert(ids.end(), { 3, t % 3 });
    }
    ggml_tensor rows = matrix(type, w.data(), k, m, EXPERTS), columns = matrix(GGML_TYPE_F32, y.data(), k, 1, TOKENS);
    ggml_tensor which = matrix(GGML_TYPE_I32, ids.data(), USED, TOKENS);
    ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), m, USED, TOKENS);
    dst.op = GGML_OP_MUL_MAT_ID;
    dst.src[0] = &rows, dst.src[1] = &columns, dst.src[2] = &which;
    compute(dst);
    for (int64_t i = 0; i < USED * TOKENS; ++i) {
        const char * begin = w.data() + ids[i] * rows.nb[2];
        std::vector<char> expert(begin, begin + rows.nb[2]);
        const floats one = product(type, expert.data(), &y[i / USED * k], k, m, 1);
        all.same = all.same && !memcmp(one.data(), &out[i * m], m * sizeof(float));
    }
}

template <class B> static void test(const char * name, ggml_type type) {
    if (!ggml_cpu_small_batch_type(type)) {
        printf("%s none\n", name);
        return;
    }
    verdict all;
    for (int64_t blocks : { 1, 2, 3, 7 }) {
        for (int64_t m : { 1, 2, 3, 4, 5, 11, 71 }) {
            few_columns<B>(type, blocks * ggml_blck_size(type), m, all);
        }
    }
    experts<B>(type, 3 * ggml_blck_size(type), 7, all);
    printf("%s %.2e %s\n", name, all.error, all.same ? "same" : "different");
}

int main() {
    test<block_q8_0>("Q8_0", GGML_TYPE_Q8_0);
    test<block_q4_K>("Q4_K", GGML_TYPE_Q4_K);
    test<block_q6_K>("Q6_K", GGML_TYPE_Q6_K);
    test<block_q5_K>("Q5_K", GGML_TYPE_Q5_K);
    test<block_q4_0>("Q4_0", GGML_TYPE_Q4_0);
    test<block_iq4_xs>("IQ4_XS", GGML_TYPE_IQ4_XS);
}
