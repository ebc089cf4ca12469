// Attention of a step's trees over pages of keys and values, for a CPU: lpr.model.attention.native.
//
// A work item takes the entries of a sequence with all heads of a GQA group ("lanes") and a piece of the keys, 64 at a
// time, so that keys and values are read once for the whole tree. Lanes lie side by side in vectors: scores are [keys,
// lanes], and the running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) needs no sum across a vector. The pieces
// of a sequence's keys are combined by whoever finishes last (split-KV, Dao et al. 2023).
#pragma once

#include <atomic>
#include <memory>

#include "lanes.h"
#include "paged_step.h"
#include "parallel.h"
#include "workspace.h"

namespace lpr {

constexpr int kKeys = 64;          // keys of a block
constexpr int kMostLanes = 256;    // of an item: entries x heads of a group
constexpr int kPieceKeys = 512;    // keys of an item, at least
constexpr int kMostPieces = 16;    // of a sequence's keys, each of which leaves a partial result
constexpr float kFloor = -1e30f;   // below any score; a maximum of nothing, from which differences stay numbers

inline int vectors_of(int count) { return (count + kLanes - 1) / kLanes; }

struct Item {
  const Sequence* sequence;
  const uint16_t* masks;    // [entries][vectors of lanes]: bit = the lane sees the entry; null for a chain
  int head, first, count;   // K/V head; entries of the sequence
  int64_t begin, end;       // keys
  int part, num_parts;      // of the partial results that belong together; 1: the item has all keys
  float* partial;           // [num_parts][lanes x (value width + 2)]
  std::atomic<int>* open;   // items of them that are not done
};

// A vector register, and how many of them sums may take: vectors of lanes and keys of a product of scores, rows and
// vectors of one of values, each of kLanes.
struct WideTile {
  using V = Lanes;
  static constexpr int kVectors = 4, kFewKeys = 4, kManyKeys = 8, kRows = 4, kColumns = 4;
};
struct NarrowTile {
  using V = HalfLanes;
  static constexpr int kVectors = 1, kFewKeys = 4, kManyKeys = 4, kRows = 2, kColumns = 2;
};
struct SmallTile {
  using V = QuarterLanes;
  static constexpr int kVectors = 1, kFewKeys = 2, kManyKeys = 2, kRows = 2, kColumns = 1;
};

// x = softcap * tanh(x / softcap).
template <class V>
LPR_INLINE void cap(V& x, float softcap) {
  V size = x < 0.0f ? -x : x;
  V power = size * (-2.0f / softcap);
  exponential(power);
  V bounded = softcap * (1.0f - power) / (1.0f + power);
  x = x < 0.0f ? -bounded : bounded;
}

// A block of keys: `count` from `begin` on, and where the next block lies in the cache.
struct KeyBlock {
  int64_t begin;
  int count, next_count;
  const float* keys[kKeys];
  const float* values[kKeys];
  const char* next_keys[kKeys];
  const char* next_values[kKeys];
  int key_bytes, value_bytes;
};

// Processors fetch ahead within a page of memory only, and the rows of a head are short.
LPR_INLINE void fetch(const char* from, int bytes) {
  for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte);
}

// Fetches the first block of an item, which no block before it has fetched: keys first, as they are needed first.
LPR_INLINE void fetch_first(const KeyBlock& block) {
  for (int k = 0; k < block.next_count; k++) fetch(block.next_keys[k], block.key_bytes);
  for (int k = 0; k < block.next_count; k++) fetch(block.next_values[k], block.value_bytes);
}

// Scores [K keys][N vectors] of lanes `queries` [dim][N vectors].
template <class V, int N, int K>
LPR_INLINE void score_keys(const float* queries, const float* const* keys, int dim, float* scores) {
  constexpr int W = Vector<V>::kWidth, M = N * kLanes / W;
  V sums[K][M] = {}, query[M];
  for (int d = 0; d < dim; d++) {
    _Pragma("GCC unroll 8")
    for (int m = 0; m < M; m++) load(query[m], queries + (d * M + m) * W);
    _Pragma("GCC unroll 8")
    for (int k = 0; k < K; k++) {
      float key = keys[k][d];
      _Pragma("GCC unroll 8")
      for (int m = 0; m < M; m++) sums[k][m] += query[m] * key;
    }
  }
  _Pragma("GCC unroll 8")
  for (int k = 0; k < K; k++)
    _Pragma("GCC unroll 8")
    for (int m = 0; m < M; m++) store(scores + (k * M + m) * W, sums[k][m]);
}

template <class Tile, int N>
LPR_INLINE void score_block(const float* queries, const KeyBlock& block, bool fetches, int dim, float* scores) {
  constexpr int K = N <= 2 ? Tile::kManyKeys : Tile::kFewKeys;
  for (int k = 0; k < block.count; k += K) {
    if (fetches)
      for (int next = k; next < std::min(k + K, block.next_count); next++) {
        fetch(block.next_keys[next], block.key_bytes);
        fetch(block.next_values[next], block.value_bytes);
      }
    score_keys<typename Tile::V, N, K>(queries, block.keys + k, dim, scores + k * N * kLanes);
  }
}

// R rows of sums [stride] from `column` on, C vectors: shrunk, and weights [keys][num_lanes] times values added.
template <class V, int R, int C>
LPR_INLINE void add_values(const float* weights, int num_lanes, const float* const* values, int count, int column,
                           const float* shrink, float* sums, int stride) {
  constexpr int W = Vector<V>::kWidth, M = C * kLanes / W;
  V acc[R][M], value[M];
  _Pragma("GCC unroll 8")
  for (int r = 0; r < R; r++)
    _Pragma("GCC unroll 8")
    for (int m = 0; m < M; m++) {
      load(acc[r][m], sums + r * stride + m * W);
      acc[r][m] = acc[r][m] * shrink[r];
    }
  for (int k = 0; k < count; k++) {
    _Pragma("GCC unroll 8")
    for (int m = 0; m < M; m++) load(value[m], values[k] + column + m * W);
    _Pragma("GCC unroll 8")
    for (int r = 0; r < R; r++) {
      float weight = weights[k * num_lanes + r];
      _Pragma("GCC unroll 8")
      for (int m = 0; m < M; m++) acc[r][m] += value[m] * weight;
    }
  }
  _Pragma("GCC unroll 8")
  for (int r = 0; r < R; r++)
    _Pragma("GCC unroll 8")
    for (int m = 0; m < M; m++) store(sums + r * stride + m * W, acc[r][m]);
}

template <class Tile, int R>
LPR_INLINE void add_rows(const float* weights, int num_lanes, const float* const* values, int count, const float* shrink,
                         float* sums, int stride) {
  int column = 0;
  for (; column + Tile::kColumns * kLanes <= stride; column += Tile::kColumns * kLanes)
    add_values<typename Tile::V, R, Tile::kColumns>(weights, num_lanes, values, count, column, shrink, sums + column, stride);
  for (; column < stride; column += kLanes)
    add_values<typename Tile::V, R, 1>(weights, num_lanes, values, count, column, shrink, sums + column, stride);
}

// What the lanes of an item see, and their running softmax.
struct LaneState {
  int32_t entry[kMostLanes], lowest[kMostLanes];
  float top[kMostLanes], total[kMostLanes], shrink[kMostLanes];
  int32_t highest_lowest = 0;
};

// Hides what the lanes of a register, from `lane` on, do not see of key `k` of a block.
template <class V>
LPR_INLINE void hide(V& scores, const Item& item, const KeyBlock& block, int k, int lane, int num_vectors,
                     const LaneState& lanes, bool has_rule) {
  const V hidden = V{} - std::numeric_limits<float>::infinity();
  typename Vector<V>::Words place;
  int64_t entry = block.begin + k - item.sequence->num_cached;
  if (entry >= 0) {
    if (item.masks) {
      int32_t mask = item.masks[entry * num_vectors + lane / kLanes] >> (lane % kLanes);
      scores = (Vector<V>::kBits & mask) != 0 ? scores : hidden;
    } else {
      std::memcpy(&place, lanes.entry + lane, sizeof(place));
      scores = place >= static_cast<int32_t>(entry) ? scores : hidden;
    }
  }
  if (has_rule) {
    int32_t position = static_cast<int32_t>(entry >= 0 ? item.sequence->positions[entry] : block.begin + k);
    std::memcpy(&place, lanes.lowest + lane, sizeof(place));
    scores = place <= position ? scores : hidden;
  }
}

// Makes weights of a block's scores [keys][N vectors], for lanes from vector `first` on.
template <class V, int N>
LPR_INLINE void weigh_block(float* scores, const Item& item, const KeyBlock& block, int first, int num_vectors,
                            float softcap, LaneState& lanes) {
  // Committed token j is key j; an entry's position may be less than its key.
  bool has_rule = lanes.highest_lowest > std::min<int64_t>(block.begin, item.sequence->num_cached);
  bool has_hidden = has_rule || block.begin + block.count > item.sequence->num_cached;
  for (int offset = 0; offset < N * kLanes; offset += Vector<V>::kWidth) {
    int lane = first * kLanes + offset;
    V before, most, score, sum;
    load(before, lanes.top + lane);
    most = before;
    for (int k = 0; k < block.count; k++) {
      float* mine = scores + k * N * kLanes + offset;
      load(score, mine);
      if (softcap > 0) cap(score, softcap);
      if (has_hidden) hide(score, item, block, k, lane, num_vectors, lanes, has_rule);
      if (softcap > 0 || has_hidden) store(mine, score);
      most = score > most ? score : most;
    }
    before = before - most;
    exponential(before);
    load(sum, lanes.total + lane);
    sum = sum * before;
    for (int k = 0; k < block.count; k++) {
      float* mine = scores + k * N * kLanes + offset;
      load(score, mine);
      score = score - most;
      exponential(score);
      store(mine, score);
      sum += score;
    }
    store(lanes.top + lane, most);
    store(lanes.total + lane, sum);
    store(lanes.shrink + lane, before);
  }
}

template <class Tile, int N>
LPR_INLINE void attend_chunk(const Item& item, const LayerCall& call, const KeyBlock& block, int first, int num_lanes,
                             const float* queries, float* scores, LaneState& lanes, float* sums, int value_stride) {
  int num_vectors = vectors_of(num_lanes), lane = first * kLanes;
  score_block<Tile, N>(queries + static_cast<int64_t>(lane) * call.dim, block, first == 0, call.dim, scores);
  weigh_block<typename Tile::V, N>(scores, item, block, first, num_vectors, call.softcap, lanes);
  int rows = std::min(N * kLanes, num_lanes - lane), row = 0;
  auto add = [&](auto size) LPR_LAMBDA_INLINE {
    constexpr int R = decltype(size)::value;
    add_rows<Tile, R>(scores + row, N * kLanes, block.values, block.count, lanes.shrink + lane + row,
                      sums + static_cast<int64_t>(lane + row) * value_stride, value_stride);
    row += R;
  };
  while (rows - row >= Tile::kRows) add(std::integral_constant<int, Tile::kRows>{});
  if (Tile::kRows > 2 && rows - row == 3) add(std::integral_constant<int, 3>{});
  if (Tile::kRows > 2 && rows - row == 2) add(std::integral_constant<int, 2>{});
  if (rows - row == 1) add(std::integral_constant<int, 1>{});
}

// Memory of a worker, kept from layer to layer.
struct Scratch {
  Workspace memory;
  LaneState lanes;
};

// Divides the sums of lanes by their totals, and writes them.
LPR_INLINE void finish(const Item& item, const LayerCall& call, const float* top, const float* total, const float* sums,
                       int value_stride) {
  int num_lanes = item.count * call.group;
  for (int lane = 0; lane < num_lanes; lane++) {
    int entry = item.first + lane / call.group, head = item.head * call.group + lane % call.group;
    float whole = total[lane], shrink = 1;
    if (call.sinks) {  // takes probability and gives no value
      float sink = call.sinks[head], most = std::max(top[lane], sink);
      Lanes powers = Lanes{} + (sink - most);
      powers[1] = top[lane] - most;
      exponential(powers);
      shrink = powers[1];
      whole = whole * shrink + powers[0];
    }
    float factor = whole > 0 ? shrink / whole : 0;
    const float* from = sums + static_cast<int64_t>(lane) * value_stride;
    put(call, *item.sequence, entry, head, from, factor);
  }
}

// Partial results [parts][sums of lanes, tops, totals] become the first part's.
LPR_INLINE void combine(const Item& item, const LayerCall& call, int value_stride) {
  int lanes = vectors_of(item.count * call.group) * kLanes;
  int64_t size = static_cast<int64_t>(lanes) * (value_stride + 2);
  float *sums = item.partial, *top = sums + static_cast<int64_t>(lanes) * value_stride, *total = top + lanes;
  for (int part = 1; part < item.num_parts; part++) {
    const float* other = item.partial + part * size;
    const float *other_top = other + static_cast<int64_t>(lanes) * value_stride, *other_total = other_top + lanes;
    for (int first = 0; first < lanes; first += kLanes) {
      Lanes mine, theirs, most, sum, other_sum;
      load(mine, top + first);
      load(theirs, other_top + first);
      most = mine > theirs ? mine : theirs;
      mine = mine - most;
      theirs = theirs - most;
      exponential(mine);
      exponential(theirs);
      load(sum, total + first);
      load(other_sum, other_total + first);
      store(top + first, most);
      store(total + first, sum * mine + other_sum * theirs);
      for (int lane = 0; lane < kLanes; lane++) {
        float *to = sums + static_cast<int64_t>(first + lane) * value_stride, keep = mine[lane], take = theirs[lane];
        const float* from = other + static_cast<int64_t>(first + lane) * value_stride;
        for (int d = 0; d < value_stride; d++) to[d] = to[d] * keep + from[d] * take;
      }
    }
  }
  finish(item, call, top, total, sums, value_stride);
}

// Sets up the lanes of an item, padded to whole vectors; `put_query` gets each real lane and its query.
template <class PutQuery>
LPR_INLINE void begin_lanes(const Item& item, const LayerCall& call, LaneState& lanes, const PutQuery& put_query) {
  const Sequence& sequence = *item.sequence;
  int num_lanes = item.count * call.group;
  lanes.highest_lowest = 0;
  for (int lane = 0; lane < vectors_of(num_lanes) * kLanes; lane++) {
    int entry = item.first + std::min(lane, num_lanes - 1) / call.group;
    lanes.entry[lane] = entry;
    lanes.lowest[lane] = call.rule.lowest(sequence.positions[entry]);
    lanes.highest_lowest = std::max(lanes.highest_lowest, lanes.lowest[lane]);
    lanes.top[lane] = kFloor;
    lanes.total[lane] = 0;
    if (lane >= num_lanes) continue;
    int64_t head = item.head * call.group + lane % call.group;
    int64_t offset = sequence.batch * call.query_batch + head * call.query_head + (sequence.first + entry) * call.query_token;
    put_query(lane, static_cast<const char*>(at(call.query, call.is_half, offset)));
  }
}

// Writes an item's output, or its part, which whoever ends last combines.
LPR_INLINE void end_item(const Item& item, const LayerCall& call, const LaneState& lanes, float* sums, int value_stride,
                         int padded) {
  if (item.num_parts == 1) return finish(item, call, lanes.top, lanes.total, sums, value_stride);
  size_t sum_size = static_cast<size_t>(padded) * value_stride;
  float* mine = item.partial + item.part * (sum_size + 2 * static_cast<size_t>(padded));
  std::copy(sums, sums + sum_size, mine);
  std::copy(lanes.top, lanes.top + padded, mine + sum_size);
  std::copy(lanes.total, lanes.total + padded, mine + sum_size + padded);
  if (item.open->fetch_sub(1, std::memory_order_acq_rel) == 1) combine(item, call, value_stride);
}

// Finds the next up to `most` keys of an item, from `begin` on.
LPR_INLINE void find_keys(const PagedStep& step, const LayerCall& call, const Item& item, int64_t begin, int most,
                          KeyBlock& block) {
  int bytes = call.is_half ? 2 : 4;
  block.next_count = static_cast<int>(std::min<int64_t>(most, std::max<int64_t>(0, item.end - begin)));
  for (int k = 0; k < block.next_count; k++) {
    int64_t row = step.row_of(*item.sequence, begin + k);
    block.next_keys[k] = static_cast<const char*>(call.key) + (item.head * call.key_head + row * call.key_row) * bytes;
    block.next_values[k] = static_cast<const char*>(call.value) + (item.head * call.value_head + row * call.value_row) * bytes;
  }
}

// Makes the keys found last those of the block: copies [key_width] and [value_width], if there is room for them.
LPR_INLINE void take_keys(const LayerCall& call, int key_width, float* own_keys, int value_width, float* own_values,
                          KeyBlock& block) {
  block.count = block.next_count;
  for (int k = 0; k < block.count; k++) {
    const char *key = block.next_keys[k], *value = block.next_values[k];
    if (own_keys) unpack(key, call.is_half, call.dim, key_width, own_keys + k * key_width);
    block.keys[k] = own_keys ? own_keys + k * key_width : reinterpret_cast<const float*>(key);
    if (own_values) unpack(value, call.is_half, call.value_dim, value_width, own_values + k * value_width);
    block.values[k] = own_values ? own_values + k * value_width : reinterpret_cast<const float*>(value);
  }
  for (int k = block.count; k % 8; k++) block.keys[k] = block.keys[block.count - 1];  // several are multiplied at once
}

template <class Tile>
LPR_INLINE void attend_item(const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  const Sequence& sequence = *item.sequence;
  int num_lanes = item.count * call.group, num_vectors = vectors_of(num_lanes), padded = num_vectors * kLanes;
  int key_width = call.dim, value_stride = vectors_of(call.value_dim) * kLanes;
  bool copy_keys = call.is_half, copy_values = call.is_half || value_stride != call.value_dim;
  size_t query_size = static_cast<size_t>(padded) * call.dim, sum_size = static_cast<size_t>(padded) * value_stride;
  size_t score_size = static_cast<size_t>(kKeys) * Tile::kVectors * kLanes;
  size_t needed = query_size + sum_size + score_size + key_width + static_cast<size_t>(kKeys) * (key_width + value_stride);
  float* queries = reinterpret_cast<float*>(scratch.memory.at_least(needed * sizeof(float)));
  float *sums = queries + query_size, *scores = sums + sum_size;
  float *line = scores + score_size, *own_keys = line + key_width, *own_values = own_keys + kKeys * key_width;
  LaneState& lanes = scratch.lanes;
  // Queries as [chunk of vectors][dim][lanes of the chunk], scaled.
  std::fill(queries, queries + query_size, 0.0f);
  std::fill(sums, sums + sum_size, 0.0f);
  begin_lanes(item, call, lanes, [&](int lane, const char* query) LPR_LAMBDA_INLINE {
    unpack(query, call.is_half, call.dim, call.dim, line);
    int chunk = lane / (Tile::kVectors * kLanes) * Tile::kVectors;
    int width = std::min(Tile::kVectors, num_vectors - chunk) * kLanes;
    float* to = queries + static_cast<int64_t>(chunk) * kLanes * call.dim + (lane - chunk * kLanes);
    for (int d = 0; d < call.dim; d++) to[static_cast<int64_t>(d) * width] = line[d] * call.scale;
  });
  KeyBlock block;
  int item_bytes = call.is_half ? 2 : 4;
  block.key_bytes = call.dim * item_bytes;
  block.value_bytes = call.value_dim * item_bytes;
  find_keys(step, call, item, item.begin, kKeys, block);
  fetch_first(block);
  for (block.begin = item.begin; block.begin < item.end; block.begin += kKeys) {
    take_keys(call, key_width, copy_keys ? own_keys : nullptr, value_stride, copy_values ? own_values : nullptr, block);
    find_keys(step, call, item, block.begin + kKeys, kKeys, block);
    for (int first = 0; first < num_vectors; first += Tile::kVectors) {
      auto attend = [&](auto size) LPR_LAMBDA_INLINE {
        attend_chunk<Tile, decltype(size)::value>(item, call, block, first, num_lanes, queries, scores, lanes, sums,
                                                  value_stride);
      };
      switch (std::min(Tile::kVectors, num_vectors - first)) {
        case 1: attend(std::integral_constant<int, 1>{}); break;
        case 2: if (Tile::kVectors > 1) attend(std::integral_constant<int, Tile::kVectors < 2 ? 1 : 2>{}); break;
        case 3: if (Tile::kVectors > 1) attend(std::integral_constant<int, Tile::kVectors < 2 ? 1 : 3>{}); break;
        case 4: if (Tile::kVectors > 1) attend(std::integral_constant<int, Tile::kVectors < 2 ? 1 : 4>{}); break;
      }
    }
  }
  end_item(item, call, lanes, sums, value_stride, padded);
}

}  // namespace lpr
