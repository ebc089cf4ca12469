// Products in bfloat16 by a core's matrix unit (Intel AMX), with the panels of products.h.
//
// One instruction adds 16 rows times 32 inputs times 16 outputs, so up to 16 rows cost the read of the weights and no
// more. A panel [inputs / 2][32][2] is two tiles of weights side by side as it lies. Rows are copied into tiles first, in
// whole ones: what is behind the last row is zero. Each output is one sum over the inputs in their order, whatever the
// number of rows, so one row has the same bits as many.
#pragma once

#include <vector>

#include "amx.h"
#include "products.h"

#ifdef LPR_HAS_TILES

namespace lpr {

constexpr int64_t kWeightBytes = 2 * kTileBytes;        // of a panel's weights for as many inputs
constexpr int64_t kWeightsAhead = 4 * kWeightBytes;     // that are fetched ahead
constexpr int64_t kFewTiles = 4;                        // of rows, which one thread copies
constexpr int64_t kRowsTogether = 256;                  // that stay in a core's cache

// Sums [M][2][16][16] of M tiles of rows, `stride` bytes apart, and a panel of weights.
template <int M, bool kFetches>
LPR_AMX inline void sum_tiles(const char* rows, int64_t stride, const char* weights, int64_t depth, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (M > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k++, rows += kTileBytes, weights += kWeightBytes) {
    _tile_loadd(6, weights, 128);
    _tile_loadd(7, weights + 64, 128);
    if (kFetches)
      for (int64_t line = 0; line < kWeightBytes; line += 64) _mm_prefetch(weights + kWeightsAhead + line, _MM_HINT_T0);
    _tile_loadd(4, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (M > 1) {
      _tile_loadd(5, rows + stride, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (M > 1) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Writes sums [2][16][16] of the rows from `row` on and the panel of outputs from `first` on.
LPR_AMX inline void write_sums(const Product& product, const float* sums, int64_t row, int64_t first) {
  __mmask16 masks[2];
  masks_of(product.outputs - first, masks);
  int64_t count = std::min(kTileRows, product.rows - row);
  uint16_t* out = reinterpret_cast<uint16_t*>(product.out) + row * product.outputs + first;
  for (int half = 0; half < 2; half++) {
    const float* from = product.bias ? product.bias + first + 16 * half : nullptr;
    __m512 bias = from ? _mm512_maskz_loadu_ps(masks[half], from) : _mm512_setzero_ps();
    for (int64_t r = 0; r < count; r++) {
      __m512 total = _mm512_add_ps(_mm512_loadu_ps(sums + 256 * half + 16 * r), bias);
      __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(total));
      _mm256_mask_storeu_epi16(out + r * product.outputs + 16 * half, masks[half], rounded);
    }
  }
}

// Panels first..last-1 of outputs for the tiles of rows begin..end-1.
LPR_AMX inline void multiply_panels(const Product& product, const char* tiles, int64_t depth, int64_t begin, int64_t end,
                                    int64_t first, int64_t last) {
  see_memory();
  begin_tiles();
  alignas(64) float sums[1024];
  int64_t stride = depth * kTileBytes;
  for (int64_t tile = begin; tile < end; tile += 2) {
    bool are_two = tile + 1 < end;
    for (int64_t panel = first; panel < last; panel++) {
      const char* weights = product.packed + panel * depth * kWeightBytes;
      auto sum = tile == begin ? (are_two ? sum_tiles<2, true> : sum_tiles<1, true>)
                               : (are_two ? sum_tiles<2, false> : sum_tiles<1, false>);
      sum(tiles + tile * stride, stride, weights, depth, sums);
      write_sums(product, sums, tile * kTileRows, panel * kPanel);
      if (are_two) write_sums(product, sums + 512, (tile + 1) * kTileRows, panel * kPanel);
    }
  }
  _tile_release();
}

// Copies the rows of a tile to `to`, [depth][16][32], with zeros behind the last row and input.
inline void lay_rows_out(const Product& product, int64_t tile, int64_t depth, char* to) {
  int64_t bytes = product.inputs * 2;
  for (int64_t r = 0; r < kTileRows; r++) {
    int64_t row = tile * kTileRows + r;
    const char* from = product.given + row * bytes;
    for (int64_t k = 0; k < depth; k++) {
      char* line = to + k * kTileBytes + r * 64;
      int64_t part = row < product.rows ? std::min<int64_t>(64, bytes - k * 64) : 0;
      std::memcpy(line, from + k * 64, part);
      std::memset(line + part, 0, 64 - part);
    }
  }
}

// As `multiply`, with panels whose inputs are padded with zeros to a multiple of 32.
inline void multiply_by_tiles(const Product& product, int num_threads) {
  int64_t depth = (product.inputs + kTileInputs - 1) / kTileInputs;
  int64_t num_tiles = (product.rows + kTileRows - 1) / kTileRows;
  static thread_local std::vector<char> memory;
  size_t size = static_cast<size_t>(num_tiles * depth * kTileBytes) + 64;
  if (memory.size() < size) memory.resize(size);
  char* tiles = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  parallel_for(num_tiles, num_tiles < kFewTiles ? 1 : num_threads,
               [&](int64_t tile, int) { lay_rows_out(product, tile, depth, tiles + tile * depth * kTileBytes); });
  int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  int64_t panels = std::clamp<int64_t>(num_panels / (8 * num_threads), 1, kMostPanels);
  int64_t num_items = (num_panels + panels - 1) / panels;
  int64_t together = kRowsTogether / kTileRows, num_parts = (num_tiles + together - 1) / together;
  parallel_for(num_parts * num_items, num_threads, [&](int64_t item, int) {
    int64_t begin = item / num_items * together, first = item % num_items * panels;
    multiply_panels(product, tiles, depth, begin, std::min(num_tiles, begin + together), first,
                    std::min(num_panels, first + panels));
  });
}

// `multiply` by the best instructions of this processor.
inline void multiply_best(const Product& product, bool is_half, int num_threads) {
  is_half && can_use_amx() ? multiply_by_tiles(product, num_threads) : multiply(product, is_half, num_threads);
}

}  // namespace lpr
#endif
