#pragma once

// Vectors of 4 floats on 64-bit ARM, operations by x86's names: for few-rows-attention-neon.h and large-batch-ops.cpp.

#include "ggml-cpu-impl.h"
#include "vec.h"

#include <arm_neon.h>

#include <cstring>

#define NEON_INLINE static inline __attribute__((always_inline))
#define SB_INLINE   NEON_INLINE
#ifdef __clang__
#define SB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SB_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

NEON_INLINE float32x4_t neon_loadu_ps(const float * p)                              { return vld1q_f32(p); }
NEON_INLINE void        neon_storeu_ps(float * p, float32x4_t x)                    { vst1q_f32(p, x); }
NEON_INLINE float32x4_t neon_setzero_ps()                                           { return vdupq_n_f32(0); }
NEON_INLINE float32x4_t neon_set1_ps(float x)                                       { return vdupq_n_f32(x); }
NEON_INLINE float32x4_t neon_add_ps(float32x4_t a, float32x4_t b)                   { return vaddq_f32(a, b); }
NEON_INLINE float32x4_t neon_sub_ps(float32x4_t a, float32x4_t b)                   { return vsubq_f32(a, b); }
NEON_INLINE float32x4_t neon_mul_ps(float32x4_t a, float32x4_t b)                   { return vmulq_f32(a, b); }
NEON_INLINE float32x4_t neon_max_ps(float32x4_t a, float32x4_t b)                   { return vmaxq_f32(a, b); }
NEON_INLINE float32x4_t neon_fmadd_ps(float32x4_t a, float32x4_t b, float32x4_t c)  { return vfmaq_f32(c, a, b); }
NEON_INLINE float32x4_t neon_fnmadd_ps(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmsq_f32(c, a, b); }

// the first n floats at p
NEON_INLINE float32x4_t neon_load_first(const float * p, int64_t n) {
    if (n >= 4) {
        return vld1q_f32(p);
    }
    float lanes[4] = {};
    memcpy(lanes, p, n * sizeof(float));
    return vld1q_f32(lanes);
}

// float i of all x to out + i * stride, for each i
NEON_INLINE void neon_transpose(const float32x4_t * x, char * out, size_t stride) {
    const float32x4x2_t even = vtrnq_f32(x[0], x[1]), odd = vtrnq_f32(x[2], x[3]);
    for (int i = 0; i < 2; ++i) {
        vst1q_f32((float *) (out + i * stride),       vcombine_f32(vget_low_f32(even.val[i]),  vget_low_f32(odd.val[i])));
        vst1q_f32((float *) (out + (i + 2) * stride), vcombine_f32(vget_high_f32(even.val[i]), vget_high_f32(odd.val[i])));
    }
}

NEON_INLINE float32x4_t neon_exp(float32x4_t x) {
#if defined(__ARM_FEATURE_SVE)
    // ggml_v_expf is SVE's then, and takes no register of NEON
    const svbool_t four = svptrue_pat_b32(SV_VL4);
    float lanes[4];
    vst1q_f32(lanes, x);
    svst1_f32(four, lanes, ggml_v_expf(four, svld1_f32(four, lanes)));
    return vld1q_f32(lanes);
#else
    return ggml_v_expf(x);
#endif
}

} // namespace
