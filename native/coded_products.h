// Products of rows with the weights of low-bit checkpoints (lpr.model.low_bit.layers): codes of 8 or 4 bits, with a scale
// and perhaps a minimum for each group of an output's inputs.
//
// Codes are widened to floats in registers and rows stay floats, so a product differs from that of the widened weights by
// the order of its additions alone: a checkpoint is the model, and no rounding is added to its own. A row has the same
// bits for every number of rows and on every processor.
#pragma once

#include "products.h"

#ifdef LPR_HAS_TILES
#define LPR_NARROW_HALF __attribute__((target("avx2,fma,f16c")))

namespace lpr {

enum CodedKind { kInt8, kFp8, kInt4, kFp4 };

constexpr bool is_narrow_code(int kind) { return kind == kInt4 || kind == kFp4; }
constexpr int inputs_a_step(int kind) { return is_narrow_code(kind) ? 8 : 4; }  // whose codes are kStepBytes

// The sums of a row's segments: no group is cut, and no segment has more than kSummed inputs.
template <typename Visit>
LPR_INLINE void each_segment(const CodedForm& form, int64_t inputs, Visit visit) {
  int64_t padded = (inputs + 7) / 8 * 8, segment = 0;
  for (int64_t group = 0; group < form.num_groups; group++) {
    int64_t end = group + 1 == form.num_groups ? padded : (group + 1) * form.group;
    for (int64_t start = group * form.group; start < end; start += kSummed)
      visit(group, segment++, start, std::min(end, start + kSummed));
  }
}

inline int64_t num_segments(const CodedForm& form, int64_t inputs) {
  int64_t count = 0;
  each_segment(form, inputs, [&](int64_t, int64_t, int64_t, int64_t) { count++; });
  return count;
}

// The codes of a step, 32 outputs of each input, as floats.
template <int kKind>
struct WideCodes {
  __m512 table;
  __m512i words[2];

  LPR_WIDE LPR_INLINE explicit WideCodes(const CodedForm& form) : table(_mm512_loadu_ps(form.table)) {}
  LPR_WIDE LPR_INLINE void begin(const char* step) {
    if (!is_narrow_code(kKind)) return;
    words[0] = _mm512_loadu_si512(step);
    words[1] = _mm512_loadu_si512(step + 64);
  }
  LPR_WIDE LPR_INLINE void next(const char* step, int place, __m512 (&values)[2]) {
    if (is_narrow_code(kKind)) {
      for (int half = 0; half < 2; half++) {
        values[half] = _mm512_permutexvar_ps(words[half], table);  // by the lowest 4 bits
        words[half] = _mm512_srli_epi32(words[half], 4);
      }
      return;
    }
    __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + 32 * place));
    if (kKind == kInt8) {
      values[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
      values[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
      return;
    }
    // e4m3 has float16's form with a bit less of the exponent: the values are 2^-8 times what they mean.
    __m512i halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7), _mm512_set1_epi16(-0x4001));
    values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
};

template <int R, int kKind>
LPR_WIDE void wide_coded_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  const CodedForm& form = *product.coded();
  int64_t inputs = product.inputs, outputs = product.outputs, stride = (inputs + 7) / 8 * 8;
  const float* given = reinterpret_cast<const float*>(product.given) + row * stride;
  const float* scales = reinterpret_cast<const float*>(weights);
  const float* lows = scales + form.num_groups * kPanel;
  const char* step = weights + form.num_groups * kPanel * (form.has_low ? 2 : 1) * static_cast<int64_t>(sizeof(float));
  int64_t segments = form.has_low ? num_segments(form, inputs) : 0;
  if (!ahead.next) ahead = {step + kAhead * kStepBytes, kStepBytes};
  WideCodes<kKind> codes(form);
  __m512 totals[R][2];
  for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
  each_segment(form, inputs, [&](int64_t group, int64_t segment, int64_t start, int64_t end) LPR_WIDE {
    __m512 sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = start; k < end; k += inputs_a_step(kKind), step += kStepBytes) {
      ahead.fetch();
      codes.begin(step);
#pragma GCC unroll 8
      for (int place = 0; place < inputs_a_step(kKind); place++) {
        __m512 values[2];
        codes.next(step, place, values);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          __m512 value = _mm512_set1_ps(given[r * stride + k + place]);
          sums[r][0] = _mm512_fmadd_ps(value, values[0], sums[r][0]);
          sums[r][1] = _mm512_fmadd_ps(value, values[1], sums[r][1]);
        }
      }
    }
    for (int half = 0; half < 2; half++) {
      __m512 scale = _mm512_loadu_ps(scales + group * kPanel + 16 * half);
      if (kKind == kFp8) scale = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
      for (int r = 0; r < R; r++) totals[r][half] = _mm512_fmadd_ps(sums[r][half], scale, totals[r][half]);
      if (!form.has_low) continue;
      __m512 low = _mm512_loadu_ps(lows + group * kPanel + 16 * half);
      for (int r = 0; r < R; r++) {
        __m512 sum = _mm512_set1_ps(product.given_scales[(row + r) * segments + segment]);
        totals[r][half] = _mm512_fmadd_ps(sum, low, totals[r][half]);
      }
    }
  });
  __mmask16 masks[2];
  masks_of(outputs - first, masks);
  for (int half = 0; half < 2; half++) {
    int64_t at = first + 16 * half;
    __m512 bias = product.bias ? _mm512_maskz_loadu_ps(masks[half], product.bias + at) : _mm512_setzero_ps();
    for (int r = 0; r < R; r++)
      write_wide(product, _mm512_add_ps(totals[r][half], bias), (row + r) * outputs + at, masks[half]);
  }
}

// 8 outputs from `v * 8` on of input `place` of a step.
template <int kKind>
LPR_NARROW_HALF LPR_INLINE __m256 narrow_codes(const CodedForm& form, const char* step, int v, int place) {
  if (is_narrow_code(kKind)) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step) + v);
    __m256i index = _mm256_srli_epi32(words, 4 * place);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(form.table), index);  // by the lowest 3 bits
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(form.table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - 4 * place)));
  }
  __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(step + 32 * place + 8 * v));
  if (kKind == kInt8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(-0x4001)));
}

// Up to two rows take the whole panel at once, more one half of its outputs after the other.
template <int R, int kKind>
LPR_NARROW_HALF void narrow_coded_tile(const Product& product, const char* weights, int64_t row, int64_t first, Ahead ahead) {
  constexpr int kVectors = R <= 2 ? 4 : 2;
  const CodedForm& form = *product.coded();
  int64_t inputs = product.inputs, outputs = product.outputs, stride = (inputs + 7) / 8 * 8;
  const float* given = reinterpret_cast<const float*>(product.given) + row * stride;
  const float* scales = reinterpret_cast<const float*>(weights);
  const float* lows = scales + form.num_groups * kPanel;
  const char* codes = weights + form.num_groups * kPanel * (form.has_low ? 2 : 1) * static_cast<int64_t>(sizeof(float));
  int64_t segments = form.has_low ? num_segments(form, inputs) : 0;
  if (!ahead.next) ahead = {codes + kAhead * kStepBytes, kStepBytes};
  alignas(64) float totals[R][kPanel] = {};
  each_segment(form, inputs, [&](int64_t group, int64_t segment, int64_t start, int64_t end) LPR_NARROW_HALF {
    const char* begin = codes;
    for (int v = 0; v < 4; v += kVectors) {
      const char* step = begin;
      __m256 sums[R][kVectors];
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kVectors; i++) sums[r][i] = _mm256_setzero_ps();
      for (int64_t k = start; k < end; k += inputs_a_step(kKind), step += kStepBytes) {
        if (v == 0) ahead.fetch();
#pragma GCC unroll 8
        for (int place = 0; place < inputs_a_step(kKind); place++) {
          __m256 values[kVectors];
#pragma GCC unroll 4
          for (int i = 0; i < kVectors; i++) values[i] = narrow_codes<kKind>(form, step, v + i, place);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) {
            __m256 value = _mm256_set1_ps(given[r * stride + k + place]);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i++) sums[r][i] = _mm256_fmadd_ps(value, values[i], sums[r][i]);
          }
        }
      }
      codes = step;
      for (int i = 0; i < kVectors; i++) {
        int64_t at = group * kPanel + (v + i) * 8;
        __m256 scale = _mm256_loadu_ps(scales + at);
        if (kKind == kFp8) scale = _mm256_mul_ps(scale, _mm256_set1_ps(256.0f));
        for (int r = 0; r < R; r++) {
          float* total = totals[r] + (v + i) * 8;
          __m256 found = _mm256_fmadd_ps(sums[r][i], scale, _mm256_load_ps(total));
          if (form.has_low) {
            __m256 sum = _mm256_set1_ps(product.given_scales[(row + r) * segments + segment]);
            found = _mm256_fmadd_ps(sum, _mm256_loadu_ps(lows + at), found);
          }
          _mm256_store_ps(total, found);
        }
      }
    }
  });
  int64_t width = std::min(kPanel, outputs - first);
  for (int r = 0; r < R; r++) {
    for (int64_t i = 0; i < width; i++) totals[r][i] += product.bias ? product.bias[first + i] : 0.0f;
    write_narrow(product, totals[r], (row + r) * outputs + first, width);
  }
}

constexpr int kCodedRows = 12;  // 24 sums, a table, two words and two registers of their values, and one value of a row

template <int kKind>
constexpr Tile kWideCodedTiles[] = {
    wide_coded_tile<1, kKind>, wide_coded_tile<2, kKind>,  wide_coded_tile<3, kKind>,  wide_coded_tile<4, kKind>,
    wide_coded_tile<5, kKind>, wide_coded_tile<6, kKind>,  wide_coded_tile<7, kKind>,  wide_coded_tile<8, kKind>,
    wide_coded_tile<9, kKind>, wide_coded_tile<10, kKind>, wide_coded_tile<11, kKind>, wide_coded_tile<12, kKind>};
template <int kKind>
constexpr Tile kNarrowCodedTiles[] = {narrow_coded_tile<1, kKind>, narrow_coded_tile<2, kKind>,
                                      narrow_coded_tile<3, kKind>, narrow_coded_tile<4, kKind>,
                                      narrow_coded_tile<5, kKind>, narrow_coded_tile<6, kKind>};

template <int kKind>
inline TileSet coded_tiles_of() {
  if (has_wide_vectors()) return {kWideCodedTiles<kKind>, kCodedRows};
  return {kNarrowCodedTiles<kKind>, kNarrowRows};
}

inline TileSet coded_tiles(int64_t kind) {
  switch (kind) {
    case kInt8: return coded_tiles_of<kInt8>();
    case kFp8: return coded_tiles_of<kFp8>();
    default: return coded_tiles_of<kInt4>();  // fp4 differs in its table alone
  }
}

// Copies row `row` as floats, with zeros to a multiple of 8, and adds up its segments.
inline void widen_row(const Product& product, int64_t row, float* to, float* sums) {
  int64_t inputs = product.inputs, first = row * inputs;
  if (product.has_half_rows)
    widen_values(reinterpret_cast<const BFloat*>(product.given) + first, inputs, to);
  else
    std::memcpy(to, reinterpret_cast<const float*>(product.given) + first, static_cast<size_t>(inputs) * sizeof(float));
  std::fill(to + inputs, to + (inputs + 7) / 8 * 8, 0.0f);
  if (!sums) return;
  each_segment(*product.coded(), inputs, [&](int64_t, int64_t segment, int64_t start, int64_t end) {
    float parts[8] = {};
    for (int64_t k = start; k < end; k += 8)
      for (int i = 0; i < 8; i++) parts[i] += to[k + i];
    sums[segment] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
  });
}

// The product of weights whose panels are scales [groups][32], minima, if there are any, and codes: of 4 bits words of 8
// inputs, [inputs / 8][32], of 8 bits [inputs][32].
inline void multiply_coded(Product product, int num_threads) {
  static thread_local Workspace memory;
  const CodedForm& form = *product.coded();
  int64_t stride = (product.inputs + 7) / 8 * 8, rows = product.rows;
  int64_t segments = form.has_low ? num_segments(form, product.inputs) : 0;
  float* begin = reinterpret_cast<float*>(memory.at_least(static_cast<size_t>(rows * (stride + segments)) * sizeof(float)));
  float* sums = form.has_low ? begin + rows * stride : nullptr;
  parallel_for(rows, rows * stride > kSummed * 64 ? num_threads : 1, [&](int64_t row, int) {
    widen_row(product, row, begin + row * stride, sums ? sums + row * segments : nullptr);
  });
  product.given = reinterpret_cast<const char*>(begin);
  product.given_scales = sums;
  multiply_in_tiles(product, coded_tiles(form.kind), num_threads);
}

}  // namespace lpr
#endif
