#pragma once

// How sums of a softmax are merged, in lanes: those of tiles to a stretch's, those of stretches to a row's. Products are added by
// fused instructions that are written down: a compiler may fuse either of two products. After attention-simd.h's vectors, or
// few-rows-attention-neon.h's.

namespace {

// what the values so far, and those that are added, are multiplied by
struct merging {
    vec before, more;

    inline __attribute__((always_inline)) vec add(vec value, vec x) const { return FR(fmadd_ps)(value, before, FR(mul_ps)(x, more)); }
};

FR_INLINE merging merge_sums(vec & max, vec & sum, vec more_max, vec more_sum) {
    const vec largest = FR(max_ps)(max, more_max);
    const vec top     = FR(max_ps)(FR(set1_ps)(-FLT_MAX), largest); // nothing is seen yet: exp(-inf - top) is zero
    const merging m   = { exp_of(FR(sub_ps)(max, top)), exp_of(FR(sub_ps)(more_max, top)) };
    max = largest;
    sum = m.add(sum, more_sum);
    return m;
}

} // namespace
