// Matrix products of the rows of a step with weights that are laid out once, when a model is loaded.
//
// A tree of a few nodes costs little because its rows share one read of the weights. So the loop follows the weights:
// panels of 32 outputs lie one after the other, and are fetched some steps ahead. A tile of a few rows keeps its sums in
// registers (Goto and van de Geijn 2008, section 4, with the weights in the place of their packed B). Each output is a sum
// of sums over 512 inputs in their order, so its bits depend neither on the rows beside it nor on the number of threads.
//
// Weights of a float model that bfloat16 holds exactly, as those of a checkpoint in bfloat16, lie as such and are widened
// on the way: the same sums from half the memory.
#pragma once

#include <tuple>

#include "parallel.h"
#include "product_tiles.h"
#include "workspace.h"

#ifdef LPR_HAS_TILES
namespace lpr {

constexpr int64_t kNearRows = 126;  // that go past the weights together, and stay in a core's cache
constexpr int64_t kMostPanels = 8;  // of an item of work

// A weight that is laid out, by its address.
struct PackedWeight {
  uintptr_t packed, bias;  // bias: 0 if there is none
  int64_t outputs, inputs;
  int bits;          // of a weight
  uintptr_t scales;  // of weights of 8 bits, else 0

  Product times(uintptr_t given, uintptr_t out, int64_t rows, bool has_half_rows) const {
    return {reinterpret_cast<const char*>(packed), reinterpret_cast<const float*>(bias),
            reinterpret_cast<const char*>(given),  reinterpret_cast<char*>(out),
            rows, outputs, inputs, bits == 16, has_half_rows, bits > 8 ? 0 : bits, reinterpret_cast<const float*>(scales)};
  }
};
using GivenWeight = std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, int, uintptr_t>;  // as Python has it

inline PackedWeight weight_of(const GivenWeight& given) {
  return std::apply([](auto... each) { return PackedWeight{each...}; }, given);
}

// Part `index` of `count` equal parts of `whole`.
inline int64_t edge(int64_t whole, int64_t index, int64_t count) { return whole * index / count; }

LPR_CLONES inline void widen_values(const BFloat* from, int64_t count, float* to) {
  for (; count >= kLanes; count -= kLanes, from += kLanes, to += kLanes) {
    Lanes value;
    load(value, from);
    store(to, value);
  }
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

// Panel by panel, all rows of each while its weights are near; of many rows as many as stay in a core's cache.
inline void multiply_in_tiles(const Product& product, const TileSet& set, int num_threads) {
  int64_t num_panels = product.panels ? product.num_panels : (product.outputs + kPanel - 1) / kPanel, most = set.most_rows;
  int64_t num_tiles = (product.rows + most - 1) / most, most_tiles = kNearRows / most;
  int64_t num_parts = (num_tiles + most_tiles - 1) / most_tiles;
  int64_t size = std::clamp<int64_t>(num_panels / (8 * num_threads), 1, kMostPanels);
  int64_t panel_bytes = product.panel_bytes();
  int64_t num_items = (num_panels + size - 1) / size;
  parallel_for(num_parts * num_items, num_threads, [&](int64_t item, int) {
    int64_t part = item / num_items, first = item % num_items * size;
    int64_t begin = edge(num_tiles, part, num_parts), end = edge(num_tiles, part + 1, num_parts), count = end - begin;
    for (int64_t place = first; place < std::min(num_panels, first + size); place++) {
      int64_t panel = product.panels ? product.panels[place] : place;
      const char* weights = product.packed + panel * panel_bytes;
      for (int64_t tile = begin; tile < end; tile++) {
        int64_t row = edge(product.rows, tile, num_tiles);
        Ahead ahead{nullptr, 0};
        if (count > 1) ahead = {weights + panel_bytes + (tile - begin) * (panel_bytes / count), kStepBytes / count};
        set.tiles[edge(product.rows, tile + 1, num_tiles) - row - 1](product, weights, row, panel * kPanel, ahead);
      }
    }
  });
}

// In floats; rows of bfloat16 are widened first.
inline void multiply_floats(Product product, int num_threads) {
  static thread_local Workspace memory;
  if (product.has_half_rows) {
    int64_t inputs = product.inputs;
    float* wide = reinterpret_cast<float*>(memory.at_least(static_cast<size_t>(product.rows * inputs) * sizeof(float)));
    const BFloat* given = reinterpret_cast<const BFloat*>(product.given);
    parallel_for(product.rows, num_threads, [&](int64_t row, int) {
      widen_values(given + row * inputs, inputs, wide + row * inputs);
    });
    product.given = reinterpret_cast<const char*>(wide);
  }
  multiply_in_tiles(product, float_tiles(product.has_half_weights), num_threads);
}

}  // namespace lpr
#endif
