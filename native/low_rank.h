// Low-rank products that are added to some rows of a matrix product (LoRA, Hu et al. 2021): up * (down * x).
//
// A row is computed by itself: four sums over every fourth input, added in one order, and then a sum over the ranks for
// each output. So its bits depend neither on the rows beside it nor on the number of threads. Sums are of floats, and
// what is added to bfloat16 is rounded once.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "parallel.h"

namespace lpr {

constexpr int64_t kMostRank = 512;  // lpr.model.lora.files has it, too
constexpr int64_t kSums = 4;

// The pair of one adapter for some of the outputs. Numbers of ranks and outputs are padded to whole vectors, with zeros.
struct LowRankPair {
  int64_t first, outputs, rank;  // of the outputs the first one
  const float* down;             // [inputs, rank]
  const float* up;               // [rank, outputs]
};

LPR_INLINE int64_t in_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <typename T>
LPR_INLINE float value_at(const T* from) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return *from;
  } else {
    uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
}

template <typename T>
LPR_INLINE void add_low_rank(const LowRankPair& pair, const T* row, int64_t inputs, T* out) {
  float inner[kMostRank];
  int64_t ranks = in_lanes(pair.rank), columns = in_lanes(pair.outputs);
  for (int64_t rank = 0; rank < ranks; rank += kLanes) {
    Lanes sums[kSums] = {};
    const float* down = pair.down + rank;
    int64_t input = 0;
    for (; input + kSums <= inputs; input += kSums) {
      LPR_UNROLL
      for (int64_t i = 0; i < kSums; i++) {
        Lanes weights;
        load(weights, down + (input + i) * ranks);
        sums[i] += weights * value_at(row + input + i);
      }
    }
    for (; input < inputs; input++) {
      Lanes weights;
      load(weights, down + input * ranks);
      sums[0] += weights * value_at(row + input);
    }
    Lanes whole = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    store(inner + rank, whole);
  }
  for (int64_t column = 0; column < columns; column += kLanes) {
    Lanes sum{};
    for (int64_t rank = 0; rank < pair.rank; rank++) {
      Lanes weights;
      load(weights, pair.up + rank * columns + column);
      sum += weights * inner[rank];
    }
    T* to = out + pair.first + column;
    int64_t count = std::min<int64_t>(kLanes, pair.outputs - column);
    T part[kLanes] = {};
    std::memcpy(part, to, count * sizeof(T));
    Lanes known;
    load(known, part);
    known += sum;
    store(part, known);
    std::memcpy(to, part, count * sizeof(T));
  }
}

LPR_CLONES inline void add_to_row(const LowRankPair& pair, const float* row, int64_t inputs, float* out) {
  add_low_rank(pair, row, inputs, out);
}
LPR_CLONES inline void add_to_row(const LowRankPair& pair, const BFloat* row, int64_t inputs, BFloat* out) {
  add_low_rank(pair, row, inputs, out);
}

// Adds to rows of `out` [rows, outputs] the products of `given` [rows, inputs] with the pairs of the row's adapter:
// `places` [rows] has its number, below 0 for none, and its pairs are numbers `starts[place]` to `starts[place + 1]`;
// one from `num_places` on has none here.
template <typename T>
void add_low_rank_rows(const T* given, T* out, int64_t rows, int64_t inputs, int64_t outputs, const int32_t* places,
                       int64_t num_places, const int64_t* starts, const LowRankPair* pairs, int num_threads) {
  parallel_for(rows, num_threads, [&](int64_t row, int) {
    if (places[row] < 0 || places[row] >= num_places) return;
    for (int64_t each = starts[places[row]]; each < starts[places[row] + 1]; each++) {
      add_to_row(pairs[each], given + row * inputs, inputs, out + row * outputs);
    }
  });
}

}  // namespace lpr
