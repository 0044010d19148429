// The instructions of AMX in plain C++, included before anything else of a file that is compiled for a CPU without them. What
// would raise an exception on a CPU ends the program.
//
// EMULATED_AMX=refused: the system permits no tiles. EMULATED_AMX=wrong: a product is off by one, in the last of its sums.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1

namespace emulated {

struct config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t  rows[16];
};

inline void expect(bool right, const char * what) {
    if (!right) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

struct tiles {
    config  now;
    uint8_t data[8][16][64];
    ~tiles() { expect(!now.palette, "a thread ends with a configuration"); }
};

inline thread_local tiles mine = {};
inline std::atomic<bool>  permitted { false };

struct counter {
    std::atomic<long> n { 0 };
    ~counter() { printf("products %ld\n", n.load()); }
};
inline counter products;

inline bool mode(const char * name) {
    const char * value = getenv("EMULATED_AMX");
    return value && !strcmp(value, name);
}

inline long request(long number, long code, long feature) {
    expect(number == SYS_arch_prctl && code == 0x1023 && feature == 18, "not the request for tiles");
    permitted = !mode("refused");
    return permitted ? 0 : -1;
}

inline void load_config(const void * from) {
    config c;
    memcpy(&c, from, sizeof(c));
    expect(permitted, "tiles without permission");
    bool right = c.palette <= 1 && c.start_row == 0;
    for (int i = 0; i < 16; ++i) {
        right = right && (i > 13 || !c.reserved[i]) && (i < 8 ? c.bytes[i] <= 64 && c.rows[i] <= 16 : !c.bytes[i] && !c.rows[i]);
        right = right && !c.bytes[i] == !c.rows[i];
    }
    expect(right, "not a configuration");
    memset(mine.data, 0, sizeof(mine.data));
    mine.now = c.palette ? c : config {};
}

inline void store_config(void * to) {
    expect(permitted, "tiles without permission");
    memcpy(to, &mine.now, sizeof(config));
}

inline void expect_tile(int i) {
    expect(mine.now.palette == 1 && i >= 0 && i < 8 && mine.now.rows[i] > 0, "a tile that is not configured");
}

inline void zero(int i) {
    expect_tile(i);
    memset(mine.data[i], 0, sizeof(mine.data[i]));
}

inline void load(int i, const void * from, size_t stride) {
    zero(i);
    for (int r = 0; r < mine.now.rows[i]; ++r) {
        memcpy(mine.data[i][r], (const char *) from + r * stride, mine.now.bytes[i]);
    }
}

inline void store(int i, void * to, size_t stride) {
    expect_tile(i);
    for (int r = 0; r < mine.now.rows[i]; ++r) {
        memcpy((char *) to + r * stride, mine.data[i][r], mine.now.bytes[i]);
    }
}

// the operation of TDPBSSD in Intel's Software Developer's Manual
inline void multiply(int c, int a, int b) {
    expect_tile(c), expect_tile(a), expect_tile(b);
    const config & now = mine.now;
    expect(c != a && c != b && a != b, "the same tile twice");
    expect(now.rows[c] == now.rows[a] && now.bytes[c] == now.bytes[b] && now.bytes[a] == 4 * now.rows[b] && now.bytes[b] % 4 == 0,
           "tiles do not fit each other");
    for (int m = 0; m < now.rows[c]; ++m) {
        for (int k = 0; k < now.rows[b]; ++k) {
            for (int n = 0; n < now.bytes[b]; ++n) {
                int32_t sum;
                memcpy(&sum, mine.data[c][m] + n / 4 * 4, 4);
                sum += (int8_t) mine.data[a][m][4 * k + n % 4] * (int8_t) mine.data[b][k][n];
                memcpy(mine.data[c][m] + n / 4 * 4, &sum, 4);
            }
        }
    }
    static const bool wrong = mode("wrong");
    if (wrong) {
        mine.data[c][now.rows[c] - 1][now.bytes[c] - 4] ^= 1;
    }
    ++products.n;
}

} // namespace emulated

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(from)          emulated::load_config(from)
#define _tile_storeconfig(to)           emulated::store_config(to)
#define _tile_zero(i)                   emulated::zero(i)
#define _tile_loadd(i, from, stride)    emulated::load(i, from, stride)
#define _tile_stored(i, to, stride)     emulated::store(i, to, stride)
#define _tile_dpbssd(c, a, b)           emulated::multiply(c, a, b)
#define syscall                         emulated::request
