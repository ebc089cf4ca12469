// The innermost part of matrix products (products.h): a few rows times one panel of weights, with AVX-512 or with AVX2.
//
// Both multiply and add by one instruction, in the same order, so a float has the same bits with either.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define LPR_HAS_TILES 1
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#define LPR_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define LPR_WIDE_HALF __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))
#define LPR_NARROW __attribute__((target("avx2,fma")))

namespace lpr {

constexpr int64_t kPanel = 32;       // outputs
constexpr int kWideRows = 14;        // most rows of a tile: 28 sums, two registers of weights and one value of a row
constexpr int kNarrowRows = 6;       // 12 sums of 16 outputs, two registers of weights and one value of a row
constexpr int64_t kStepBytes = 128;  // of weights that a step multiplies: 32 floats, or pairs of 32 bfloat16
constexpr int64_t kAhead = 64;       // steps that weights are fetched ahead
constexpr int64_t kSummed = 512;     // inputs of a sum: in one of many thousands, errors add up

// How low-bit weights lie: with zeros behind the inputs to a multiple of 4, or with 4 bits in groups.
constexpr int64_t kGroup = 32;  // inputs
constexpr int64_t kGroupFactBytes = 4 * kPanel;
constexpr int64_t kGroupBytes = kGroupFactBytes + kPanel * kGroup / 2;
inline int64_t padded_inputs(int64_t inputs) { return (inputs + 3) / 4 * 4; }
inline int64_t num_groups(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// How the weights of a low-bit checkpoint lie (coded_products.h); `bits` of a product with them is 1.
struct CodedForm {
  int64_t kind, group, num_groups, has_low, panel_bytes;
  float table[16];  // of codes of 4 bits
};

struct Product {
  const char* packed;  // weights: float [panels][inputs][32], or bfloat16 [panels][inputs / 2][32][2]
  const float* bias;   // or null
  const char* given;   // [rows, inputs]
  char* out;           // [rows, outputs]
  int64_t rows, outputs, inputs;
  bool has_half_weights, has_half_rows;  // bfloat16; `given` and `out` have one type
  int bits = 0;                          // of low-bit weights (low_bit_products.h, int4_products.h), 8 or 4; 1: codes
  const float* scales = nullptr;         // of weights of 8 bits, one per output
  const float* given_scales = nullptr;   // of rows that are rounded to go with them
  const int32_t* panels = nullptr;       // the only ones that are multiplied, or null
  int64_t num_panels = 0;

  const CodedForm* coded() const { return reinterpret_cast<const CodedForm*>(scales); }
  int64_t panel_bytes() const {
    if (bits == 1) return coded()->panel_bytes;
    if (bits == 8) return kPanel * padded_inputs(inputs);
    return bits == 4 ? num_groups(inputs) * kGroupBytes : kPanel * inputs * (has_half_weights ? 2 : 4);
  }
};

// What a tile fetches while it multiplies, two lines of 64 bytes a step: another panel from `next` on, or, without one,
// its own weights.
struct Ahead {
  const char* next;
  int64_t stride;  // bytes a step
  LPR_INLINE void fetch() {
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + 64, _MM_HINT_T0);
    next += stride;
  }
};

// Multiplies the rows from `row` on by the panel `weights` of outputs from `first` on.
using Tile = void (*)(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead);

LPR_WIDE inline void masks_of(int64_t width, __mmask16 masks[2]) {
  masks[0] = static_cast<__mmask16>(width >= 16 ? 0xffff : (1u << width) - 1);
  masks[1] = static_cast<__mmask16>(width >= 32 ? 0xffff : width <= 16 ? 0 : (1u << (width - 16)) - 1);
}

// Writes 16 outputs from value `at` of the result on.
LPR_WIDE inline void write_wide(const Product& product, __m512 outputs, int64_t at, __mmask16 mask) {
  if (product.has_half_rows) {
    __m256i halves = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(rounded(reinterpret_cast<Lanes>(outputs)) >> 16));
    _mm256_mask_storeu_epi16(reinterpret_cast<BFloat*>(product.out) + at, mask, halves);
  } else {
    _mm512_mask_storeu_ps(reinterpret_cast<float*>(product.out) + at, mask, outputs);
  }
}

template <int R>
LPR_WIDE inline void add_to(__m512 (&totals)[R][2], const __m512 (&sums)[R][2], bool is_first) {
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++)
      totals[r][half] = is_first ? sums[r][half] : _mm512_add_ps(totals[r][half], sums[r][half]);
}

// 16 weights of input `place` of a step.
template <bool kHasHalves>
LPR_WIDE inline __m512 wide_weights(const char* step, int place) {
  if (!kHasHalves) return _mm512_loadu_ps(step);
  __m512i pairs = _mm512_loadu_si512(step);
  return _mm512_castsi512_ps(place ? _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(pairs, 16));
}

template <int R, bool kHasHalves>
LPR_WIDE void wide_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  constexpr int kTogether = kHasHalves ? 2 : 1;
  int64_t inputs = product.inputs, outputs = product.outputs;
  const float* given = reinterpret_cast<const float*>(product.given) + row * inputs;
  if (!ahead.next) ahead = {weights + kAhead * kStepBytes, kStepBytes};
  __m512 totals[R][2];
  for (int64_t start = 0; start < inputs; start += kSummed) {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = start; k < std::min(inputs, start + kSummed); k += kTogether, weights += kStepBytes) {
      ahead.fetch();
#pragma GCC unroll 2
      for (int place = 0; place < kTogether; place++) {
        __m512 low = wide_weights<kHasHalves>(weights, place), high = wide_weights<kHasHalves>(weights + 64, place);
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
          __m512 value = _mm512_set1_ps(given[r * inputs + k + place]);
          sums[r][0] = _mm512_fmadd_ps(value, low, sums[r][0]);
          sums[r][1] = _mm512_fmadd_ps(value, high, sums[r][1]);
        }
      }
    }
    add_to<R>(totals, sums, start == 0);
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  for (int half = 0; half < 2; half++) {
    const float* from = product.bias ? product.bias + first + 16 * half : nullptr;
    __m512 bias = from ? _mm512_maskz_loadu_ps(masks[half], from) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++) {
      int64_t at = (row + r) * outputs + first + 16 * half;
      write_wide(product, from ? _mm512_add_ps(totals[r][half], bias) : totals[r][half], at, masks[half]);
    }
  }
}

// By the instruction that multiplies pairs of bfloat16.
template <int R>
LPR_WIDE_HALF void pairs_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  int64_t inputs = product.inputs, outputs = product.outputs;
  const uint16_t* given = reinterpret_cast<const uint16_t*>(product.given) + row * inputs;
  if (!ahead.next) ahead = {weights + kAhead * kStepBytes, kStepBytes};
  __m512 totals[R][2];
  for (int64_t start = 0; start < inputs; start += kSummed) {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = start; k < std::min(inputs, start + kSummed); k += 2, weights += kStepBytes) {
      __m512bh low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights));
      __m512bh high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + 64));
      ahead.fetch();
#pragma GCC unroll 14
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, given + r * inputs + k, sizeof(pair));
        __m512bh values = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], values, low);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], values, high);
      }
    }
    add_to<R>(totals, sums, start == 0);
  }
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  uint16_t* out = reinterpret_cast<uint16_t*>(product.out) + row * outputs + first;
  for (int half = 0; half < 2; half++) {
    const float* from = product.bias ? product.bias + first + 16 * half : nullptr;
    __m512 bias = from ? _mm512_maskz_loadu_ps(masks[half], from) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++) {
      __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(totals[r][half], bias)));
      _mm256_mask_storeu_epi16(out + r * outputs + 16 * half, masks[half], rounded);
    }
  }
}

// Writes `width` of 32 outputs from value `at` of the result on.
LPR_NARROW inline void write_narrow(const Product& product, const float* outputs, int64_t at, int64_t width) {
  if (!product.has_half_rows) {
    std::memcpy(reinterpret_cast<float*>(product.out) + at, outputs, static_cast<size_t>(width) * sizeof(float));
    return;
  }
  BFloat halves[kPanel];
  for (int i = 0; i < kPanel; i += kLanes) {
    Lanes sum;
    load(sum, outputs + i);
    store(halves + i, sum);
  }
  std::memcpy(reinterpret_cast<BFloat*>(product.out) + at, halves, static_cast<size_t>(width) * sizeof(BFloat));
}

// 8 weights of input `place` of a step.
template <bool kHasHalves>
LPR_NARROW inline __m256 narrow_weights(const char* step, int place) {
  if (!kHasHalves) return _mm256_loadu_ps(reinterpret_cast<const float*>(step));
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step));
  return _mm256_castsi256_ps(place ? _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)) : _mm256_slli_epi32(pairs, 16));
}

// Up to two rows take the whole panel at once, more one half of its outputs after the other.
template <int R, bool kHasHalves>
LPR_NARROW void narrow_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  constexpr int kTogether = kHasHalves ? 2 : 1, kVectors = R <= 2 ? 4 : 2, kPasses = 4 / kVectors;
  constexpr int64_t kBlockBytes = kSummed / kTogether * kStepBytes;
  int64_t inputs = product.inputs, outputs = product.outputs, width = std::min(kPanel, outputs - first);
  const float* given = reinterpret_cast<const float*>(product.given) + row * inputs;
  if (!ahead.next) ahead = {weights + (kPasses > 1 ? kBlockBytes : kAhead * kStepBytes), kStepBytes};
  ahead.stride /= kPasses;
  alignas(64) float totals[R][kPanel];
  for (int64_t start = 0; start < inputs; start += kSummed, weights += kBlockBytes) {
    int64_t end = std::min(inputs, start + kSummed);
    for (int v = 0; v < 4; v += kVectors) {
      const char* step = weights + v * 32;
      __m256 sums[R][kVectors];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kVectors; i++) sums[r][i] = _mm256_setzero_ps();
      for (int64_t k = start; k < end; k += kTogether, step += kStepBytes) {
        ahead.fetch();
#pragma GCC unroll 2
        for (int place = 0; place < kTogether; place++) {
          __m256 columns[kVectors];
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; i++) columns[i] = narrow_weights<kHasHalves>(step + 32 * i, place);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) {
            __m256 value = _mm256_broadcast_ss(given + r * inputs + k + place);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i++) sums[r][i] = _mm256_fmadd_ps(value, columns[i], sums[r][i]);
          }
        }
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kVectors; i++) {
          float* total = totals[r] + (v + i) * 8;
          _mm256_store_ps(total, start ? _mm256_add_ps(_mm256_load_ps(total), sums[r][i]) : sums[r][i]);
        }
    }
  }
  for (int r = 0; r < R; r++) {
    if (product.bias)
      for (int64_t i = 0; i < width; i++) totals[r][i] += product.bias[first + i];
    write_narrow(product, totals[r], (row + r) * outputs + first, width);
  }
}

constexpr Tile kPairsTiles[] = {pairs_tile<1>, pairs_tile<2>,  pairs_tile<3>,  pairs_tile<4>,  pairs_tile<5>,
                                pairs_tile<6>, pairs_tile<7>,  pairs_tile<8>,  pairs_tile<9>,  pairs_tile<10>,
                                pairs_tile<11>, pairs_tile<12>, pairs_tile<13>, pairs_tile<14>};
template <bool kHasHalves>
constexpr Tile kWideTiles[] = {wide_tile<1, kHasHalves>,  wide_tile<2, kHasHalves>,  wide_tile<3, kHasHalves>,
                               wide_tile<4, kHasHalves>,  wide_tile<5, kHasHalves>,  wide_tile<6, kHasHalves>,
                               wide_tile<7, kHasHalves>,  wide_tile<8, kHasHalves>,  wide_tile<9, kHasHalves>,
                               wide_tile<10, kHasHalves>, wide_tile<11, kHasHalves>, wide_tile<12, kHasHalves>,
                               wide_tile<13, kHasHalves>, wide_tile<14, kHasHalves>};
template <bool kHasHalves>
constexpr Tile kNarrowTiles[] = {narrow_tile<1, kHasHalves>, narrow_tile<2, kHasHalves>, narrow_tile<3, kHasHalves>,
                                 narrow_tile<4, kHasHalves>, narrow_tile<5, kHasHalves>, narrow_tile<6, kHasHalves>};

inline std::atomic<bool> is_narrow{false};  // true: as on a processor without AVX-512, for tests

inline bool has_wide_vectors() {
  return !is_narrow.load(std::memory_order_relaxed) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
inline bool multiplies_pairs() { return has_wide_vectors() && __builtin_cpu_supports("avx512bf16"); }
inline bool can_tile() {
  return has_wide_vectors() || (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
}

// The tiles of 1, 2, ... `most_rows` rows.
struct TileSet {
  const Tile* tiles;
  int most_rows;
};

inline TileSet pairs_tiles() { return {kPairsTiles, kWideRows}; }

inline TileSet float_tiles(bool has_half_weights) {
  if (has_wide_vectors()) return {has_half_weights ? kWideTiles<true> : kWideTiles<false>, kWideRows};
  return {has_half_weights ? kNarrowTiles<true> : kNarrowTiles<false>, kNarrowRows};
}

}  // namespace lpr
#endif
