// The items of paged_attention.h with few lanes where registers are short (AVX2, SSE, NEON): scores are [lanes, keys].
//
// A score is a sum across the registers of a query and a key, so three lanes cost no more than three, where lanes side by
// side would fill 16 places. Of four keys at a time these sums are made together, which costs a third more for each lane.
#pragma once

#include "paged_attention.h"

namespace lpr {

constexpr int kRowKeys = 32;     // keys of a block: with their values they stay in a core's first cache
constexpr int kFewLanes = 11;    // up to which this is faster
constexpr int kKeysAtOnce = 4;   // of a product of scores

#if defined(__clang__)
#define LPR_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define LPR_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, QuarterWords{i, j, k, l})
#endif

// The sums of four registers.
template <class V>
LPR_INLINE void sums_of(const V (&from)[4], QuarterLanes& sums) {
  QuarterLanes a, b, c, d, first, second;
  add_halves(from[0], a);
  add_halves(from[1], b);
  add_halves(from[2], c);
  add_halves(from[3], d);
  first = LPR_SHUFFLE(a, b, 0, 4, 1, 5) + LPR_SHUFFLE(a, b, 2, 6, 3, 7);
  second = LPR_SHUFFLE(c, d, 0, 4, 1, 5) + LPR_SHUFFLE(c, d, 2, 6, 3, 7);
  sums = LPR_SHUFFLE(first, second, 0, 1, 4, 5) + LPR_SHUFFLE(first, second, 2, 3, 6, 7);
}

// Scores of L lanes, `queries` [L][width], and four keys; the scores of a lane are kRowKeys apart.
template <class V, int L>
LPR_INLINE void score_lanes(const float* queries, const float* const* keys, int width, float* scores) {
  constexpr int W = Vector<V>::kWidth;
  V sums[L][kKeysAtOnce] = {}, query[L], key;
  for (int d = 0; d < width; d += W) {
    _Pragma("GCC unroll 4")
    for (int lane = 0; lane < L; lane++) load(query[lane], queries + lane * width + d);
    _Pragma("GCC unroll 4")
    for (int k = 0; k < kKeysAtOnce; k++) {
      load(key, keys[k] + d);
      _Pragma("GCC unroll 4")
      for (int lane = 0; lane < L; lane++) sums[lane][k] += query[lane] * key;
    }
  }
  _Pragma("GCC unroll 4")
  for (int lane = 0; lane < L; lane++) {
    QuarterLanes found;
    sums_of(sums[lane], found);
    std::memcpy(scores + lane * kRowKeys, &found, sizeof(found));
  }
}

// Adds values times `weights`, [L][kRowKeys], to C registers of the sums [stride] of L lanes, which shrink before.
template <class V, int L, int C>
LPR_INLINE void add_lanes(const float* weights, const float* const* values, int count, int column, const float* shrink,
                          float* sums, int stride) {
  constexpr int W = Vector<V>::kWidth;
  V acc[L][C], value;
  _Pragma("GCC unroll 4")
  for (int lane = 0; lane < L; lane++)
    _Pragma("GCC unroll 8")
    for (int c = 0; c < C; c++) {
      load(acc[lane][c], sums + lane * stride + column + c * W);
      acc[lane][c] = acc[lane][c] * shrink[lane];
    }
  for (int k = 0; k < count; k++) {
    float weight[L];
    _Pragma("GCC unroll 4")
    for (int lane = 0; lane < L; lane++) weight[lane] = weights[lane * kRowKeys + k];
    _Pragma("GCC unroll 8")
    for (int c = 0; c < C; c++) {
      load(value, values[k] + column + c * W);
      _Pragma("GCC unroll 4")
      for (int lane = 0; lane < L; lane++) acc[lane][c] += value * weight[lane];
    }
  }
  _Pragma("GCC unroll 4")
  for (int lane = 0; lane < L; lane++)
    _Pragma("GCC unroll 8")
    for (int c = 0; c < C; c++) store(sums + lane * stride + column + c * W, acc[lane][c]);
}

// Lanes 0..count-1, three or fewer at a time.
template <class Work>
LPR_INLINE void by_threes(int count, const Work& work) {
  for (int first = 0; first < count;) {
    int left = count - first;
    if (left == 1) {
      work(first, std::integral_constant<int, 1>{});
      first += 1;
    } else if (left == 2 || left == 4) {
      work(first, std::integral_constant<int, 2>{});
      first += 2;
    } else {
      work(first, std::integral_constant<int, 3>{});
      first += 3;
    }
  }
}

LPR_INLINE uint32_t first_keys(int64_t count) {
  return count >= kRowKeys ? ~uint32_t{0} : count > 0 ? (uint32_t{1} << count) - 1 : 0;
}

// What a lane sees of the keys of a block, as bits.
LPR_INLINE uint32_t seen_keys(const Item& item, const KeyBlock& block, int lane, int num_vectors, const LaneState& lanes,
                              bool has_rule) {
  const Sequence& sequence = *item.sequence;
  int64_t first = block.begin - sequence.num_cached;  // entry of the first key
  uint32_t seen = first_keys(block.count);
  for (int64_t k = std::max<int64_t>(-first, 0); k < block.count; k++) {
    bool sees = item.masks ? item.masks[(first + k) * num_vectors + lane / kLanes] >> (lane % kLanes) & 1
                           : first + k <= lanes.entry[lane];
    if (!sees) seen &= ~(uint32_t{1} << k);
  }
  for (int k = 0; has_rule && k < block.count; k++) {
    // Committed token j is key j; an entry's position may be less than its key.
    int64_t position = first + k >= 0 ? sequence.positions[first + k] : block.begin + k;
    if (position < lanes.lowest[lane]) seen &= ~(uint32_t{1} << k);
  }
  return seen;
}

// Makes weights of a lane's scores of a block, and follows its running softmax.
template <class V>
LPR_INLINE void weigh_lane(float* scores, uint32_t seen, float softcap, int lane, LaneState& lanes) {
  constexpr int W = Vector<V>::kWidth, N = kRowKeys / W;
  const V hidden = V{} - std::numeric_limits<float>::infinity();
  V score[N], most = V{} + lanes.top[lane], sum = V{};
  _Pragma("GCC unroll 8")
  for (int i = 0; i < N; i++) {
    load(score[i], scores + i * W);
    if (softcap > 0) cap(score[i], softcap);
    if (seen != ~uint32_t{0}) score[i] = (Vector<V>::kBits & static_cast<int32_t>(seen >> i * W)) != 0 ? score[i] : hidden;
    most = score[i] > most ? score[i] : most;
  }
  float top = most[0];
  _Pragma("GCC unroll 8")
  for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
  float shrink = 1;
  if (top > lanes.top[lane]) {
    V difference = V{} + (lanes.top[lane] - top);
    exponential(difference);
    shrink = difference[0];
  }
  _Pragma("GCC unroll 8")
  for (int i = 0; i < N; i++) {
    score[i] = score[i] - top;
    exponential(score[i]);
    store(scores + i * W, score[i]);
    sum += score[i];
  }
  lanes.total[lane] = lanes.total[lane] * shrink + sum_of(sum);
  lanes.top[lane] = top;
  lanes.shrink[lane] = shrink;
}

template <class V>
LPR_INLINE void attend_item_by_rows(const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  constexpr int W = Vector<V>::kWidth;
  const Sequence& sequence = *item.sequence;
  int num_lanes = item.count * call.group, num_vectors = vectors_of(num_lanes), padded = num_vectors * kLanes;
  int width = (call.dim + W - 1) / W * W, value_stride = vectors_of(call.value_dim) * kLanes;
  bool copy_keys = call.is_half || width != call.dim, copy_values = call.is_half || value_stride != call.value_dim;
  size_t query_size = static_cast<size_t>(padded) * width, sum_size = static_cast<size_t>(padded) * value_stride;
  size_t score_size = static_cast<size_t>(kFewLanes) * kRowKeys, block_size = static_cast<size_t>(kRowKeys) * (width + value_stride);
  size_t needed = query_size + sum_size + score_size + block_size;
  float* queries = reinterpret_cast<float*>(scratch.memory.at_least(needed * sizeof(float)));
  float *sums = queries + query_size, *scores = sums + sum_size;
  float *own_keys = scores + score_size, *own_values = own_keys + kRowKeys * width;
  LaneState& lanes = scratch.lanes;
  std::fill(sums, sums + sum_size, 0.0f);
  begin_lanes(item, call, lanes, [&](int lane, const char* query) LPR_LAMBDA_INLINE {
    float* to = queries + static_cast<int64_t>(lane) * width;
    unpack(query, call.is_half, call.dim, width, to);
    for (int d = 0; d < call.dim; d++) to[d] *= call.scale;
  });
  int item_bytes = call.is_half ? 2 : 4;
  KeyBlock block;
  block.key_bytes = call.dim * item_bytes;
  block.value_bytes = call.value_dim * item_bytes;
  find_keys(step, call, item, item.begin, kRowKeys, block);
  fetch_first(block);
  for (block.begin = item.begin; block.begin < item.end; block.begin += kRowKeys) {
    take_keys(call, width, copy_keys ? own_keys : nullptr, value_stride, copy_values ? own_values : nullptr, block);
    find_keys(step, call, item, block.begin + kRowKeys, kRowKeys, block);
    bool has_rule = lanes.highest_lowest > std::min<int64_t>(block.begin, sequence.num_cached);
    bool has_hidden = has_rule || block.count < kRowKeys || block.begin + kRowKeys > sequence.num_cached;
    for (int k = 0; k < block.count; k += kKeysAtOnce) {
      for (int next = k; next < std::min(k + kKeysAtOnce, block.next_count); next++) {
        fetch(block.next_keys[next], block.key_bytes);
        fetch(block.next_values[next], block.value_bytes);
      }
      by_threes(num_lanes, [&](int lane, auto size) LPR_LAMBDA_INLINE {
        score_lanes<V, decltype(size)::value>(queries + static_cast<int64_t>(lane) * width, block.keys + k, width,
                                              scores + lane * kRowKeys + k);
      });
    }
    for (int lane = 0; lane < num_lanes; lane++) {
      uint32_t seen = has_hidden ? seen_keys(item, block, lane, num_vectors, lanes, has_rule) : ~uint32_t{0};
      weigh_lane<V>(scores + lane * kRowKeys, seen, call.softcap, lane, lanes);
    }
    by_threes(num_lanes, [&](int lane, auto size) LPR_LAMBDA_INLINE {
      constexpr int L = decltype(size)::value, C = L == 1 ? 8 : 4;
      const float *weights = scores + lane * kRowKeys, *shrink = lanes.shrink + lane;
      float* to = sums + static_cast<int64_t>(lane) * value_stride;
      int column = 0;
      for (; column + C * W <= value_stride; column += C * W)
        add_lanes<V, L, C>(weights, block.values, block.count, column, shrink, to, value_stride);
      for (; column < value_stride; column += kLanes)
        add_lanes<V, L, kLanes / W>(weights, block.values, block.count, column, shrink, to, value_stride);
    });
  }
  end_item(item, call, lanes, sums, value_stride, padded);
}

}  // namespace lpr
