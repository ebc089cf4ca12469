// The items of paged_attention.h in bfloat16 by a core's matrix unit (Intel AMX).
//
// Scores are keys times queries, so keys are read as they lie in a page, 16 at a time, and come out as [keys, lanes], as
// the running softmax wants them. Its weights are multiplied by pairs of values side by side, as sums of two bfloat16:
// one alone would leave errors as large as the rounding of the output, other ones in every shape of a tree.
#pragma once

#include "amx.h"
#include "paged_attention.h"

#ifdef LPR_HAS_AMX
namespace lpr {

constexpr int kChunk = 4;  // vectors of lanes whose scores are made together

inline bool fits_amx(const PagedStep& step, const LayerCall& call) {
  return call.is_half && call.dim % kTileInputs == 0 && call.value_dim % kLanes == 0 && step.page_size % kTileRows == 0;
}

// Scores [64 keys][N vectors] of a block and N vectors of queries [N][dim / 32][16 pairs][16 lanes][2], scaled.
template <int N>
LPR_AMX inline void score_tiles(const char* const* keys, int64_t key_bytes, int count, const uint16_t* queries, int steps,
                                float scale, float* scores) {
  for (int group = 0; group * kTileRows < count; group++) {
    const char* rows = keys[group];
    _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (N > 2) _tile_zero(2);
    if (N > 3) _tile_zero(3);
    for (int step = 0; step < steps; step++) {
      const uint16_t* pairs = queries + step * 512;
      _tile_loadd(6, rows + step * 64, key_bytes);
      _tile_loadd(4, pairs, 64);
      _tile_dpbf16ps(0, 6, 4);
      if (N > 1) {
        _tile_loadd(5, pairs + steps * 512, 64);
        _tile_dpbf16ps(1, 6, 5);
      }
      if (N > 2) {
        _tile_loadd(4, pairs + 2 * steps * 512, 64);
        _tile_dpbf16ps(2, 6, 4);
      }
      if (N > 3) {
        _tile_loadd(5, pairs + 3 * steps * 512, 64);
        _tile_dpbf16ps(3, 6, 5);
      }
    }
    float* to = scores + group * kTileRows * N * kLanes;
    _tile_stored(0, to, N * 64);
    if (N > 1) _tile_stored(1, to + 16, N * 64);
    if (N > 2) _tile_stored(2, to + 32, N * 64);
    if (N > 3) _tile_stored(3, to + 48, N * 64);
  }
  __m512 factor = _mm512_set1_ps(scale);
  for (int i = 0; i < count * N; i++) _mm512_storeu_ps(scores + 16 * i, _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), factor));
}

constexpr int kWeightParts = 2;

// Weights of 16 keys, [16][stride], as [16 lanes][64 keys] in bfloat16, from `to` on; what rounding takes away follows.
LPR_AMX inline void turn_weights(const float* weights, int64_t stride, uint16_t* to) {
  __m512 row[16], other[16];
  for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_ps(weights + i * stride);
  for (int i = 0; i < 8; i++) {
    other[2 * i] = _mm512_unpacklo_ps(row[2 * i], row[2 * i + 1]);
    other[2 * i + 1] = _mm512_unpackhi_ps(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    row[4 * i] = _mm512_shuffle_ps(other[4 * i], other[4 * i + 2], 0x44);
    row[4 * i + 1] = _mm512_shuffle_ps(other[4 * i], other[4 * i + 2], 0xee);
    row[4 * i + 2] = _mm512_shuffle_ps(other[4 * i + 1], other[4 * i + 3], 0x44);
    row[4 * i + 3] = _mm512_shuffle_ps(other[4 * i + 1], other[4 * i + 3], 0xee);
  }
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 4; i++) {
      other[8 * half + i] = _mm512_shuffle_f32x4(row[8 * half + i], row[8 * half + i + 4], 0x88);
      other[8 * half + i + 4] = _mm512_shuffle_f32x4(row[8 * half + i], row[8 * half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    row[i] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0xdd);
  }
  for (int i = 0; i < 16; i++) {
    __m256i high = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(row[i]));
    __m512 kept = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    __m256i low = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_sub_ps(row[i], kept)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * kKeys), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (kLanes + i) * kKeys), low);
  }
}

// Values of a block as pairs of keys, [2][width / 16][16 pairs][16][2]; zeros behind the last key.
LPR_AMX inline void pair_values(const char* const* values, int count, int width, uint16_t* to) {
  alignas(64) uint16_t order[32];
  for (uint16_t i = 0; i < 16; i++) order[2 * i] = i, order[2 * i + 1] = 32 + i;
  __m512i by = _mm512_load_si512(order);
  for (int pair = 0; pair < kKeys / 2; pair++)
    for (int tile = 0; tile < width / kLanes; tile++) {
      __m256i halves[2];
      for (int i = 0; i < 2; i++) {
        int key = 2 * pair + i;
        halves[i] = key < count ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values[key] + 32 * tile)) : _mm256_setzero_si256();
      }
      __m512i both = _mm512_permutex2var_epi16(_mm512_castsi256_si512(halves[0]), by, _mm512_castsi256_si512(halves[1]));
      _mm512_storeu_si512(to + ((pair / 16 * (width / kLanes) + tile) * 16 + pair % 16) * 32, both);
    }
}

// Sums [16][stride] of a vector of lanes: shrunk, and both parts of `weights` [2][16][64] times `pairs` of values added.
LPR_AMX inline void add_tiles(const uint16_t* weights, const uint16_t* pairs, int num_steps, int num_tiles,
                              const float* shrink, float* sums) {
  int64_t stride = num_tiles * kLanes;
  for (int lane = 0; lane < kLanes; lane++) {
    if (shrink[lane] == 1.0f) continue;
    __m512 factor = _mm512_set1_ps(shrink[lane]);
    for (int64_t i = lane * stride; i < (lane + 1) * stride; i += kLanes)
      _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), factor));
  }
  see_memory();
  for (int tile = 0; tile < num_tiles; tile += 4) {
    int left = num_tiles - tile;
    float* to = sums + tile * kLanes;
    _tile_loadd(0, to, stride * 4);
    if (left > 1) _tile_loadd(1, to + 16, stride * 4);
    if (left > 2) _tile_loadd(2, to + 32, stride * 4);
    if (left > 3) _tile_loadd(3, to + 48, stride * 4);
    for (int step = 0; step < num_steps; step++) {
      const uint16_t* from = pairs + (step * num_tiles + tile) * 512;
      _tile_loadd(6, weights + 32 * step, kKeys * 2);
      _tile_loadd(7, weights + kLanes * kKeys + 32 * step, kKeys * 2);
      _tile_loadd(4, from, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(0, 7, 4);
      if (left > 1) {
        _tile_loadd(5, from + 512, 64);
        _tile_dpbf16ps(1, 6, 5);
        _tile_dpbf16ps(1, 7, 5);
      }
      if (left > 2) {
        _tile_loadd(4, from + 1024, 64);
        _tile_dpbf16ps(2, 6, 4);
        _tile_dpbf16ps(2, 7, 4);
      }
      if (left > 3) {
        _tile_loadd(5, from + 1536, 64);
        _tile_dpbf16ps(3, 6, 5);
        _tile_dpbf16ps(3, 7, 5);
      }
    }
    _tile_stored(0, to, stride * 4);
    if (left > 1) _tile_stored(1, to + 16, stride * 4);
    if (left > 2) _tile_stored(2, to + 32, stride * 4);
    if (left > 3) _tile_stored(3, to + 48, stride * 4);
  }
}

template <int N>
LPR_AMX inline void attend_tiles(const Item& item, const LayerCall& call, const KeyBlock& block, const char* const* groups,
                                 int first, int num_lanes, const uint16_t* queries, const uint16_t* pairs, float* scores,
                                 uint16_t* weights, LaneState& lanes, float* sums) {
  int steps = call.dim / static_cast<int>(kTileInputs), lane = first * kLanes;
  see_memory();
  score_tiles<N>(groups, call.key_row * 2, block.count, queries + static_cast<int64_t>(first) * steps * 512, steps, call.scale,
                 scores);
  weigh_block<Lanes, N>(scores, item, block, first, vectors_of(num_lanes), call.softcap, lanes);
  for (int k = block.count; k % 32; k++) std::memset(scores + k * N * kLanes, 0, N * kLanes * sizeof(float));
  int num_steps = (block.count + 31) / 32;
  for (int v = 0; v < N; v++) {
    for (int group = 0; group < 2 * num_steps; group++)
      turn_weights(scores + (group * kTileRows * N + v) * kLanes, N * kLanes, weights + group * kTileRows);
    add_tiles(weights, pairs, num_steps, call.value_dim / kLanes, lanes.shrink + lane + v * kLanes,
              sums + static_cast<int64_t>(lane + v * kLanes) * call.value_dim);
  }
}

LPR_AMX inline void attend_item_by_tiles(const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  const Sequence& sequence = *item.sequence;
  int num_lanes = item.count * call.group, num_vectors = vectors_of(num_lanes), padded = num_vectors * kLanes;
  int steps = call.dim / static_cast<int>(kTileInputs), words = call.dim / 2;
  size_t query_size = static_cast<size_t>(padded) * words, sum_size = static_cast<size_t>(padded) * call.value_dim;
  size_t score_size = static_cast<size_t>(kKeys) * kChunk * kLanes, weight_size = kWeightParts * kLanes * kKeys / 2;
  size_t value_size = static_cast<size_t>(kKeys) * call.value_dim / 2;
  size_t needed = query_size + sum_size + score_size + weight_size + value_size + 16;
  if (scratch.floats.size() < needed) scratch.floats.resize(needed);
  float* sums = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.floats.data()) + 63) / 64 * 64);
  float *scores = sums + sum_size, *query_floats = scores + score_size, *weight_floats = query_floats + query_size;
  uint16_t *queries = reinterpret_cast<uint16_t*>(query_floats), *weights = reinterpret_cast<uint16_t*>(weight_floats);
  uint16_t* pairs = reinterpret_cast<uint16_t*>(weight_floats + weight_size);
  LaneState& lanes = scratch.lanes;
  std::memset(sums, 0, sum_size * sizeof(float));
  std::memset(queries, 0, query_size * sizeof(float));
  begin_lanes(item, call, lanes, [&](int lane, const char* query) {
    uint16_t* to = queries + static_cast<int64_t>(lane / kLanes) * steps * 512 + 2 * (lane % kLanes);
    for (int word = 0; word < words; word++, query += 4) std::memcpy(to + word * 32, query, 4);
  });
  begin_tiles();
  KeyBlock block;
  const char *values[kKeys], *groups[kKeys / kTileRows];
  for (block.begin = item.begin; block.begin < item.end; block.begin += kKeys) {
    block.count = static_cast<int>(std::min<int64_t>(kKeys, item.end - block.begin));
    for (int k = 0; k < block.count; k++) {
      int64_t row = step.row_of(sequence, block.begin + k);
      values[k] = static_cast<const char*>(call.value) + (item.head * call.value_head + row * call.value_row) * 2;
      const char* key = static_cast<const char*>(call.key) + (item.head * call.key_head + row * call.key_row) * 2;
      if (k % kTileRows == 0) groups[k / kTileRows] = key;
    }
    pair_values(values, block.count, call.value_dim, pairs);
    for (int first = 0; first < num_vectors; first += kChunk) {
      auto attend = std::min(kChunk, num_vectors - first) == 1   ? attend_tiles<1>
                    : std::min(kChunk, num_vectors - first) == 2 ? attend_tiles<2>
                    : std::min(kChunk, num_vectors - first) == 3 ? attend_tiles<3>
                                                                 : attend_tiles<4>;
      attend(item, call, block, groups, first, num_lanes, queries, pairs, scores, weights, lanes, sums);
    }
  }
  _tile_release();
  end_item(item, call, lanes, sums, call.value_dim, padded);
}

}  // namespace lpr
#endif
