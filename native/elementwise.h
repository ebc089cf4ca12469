// The parts of a decoder layer between its matrix products: RMS norms, rotary embedding, gated activations.
//
// Each row is computed by itself with the same operations, so its bits depend neither on the rows beside it nor on the
// number of threads. Values are float or bfloat16, which is rounded where the modules of transformers round.
#pragma once

#include "amx.h"
#include "attention.h"
#include "parallel.h"
#include "product_tiles.h"

namespace lpr {

template <class V> LPR_INLINE void round_to(const float*, V&) {}
template <class V>
LPR_INLINE void round_to(const BFloat*, V& value) {
  typename Vector<V>::Bits bits = rounded(value) & 0xffff0000;
  std::memcpy(&value, &bits, sizeof(value));
}

#ifdef LPR_HAS_AMX
// bfloat16 where a processor rounds to it by one instruction, which makes zeros of values below the least normal one.
struct UnitHalf {
  uint16_t bits;
};
LPR_INLINE void load(Lanes& to, const UnitHalf* from) { load(to, reinterpret_cast<const BFloat*>(from)); }
// By name: a function for this processor could not be inlined into those that are for any.
LPR_INLINE LaneHalves half_of(const Lanes& value) {
  LaneHalves halves;
  asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(value));
  return halves;
}
LPR_INLINE void store(UnitHalf* to, const Lanes& from) {
  LaneHalves halves = half_of(from);
  std::memcpy(to, &halves, sizeof(halves));
}
LPR_INLINE void round_to(const UnitHalf*, Lanes& value) {
  LaneBits wide = __builtin_convertvector(half_of(value), LaneBits) << 16;
  std::memcpy(&value, &wide, sizeof(value));
}
#endif

// Part of a row at `from`, of which `count` values are left; zeros behind its end.
template <class V, typename T>
LPR_INLINE void load_part(V& to, const T* from, int64_t count) {
  if (count >= Vector<V>::kWidth) return load(to, from);
  T padded[Vector<V>::kWidth] = {};
  std::memcpy(padded, from, count * sizeof(T));
  load(to, padded);
}

template <class V, typename T>
LPR_INLINE void store_part(T* to, const V& from, int64_t count) {
  if (count >= Vector<V>::kWidth) return store(to, from);
  T padded[Vector<V>::kWidth];
  store(padded, from);
  std::memcpy(to, padded, count * sizeof(T));
}

// `rows` x `groups` vectors of `width` values; vectors of a row lie side by side, rows are a stride apart.
struct Vectors {
  int64_t rows, groups, width;
};

// How an RMS norm applies its weight: T(x) * w, x * (1 + w) or x * w, the latter two in float.
enum class Weighing : int { kRounded, kOnePlus, kWide };

struct Norm {
  uintptr_t states, added, weight, out;  // with `added` (or 0), `states` is first replaced by its sum with it
  Vectors size;
  int64_t stride, out_stride;
  float epsilon;
  Weighing weighing;
};

template <class V, typename T>
LPR_INLINE void norm_vector(T* states, const T* added, const T* weight, T* out, int64_t width, const Norm& norm) {
  V value, other, sums[4] = {};
  for (int64_t i = 0, block = 0; i < width; i += Vector<V>::kWidth, block++) {
    load_part(value, states + i, width - i);
    if (added) {
      load_part(other, added + i, width - i);
      value += other;
      round_to(states, value);
      store_part(states + i, value, width - i);
    }
    sums[block & 3] += value * value;
  }
  float mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width);
  float factor = 1.0f / std::sqrt(mean + norm.epsilon);
  for (int64_t i = 0; i < width; i += Vector<V>::kWidth) {
    load_part(value, states + i, width - i);
    load_part(other, weight + i, width - i);
    value *= factor;
    if (norm.weighing == Weighing::kRounded) round_to(states, value);
    if (norm.weighing == Weighing::kOnePlus) other += 1.0f;
    value *= other;
    store_part(out + i, value, width - i);
  }
}

template <class V, typename T>
LPR_INLINE void compute_rows(const Norm& norm, int64_t first, int64_t last) {
  const Vectors& size = norm.size;
  for (int64_t row = first; row < last; row++)
    for (int64_t group = 0; group < size.groups; group++) {
      int64_t from = row * norm.stride + group * size.width, to = row * norm.out_stride + group * size.width;
      const T* added = norm.added ? reinterpret_cast<const T*>(norm.added) + from : nullptr;
      norm_vector<V>(reinterpret_cast<T*>(norm.states) + from, added, reinterpret_cast<const T*>(norm.weight),
                  reinterpret_cast<T*>(norm.out) + to, size.width, norm);
    }
}

struct Rotation {
  uintptr_t states, cosines, sines;  // heads of `width`, in place; [rows, width] each
  Vectors size;
  int64_t stride;
};

// As `x * cos + rotate_half(x) * sin`.
template <class V, typename T>
LPR_INLINE void compute_rows(const Rotation& turn, int64_t first, int64_t last) {
  int64_t width = turn.size.width, half = width / 2;
  for (int64_t row = first; row < last; row++) {
    const T* cosines = reinterpret_cast<const T*>(turn.cosines) + row * width;
    const T* sines = reinterpret_cast<const T*>(turn.sines) + row * width;
    for (int64_t head = 0; head < turn.size.groups; head++) {
      T* low = reinterpret_cast<T*>(turn.states) + row * turn.stride + head * width;
      T* high = low + half;
      for (int64_t i = 0; i < half; i += Vector<V>::kWidth) {
        V a, b, cosine, sine, first_half, second_half, part;
        int64_t left = half - i;
        load_part(a, low + i, left);
        load_part(b, high + i, left);
        load_part(cosine, cosines + i, left);
        load_part(sine, sines + i, left);
        first_half = a * cosine;
        round_to(low, first_half);
        part = -b * sine;
        round_to(low, part);
        first_half += part;
        load_part(cosine, cosines + half + i, left);
        load_part(sine, sines + half + i, left);
        second_half = b * cosine;
        round_to(low, second_half);
        part = a * sine;
        round_to(low, part);
        second_half += part;
        store_part(low + i, first_half, left);
        store_part(high + i, second_half, left);
      }
    }
  }
}

enum class Activation : int { kSilu, kGeluTanh };

struct Gate {
  uintptr_t states, out;  // [rows, 2 * width]: gates, then values; [rows, width]
  Vectors size;
  Activation activation;
};

template <class V>
LPR_INLINE V slope_of(const V& x, Activation activation) {
  return activation == Activation::kSilu ? x : (x + x * x * x * 0.044715f) * 1.5957691216057308f;
}

// x * sigmoid(slope(x)): SiLU has x itself, GELU in its tanh form 2 * sqrt(2 / pi) * (x + 0.044715 x^3).
template <class V, typename T>
LPR_INLINE void activate(const T*, V& x, Activation activation) {
  V slope = slope_of(x, activation);
  V fall = slope < 0.0f ? slope : -slope;
  exponential(fall);
  V above = 1.0f / (fall + 1.0f);
  x *= slope < 0.0f ? fall * above : above;
}

#ifdef LPR_HAS_AMX
// The same by one division, exact enough for a bfloat16: x / (1 + 2^(-slope * log2(e))).
LPR_INLINE void activate(const UnitHalf*, Lanes& x, Activation activation) {
  Lanes rise = slope_of(x, activation) * -kLog2E;
  rise = rise > -kLowestPower ? Lanes{} - kLowestPower : rise;
  power_of_two(rise);
  x /= rise + 1.0f;
}
#endif

template <class V, typename T>
LPR_INLINE void compute_rows(const Gate& gate, int64_t first, int64_t last) {
  int64_t width = gate.size.width;
  for (int64_t row = first; row < last; row++) {
    const T* gates = reinterpret_cast<const T*>(gate.states) + row * 2 * width;
    T* out = reinterpret_cast<T*>(gate.out) + row * width;
    for (int64_t i = 0; i < width; i += Vector<V>::kWidth) {
      V value, other;
      load_part(value, gates + i, width - i);
      load_part(other, gates + width + i, width - i);
      activate(out, value, gate.activation);
      round_to(out, value);
      value *= other;
      store_part(out + i, value, width - i);
    }
  }
}

struct Sum {
  uintptr_t states, added;  // [rows, width]; the sum takes the place of the first
  Vectors size;
};

template <class V, typename T>
LPR_INLINE void compute_rows(const Sum& sum, int64_t first, int64_t last) {
  int64_t end = last * sum.size.width;
  T* states = reinterpret_cast<T*>(sum.states);
  const T* added = reinterpret_cast<const T*>(sum.added);
  for (int64_t i = first * sum.size.width; i < end; i += Vector<V>::kWidth) {
    V value, other;
    load_part(value, states + i, end - i);
    load_part(other, added + i, end - i);
    value += other;
    store_part(states + i, value, end - i);
  }
}

// With the registers of each processor; `is_half` chooses bfloat16.
template <class V, typename Part>
LPR_INLINE void compute_part(const Part& part, bool is_half, int64_t first, int64_t last) {
  is_half ? compute_rows<V, BFloat>(part, first, last) : compute_rows<V, float>(part, first, last);
}
template <typename Part>
void run_rows(const Part& part, bool is_half, int64_t first, int64_t last) {
  compute_part<QuarterLanes>(part, is_half, first, last);
}
#ifdef LPR_HAS_TILES
template <typename Part>
LPR_NARROW void run_rows_narrow(const Part& part, bool is_half, int64_t first, int64_t last) {
  compute_part<HalfLanes>(part, is_half, first, last);
}
template <typename Part>
LPR_WIDE void run_rows_wide(const Part& part, bool is_half, int64_t first, int64_t last) {
  compute_part<Lanes>(part, is_half, first, last);
}
#endif

#ifdef LPR_HAS_AMX
template <typename Part>
LPR_AMX inline void run_half_rows(const Part& part, int64_t first, int64_t last) {
  compute_rows<Lanes, UnitHalf>(part, first, last);
}
#endif

constexpr int64_t kValuesPerItem = 1 << 13;  // a few us of work: a smaller part is not worth a second thread

// Computes a part on up to `num_threads` threads.
template <typename Part>
void run_part(const Part& part, bool is_half, int num_threads) {
  int64_t rows = part.size.rows, width = part.size.groups * part.size.width;
  int64_t rows_per_item = std::max<int64_t>(1, kValuesPerItem / std::max<int64_t>(1, width));
  int64_t items = (rows + rows_per_item - 1) / rows_per_item;
  parallel_for(items, num_threads, [&](int64_t item, int) {
    int64_t first = item * rows_per_item, last = std::min(rows, first + rows_per_item);
#ifdef LPR_HAS_AMX
    if (is_half && can_use_amx()) return run_half_rows(part, first, last);
#endif
#ifdef LPR_HAS_TILES
    if (has_wide_vectors()) return run_rows_wide(part, is_half, first, last);
    if (can_tile()) return run_rows_narrow(part, is_half, first, last);
#endif
    run_rows(part, is_half, first, last);
  });
}

}  // namespace lpr
