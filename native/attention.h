// Attention of one sequence's entries, each over its own path in the order of positions (lpr.model.attention.in_order).
//
// Every sum is written out lane by lane, and no multiplication is fused with an addition, so that the bits of an entry
// depend neither on the entries beside it nor on the machine's vectors: a vector type of 16 floats means the same
// additions with SSE, AVX2 and AVX-512, of which the processor's own is taken when the program runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace lpr {

constexpr int kMostQueries = 4;  // heads of a group that share the rows that are read

// Rows of floats, `stride` apart, in whole blocks of lanes.
struct States {
  const float* data;
  int64_t stride;
  int num_blocks;
  const float* at(int64_t row) const { return data + row * stride; }
};

// Where an entry's keys lie: cache rows in the order of positions.
struct Path {
  const int32_t* rows;
  int count;
};

// Scores of Q queries with the keys along a path; [Q][padded], -inf behind the path.
template <int Q>
LPR_INLINE void score(const float* queries, const States& keys, const Path& path, float* scores, int padded) {
  int width = keys.num_blocks * kLanes;
  for (int i = 0; i < path.count; i++) {
    const float* key = keys.at(path.rows[i]);
    Lanes sums[Q] = {}, part, query;
    for (int block = 0; block < keys.num_blocks; block++) {
      load(part, key + block * kLanes);
      LPR_UNROLL
      for (int q = 0; q < Q; q++) {
        load(query, queries + q * width + block * kLanes);
        sums[q] += query * part;
      }
    }
    LPR_UNROLL
    for (int q = 0; q < Q; q++) scores[q * padded + i] = sum_of(sums[q]);
  }
  for (int q = 0; q < Q; q++)
    std::fill(scores + q * padded + path.count, scores + (q + 1) * padded, -std::numeric_limits<float>::infinity());
}

// Make weights of scores, in place; their sum. A sink adds to it without a value (GPT-OSS).
LPR_INLINE float weigh(float* scores, int count, int padded, float softcap, const float* sink) {
  if (softcap > 0)
    for (int i = 0; i < count; i++) scores[i] = std::tanh(scores[i] / softcap) * softcap;
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity(), part;
  for (int i = 0; i < padded; i += kLanes) {
    load(part, scores + i);
    most = part > most ? part : most;
  }
  float highest = sink ? *sink : -std::numeric_limits<float>::infinity();
  for (int lane = 0; lane < kLanes; lane++) highest = std::max(highest, most[lane]);
  Lanes total = Lanes{};
  for (int i = 0; i < padded; i += kLanes) {
    load(part, scores + i);
    part = part - highest;
    exponential(part);
    std::memcpy(scores + i, &part, sizeof(part));
    total += part;
  }
  float sum = sum_of(total);
  if (sink) {
    Lanes own = Lanes{} + (*sink - highest);
    exponential(own);
    sum += own[0];
  }
  return sum;
}

// Weighted values of N blocks of columns from `first` on, added in the order of the path, over the sums of weights.
template <int Q, int N>
LPR_INLINE void mix(const float* weights, int padded, const States& values, const Path& path, const float* totals,
                    int first, float* out) {
  Lanes sums[Q][N] = {}, part[N];
  for (int i = 0; i < path.count; i++) {
    const float* value = values.at(path.rows[i]) + first * kLanes;
    LPR_UNROLL
    for (int block = 0; block < N; block++) load(part[block], value + block * kLanes);
    LPR_UNROLL
    for (int q = 0; q < Q; q++) {
      float weight = weights[q * padded + i];
      LPR_UNROLL
      for (int block = 0; block < N; block++) sums[q][block] += part[block] * weight;
    }
  }
  LPR_UNROLL
  for (int q = 0; q < Q; q++) {
    LPR_UNROLL
    for (int block = 0; block < N; block++) {
      Lanes mean = sums[q][block] / totals[q];
      std::memcpy(out + (q * values.num_blocks + first + block) * kLanes, &mean, sizeof(mean));
    }
  }
}

template <int Q>
LPR_INLINE void attend_queries(const float* queries, const States& keys, const States& values, const Path& path,
                               float softcap, const float* sinks, float* scores, float* out) {
  int padded = (path.count + kLanes - 1) / kLanes * kLanes;
  score<Q>(queries, keys, path, scores, padded);
  float totals[Q];
  for (int q = 0; q < Q; q++)
    totals[q] = weigh(scores + q * padded, path.count, padded, softcap, sinks ? sinks + q : nullptr);
  int first = 0;
  for (; first + 4 <= values.num_blocks; first += 4) mix<Q, 4>(scores, padded, values, path, totals, first, out);
  for (; first < values.num_blocks; first++) mix<Q, 1>(scores, padded, values, path, totals, first, out);
}

// Up to kMostQueries scaled queries of heads that share keys and values, over one path; `queries` and `out` are [Q, blocks
// of 16] of the keys and of the values.
LPR_CLONES inline void attend_path(int num_queries, const float* queries, const States& keys, const States& values,
                                   const Path& path, float softcap, const float* sinks, float* scores, float* out) {
  switch (num_queries) {
    case 1: attend_queries<1>(queries, keys, values, path, softcap, sinks, scores, out); break;
    case 2: attend_queries<2>(queries, keys, values, path, softcap, sinks, scores, out); break;
    case 3: attend_queries<3>(queries, keys, values, path, softcap, sinks, scores, out); break;
    case 4: attend_queries<4>(queries, keys, values, path, softcap, sinks, scores, out); break;
  }
}

}  // namespace lpr
