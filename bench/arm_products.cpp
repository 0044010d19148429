// Runs one kernel of a product once, for bench/arm_products.py to trace:
// arm_products ours|dot|gemv|gemm TYPE COLUMNS WEIGHTS. 4 rows; gemv and gemm: 8, or 4 where blocks of 4 are repacked.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "../tests/arm/one_thread.h"
#include "quants.h"
#include "repack.h"

#include <cstring>
#include <string>

typedef void (*vec_dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
typedef void (*gem)(int, float *, size_t, const void *, const void *, int, int);

struct kernels {
    const char * name;
    ggml_type    type;
    vec_dot      dot;
    gem          gemv, gemm;
    int          rows;
};

static const kernels all[] = {
    { "Q8_0", GGML_TYPE_Q8_0, ggml_vec_dot_q8_0_q8_0, ggml_gemv_q8_0_4x8_q8_0, ggml_gemm_q8_0_4x8_q8_0, 4 },
    { "Q4_0", GGML_TYPE_Q4_0, ggml_vec_dot_q4_0_q8_0, ggml_gemv_q4_0_4x8_q8_0, ggml_gemm_q4_0_4x8_q8_0, 4 },
    { "Q4_K", GGML_TYPE_Q4_K, ggml_vec_dot_q4_K_q8_K, ggml_gemv_q4_K_8x8_q8_K, ggml_gemm_q4_K_8x8_q8_K, 8 },
    { "Q5_K", GGML_TYPE_Q5_K, ggml_vec_dot_q5_K_q8_K, ggml_gemv_q5_K_8x8_q8_K, ggml_gemm_q5_K_8x8_q8_K, 8 },
    { "Q6_K", GGML_TYPE_Q6_K, ggml_vec_dot_q6_K_q8_K, ggml_gemv_q6_K_8x8_q8_K, ggml_gemm_q6_K_8x8_q8_K, 8 },
    { "IQ4_XS", GGML_TYPE_IQ4_XS, ggml_vec_dot_iq4_xs_q8_K, nullptr, nullptr, 4 },
};

int main(int, char ** argv) {
    const std::string way = argv[1];
    const int n = atoi(argv[3]), k = atoi(argv[4]);
    for (const kernels & one : all) {
        if (strcmp(one.name, argv[2])) {
            continue;
        }
        const size_t row = ggml_row_size(one.type, k);
        std::vector<char> x(8 * row + 4096), y(4 * (k / 32) * sizeof(block_q8_0) + 4096 + 4 * (k / 256) * sizeof(block_q8_K));
        float out[64];
        if (way == "ours") {
            std::vector<float> columns(k * n, 1.0f);
            product(one.type, x.data(), columns.data(), k, 4, n);
        } else if (way == "dot") {
            for (int r = 0; r < 4; ++r) {
                one.dot(k, out, 0, x.data() + r * row, 0, y.data(), 0, 1);
            }
        } else if (one.gemv) {
            (way == "gemv" ? one.gemv : one.gemm)(k, out, 8, x.data(), y.data(), way == "gemv" ? 1 : 4, one.rows);
        }
    }
}
