// Products in bfloat16 by a core's matrix unit (Intel AMX), with the panels of products.h.
//
// One instruction adds 16 rows times 32 inputs times 16 outputs, so up to 16 rows cost the read of the weights and no
// more. A panel [inputs / 2][32][2] is two tiles of weights side by side as it lies, and 16 rows are a tile; the last few
// are copied behind one another first, with zeros behind them. Each output is one sum over the inputs in their order,
// whatever the number of rows, so one row has the same bits as many.
#pragma once

#include "amx.h"
#include "coded_products.h"
#include "int4_products.h"
#include "products.h"
#include "workspace.h"

#ifdef LPR_HAS_TILES

namespace lpr {

constexpr int64_t kWeightBytes = 2 * kTileBytes;     // of a panel's weights for as many inputs
constexpr int64_t kWeightsAhead = 4 * kWeightBytes;  // that are fetched ahead
constexpr int64_t kLine = 64;                        // bytes of a cache's line, and of a tile's row
constexpr int64_t kFewTiles = 4;                     // of rows, which one thread copies
constexpr int64_t kNearBytes = 5 << 18;              // of rows that stay in a core's cache
constexpr int64_t kPartSteps = 9;                    // of 32 inputs, whose weights stay in a core's first cache with rows

// Weights that a sum fetches while it multiplies, so many lines for each 32 inputs.
struct WeightsAhead {
  const char* next;
  int64_t lines;
};

// Sums [M][16][32] of M tiles of rows, which are `stride` bytes apart, and a panel of weights, over `bytes` of the rows;
// they are added to `sums` but for the first part. Where no other tiles share the panel, it is fetched from memory now,
// else the next one is.
template <int M, bool kIsOnly>
LPR_AMX inline void sum_tiles(const char* rows, const char* others, int64_t stride, int64_t bytes, const char* weights,
                              WeightsAhead ahead, bool is_first, float* sums) {
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 2 * kLine);
    _tile_loadd(1, sums + 16, 2 * kLine);
    if (M > 1) {
      _tile_loadd(2, sums + 512, 2 * kLine);
      _tile_loadd(3, sums + 528, 2 * kLine);
    }
  }
  for (const char* end = rows + bytes; rows < end; rows += kLine, others += kLine, weights += kWeightBytes) {
    _tile_loadd(6, weights, 2 * kLine);
    _tile_loadd(7, weights + kLine, 2 * kLine);
    if (kIsOnly) {
      for (int64_t at = 0; at < kWeightBytes; at += kLine) _mm_prefetch(weights + kWeightsAhead + at, _MM_HINT_T0);
    } else {
      for (int64_t i = 0; i < ahead.lines; i++, ahead.next += kLine) _mm_prefetch(ahead.next, _MM_HINT_T1);
    }
    _tile_loadd(4, rows, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (M > 1) {
      _tile_loadd(5, others, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 2 * kLine);
  _tile_stored(1, sums + 16, 2 * kLine);
  if (M > 1) {
    _tile_stored(2, sums + 512, 2 * kLine);
    _tile_stored(3, sums + 528, 2 * kLine);
  }
}

// Writes sums [16][32] of the rows from `row` on and the panel of outputs from `first` on.
LPR_AMX inline void write_sums(const Product& product, const float* sums, int64_t row, int64_t first) {
  __mmask16 masks[2];
  masks_of(product.outputs - first, masks);
  __mmask32 both = masks[0] | static_cast<__mmask32>(masks[1]) << 16;
  int64_t count = std::min(kTileRows, product.rows - row);
  uint16_t* out = reinterpret_cast<uint16_t*>(product.out) + row * product.outputs + first;
  __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (product.bias)
    for (int half = 0; half < 2; half++) bias[half] = _mm512_maskz_loadu_ps(masks[half], product.bias + first + 16 * half);
  for (int64_t r = 0; r < count; r++, sums += kPanel, out += product.outputs) {
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums), bias[0]), high = _mm512_add_ps(_mm512_load_ps(sums + 16), bias[1]);
    __m512i rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm512_mask_storeu_epi16(out, both, rounded);
  }
}

// The tiles of a product's rows, each [16][stride] bytes: as they lie up to tile `first_copied`.
struct RowTiles {
  const char* given;
  const char* copied;
  int64_t first_copied, stride;
  const char* at(int64_t tile) const {
    const char* from = tile < first_copied ? given : copied - first_copied * kTileRows * stride;
    return from + tile * kTileRows * stride;
  }
};

// Panels first..last-1 of outputs for the tiles begin..end-1 of rows. A part of a panel stays near while the rows go past
// it, and the next panel is fetched meanwhile.
LPR_AMX inline void multiply_panels(const Product& product, const RowTiles& tiles, int64_t begin, int64_t end,
                                    int64_t first, int64_t last) {
  int64_t depth = tiles.stride / kLine, panel_bytes = depth * kWeightBytes;
  int64_t pairs = (end - begin + 1) / 2, lines = (kWeightBytes / kLine + pairs - 1) / pairs;
  int64_t num_parts = pairs == 1 ? 1 : (depth + kPartSteps - 1) / kPartSteps;
  static thread_local Workspace memory;
  float* sums = reinterpret_cast<float*>(memory.at_least(static_cast<size_t>(pairs * 4 * kTileBytes)));
  see_memory();
  begin_tiles();
  for (int64_t panel = first; panel < last; panel++) {
    WeightsAhead ahead{product.packed + (panel + 1) * panel_bytes, panel + 1 < last ? lines : 0};
    for (int64_t part = 0; part < num_parts; part++) {
      int64_t from = edge(depth, part, num_parts), steps = edge(depth, part + 1, num_parts) - from;
      const char* weights = product.packed + panel * panel_bytes + from * kWeightBytes;
      float* to = sums;
      for (int64_t tile = begin; tile < end; tile += 2, ahead.next += steps * lines * kLine, to += kTileBytes) {
        bool are_two = tile + 1 < end;
        auto sum = pairs == 1 ? (are_two ? sum_tiles<2, true> : sum_tiles<1, true>)
                              : (are_two ? sum_tiles<2, false> : sum_tiles<1, false>);
        sum(tiles.at(tile) + from * kLine, are_two ? tiles.at(tile + 1) + from * kLine : nullptr, tiles.stride,
            steps * kLine, weights, ahead, part == 0, to);
        if (part + 1 < num_parts) continue;
        write_sums(product, to, tile * kTileRows, panel * kPanel);
        if (are_two) write_sums(product, to + 512, (tile + 1) * kTileRows, panel * kPanel);
      }
    }
  }
  _tile_release();
}

// Copies the rows of a tile to `to`, [16][stride], with zeros behind the last row and input.
LPR_AMX inline void copy_rows(const Product& product, int64_t tile, int64_t stride, char* to) {
  int64_t count = std::min(kTileRows, product.rows - tile * kTileRows);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(product.given) + tile * kTileRows * product.inputs;
  std::memset(to, 0, static_cast<size_t>(kTileRows * stride));
  for (int64_t r = 0; r < count; r++)
    std::memcpy(to + r * stride, from + r * product.inputs, static_cast<size_t>(product.inputs * 2));
}

// As `multiply_in_tiles`, with panels whose inputs are padded with zeros to a multiple of 32.
inline void multiply_by_tiles(const Product& product, int num_threads) {
  int64_t stride = (product.inputs + kTileInputs - 1) / kTileInputs * kLine, tile_bytes = kTileRows * stride;
  int64_t num_whole = product.inputs % kTileInputs == 0 ? product.rows / kTileRows : 0;
  int64_t num_tiles = (product.rows + kTileRows - 1) / kTileRows, num_copied = num_tiles - num_whole;
  static thread_local Workspace memory;
  char* copied = memory.at_least(static_cast<size_t>(num_copied * tile_bytes));
  parallel_for(num_copied, num_copied < kFewTiles ? 1 : num_threads, [&](int64_t i, int) {
    copy_rows(product, num_whole + i, stride, copied + i * tile_bytes);
  });
  RowTiles tiles{product.given, copied, num_whole, stride};
  int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  // Where rows share a panel, only the panels of one item are fetched ahead, so items are large.
  int64_t panels = num_tiles > 2 ? (num_panels + num_threads - 1) / num_threads
                                 : std::clamp<int64_t>(num_panels / (8 * num_threads), 1, kMostPanels);
  int64_t num_items = (num_panels + panels - 1) / panels;
  int64_t num_parts = (num_tiles * tile_bytes + kNearBytes - 1) / kNearBytes;
  parallel_for(num_parts * num_items, num_threads, [&](int64_t item, int) {
    int64_t part = item / num_items, first = item % num_items * panels;
    multiply_panels(product, tiles, edge(num_tiles, part, num_parts), edge(num_tiles, part + 1, num_parts), first,
                    std::min(num_panels, first + panels));
  });
}

// The product by the best instructions of this processor.
inline void multiply(const Product& product, int num_threads) {
  if (product.bits == 1) return multiply_coded(product, num_threads);
  if (product.bits) return product.bits == 4 ? multiply_int4(product, num_threads) : multiply_low_bits(product, num_threads);
  if (!product.has_half_rows) return multiply_floats(product, num_threads);
  if (can_use_amx()) return multiply_by_tiles(product, num_threads);
  multiplies_pairs() ? multiply_in_tiles(product, pairs_tiles(), num_threads) : multiply_floats(product, num_threads);
}

}  // namespace lpr
#endif
