// Runs one kernel once, for bench/arm_kernels.py to trace:
// arm_kernels attention F16|Q8_0 ours|upstream ROWS CELLS: 4 heads of 256 numbers, one KV head.
// arm_kernels delta_net F32 ours|upstream TOKENS HEADS: heads of 128 columns; up to 4 tokens leave a state each.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "../tests/arm/one_thread.h"
#include "few-rows-attention.h"
#include "large-batch-ops.h"
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

static std::vector<float> numbers(int64_t n) {
    static std::mt19937 dice(7);
    std::vector<float> x(n);
    std::generate(x.begin(), x.end(), [] { return (int) (dice() % 2001 - 1000) / 1000.0f; });
    return x;
}

// of ggml-cpu.c, which asks Linux for it: bytes of an SVE register
extern "C" int ggml_cpu_get_sve_cnt(void) { return 16; }

// what is traced lies between these
extern "C" __attribute__((noinline)) void kernel_begins() { __asm__ volatile("nop"); }
extern "C" __attribute__((noinline)) void kernel_ends() { __asm__ volatile("nop"); }

static void operation(ggml_tensor & dst, void (*compute)(const ggml_compute_params *, ggml_tensor *)) {
    static char memory[1 << 20];
    ggml_compute_params params = {};
    params.nth   = 1;
    params.wdata = memory;
    params.wsize = sizeof(memory);
    kernel_begins();
    compute(&params, &dst);
    kernel_ends();
}

static void attention(ggml_type type, int64_t n_rows, int64_t n_cells) {
    constexpr int64_t SIZE = 256, HEADS = 4;
    std::vector<float> plain = numbers(SIZE * n_cells), query = numbers(SIZE * n_rows * HEADS), out(query.size());
    std::vector<char> cells(n_cells * ggml_row_size(type, SIZE));
    ggml_quantize_chunk(type, plain.data(), cells.data(), 0, n_cells, SIZE, nullptr);
    ggml_tensor q = matrix(GGML_TYPE_F32, query.data(), SIZE, n_rows, HEADS), k = matrix(type, cells.data(), SIZE, n_cells);
    ggml_tensor dst = matrix(GGML_TYPE_F32, out.data(), SIZE, HEADS, n_rows);
    const float scale = 1 / 16.f;
    memcpy(dst.op_params, &scale, sizeof(scale));
    dst.src[0] = &q, dst.src[1] = dst.src[2] = &k;
    operation(dst, ggml_compute_forward_flash_attn_ext);
}

static void delta_net(int64_t n_tokens, int64_t n_heads) {
    constexpr int64_t SIZE = 128;
    const int32_t n_states = n_tokens <= 4 ? n_tokens : 1;
    std::vector<float> in = numbers(SIZE * n_heads * n_tokens), small = numbers(n_heads * n_tokens), begin = numbers(SIZE * SIZE * n_heads);
    std::vector<float> out(in.size() + n_states * begin.size());
    ggml_tensor x = matrix(GGML_TYPE_F32, in.data(), SIZE, n_heads, n_tokens), g = matrix(GGML_TYPE_F32, small.data(), 1, n_heads, n_tokens);
    ggml_tensor state = matrix(GGML_TYPE_F32, begin.data(), SIZE * SIZE * n_heads, 1), dst = matrix(GGML_TYPE_F32, out.data(), out.size(), 1);
    memcpy(dst.op_params, &n_states, sizeof(n_states));
    dst.src[0] = dst.src[1] = dst.src[2] = &x, dst.src[3] = dst.src[4] = &g, dst.src[5] = &state;
    operation(dst, ggml_compute_forward_gated_delta_net);
}

int main(int, char ** argv) {
    const std::string kernel = argv[1], type = argv[2], way = argv[3];
    const int n = atoi(argv[4]), length = atoi(argv[5]);
    ggml_cpu_set_few_rows_attention(way == "ours");
    ggml_cpu_set_large_batch(way == "ours");
    if (kernel == "attention") {
        attention(type == "F16" ? GGML_TYPE_F16 : GGML_TYPE_Q8_0, n, length);
    } else if (kernel == "delta_net") {
        delta_net(n, length);
    }
}
