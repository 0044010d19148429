// Asks ggml's CUDA, Metal and Vulkan backends about the nodes of a graph while it is computed. Their answers are
// functions of upstream's, cut out of the tree by bench/ops.py (*.inc); around them here: a device to be asked about.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

struct failed {};
#undef GGML_ASSERT
#undef GGML_ABORT
#define GGML_ASSERT(x) do { if (!(x)) { throw failed(); } } while (0)
#define GGML_ABORT(...) throw failed()

namespace cuda {
#define GGML_CUDA_USE_CUB  // from CUDA 11.7 on
#define FLASH_ATTN_AVAILABLE
#define __host__
#define __device__
struct info { struct device { int cc; size_t smpb; } devices[1]; };
static info the_info;
static const info & ggml_cuda_info() { return the_info; }
static int ggml_cuda_highest_compiled_arch(int cc) { return cc; }  // built for that architecture
struct ggml_backend_cuda_device_context { int device; };
struct ggml_backend_cuda_buffer_type_context { int device; };
static bool ggml_backend_buft_is_cuda(ggml_backend_buffer_type_t) { return false; }  // of another CUDA device
static bool ggml_cuda_lightning_indexer_supported(int, const ggml_tensor *) { return false; }  // not in our models
#include "cuda.inc"
static bool supports(int cc, const ggml_tensor * op) {
    the_info.devices[0] = { cc, 48*1024 };
    ggml_backend_cuda_device_context context = { 0 };
    ggml_backend_device device = {};
    device.context = &context;
    return ggml_backend_cuda_device_supports_op(&device, op);
}
}

namespace metal {
struct device { struct { bool has_simdgroup_mm, has_simdgroup_reduction, has_bfloat; size_t max_theadgroup_memory_size; } props; };
typedef device * ggml_metal_device_t;
#include "metal.inc"
static bool supports(const ggml_tensor * op) {  // Apple's own GPUs
    device dev = { { true, true, true, 32768 } };
    return ggml_metal_device_supports_op(&dev, op);
}
}

namespace vulkan {
struct pipeline {  // there is one for everything that has a name
    pipeline operator[](size_t) const { return {}; }
    bool operator!=(std::nullptr_t) const { return true; }
    explicit operator bool() const { return true; }
};
typedef pipeline vk_pipeline;
struct device_struct {
    bool shader_int64 = true, buffer_device_address = true, shader_64b_indexing = false, coopmat2 = false, fp16 = true;
    bool subgroup_basic = true, subgroup_shuffle = true, subgroup_vote = true, subgroup_arithmetic = true;
    bool subgroup_require_full_support = true, vulkan_memory_model = true;
    size_t max_buffer_size = SIZE_MAX;
    uint32_t subgroup_size_log2 = 5, max_workgroup_size_log2 = 10;
    struct { struct { uint32_t maxStorageBufferRange, maxComputeSharedMemorySize, minStorageBufferOffsetAlignment; } limits; }
        properties = { { UINT32_MAX, 49152, 16 } };
    pipeline mul_mat_id_s, mul_mat_id_m, mul_mat_id_l;
#include "vulkan-pipelines.inc"
};
typedef device_struct * vk_device;
struct ggml_backend_vk_device_context { int device; };
struct ggml_backend_vk_context { vk_device device; };
static device_struct the_device;
static vk_device the_handle = &the_device;
static const vk_device & ggml_vk_get_device(int) { return the_handle; }
static bool ggml_vk_lightning_indexer_k_type_supported(ggml_type) { return false; }  // not in our models
static uint64_t vk_tensor_offset(const ggml_tensor *) { return 0; }
#define UNUSED GGML_UNUSED
#include "vulkan.inc"
static bool supports(const ggml_tensor * op) {
    ggml_backend_vk_device_context context = { 0 };
    ggml_backend_device device = {};
    device.context = &context;
    if (!ggml_backend_vk_device_supports_op(&device, op)) {
        return false;
    }
    if (op->op == GGML_OP_CONT || op->op == GGML_OP_CPY || op->op == GGML_OP_DUP) {
        ggml_backend_vk_context asking = { the_handle };
        ggml_vk_get_cpy_pipeline(&asking, op->src[0], op, op->type);  // asserts for what nothing can copy
    }
    return true;
}
}

static std::map<std::string, std::string> found;  // graph, operation, tensors -> a letter for each device, a test
static std::string graph, report;

static std::string described(const ggml_tensor * t) {
    char text[160];
    snprintf(text, sizeof(text), "%s[%lld,%lld,%lld,%lld]%s", ggml_type_name(t->type), (long long) t->ne[0],
        (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3], ggml_is_contiguous(t) ? "" : "*");
    return text;
}

static void put(std::ostream & out, const ggml_tensor * t) {
    out << " " << t->type;
    for (int64_t n : t->ne) {
        out << " " << n;
    }
}

// A line of upstream's test-backend-ops --test-file: how to compute the node again, with random numbers. Nothing where
// only its own cases know how to compare: ids in any order, products with a matrix that must be Hadamard's.
static std::string test(const ggml_tensor * node) {
    if (node->op == GGML_OP_TOP_K || (node->op == GGML_OP_MUL_MAT && node->op_params[1])) {
        return "";
    }
    std::ostringstream out;
    out << node->op;
    put(out, node);
    out << " " << GGML_MAX_OP_PARAMS / sizeof(int32_t);
    for (size_t i = 0; i < GGML_MAX_OP_PARAMS / sizeof(int32_t); i++) {
        out << " " << node->op_params[i];
    }
    int n = 0;
    while (n < GGML_MAX_SRC && node->src[n]) {
        n++;
    }
    out << " " << n;
    for (int i = 0; i < n; i++) {
        put(out, node->src[i]);
        for (size_t stride : node->src[i]->nb) {
            out << " " << stride;
        }
    }
    out << " -";
    return out.str();
}

template <typename F> static char letter(F supports) {
    try {
        return supports() ? 'y' : 'n';
    } catch (const failed &) {
        return '!';  // it says yes, and would abort
    }
}

extern "C" void ops_graph(const char * name) { graph = name; }

// llama.cpp's evaluation callback: looks at the node, and does not ask for its data
extern "C" bool ops_node(ggml_tensor * node, bool ask, void *) {
    if (!ask) {
        return true;
    }
    switch (node->op) {  // nothing is computed
        case GGML_OP_NONE: case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return false;
        default:
            break;
    }
    std::string key = graph + "\t" + ggml_op_desc(node) + "\t";
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (node->src[i]) {
            key += described(node->src[i]) + " ";
        }
    }
    key += "-> " + described(node);
    key += node->buffer && !ggml_backend_buffer_is_host(node->buffer) ? "\tdevice" : "\thost";
    if (found.count(key)) {
        return false;
    }
    std::string letters;
    for (int cc : { 750, 800, 860, 890, 900, 1200 }) {
        letters += letter([&] { return cuda::supports(cc, node); });
    }
    letters += letter([&] { return metal::supports(node); });
    letters += letter([&] { return vulkan::supports(node); });
    found[key] = letters + "\t" + test(node);
    return false;
}

// Lines of graph, operation, tensors, place, letters, test, with tabs between
extern "C" const char * ops_report(void) {
    report.clear();
    for (const auto & [key, letters] : found) {
        report += key + "\t" + letters + "\n";
    }
    return report.c_str();
}
