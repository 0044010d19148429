// Computes products of many columns with AMX tiles and without, and compares every bit. Prints a line for each type: its name,
// the number of products, and of those that differ.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "large-batch.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

// ---- what the kernels need of ggml-cpu.c

static pthread_barrier_t barrier;
static std::atomic<int>  chunk;
extern "C" {
void ggml_barrier(struct ggml_threadpool *) { pthread_barrier_wait(&barrier); }
void ggml_threadpool_chunk_set(struct ggml_threadpool *, int value) { chunk = value; }
int  ggml_threadpool_chunk_add(struct ggml_threadpool *, int value) { return chunk.fetch_add(value); }
bool ggml_cpu_large_batch(void) { return true; }
bool ggml_cpu_small_batch_type(int32_t) { return true; }
float ggml_table_f32_f16[1 << 16];
float ggml_table_f32_e8m0_half[1 << 8];
}

static ggml_tensor tensor(ggml_type type, void * data, int64_t ne0, int64_t ne1, int64_t ne2 = 1) {
    ggml_tensor t = {};
    t.type = type;
    t.data = data;
    t.ne[0] = ne0, t.ne[1] = ne1, t.ne[2] = ne2, t.ne[3] = 1;
    t.nb[0] = ggml_type_size(type), t.nb[1] = ggml_row_size(type, ne0), t.nb[2] = ne1 * t.nb[1], t.nb[3] = ne2 * t.nb[2];
    return t;
}

static void compute(ggml_tensor & dst, int n_threads) {
    std::vector<char> memory(ggml_large_batch_wdata_size(n_threads, &dst));
    pthread_barrier_init(&barrier, nullptr, n_threads);
    const auto run = [&](int i) {
        ggml_compute_params params = {};
        params.ith   = i;
        params.nth   = n_threads;
        params.wdata = memory.data();
        params.wsize = memory.size();
        if (!ggml_compute_forward_large_batch(&params, &dst)) {
            fprintf(stderr, "not computed\n");
            exit(2);
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < n_threads; ++i) {
        others.emplace_back(run, i);
    }
    run(0);
    for (std::thread & t : others) {
        t.join();
    }
    pthread_barrier_destroy(&barrier);
}

// ---- numbers

static std::mt19937 dice(7);

// 0.004 to 0.016
template <class B> static auto set_scales(B & b, int) -> decltype((void) b.data.data.dmin) {
    b.data.data.d = (ggml_half) (0x1C00 + dice() % 0x0800), b.data.data.dmin = (ggml_half) (0x1C00 + dice() % 0x0800);
}
template <class B> static auto set_scales(B & b, int) -> decltype((void) b.data.data.m) {
    b.data.data.d = (ggml_half) (0x1C00 + dice() % 0x0800), b.data.data.m = (ggml_half) (0x1C00 + dice() % 0x0800);
}
static void set_scales(block_iq1_m & b, int) { // four bits in each of four words
    const int scale = 0x1C00 + dice() % 0x0800;
    uint16_t words[4];
    memcpy(words, b.scales, sizeof(words));
    for (int i = 0; i < 4; ++i) {
        words[i] = (uint16_t) ((words[i] & 0x0FFF) | (scale >> 4 * i & 0xF) << 12);
    }
    memcpy(b.scales, words, sizeof(words));
}
template <class B> static auto set_scales(B & b, int) -> decltype((void) b.d) { b.d = (ggml_half) (0x1C00 + dice() % 0x0800); }
template <class B> static void set_scales(B & b, ...) { b.e = (uint8_t) (118 + dice() % 4); }

// every bit of a block that is no scale has any value
template <class B> static std::vector<char> weights(int64_t n_blocks) {
    std::vector<char> bytes(n_blocks * sizeof(B));
    std::generate(bytes.begin(), bytes.end(), [] { return (char) dice(); });
    for (int64_t i = 0; i < n_blocks; ++i) {
        set_scales(((B *) bytes.data())[i], 0);
    }
    return bytes;
}

// of different magnitude, some of them zero; not so different that of a unit, which has one scale, most would be
static std::vector<float> numbers(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (int64_t i = 0; i < n; ++i) {
        const float scale[] = { 1, 0, 0.3f, 3, 1 };
        x[i] = scale[i / 32 % 5] * normal(dice);
    }
    return x;
}

// ---- cases

struct verdict {
    int n = 0, different = 0;

    void compare(ggml_tensor & dst, int n_threads) {
        std::vector<float> tiles(ggml_nelements(&dst), NAN), vectors(tiles);
        for (auto * out : { &tiles, &vectors }) {
            ggml_cpu_set_amx_tiles(out == &tiles);
            dst.data = out->data();
            compute(dst, n_threads);
        }
        const bool numbers = std::all_of(vectors.begin(), vectors.end(), [](float x) { return std::isfinite(x); });
        different += !numbers || memcmp(tiles.data(), vectors.data(), tiles.size() * sizeof(float)) != 0;
        ++n;
    }
};

// `planes` matrices of m rows of k weights, each times 2 matrices of n columns
template <class B> static void matrices(ggml_type type, int64_t k, int64_t m, int64_t n, int64_t planes, int n_threads, verdict & all) {
    std::vector<char>  w = weights<B>(planes * m * k / ggml_blck_size(type));
    std::vector<float> y = numbers(planes * k * n);
    ggml_tensor rows = tensor(type, w.data(), k, m, planes), columns = tensor(GGML_TYPE_F32, y.data(), k, n, planes);
    ggml_tensor dst = tensor(GGML_TYPE_F32, nullptr, m, n, planes);
    dst.op = GGML_OP_MUL_MAT;
    dst.src[0] = &rows, dst.src[1] = &columns;
    all.compare(dst, n_threads);
}

// 6 experts, tokens that use 2 each: one expert serves one token, one nobody, the others many
template <class B> static void experts(ggml_type type, int64_t k, int64_t m, int64_t n, bool shared, int n_threads, verdict & all) {
    constexpr int64_t EXPERTS = 6, USED = 2;
    std::vector<char>    w = weights<B>(EXPERTS * m * k / ggml_blck_size(type));
    std::vector<float>   y = numbers(k * n * USED);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < n; ++t) {
        ids.insert(ids.end(), { 3, t == 5 ? 4 : (int32_t) (dice() % 3) });
    }
    ggml_tensor rows = tensor(type, w.data(), k, m, EXPERTS), columns = tensor(GGML_TYPE_F32, y.data(), k, shared ? 1 : USED, n);
    ggml_tensor which = tensor(GGML_TYPE_I32, ids.data(), USED, n);
    ggml_tensor dst = tensor(GGML_TYPE_F32, nullptr, m, USED, n);
    dst.op = GGML_OP_MUL_MAT_ID;
    dst.src[0] = &rows, dst.src[1] = &columns, dst.src[2] = &which;
    all.compare(dst, n_threads);
}

template <class B> static void test(const char * name, ggml_type type) {
    const int64_t block = ggml_blck_size(type);
    verdict all;
    for (int64_t k : { block, 3 * block, 5 * block, 1024 + 7 * block }) { // a tile has 1024 weights
        for (int64_t m : { 1, 17, 70 }) {
            for (int64_t n : { 33, 48, 50, 64 }) { // 16 columns at a time
                matrices<B>(type, k, m, n, 1, 1, all);
            }
        }
    }
    matrices<B>(type, 2 * block, 50, 35, 3, 1, all);
    matrices<B>(type, 1280, 131, 49, 1, 3, all);
    for (bool shared : { true, false }) {
        experts<B>(type, 3 * block, 33, 37, shared, 1, all);
        experts<B>(type, 1280, 38, 81, shared, 3, all);
    }
    printf("%s %d %d\n", name, all.n, all.different);
    fflush(stdout);
}

int main() {
    for (int i = 0; i < 1 << 16; ++i) {
        ggml_table_f32_f16[i] = ggml_fp16_to_fp32((ggml_fp16_t) i);
    }
    for (int i = 0; i < 1 << 8; ++i) {
        ggml_table_f32_e8m0_half[i] = GGML_E8M0_TO_FP32_HALF(i);
    }
    test<block_q8_0>("Q8_0", GGML_TYPE_Q8_0);
    test<block_q5_0>("Q5_0", GGML_TYPE_Q5_0);
    test<block_q5_1>("Q5_1", GGML_TYPE_Q5_1);
    test<block_q4_0>("Q4_0", GGML_TYPE_Q4_0);
    test<block_q4_1>("Q4_1", GGML_TYPE_Q4_1);
    test<block_q2_0>("Q2_0", GGML_TYPE_Q2_0);
    test<block_q1_0>("Q1_0", GGML_TYPE_Q1_0);
    test<block_iq4_nl>("IQ4_NL", GGML_TYPE_IQ4_NL);
    test<block_mxfp4>("MXFP4", GGML_TYPE_MXFP4);
    test<block_q6_K>("Q6_K", GGML_TYPE_Q6_K);
    test<block_q5_K>("Q5_K", GGML_TYPE_Q5_K);
    test<block_q4_K>("Q4_K", GGML_TYPE_Q4_K);
    test<block_q3_K>("Q3_K", GGML_TYPE_Q3_K);
    test<block_q2_K>("Q2_K", GGML_TYPE_Q2_K);
    test<block_iq4_xs>("IQ4_XS", GGML_TYPE_IQ4_XS);
    test<block_iq3_s>("IQ3_S", GGML_TYPE_IQ3_S);
    test<block_iq3_xxs>("IQ3_XXS", GGML_TYPE_IQ3_XXS);
    test<block_iq2_s>("IQ2_S", GGML_TYPE_IQ2_S);
    test<block_iq2_xs>("IQ2_XS", GGML_TYPE_IQ2_XS);
    test<block_iq2_xxs>("IQ2_XXS", GGML_TYPE_IQ2_XXS);
    test<block_iq1_s>("IQ1_S", GGML_TYPE_IQ1_S);
    test<block_iq1_m>("IQ1_M", GGML_TYPE_IQ1_M);
    test<block_tq2_0>("TQ2_0", GGML_TYPE_TQ2_0);
    test<block_tq1_0>("TQ1_0", GGML_TYPE_TQ1_0);
}
