// Products of rows with weights of 8 bits and one scale per output (lpr.model.low_bit).
//
// Rows are rounded to 16 bits, with a scale for each 512 inputs, so what is lost is the weights' rounding alone. One
// instruction then multiplies pairs of 16 bits and adds them to 32-bit sums, exactly: a step of a few rows takes as long
// as reading the weights does, and a row has the same bits for every number of rows and on every processor. Of 512 inputs a sum
// stays below 512 * 32767 * 127 < 2^31.
#pragma once

#include "products.h"

#ifdef LPR_HAS_TILES
#define LPR_WIDE_PAIRS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512vnni")))

namespace lpr {

constexpr float kMostLevels = 32767.0f;           // of a row's values
constexpr int64_t kAloneRounding = 1 << 15;  // values that one thread rounds
static_assert(kSummed * 32767 * 127 < (int64_t{1} << 31), "a sum fits");

inline int64_t num_blocks(int64_t inputs) { return (inputs + kSummed - 1) / kSummed; }

// Rounds up to kSummed values, a multiple of 16 of which lie at `from`; returns their scale, NaN if one is not finite.
// In vectors of 8: of wider ones GCC makes comparisons one by one with AVX2.
LPR_CLONES inline float round_values(const float* from, int64_t count, int16_t* to) {
  using V = HalfLanes;
  constexpr int kWidth = Vector<V>::kWidth;
  V most = {}, nothing = {};
  for (int64_t i = 0; i < count; i += kWidth) {
    V value;
    load(value, from + i);
    nothing += value * 0.0f;
    value = value < 0.0f ? -value : value;
    most = value > most ? value : most;
  }
  float largest = 0.0f;
  for (int i = 0; i < kWidth; i++) largest = std::max(largest, most[i]);
  float scale = largest / kMostLevels + sum_of(nothing), factor = largest > 0.0f ? kMostLevels / largest : 0.0f;
  const V magic = V{} + 12582912.0f;  // 1.5 * 2^23: sums end with the nearest integer
  for (int64_t i = 0; i < count; i += kWidth) {
    V value;
    load(value, from + i);
    value = value * factor + magic;
    Vector<V>::Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Vector<V>::Halves halves = __builtin_convertvector(bits, Vector<V>::Halves);  // the low ones, two's complement
    std::memcpy(to + i, &halves, sizeof(halves));
  }
  return scale;
}

// Rounds row `row` of a product to `to` [padded inputs], with a scale for each block.
inline void round_row(const Product& product, int64_t row, int16_t* to, float* scales) {
  for (int64_t start = 0; start < product.inputs; start += kSummed) {
    int64_t count = std::min(kSummed, product.inputs - start), whole = (count + kLanes - 1) / kLanes * kLanes;
    alignas(64) float values[kSummed];
    alignas(64) int16_t levels[kSummed];
    int64_t first = row * product.inputs + start;
    if (product.has_half_rows)
      widen_values(reinterpret_cast<const BFloat*>(product.given) + first, count, values);
    else
      std::memcpy(values, reinterpret_cast<const float*>(product.given) + first, static_cast<size_t>(count) * sizeof(float));
    std::fill(values + count, values + whole, 0.0f);
    *scales++ = round_values(values, whole, levels);
    std::memcpy(to + start, levels, static_cast<size_t>(std::min(padded_inputs(count), kSummed)) * sizeof(int16_t));
  }
}

// Two values of a row.
LPR_INLINE int32_t pair_at(const int16_t* values) {
  int32_t pair;
  std::memcpy(&pair, values, sizeof(pair));
  return pair;
}

// Sums of few rows are kept for each second pair of inputs apart: each waits for the one before it.
constexpr int sums_apart(int rows) { return rows <= 6 ? 2 : 1; }

// 16 pairs of weights.
LPR_WIDE_PAIRS LPR_INLINE __m512i wide_weights_of(const char* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Adds products of pairs. As an intrinsic GCC 12 copies sums between registers and memory in each step.
LPR_WIDE_PAIRS LPR_INLINE __m512i add_pairs(__m512i sum, __m512i weights, __m512i values) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(values));
  return sum;
}

// Multiplies R rows of `product`, whose `given` is rounded, by the panel `weights` of outputs from `first` on.
template <int R>
LPR_WIDE_PAIRS void wide_low_bit_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  constexpr int kApart = sums_apart(R);
  int64_t stride = padded_inputs(product.inputs), blocks = num_blocks(product.inputs), outputs = product.outputs;
  const int16_t* given = reinterpret_cast<const int16_t*>(product.given) + row * stride;
  const float* scales = product.given_scales + row * blocks;
  if (!ahead.next) ahead = {weights + kAhead * kStepBytes, kStepBytes};
  __m512 totals[R][2];
  for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
  for (int64_t start = 0; start < stride; start += kSummed, scales++) {
    __m512i sums[kApart][R][2];
    for (int i = 0; i < kApart; i++)
      for (int r = 0; r < R; r++) sums[i][r][0] = sums[i][r][1] = _mm512_setzero_si512();
    for (int64_t k = start; k < std::min(stride, start + kSummed); k += 4) {
      ahead.fetch();
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++, weights += 64) {
        __m512i low = wide_weights_of(weights), high = wide_weights_of(weights + 32);
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
          __m512i values = _mm512_set1_epi32(pair_at(given + r * stride + k + 2 * i));
          sums[i % kApart][r][0] = add_pairs(sums[i % kApart][r][0], low, values);
          sums[i % kApart][r][1] = add_pairs(sums[i % kApart][r][1], high, values);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) {
        __m512i sum = sums[0][r][half];
        if (kApart > 1) sum = _mm512_add_epi32(sum, sums[kApart - 1][r][half]);
        totals[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scales[r * blocks]), totals[r][half]);
      }
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  for (int half = 0; half < 2; half++) {
    int64_t at = first + 16 * half;
    __m512 scale = _mm512_maskz_loadu_ps(masks[half], product.scales + at);
    __m512 bias = product.bias ? _mm512_maskz_loadu_ps(masks[half], product.bias + at) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++)
      write_wide(product, _mm512_fmadd_ps(totals[r][half], scale, bias), (row + r) * outputs + at, masks[half]);
  }
}

// Up to two rows take the whole panel at once, more one half of its outputs after the other.
template <int R>
LPR_NARROW void narrow_low_bit_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  constexpr int kVectors = R <= 2 ? 4 : 2, kPasses = 4 / kVectors;
  constexpr int64_t kBlockBytes = kSummed / 4 * kStepBytes;
  int64_t stride = padded_inputs(product.inputs), blocks = num_blocks(product.inputs), outputs = product.outputs;
  const int16_t* given = reinterpret_cast<const int16_t*>(product.given) + row * stride;
  const float* scales = product.given_scales + row * blocks;
  if (!ahead.next) ahead = {weights + (kPasses > 1 ? kBlockBytes : kAhead * kStepBytes), kStepBytes};
  ahead.stride /= kPasses;
  alignas(64) float totals[R][kPanel] = {};
  for (int64_t start = 0; start < stride; start += kSummed, weights += kBlockBytes, scales++) {
    for (int v = 0; v < 4; v += kVectors) {
      const char* step = weights + v * 16;
      __m256i sums[R][kVectors];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kVectors; i++) sums[r][i] = _mm256_setzero_si256();
      for (int64_t k = start; k < std::min(stride, start + kSummed); k += 4) {
        ahead.fetch();
#pragma GCC unroll 2
        for (int place = 0; place < 4; place += 2, step += 64) {
          __m256i columns[kVectors];
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; i++)
            columns[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(step) + i));
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) {
            __m256i values = _mm256_set1_epi32(pair_at(given + r * stride + k + place));
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i++)
              sums[r][i] = _mm256_add_epi32(sums[r][i], _mm256_madd_epi16(columns[i], values));
          }
        }
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kVectors; i++) {
          float* total = totals[r] + (v + i) * 8;
          __m256 scale = _mm256_set1_ps(scales[r * blocks]);
          _mm256_store_ps(total, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][i]), scale, _mm256_load_ps(total)));
        }
    }
  }
  int64_t width = std::min(kPanel, outputs - first);
  for (int r = 0; r < R; r++) {
    for (int64_t i = 0; i < width; i++)
      totals[r][i] = __builtin_fmaf(totals[r][i], product.scales[first + i], product.bias ? product.bias[first + i] : 0.0f);
    write_narrow(product, totals[r], (row + r) * outputs + first, width);
  }
}

constexpr Tile kWideLowBitTiles[] = {
    wide_low_bit_tile<1>,  wide_low_bit_tile<2>,  wide_low_bit_tile<3>,  wide_low_bit_tile<4>,  wide_low_bit_tile<5>,
    wide_low_bit_tile<6>,  wide_low_bit_tile<7>,  wide_low_bit_tile<8>,  wide_low_bit_tile<9>,  wide_low_bit_tile<10>,
    wide_low_bit_tile<11>, wide_low_bit_tile<12>, wide_low_bit_tile<13>, wide_low_bit_tile<14>};
constexpr Tile kNarrowLowBitTiles[] = {narrow_low_bit_tile<1>, narrow_low_bit_tile<2>, narrow_low_bit_tile<3>,
                                       narrow_low_bit_tile<4>, narrow_low_bit_tile<5>, narrow_low_bit_tile<6>};

inline bool multiplies_low_bits() { return has_wide_vectors() && __builtin_cpu_supports("avx512vnni"); }

inline TileSet low_bit_tiles() {
  if (multiplies_low_bits()) return {kWideLowBitTiles, kWideRows};
  return {kNarrowLowBitTiles, kNarrowRows};
}

// The product of weights [panels][inputs / 2][32][2] of 8 bits, with `inputs` padded to a multiple of 4.
inline void multiply_low_bits(Product product, int num_threads) {
  static thread_local Workspace memory;
  int64_t stride = padded_inputs(product.inputs), blocks = num_blocks(product.inputs), rows = product.rows;
  size_t level_bytes = (static_cast<size_t>(rows * stride) * sizeof(int16_t) + kCacheLine - 1) / kCacheLine * kCacheLine;
  char* begin = memory.at_least(level_bytes + static_cast<size_t>(rows * blocks) * sizeof(float));
  int16_t* levels = reinterpret_cast<int16_t*>(begin);
  float* scales = reinterpret_cast<float*>(begin + level_bytes);
  parallel_for(rows, rows * stride > kAloneRounding ? num_threads : 1, [&](int64_t row, int) {
    round_row(product, row, levels + row * stride, scales + row * blocks);
  });
  product.given = begin;
  product.given_scales = scales;
  multiply_in_tiles(product, low_bit_tiles(), num_threads);
}

}  // namespace lpr
#endif
