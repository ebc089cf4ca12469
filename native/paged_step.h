// What attention needs of a step, for all layers: per sequence its block table, its committed tokens and its tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "lanes.h"

namespace lpr {

// Keys that an entry sees besides the tree's rule: of the last `window` positions, or of its own `chunk`; 0: all.
struct KeyRule {
  int32_t window = 0, chunk = 0;
  int32_t lowest(int32_t position) const {
    int32_t first = 0;
    if (window) first = std::max(first, position - window + 1);
    if (chunk) first = std::max(first, position / chunk * chunk);
    return first;
  }
};

struct Sequence {
  const int32_t* table;      // pages of its cache rows
  int32_t num_cached;        // committed tokens: token j is row j, entry i is row num_cached + i
  int32_t count;             // entries
  int64_t batch, first;      // where the first entry stands among the step's tokens [B, T]
  std::vector<int32_t> tokens, parents, positions;
  bool is_chain;             // each entry sees those before it
  int num_words = 0;         // 64-bit words of `seen_by` per entry
  std::vector<uint64_t> seen_by = {};  // [count][num_words]: bit t of entry j: entry t is j or below it; empty for a chain

  // `entries` is int32 [3, count]: tokens, parents (below -1 or -1: none), positions.
  Sequence(const int32_t* pages, int32_t cached, const int32_t* entries, int32_t number, int64_t row, int64_t start)
      : table(pages), num_cached(cached), count(number), batch(row), first(start),
        tokens(entries, entries + number), parents(entries + number, entries + 2 * number),
        positions(entries + 2 * number, entries + 3 * number) {
    is_chain = true;
    for (int32_t i = 0; i < count; i++) {
      if (parents[i] >= i) throw std::invalid_argument("a parent stands before its children");
      is_chain = is_chain && parents[i] == i - 1;
    }
    if (is_chain) return;
    num_words = (count + 63) / 64;
    seen_by.assign(static_cast<size_t>(count) * num_words, 0);
    for (int32_t i = count - 1; i >= 0; i--) {
      uint64_t* mine = &seen_by[static_cast<size_t>(i) * num_words];
      mine[i / 64] |= uint64_t{1} << i % 64;
      if (parents[i] < 0) continue;
      uint64_t* above = &seen_by[static_cast<size_t>(parents[i]) * num_words];
      for (int word = 0; word < num_words; word++) above[word] |= mine[word];
    }
  }

  bool sees(int32_t entry, int32_t other) const {
    if (is_chain) return other <= entry;
    return seen_by[static_cast<size_t>(other) * num_words + entry / 64] >> entry % 64 & 1;
  }

  int32_t lowest(const KeyRule& rule) const {
    int32_t least = std::numeric_limits<int32_t>::max();
    for (int32_t position : positions) least = std::min(least, rule.lowest(position));
    return std::min(least, num_cached);
  }
};

struct PagedStep {
  std::vector<Sequence> sequences;
  int64_t page_size;
  int num_threads;

  int64_t row_of(const Sequence& sequence, int64_t key) const {
    return sequence.table[key / page_size] * page_size + key % page_size;
  }
};

// A layer's tensors; strides in elements. The output is [B, T, heads, value_dim], contiguous.
struct LayerCall {
  const void *query, *key, *value;
  void* out;
  int64_t num_tokens;                              // T
  int64_t query_batch, query_head, query_token;    // strides of [B, heads, T, dim]
  int64_t key_head, key_row, value_head, value_row;  // strides of [kv_heads, rows, dim]
  int kv_heads, group, dim, value_dim;
  bool is_half;                                    // bfloat16, else float32
  float scale, softcap;                            // softcap 0: none
  KeyRule rule;
  const float* sinks;                              // per head a logit without a value, or null
};

// The attention of one step, layer by layer: that of bind_paged.cpp, which is compiled with rules of its own.
struct PageReader {
  virtual ~PageReader() = default;
  virtual void attend(const LayerCall& call, bool exact) = 0;
};

// Reads the pages of `step`.
std::unique_ptr<PageReader> read_pages(PagedStep step);

// Exact attention of a step (lpr.model.exact), compiled where no multiplication is fused with an addition.
void attend_exactly(const PagedStep& step, const LayerCall& call);

LPR_INLINE float widened(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

LPR_INLINE uint16_t rounded(float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  uint32_t nearest = bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<uint16_t>((value != value ? bits | 0x400000 : nearest) >> 16);
}

// `count` values as floats, with zeros up to `width`.
LPR_INLINE void unpack(const void* from, bool is_half, int count, int width, float* to) {
  if (is_half) {
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    for (int i = 0; i < count; i++) to[i] = widened(halves[i]);
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
  for (int i = count; i < width; i++) to[i] = 0;
}

LPR_INLINE const void* at(const void* base, bool is_half, int64_t offset) {
  return static_cast<const char*>(base) + offset * (is_half ? 2 : 4);
}

// Writes the output of a head of an entry, times `factor`.
LPR_INLINE void put(const LayerCall& call, const Sequence& sequence, int entry, int head, const float* from, float factor) {
  int64_t token = sequence.batch * call.num_tokens + sequence.first + entry;
  int64_t to = (token * call.kv_heads * call.group + head) * call.value_dim;
  int width = call.value_dim;
  if (call.is_half) {
    uint16_t* __restrict halves = static_cast<uint16_t*>(call.out) + to;
    for (int d = 0; d < width; d++) halves[d] = rounded(from[d] * factor);
  } else {
    float* __restrict floats = static_cast<float*>(call.out) + to;
    for (int d = 0; d < width; d++) floats[d] = from[d] * factor;
  }
}

}  // namespace lpr
