// Matrix products of the rows of a step with weights that are laid out once, when a model is loaded.
//
// A tree of a few nodes costs little because its rows share one read of the weights. So the loop follows the weights:
// panels of 32 outputs lie one after the other, each [inputs][32] floats or [inputs / 2][32][2] bfloat16, and are fetched
// some steps ahead. A tile of up to 14 rows keeps its sums in registers (Goto and van de Geijn 2008, section 4, with the
// weights in the place of their packed B). Each output is a sum of sums over 512 inputs in their order, so its bits
// depend neither on the rows beside it nor on the number of threads.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define LPR_HAS_TILES 1
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "parallel.h"

#define LPR_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define LPR_WIDE_HALF __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))

namespace lpr {

constexpr int64_t kPanel = 32;
constexpr int kMostTileRows = 14;  // 28 sums, two registers of weights and one value of a row
constexpr int64_t kStepBytes = 128;  // of weights
constexpr int64_t kAhead = 64;     // steps that weights are fetched ahead
constexpr int64_t kSummed = 512;   // inputs of a sum: in one of many thousands, errors add up
constexpr int64_t kMostTiles = 9;   // whose rows go past the weights together
constexpr int64_t kMostPanels = 8;  // of an item of work

struct Product {
  const char* packed;
  const float* bias;  // or null
  const char* given;  // [rows, inputs]
  char* out;          // [rows, outputs]
  int64_t rows, outputs, inputs;
};

// What a tile fetches while it multiplies: two lines of 64 bytes a step, which is what it reads.
struct Ahead {
  const char* next;
  int64_t stride;  // bytes a step
  LPR_INLINE void fetch() {
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 64, _MM_HINT_T0);
    next += stride;
  }
};

// Rows from `row` on and the panel of outputs from `first` on.
using Tile = void (*)(const Product& product, int64_t row, int64_t first, Ahead ahead);

LPR_WIDE inline void masks_of(int64_t width, __mmask16 masks[2]) {
  masks[0] = static_cast<__mmask16>(width >= 16 ? 0xffff : (1u << width) - 1);
  masks[1] = static_cast<__mmask16>(width >= 32 ? 0xffff : width <= 16 ? 0 : (1u << (width - 16)) - 1);
}

template <int R>
LPR_WIDE inline void add_to(__m512 (&totals)[R][2], const __m512 (&sums)[R][2], bool is_first) {
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++)
      totals[r][half] = is_first ? sums[r][half] : _mm512_add_ps(totals[r][half], sums[r][half]);
}

template <int R>
LPR_WIDE void tile_of_floats(const Product& product, int64_t row, int64_t first, Ahead ahead) {
  int64_t inputs = product.inputs, outputs = product.outputs;
  const float* weights = reinterpret_cast<const float*>(product.packed) + first * inputs;
  const float* given = reinterpret_cast<const float*>(product.given) + row * inputs;
  __m512 totals[R][2];
  for (int64_t start = 0; start < inputs; start += kSummed) {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = start; k < std::min(inputs, start + kSummed); k++, weights += kPanel) {
      __m512 low = _mm512_loadu_ps(weights), high = _mm512_loadu_ps(weights + 16);
      ahead.fetch();
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        __m512 value = _mm512_set1_ps(given[r * inputs + k]);
        sums[r][0] = _mm512_fmadd_ps(value, low, sums[r][0]);
        sums[r][1] = _mm512_fmadd_ps(value, high, sums[r][1]);
      }
    }
    add_to<R>(totals, sums, start == 0);
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  float* out = reinterpret_cast<float*>(product.out) + row * outputs + first;
  for (int half = 0; half < 2; half++) {
    const float* from = product.bias ? product.bias + first + 16 * half : nullptr;
    __m512 bias = from ? _mm512_maskz_loadu_ps(masks[half], from) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++)
      _mm512_mask_storeu_ps(out + r * outputs + 16 * half, masks[half],
                            from ? _mm512_add_ps(totals[r][half], bias) : totals[r][half]);
  }
}

template <int R>
LPR_WIDE_HALF void tile_of_halves(const Product& product, int64_t row, int64_t first, Ahead ahead) {
  int64_t inputs = product.inputs, outputs = product.outputs;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(product.packed) + first * inputs;
  const uint16_t* given = reinterpret_cast<const uint16_t*>(product.given) + row * inputs;
  __m512 totals[R][2];
  for (int64_t start = 0; start < inputs; start += kSummed) {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = start; k < std::min(inputs, start + kSummed); k += 2, weights += 2 * kPanel) {
      __m512bh low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights));
      __m512bh high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + 32));
      ahead.fetch();
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, given + r * inputs + k, sizeof(pair));
        __m512bh values = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], values, low);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], values, high);
      }
    }
    add_to<R>(totals, sums, start == 0);
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  uint16_t* out = reinterpret_cast<uint16_t*>(product.out) + row * outputs + first;
  for (int half = 0; half < 2; half++) {
    const float* from = product.bias ? product.bias + first + 16 * half : nullptr;
    __m512 bias = from ? _mm512_maskz_loadu_ps(masks[half], from) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++) {
      __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(totals[r][half], bias)));
      _mm256_mask_storeu_epi16(out + r * outputs + 16 * half, masks[half], rounded);
    }
  }
}

constexpr Tile kFloatTiles[] = {tile_of_floats<1>,  tile_of_floats<2>,  tile_of_floats<3>,  tile_of_floats<4>,
                                tile_of_floats<5>,  tile_of_floats<6>,  tile_of_floats<7>,  tile_of_floats<8>,
                                tile_of_floats<9>,  tile_of_floats<10>, tile_of_floats<11>, tile_of_floats<12>,
                                tile_of_floats<13>, tile_of_floats<14>};
constexpr Tile kHalfTiles[] = {tile_of_halves<1>,  tile_of_halves<2>,  tile_of_halves<3>,  tile_of_halves<4>,
                               tile_of_halves<5>,  tile_of_halves<6>,  tile_of_halves<7>,  tile_of_halves<8>,
                               tile_of_halves<9>,  tile_of_halves<10>, tile_of_halves<11>, tile_of_halves<12>,
                               tile_of_halves<13>, tile_of_halves<14>};

inline bool can_tile(bool is_half) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && (!is_half || __builtin_cpu_supports("avx512bf16"));
}

// Part `index` of `count` equal parts of `whole`.
inline int64_t edge(int64_t whole, int64_t index, int64_t count) { return whole * index / count; }

// Panel by panel, all rows of each while its weights are near; of many rows as many as stay in a core's cache.
inline void multiply(const Product& product, bool is_half, int num_threads) {
  const Tile* tiles = is_half ? kHalfTiles : kFloatTiles;
  int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  int64_t num_tiles = (product.rows + kMostTileRows - 1) / kMostTileRows;
  int64_t num_parts = (num_tiles + kMostTiles - 1) / kMostTiles;
  int64_t size = std::clamp<int64_t>(num_panels / (8 * num_threads), 1, kMostPanels);
  int64_t panel_bytes = kPanel * product.inputs * (is_half ? 2 : 4);
  int64_t num_items = (num_panels + size - 1) / size;
  parallel_for(num_parts * num_items, num_threads, [&](int64_t item, int) {
    int64_t part = item / num_items, first = item % num_items * size;
    int64_t begin = edge(num_tiles, part, num_parts), end = edge(num_tiles, part + 1, num_parts);
    for (int64_t panel = first; panel < std::min(num_panels, first + size); panel++) {
      const char* weights = product.packed + panel * panel_bytes;
      for (int64_t tile = begin; tile < end; tile++) {
        int64_t row = edge(product.rows, tile, num_tiles), count = end - begin;
        Ahead ahead{weights + kAhead * kStepBytes, kStepBytes};
        if (count > 1) ahead = {weights + panel_bytes + (tile - begin) * (panel_bytes / count), kStepBytes / count};
        tiles[edge(product.rows, tile + 1, num_tiles) - row - 1](product, row, panel * kPanel, ahead);
      }
    }
  });
}

}  // namespace lpr
#endif
