// Products of rows with weights of 4 bits, which have a scale and a minimum for each 32 inputs of an output.
//
// Rows are rounded to 8 bits, with a scale for each 32 inputs: that adds little to the weights' own rounding. The sum of a
// group is exact; the groups of an output are added in their order.
#pragma once

#include "low_bit_products.h"

#ifdef LPR_HAS_TILES
namespace lpr {

constexpr int kInt4Rows = 8;  // most rows of a tile

// A group's scale, and the sum of its values as they were.
struct GroupFacts {
  float scale, sum;
};

// Rounds 32 values. In vectors of 8: of wider ones GCC makes comparisons one by one with AVX2.
LPR_CLONES inline GroupFacts round_group(const float* from, int8_t* to) {
  using V = HalfLanes;
  constexpr int kWidth = Vector<V>::kWidth, kParts = kGroup / kWidth;
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  V values[kParts], most = {};
  LPR_UNROLL
  for (int i = 0; i < kParts; i++) {
    load(values[i], from + i * kWidth);
    V size = values[i] < 0.0f ? -values[i] : values[i];
    most = size > most ? size : most;
  }
  float largest = 0.0f;
  for (int i = 0; i < kWidth; i++) largest = std::max(largest, most[i]);
  float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  const V magic = V{} + 12582912.0f;
  LPR_UNROLL
  for (int i = 0; i < kParts; i++) {
    V shifted = values[i] * factor + magic;
    Vector<V>::Bits bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    Bytes bytes = __builtin_convertvector(bits, Bytes);
    std::memcpy(to + i * kWidth, &bytes, sizeof(bytes));
  }
  return {largest / 127.0f, sum_of((values[0] + values[2]) + (values[1] + values[3]))};
}

// Rounds row `row` of a product to `to` [groups][32].
inline void round_groups(const Product& product, int64_t row, int8_t* to, GroupFacts* facts) {
  for (int64_t start = 0; start < product.inputs; start += kGroup, to += kGroup) {
    int64_t count = std::min(kGroup, product.inputs - start), first = row * product.inputs + start;
    alignas(64) float values[kGroup] = {};
    if (product.has_half_rows)
      widen_values(reinterpret_cast<const BFloat*>(product.given) + first, count, values);
    else
      std::memcpy(values, reinterpret_cast<const float*>(product.given) + first, static_cast<size_t>(count) * sizeof(float));
    *facts++ = round_group(values, to);
  }
}

// Adds products of four unsigned weights and signed values; see `add_pairs`.
LPR_WIDE_PAIRS LPR_INLINE __m512i add_fours(__m512i sum, __m512i weights, __m512i values) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(values));
  return sum;
}

LPR_WIDE_PAIRS LPR_INLINE __m512 wide_halves(const char* from) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int R>
LPR_WIDE_PAIRS void wide_int4_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  int64_t groups = num_groups(product.inputs), outputs = product.outputs;
  const char* given = product.given + row * groups * kGroup;
  const GroupFacts* facts = reinterpret_cast<const GroupFacts*>(product.given_scales) + row * groups;
  const __m512i low_bits = _mm512_set1_epi8(15);
  if (!ahead.next) ahead = {weights + kAhead * kStepBytes, kStepBytes};
  __m512 totals[R][2];
  for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; group++, given += kGroup, facts++) {
    ahead.fetch();
    __m512 scales[2] = {wide_halves(weights), wide_halves(weights + 32)};
    __m512 lows[2] = {wide_halves(weights + 64), wide_halves(weights + 96)};
    weights += kGroupFactBytes;
    __m512i sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = 0; k < kGroup; k += 8) {
      ahead.fetch();
#pragma GCC unroll 2
      for (int i = 0; i < 8; i += 4, weights += 64) {
        __m512i both = _mm512_loadu_si512(weights), low = _mm512_and_si512(both, low_bits);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t four;
          std::memcpy(&four, given + r * groups * kGroup + k + i, sizeof(four));
          __m512i values = _mm512_set1_epi32(four);
          sums[r][0] = add_fours(sums[r][0], low, values);
          sums[r][1] = add_fours(sums[r][1], high, values);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) {
        __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][half]), scales[half]);
        totals[r][half] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(facts[r * groups].scale), totals[r][half]);
        totals[r][half] = _mm512_fmadd_ps(lows[half], _mm512_set1_ps(facts[r * groups].sum), totals[r][half]);
      }
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  for (int half = 0; half < 2; half++) {
    int64_t at = first + 16 * half;
    __m512 bias = product.bias ? _mm512_maskz_loadu_ps(masks[half], product.bias + at) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++)
      write_wide(product, _mm512_add_ps(totals[r][half], bias), (row + r) * outputs + at, masks[half]);
  }
}

LPR_NARROW LPR_INLINE __m256 narrow_halves(const char* from) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Products of two bytes are at most 2 * 15 * 127, so that sums of the group's 8 stay in 16 bits.
template <int R>
LPR_NARROW void narrow_int4_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  int64_t groups = num_groups(product.inputs), outputs = product.outputs;
  const char* given = product.given + row * groups * kGroup;
  const GroupFacts* facts = reinterpret_cast<const GroupFacts*>(product.given_scales) + row * groups;
  const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  if (!ahead.next) ahead = {weights + kAhead * kStepBytes, kStepBytes};
  alignas(64) float totals[R][kPanel] = {};
  for (int64_t group = 0; group < groups; group++, given += kGroup, facts++, weights += kGroupBytes) {
    for (int i = 0; i < 5; i++) ahead.fetch();
    for (int v = 0; v < 2; v++) {  // outputs 8v to 8v + 7, and the 16th after each
      const char* step = weights + kGroupFactBytes + 32 * v;
      __m256i sums[R][2];
      for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
      for (int k = 0; k < kGroup; k += 4, step += 64) {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step)), low = _mm256_and_si256(both, low_bits);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          int32_t four;
          std::memcpy(&four, given + r * groups * kGroup + k, sizeof(four));
          __m256i values = _mm256_set1_epi32(four);
          sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(low, values));
          sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(high, values));
        }
      }
      for (int half = 0; half < 2; half++) {
        int at = 16 * half + 8 * v;
        __m256 scale = narrow_halves(weights + 2 * at), low = narrow_halves(weights + 64 + 2 * at);
        for (int r = 0; r < R; r++) {
          __m256 total = _mm256_load_ps(totals[r] + at);
          __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(sums[r][half], ones)), scale);
          total = _mm256_fmadd_ps(scaled, _mm256_set1_ps(facts[r * groups].scale), total);
          _mm256_store_ps(totals[r] + at, _mm256_fmadd_ps(low, _mm256_set1_ps(facts[r * groups].sum), total));
        }
      }
    }
  }
  int64_t width = std::min(kPanel, outputs - first);
  for (int r = 0; r < R; r++) {
    if (product.bias)
      for (int64_t i = 0; i < width; i++) totals[r][i] += product.bias[first + i];
    write_narrow(product, totals[r], (row + r) * outputs + first, width);
  }
}

constexpr Tile kWideInt4Tiles[] = {wide_int4_tile<1>, wide_int4_tile<2>, wide_int4_tile<3>, wide_int4_tile<4>,
                                   wide_int4_tile<5>, wide_int4_tile<6>, wide_int4_tile<7>, wide_int4_tile<8>};
constexpr Tile kNarrowInt4Tiles[] = {narrow_int4_tile<1>, narrow_int4_tile<2>, narrow_int4_tile<3>,
                                     narrow_int4_tile<4>, narrow_int4_tile<5>, narrow_int4_tile<6>};

// The product of weights [panels][groups][640 bytes]: 32 scales and 32 minima in bfloat16, then for each four inputs of
// the group four bytes for each of 16 outputs, with the 16 outputs after them in the upper halves of the bytes.
inline void multiply_int4(Product product, int num_threads) {
  static thread_local Workspace memory;
  int64_t groups = num_groups(product.inputs), rows = product.rows, stride = groups * kGroup;
  char* begin = memory.at_least(static_cast<size_t>(rows * stride) + static_cast<size_t>(rows * groups) * sizeof(GroupFacts));
  GroupFacts* facts = reinterpret_cast<GroupFacts*>(begin + rows * stride);
  parallel_for(rows, rows * stride > kAloneRounding ? num_threads : 1, [&](int64_t row, int) {
    round_groups(product, row, reinterpret_cast<int8_t*>(begin) + row * stride, facts + row * groups);
  });
  product.given = begin;
  product.given_scales = reinterpret_cast<const float*>(facts);
  bool is_wide = multiplies_low_bits();
  multiply_in_tiles(product, {is_wide ? kWideInt4Tiles : kNarrowInt4Tiles, is_wide ? kInt4Rows : kNarrowRows}, num_threads);
}

}  // namespace lpr
#endif
