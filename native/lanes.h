// Vectors of 16 floats, which a compiler makes of SSE, AVX2 or AVX-512 registers, and e^x on them.
//
// All functions are inlined into their callers: those of exact attention add as written, others may fuse.
#pragma once

#include <cstdint>
#include <cstring>

#define LPR_UNROLL _Pragma("GCC unroll 4")  // so that sums stay in registers
#define LPR_INLINE __attribute__((always_inline)) inline
#define LPR_LAMBDA_INLINE __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define LPR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LPR_CLONES
#endif

namespace lpr {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef float HalfLanes __attribute__((vector_size(32)));
typedef float QuarterLanes __attribute__((vector_size(16)));
typedef int32_t LaneWords __attribute__((vector_size(64)));
typedef int32_t HalfWords __attribute__((vector_size(32)));
typedef int32_t QuarterWords __attribute__((vector_size(16)));
typedef uint32_t LaneBits __attribute__((vector_size(64)));
typedef uint32_t HalfBits __attribute__((vector_size(32)));
typedef uint32_t QuarterBits __attribute__((vector_size(16)));
typedef uint16_t LaneHalves __attribute__((vector_size(32)));
typedef uint16_t HalfHalves __attribute__((vector_size(16)));
typedef uint16_t QuarterHalves __attribute__((vector_size(8)));

// A vector that the target's registers hold. Of a wider one the compiler keeps arrays in memory, and makes comparisons
// one by one.
template <class V> struct Vector;
template <> struct Vector<Lanes> {
  using Words = LaneWords;
  using Bits = LaneBits;
  using Halves = LaneHalves;  // bfloat16
  static constexpr int kWidth = 16;
  static constexpr Words kBits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
};
template <> struct Vector<HalfLanes> {
  using Words = HalfWords;
  using Bits = HalfBits;
  using Halves = HalfHalves;  // bfloat16
  static constexpr int kWidth = 8;
  static constexpr Words kBits = {1, 2, 4, 8, 16, 32, 64, 128};
};
template <> struct Vector<QuarterLanes> {
  using Words = QuarterWords;
  using Bits = QuarterBits;
  using Halves = QuarterHalves;  // bfloat16
  static constexpr int kWidth = 4;
  static constexpr Words kBits = {1, 2, 4, 8};
};

template <class V> LPR_INLINE void load(V& to, const float* from) { std::memcpy(&to, from, sizeof(to)); }

template <class V> LPR_INLINE void store(float* to, const V& from) { std::memcpy(to, &from, sizeof(from)); }

// The sums of each fourth lane.
LPR_INLINE void add_halves(const QuarterLanes& from, QuarterLanes& to) { to = from; }
LPR_INLINE void add_halves(const HalfLanes& from, QuarterLanes& to) {
  QuarterLanes high;
  std::memcpy(&to, &from, sizeof(to));
  std::memcpy(&high, reinterpret_cast<const char*>(&from) + sizeof(to), sizeof(high));
  to += high;
}
LPR_INLINE void add_halves(const Lanes& from, QuarterLanes& to) {
  HalfLanes low, high;
  std::memcpy(&low, &from, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&from) + sizeof(low), sizeof(high));
  low += high;
  add_halves(low, to);
}

// The sum of the lanes, halves upon halves.
template <class V>
LPR_INLINE float sum_of(const V& lanes) {
  QuarterLanes sums;
  add_halves(lanes, sums);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// e^x for x <= 0, within two units of the last place; 0 below -87 (Cephes' polynomial, Moshier).
template <class V>
LPR_INLINE void exponential(V& x) {
  using Words = typename Vector<V>::Words;
  const V low = V{} - 87.0f;
  Words is_small = x < low;
  V held = is_small ? low : x;
  V scaled = held * 1.44269504088896341f - 0.5f;
  Words whole = __builtin_convertvector(scaled, Words);  // towards zero: rounds to the nearest, as held <= 0
  V n = __builtin_convertvector(whole, V);
  V r = held - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Words power = (whole + 127) << 23;
  V factor;
  std::memcpy(&factor, &power, sizeof(factor));
  p = p * factor;
  Words is_nan = x != x;
  x = is_nan ? x : (is_small ? V{} : p);
}

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLowestPower = -100.0f;  // of two; results below the least normal number would be slow

// 2^x for x <= 100, within three units of the last place, but no less than 2^kLowestPower: faster than `exponential`, and
// exact enough for what is rounded to bfloat16. NaN stays.
LPR_INLINE void power_of_two(Lanes& x) {
  const Lanes low = Lanes{} + kLowestPower, magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: sums end with the nearest integer
  x = low > x ? low : x;
  Lanes sum = x + magic, r = x - (sum - magic);
  Lanes p = 0.0013276472f * r + 0.009675541f;
  p = p * r + 0.05550713f;
  p = p * r + 0.2402212f;
  p = p * r + 0.69314694f;
  p = p * r + 1.0f;
  LaneWords bits, shift;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&shift, &sum, sizeof(shift));
  bits += shift << 23;
  std::memcpy(&x, &bits, sizeof(x));
}

// A bfloat16: the upper half of a float.
struct BFloat {
  uint16_t bits;
};
template <class V>
LPR_INLINE void load(V& to, const BFloat* from) {
  typename Vector<V>::Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  typename Vector<V>::Bits wide = __builtin_convertvector(halves, typename Vector<V>::Bits) << 16;
  std::memcpy(&to, &wide, sizeof(to));
}

// The value in the upper half of each word: rounded to the nearest, of two equally near ones to the even one.
template <class V>
LPR_INLINE typename Vector<V>::Bits rounded(const V& value) {
  typename Vector<V>::Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  typename Vector<V>::Words is_nan = value != value;
  return is_nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
}

template <class V>
LPR_INLINE void store(BFloat* to, const V& from) {
  typename Vector<V>::Halves halves = __builtin_convertvector(rounded(from) >> 16, typename Vector<V>::Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

}  // namespace lpr
