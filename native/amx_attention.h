// The items of paged_attention.h in bfloat16 by a core's matrix unit (Intel AMX).
//
// Scores are queries times keys and come out as [lanes, keys], so that the weights made of them are rows of the next
// product as they lie. The other side of a product wants pairs of its inputs side by side: keys and values are laid out so
// once for all lanes of an item. Weights are sums of two bfloat16: one alone would leave errors as large as the rounding of
// the output, other ones in every shape of a tree.
#pragma once

#include "amx.h"
#include "paged_attention.h"

#ifdef LPR_HAS_AMX
namespace lpr {

constexpr int kGroups = kKeys / 16;                // of 16 keys, in a block
constexpr int kLaneFloats = kLanes * kKeys;        // scores of a vector of lanes
constexpr int64_t kWeightRow = kKeys * 2;          // bytes of a lane's weights
constexpr int kWeightParts = 2;
constexpr float kSlack = 5;  // that scores may exceed what they are compared with by before sums shrink: weights below 149

inline bool fits_amx(const PagedStep& step, const LayerCall& call) {
  return call.is_half && call.dim % kTileInputs == 0 && call.value_dim % kLanes == 0 && step.page_size % kTileRows == 0;
}

// Words [16][16] as [16][16] the other way round, in place.
LPR_AMX inline void transpose(__m512* row) {
  __m512 other[16];
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
}

// Keys of a block as pairs of dimensions, [dim / 32][groups][16 pairs][16 keys][2]; `groups` point at 16 rows each.
LPR_AMX inline void pair_keys(const char* const* groups, int64_t key_bytes, int count, int steps, uint16_t* to) {
  for (int step = 0; step < steps; step++)
    for (int group = 0; group * kTileRows < count; group++) {
      __m512 row[16];
      for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_ps(groups[group] + i * key_bytes + step * 64);
      transpose(row);
      for (int i = 0; i < 16; i++) _mm512_store_ps(to + (step * kGroups + group) * 512 + 32 * i, row[i]);
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

// Adds to up to four tiles of sums: a tile of rows times tiles of pairs that lie one behind the other.
LPR_AMX inline void add_products(const uint16_t* rows, int64_t row_bytes, const uint16_t* pairs, int count) {
  _tile_loadd(6, rows, row_bytes);
  _tile_loadd(4, pairs, 64);
  _tile_dpbf16ps(0, 6, 4);
  if (count > 1) {
    _tile_loadd(5, pairs + 512, 64);
    _tile_dpbf16ps(1, 6, 5);
  }
  if (count > 2) {
    _tile_loadd(7, pairs + 1024, 64);
    _tile_dpbf16ps(2, 6, 7);
  }
  if (count > 3) {
    _tile_loadd(4, pairs + 1536, 64);
    _tile_dpbf16ps(3, 6, 4);
  }
}

// Scores [16 lanes][64 keys] of a vector of queries [16][dim].
LPR_AMX inline void score_tiles(const uint16_t* queries, const uint16_t* keys, int count, int steps, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; step++)
    add_products(queries + 32 * step, steps * 64, keys + step * kGroups * 512, vectors_of(count));
  _tile_stored(0, scores, kKeys * 4);
  _tile_stored(1, scores + 16, kKeys * 4);
  _tile_stored(2, scores + 32, kKeys * 4);
  _tile_stored(3, scores + 48, kKeys * 4);
}

inline uint64_t first_bits(int64_t count) { return count >= kKeys ? ~uint64_t{0} : count > 0 ? (uint64_t{1} << count) - 1 : 0; }

// What each lane of vector `index` sees of a block's keys, as bits.
LPR_AMX inline void see_keys(const Item& item, const KeyBlock& block, int index, int num_vectors, const LaneState& lanes,
                             uint64_t* seen) {
  int64_t first = block.begin - item.sequence->num_cached;  // entry of the first key
  int lane = index * kLanes;
  if (!item.masks) {
    for (int i = 0; i < kLanes; i++)
      seen[i] = first_bits(std::min<int64_t>(block.count, lanes.entry[lane + i] - first + 1));
  } else {
    int64_t num_committed = std::clamp<int64_t>(-first, 0, block.count);
    __m512i low = _mm512_set1_epi64(static_cast<int64_t>(first_bits(num_committed))), high = low;
    for (int64_t k = num_committed; k < block.count; k++) {
      uint16_t mask = item.masks[(first + k) * num_vectors + index];
      __m512i bit = _mm512_set1_epi64(static_cast<int64_t>(uint64_t{1} << k));
      low = _mm512_mask_or_epi64(low, static_cast<__mmask8>(mask), low, bit);
      high = _mm512_mask_or_epi64(high, static_cast<__mmask8>(mask >> 8), high, bit);
    }
    _mm512_storeu_si512(seen, low);
    _mm512_storeu_si512(seen + 8, high);
  }
  if (lanes.highest_lowest <= std::min<int64_t>(block.begin, item.sequence->num_cached)) return;
  alignas(64) int32_t positions[kKeys] = {};  // committed token j is key j; an entry's position may be less than its key
  for (int k = 0; k < block.count; k++)
    positions[k] = static_cast<int32_t>(first + k >= 0 ? item.sequence->positions[first + k] : block.begin + k);
  for (int i = 0; i < kLanes; i++) {
    __m512i lowest = _mm512_set1_epi32(lanes.lowest[lane + i]);
    for (int group = 0; group < kGroups; group++) {
      uint64_t mask = _mm512_cmpge_epi32_mask(_mm512_load_si512(positions + 16 * group), lowest);
      seen[i] &= mask << 16 * group | ~(uint64_t{0xffff} << 16 * group);
    }
  }
}

// The highest of each of 16 vectors.
LPR_AMX inline __m512 highest_of(__m512* row) {
  for (int i = 0; i < 8; i++)
    row[i] = _mm512_max_ps(_mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0x44),
                           _mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0xee));
  for (int i = 0; i < 4; i++)
    row[i] = _mm512_max_ps(_mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(row[2 * i], row[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; i++)
    row[i] = _mm512_max_ps(_mm512_unpacklo_ps(row[2 * i], row[2 * i + 1]), _mm512_unpackhi_ps(row[2 * i], row[2 * i + 1]));
  __m512 most = _mm512_max_ps(_mm512_shuffle_ps(row[0], row[1], 0x44), _mm512_shuffle_ps(row[0], row[1], 0xee));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), most);
}

LPR_AMX inline __m512 power_of(__m512 x) {
  Lanes lanes = reinterpret_cast<Lanes>(x);
  power_of_two(lanes);
  return reinterpret_cast<__m512>(lanes);
}

// Makes weights [parts][16 lanes][64 keys] of the scores [16][64] of vector `index` of lanes, and follows their running
// softmax; `totals` [16][16] have the sums of 16 keys' weights each. Where `seen` is given, a lane has these keys only.
template <bool kHasHidden>
LPR_AMX inline void weigh_tiles(float* scores, const uint64_t* seen, float scale, float softcap, int lane, LaneState& lanes,
                                float* totals, uint16_t* weights) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  if (softcap > 0) {
    for (int i = 0; i < kLaneFloats; i += 16) {
      Lanes score;
      load(score, scores + i);
      score = score * scale;
      cap(score, softcap);
      store(scores + i, score);
    }
    scale = 1;
  }
  __m512 most[16], parts[kGroups];
  for (int i = 0; i < kLanes; i++) {
    for (int group = 0; group < kGroups; group++) {
      parts[group] = _mm512_load_ps(scores + i * kKeys + 16 * group);
      if (kHasHidden) parts[group] = _mm512_mask_mov_ps(hidden, static_cast<__mmask16>(seen[i] >> 16 * group), parts[group]);
    }
    most[i] = _mm512_max_ps(_mm512_max_ps(parts[0], parts[1]), _mm512_max_ps(parts[2], parts[3]));
  }
  __m512 before = _mm512_loadu_ps(lanes.top + lane), top = _mm512_mul_ps(highest_of(most), _mm512_set1_ps(scale));
  __mmask16 is_higher = _mm512_cmp_ps_mask(top, _mm512_add_ps(before, _mm512_set1_ps(kSlack)), _CMP_NLE_UQ);  // or NaN
  __mmask16 is_first = _mm512_cmp_ps_mask(before, _mm512_set1_ps(kFloor), _CMP_EQ_OQ);  // nothing is there to shrink
  top = _mm512_mask_mov_ps(before, is_higher, top);
  __m512 shrink = power_of(_mm512_mul_ps(_mm512_sub_ps(before, top), _mm512_set1_ps(kLog2E)));
  shrink = _mm512_mask_mov_ps(shrink, is_first, _mm512_set1_ps(1));
  _mm512_storeu_ps(lanes.top + lane, top);
  _mm512_storeu_ps(lanes.shrink + lane, shrink);
  alignas(64) float offsets[kLanes];
  _mm512_store_ps(offsets, _mm512_mul_ps(top, _mm512_set1_ps(-kLog2E)));
  const __m512 factor = _mm512_set1_ps(scale * kLog2E);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int i = 0; i < kLanes; i++) {
    __m512 offset = _mm512_set1_ps(offsets[i]), high[kGroups], low[kGroups];
    for (int group = 0; group < kGroups; group++) {
      __m512 power = power_of(_mm512_fmadd_ps(_mm512_load_ps(scores + i * kKeys + 16 * group), factor, offset));
      if (kHasHidden) power = _mm512_maskz_mov_ps(static_cast<__mmask16>(seen[i] >> 16 * group), power);
      parts[group] = power;
      high[group] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(power), upper));
      low[group] = _mm512_sub_ps(power, high[group]);
    }
    __m512 total = _mm512_mul_ps(_mm512_load_ps(totals + 16 * i), _mm512_set1_ps(lanes.shrink[lane + i]));
    total = _mm512_add_ps(total, _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3])));
    _mm512_store_ps(totals + 16 * i, total);
    for (int half = 0; half < 2; half++) {
      __m512bh first = _mm512_cvtne2ps_pbh(high[2 * half + 1], high[2 * half]);
      __m512bh second = _mm512_cvtne2ps_pbh(low[2 * half + 1], low[2 * half]);
      _mm512_store_si512(weights + i * kKeys + 32 * half, reinterpret_cast<__m512i>(first));
      _mm512_store_si512(weights + kLaneFloats + i * kKeys + 32 * half, reinterpret_cast<__m512i>(second));
    }
  }
}

// Sums [16][stride] of a vector of lanes: shrunk, and both parts of `weights` [2][16][64] times `pairs` of values added.
LPR_AMX inline void add_tiles(const uint16_t* weights, const uint16_t* pairs, int num_steps, int num_tiles,
                              const float* shrink, float* sums) {
  int64_t stride = num_tiles * kLanes;
  uint32_t shrinks = _mm512_cmp_ps_mask(_mm512_loadu_ps(shrink), _mm512_set1_ps(1), _CMP_NEQ_UQ);
  for (; shrinks; shrinks &= shrinks - 1) {
    int lane = __builtin_ctz(shrinks);
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
    for (int step = 0; step < num_steps; step++)
      for (int part = 0; part < kWeightParts; part++) {  // a sum waits for its own last product, so these are far apart
        const uint16_t* from = pairs + (step * num_tiles + tile) * 512;
        add_products(weights + part * kLaneFloats + 32 * step, kWeightRow, from, left);
      }
    _tile_stored(0, to, stride * 4);
    if (left > 1) _tile_stored(1, to + 16, stride * 4);
    if (left > 2) _tile_stored(2, to + 32, stride * 4);
    if (left > 3) _tile_stored(3, to + 48, stride * 4);
  }
}

LPR_AMX inline void attend_item_by_tiles(const PagedStep& step, const LayerCall& call, const Item& item, Scratch& scratch) {
  const Sequence& sequence = *item.sequence;
  int num_lanes = item.count * call.group, num_vectors = vectors_of(num_lanes), padded = num_vectors * kLanes;
  int steps = call.dim / static_cast<int>(kTileInputs);
  size_t sum_size = static_cast<size_t>(padded) * call.value_dim, total_size = static_cast<size_t>(padded) * kLanes;
  size_t query_size = static_cast<size_t>(padded) * call.dim / 2, score_size = static_cast<size_t>(kLaneFloats);
  size_t key_size = static_cast<size_t>(kKeys) * call.dim / 2, value_size = static_cast<size_t>(kKeys) * call.value_dim / 2;
  size_t needed = sum_size + total_size + query_size + score_size + key_size + value_size + 2 * score_size;
  static_assert(kWeightParts == 2, "weights take the room of scores");
  float* sums = reinterpret_cast<float*>(scratch.memory.at_least(needed * sizeof(float)));
  float *totals = sums + sum_size, *query_floats = totals + total_size, *scores = query_floats + query_size;
  float *key_floats = scores + score_size, *value_floats = key_floats + key_size;
  uint16_t *queries = reinterpret_cast<uint16_t*>(query_floats), *keys = reinterpret_cast<uint16_t*>(key_floats);
  uint16_t *pairs = reinterpret_cast<uint16_t*>(value_floats), *weights = reinterpret_cast<uint16_t*>(value_floats + value_size);
  LaneState& lanes = scratch.lanes;
  std::memset(sums, 0, (sum_size + total_size) * sizeof(float));
  begin_lanes(item, call, lanes, [&](int lane, const char* query) {
    std::memcpy(queries + static_cast<int64_t>(lane) * call.dim, query, static_cast<size_t>(call.dim) * 2);
  });
  std::memset(queries + static_cast<int64_t>(num_lanes) * call.dim, 0, static_cast<size_t>((padded - num_lanes) * call.dim) * 2);
  begin_tiles();
  KeyBlock block;
  const char *values[kKeys], *groups[kGroups];
  for (block.begin = item.begin; block.begin < item.end; block.begin += kKeys) {
    block.count = static_cast<int>(std::min<int64_t>(kKeys, item.end - block.begin));
    for (int k = 0; k < block.count; k++) {
      int64_t row = step.row_of(sequence, block.begin + k);
      values[k] = static_cast<const char*>(call.value) + (item.head * call.value_head + row * call.value_row) * 2;
      const char* key = static_cast<const char*>(call.key) + (item.head * call.key_head + row * call.key_row) * 2;
      if (k % kTileRows == 0) groups[k / kTileRows] = key;
    }
    for (int64_t next = block.begin + kKeys; next < std::min(item.end, block.begin + 2 * kKeys); next += kTileRows) {
      int64_t row = step.row_of(sequence, next);
      const char* value = static_cast<const char*>(call.value) + (item.head * call.value_head + row * call.value_row) * 2;
      const char* key = static_cast<const char*>(call.key) + (item.head * call.key_head + row * call.key_row) * 2;
      for (int i = 0; i < kTileRows; i++, key += call.key_row * 2, value += call.value_row * 2) {
        fetch(key, call.dim * 2);
        fetch(value, call.value_dim * 2);
      }
    }
    pair_keys(groups, call.key_row * 2, block.count, steps, keys);
    pair_values(values, block.count, call.value_dim, pairs);
    bool has_rule = lanes.highest_lowest > std::min<int64_t>(block.begin, sequence.num_cached);
    // A tile waits until what it reads has left the core's stores, so weights are used after the next vector's are made.
    int waiting = -1;
    auto weights_of = [&](int v) { return weights + v % 2 * kWeightParts * kLaneFloats; };
    auto sums_of = [&](int v) { return sums + static_cast<int64_t>(v) * kLanes * call.value_dim; };
    int num_steps = (block.count + 31) / 32, num_tiles = call.value_dim / kLanes;
    for (int v = 0; v < num_vectors; v++) {
      int lane = v * kLanes;
      // Of a chain, the first lanes see none of the last keys, and the last lanes all of the first.
      if (!item.masks && block.begin - sequence.num_cached > lanes.entry[lane + kLanes - 1]) continue;
      int64_t num_seen = sequence.num_cached + (item.masks ? 0 : lanes.entry[lane] + 1);
      bool has_hidden = has_rule || block.count < kKeys || block.begin + block.count > num_seen;
      see_memory();
      score_tiles(queries + static_cast<int64_t>(lane) * call.dim, keys, block.count, steps, scores);
      uint64_t seen[kLanes];
      if (has_hidden) see_keys(item, block, v, num_vectors, lanes, seen);
      auto weigh = has_hidden ? weigh_tiles<true> : weigh_tiles<false>;
      weigh(scores, seen, call.scale, call.softcap, lane, lanes, totals + lane * kLanes, weights_of(v));
      if (waiting >= 0)
        add_tiles(weights_of(waiting), pairs, num_steps, num_tiles, lanes.shrink + waiting * kLanes, sums_of(waiting));
      waiting = v;
    }
    if (waiting >= 0)
      add_tiles(weights_of(waiting), pairs, num_steps, num_tiles, lanes.shrink + waiting * kLanes, sums_of(waiting));
  }
  _tile_release();
  for (int lane = 0; lane < padded; lane++) lanes.total[lane] = _mm512_reduce_add_ps(_mm512_load_ps(totals + lane * kLanes));
  end_item(item, call, lanes, sums, call.value_dim, padded);
}

}  // namespace lpr
#endif
