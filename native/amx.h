// The matrix unit of a core (Intel AMX) for bfloat16: eight registers, each of which holds a tile of 16 rows of 64 bytes.
//
// One instruction adds the products of a tile [16][32] and a tile of pairs [16][16][2] to sums [16][16] in float.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define LPR_HAS_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#define LPR_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))

namespace lpr {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 32;
constexpr int64_t kTileBytes = 1024;

// Asks the kernel for the tiles' registers, once for the process; false where the processor or the kernel has none.
inline bool can_use_amx() {
  static const bool can = [] {
    unsigned a, b, c, d;
    bool has_vectors = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
    bool has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_vectors && has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }();
  return can;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline const TileShapes kTileShapes;

// Before the first tile of a piece of work; `_tile_release` ends it. GCC does not tell its optimiser what tiles read, so
// what they shall read is written before `see_memory`.
LPR_AMX inline void begin_tiles() { _tile_loadconfig(&kTileShapes); }
inline void see_memory() { asm volatile("" ::: "memory"); }

}  // namespace lpr
#endif
