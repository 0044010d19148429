#pragma once

// What the kernels of all CPUs are given.

#include <cstddef>
#include <cstdint>

#define SB_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SB_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SB_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

constexpr int MAX_PASS = 8; // columns that one pass over the rows computes
constexpr int GROUP    = 4; // rows that are finished together

// Columns are prepared once for all rows, in units: a number of bytes, then for some types sums and a scale. The units
// of the columns of a pass lie side by side: unit 0 of each, unit 1 of each and so on.
struct columns {
    char  * y;
    float * sums;
    float * scales;
};

struct product {
    int64_t      n_units; // per row and per column
    const char * x;       // rows
    size_t       x_stride;
    columns      y;
    float *      dst[MAX_PASS];
};

} // namespace
