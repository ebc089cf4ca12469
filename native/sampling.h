// Which token a row of logits gives: noise by a hash, a running maximum, limits without a sort.
//
// The specification is lpr.model.sampling.specification.pick. What a row allows is a prefix of its tokens in the order (score
// descending, id ascending), whatever its limits are; so the best total of all is looked for, and if the limits refuse
// its token, they refuse all behind it, and the search goes on among those before it. The specification's logarithms are
// not computed here: where two totals are so close that rounding decides between them, or a sum so close to a limit, the
// row is said to be in doubt, and the caller asks the specification.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define LPR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LPR_EACH_CPU
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses a call
#define LPR_INLINE inline __attribute__((always_inline))

namespace lpr {

constexpr int LANES = 8;  // a register of AVX2; of a wider vector GCC makes comparisons one by one there
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words32 __attribute__((vector_size(4 * LANES)));

constexpr int64_t BLOCK = 256;                     // tokens whose largest score is known; a multiple of LANES
constexpr float MOST_NOISE = 22.9f;                // no noise is above: lpr.model.sampling.specification.LARGEST_NOISE
constexpr double NEAR = 1e-5, NEAR_PART = 1e-6;    // totals this close, absolutely and as a part, are in doubt
constexpr double SUM_DOUBT = 1e-5, RATIO_DOUBT = 1e-9;
constexpr float FAR = 30.0f;  // a weight below exp(-30) = 1e-13 is none, of a million tokens as well
constexpr int64_t MOST_IN_HEAP = 1024;

struct Chooser {
  float temperature, top_p, min_p;
  uint32_t key;
  int64_t top_k;  // 0 is off
  uint32_t first_token;  // that of column 0: the logits may be a part of the vocabulary
};

struct Winner {
  int64_t token = -1;
  double total = -std::numeric_limits<double>::infinity();
  double second = -std::numeric_limits<double>::infinity();
};

// A row's scores over its temperature, padded with -inf to whole blocks, and the largest of every block.
struct Scores {
  std::vector<float> scaled, largest;
  int64_t size = 0;
  float top = 0;
  int64_t first = 0;  // the lowest id with the largest score
  bool broken = false;
};

// Rows of logits, float or bfloat16.
struct Logits {
  uintptr_t address;
  int64_t size, stride;  // tokens of a row; values from one row to the next
  bool is_half;

  const float* floats(int64_t row) const { return reinterpret_cast<const float*>(address) + row * stride; }
  const uint16_t* halves(int64_t row) const { return reinterpret_cast<const uint16_t*>(address) + row * stride; }
};

typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

LPR_INLINE bool any_of(Ints found) {
  uint64_t words[sizeof(Ints) / sizeof(uint64_t)], any = 0;
  std::memcpy(words, &found, sizeof found);
  for (uint64_t word : words) any |= word;
  return any != 0;
}

template <typename V>
LPR_INLINE V mixed(V x) {
  x ^= x >> 17;
  x *= 0xED5AD4BBu;
  x ^= x >> 11;
  x *= 0xAC4C1B51u;
  x ^= x >> 15;
  x *= 0x31848BABu;
  return x ^ (x >> 14);
}

LPR_INLINE Floats load(const float* at) {
  Floats found;
  std::memcpy(&found, at, sizeof found);
  return found;
}

template <typename To, typename From>
LPR_INLINE To as(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "the same bits");
  std::memcpy(&to, &from, sizeof to);
  return to;
}

LPR_INLINE Floats load(const uint16_t* at) {
  Halves found;
  std::memcpy(&found, at, sizeof found);
  return as<Floats>(__builtin_convertvector(found, Words32) << 16);
}

// lpr.model.sampling.specification.gumbel up to a few units in its last place.
inline double noise_of(uint32_t key, uint32_t token) {
  uint32_t bits = mixed<uint32_t>(mixed<uint32_t>(token ^ key) ^ (key * 0x85EBCA6Bu));
  float uniform = (static_cast<float>(bits) + 0.5f) * 2.3283064365386963e-10f;  // 2^-32
  uniform = std::min(uniform, 0.999999940395355224609375f);                     // 1 - 2^-24
  return -std::log(-std::log1p(-static_cast<double>(uniform)));
}

LPR_INLINE float lowest(const float*) { return -std::numeric_limits<float>::infinity(); }
LPR_INLINE uint16_t lowest(const uint16_t*) { return 0xff80; }  // the same in bfloat16

template <typename T>
LPR_INLINE void scale_row(const T* logits, int64_t size, float temperature, Scores& to) {
  const float least = -std::numeric_limits<float>::infinity();
  int64_t blocks = (size + BLOCK - 1) / BLOCK;
  to.size = size;
  to.scaled.resize(blocks * BLOCK);
  to.largest.resize(blocks);
  float* out = to.scaled.data();
  Ints odd = {};
  Floats divisor = temperature - Floats{};
  T padded[BLOCK];
  for (int64_t block = 0; block < blocks; block++) {
    const T* from = logits + block * BLOCK;
    if ((block + 1) * BLOCK > size) {
      std::fill(padded, padded + BLOCK, lowest(logits));
      std::memcpy(padded, from, (size - block * BLOCK) * sizeof(T));
      from = padded;
    }
    Floats most = least - Floats{};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      Floats score = load(from + i) / divisor;
      odd |= score != score;
      most = score > most ? score : most;
      std::memcpy(out + block * BLOCK + i, &score, sizeof score);
    }
    float largest = least;
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    to.largest[block] = largest;
  }
  to.broken = any_of(odd);
  auto best = std::max_element(to.largest.begin(), to.largest.end());
  to.top = *best;
  const float* begin = out + (best - to.largest.begin()) * BLOCK;
  to.first = std::find(begin, begin + BLOCK, to.top) - out;
}

LPR_EACH_CPU inline void scale_floats(const float* row, int64_t size, float temperature, Scores& to) {
  scale_row(row, size, temperature, to);
}

LPR_EACH_CPU inline void scale_halves(const uint16_t* row, int64_t size, float temperature, Scores& to) {
  scale_row(row, size, temperature, to);
}

inline void scale(const Logits& logits, int64_t row, float temperature, Scores& to) {
  if (logits.is_half)
    scale_halves(logits.halves(row), logits.size, temperature, to);
  else
    scale_floats(logits.floats(row), logits.size, temperature, to);
}

template <typename T>
LPR_INLINE int64_t best_of(const T* row, int64_t size) {
  Floats most = -std::numeric_limits<float>::infinity() - Floats{};
  Ints odd = {};
  T padded[LANES];
  auto part = [&](int64_t from) {
    if (from + LANES <= size) return load(row + from);
    std::fill(padded, padded + LANES, lowest(row));
    std::memcpy(padded, row + from, (size - from) * sizeof(T));
    return load(padded);
  };
  for (int64_t i = 0; i < size; i += LANES) {
    Floats score = part(i);
    odd |= score != score;
    most = score > most ? score : most;
  }
  if (any_of(odd)) return -1;
  float largest = most[0];
  for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, most[lane]);
  if (largest == -std::numeric_limits<float>::infinity()) return -1;
  for (int64_t i = 0;; i += LANES) {
    Ints same = part(i) == largest;
    if (!any_of(same)) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (same[lane]) return i + lane;
  }
}

LPR_EACH_CPU inline int64_t best_of_floats(const float* row, int64_t size) { return best_of(row, size); }
LPR_EACH_CPU inline int64_t best_of_halves(const uint16_t* row, int64_t size) { return best_of(row, size); }

// The lowest token with the largest score; -1 in a row with a NaN, or of -inf alone.
inline int64_t best_of_row(const Logits& logits, int64_t row) {
  return logits.is_half ? best_of_halves(logits.halves(row), logits.size) : best_of_floats(logits.floats(row), logits.size);
}

// What the noise of some tokens does not exceed; `folded` is the key times 0x85EBCA6B.
LPR_INLINE Floats most_noise(Words32 tokens, uint32_t key, Words32 folded) {
  constexpr float LN2 = 0.69314718f;
  Words32 bits = mixed(mixed(tokens ^ key) ^ folded);
  // No noise exceeds -log((bits + 1/2) / 2^32), and a float's bits are a logarithm that is never too large.
  Floats halved = __builtin_convertvector(as<Ints>(bits >> 1), Floats);
  Floats exponent = __builtin_convertvector(as<Ints>(halved), Floats);
  return LN2 * (31.0f + 127.0f) - exponent * (LN2 / 8388608.0f);
}

// The best total among tokens of a score of at least `kept` that come before (`end`, `end_token`).
LPR_EACH_CPU inline Winner search(const Scores& scores, const Chooser& choice, float kept, float end, int64_t end_token) {
  Winner winner;
  auto enter = [&](int64_t token) {
    double total = static_cast<double>(scores.scaled[token]) + noise_of(choice.key, static_cast<uint32_t>(token) + choice.first_token);
    if (total > winner.total) {
      winner.second = winner.total;
      winner.total = total;
      winner.token = token;
    } else {
      winner.second = std::max(winner.second, total);
    }
  };
  enter(scores.first);
  float least = std::max(kept, end);
  Words32 folded = choice.key * 0x85EBCA6Bu - Words32{}, lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = static_cast<uint32_t>(lane) + choice.first_token;
  for (size_t block = 0; block < scores.largest.size(); block++) {
    float slack = static_cast<float>(NEAR + NEAR_PART * std::abs(winner.total)) * 2 + 1e-3f;
    float reach = static_cast<float>(winner.total) - slack;
    if (scores.largest[block] < least || scores.largest[block] + MOST_NOISE < reach) continue;
    for (int64_t i = block * BLOCK; i < static_cast<int64_t>(block + 1) * BLOCK; i += LANES) {
      Floats score = load(scores.scaled.data() + i);
      Ints possible = score + most_noise(lanes + static_cast<uint32_t>(i), choice.key, folded) >= reach;
      if (!any_of(possible)) continue;
      for (int lane = 0; lane < LANES; lane++) {
        int64_t token = i + lane;
        if (!possible[lane] || token >= scores.size || token == scores.first || score[lane] < kept) continue;
        if (score[lane] > end || (score[lane] == end && token < end_token)) enter(token);
      }
      slack = static_cast<float>(NEAR + NEAR_PART * std::abs(winner.total)) * 2 + 1e-3f;
      reach = static_cast<float>(winner.total) - slack;
    }
  }
  return winner;
}

LPR_INLINE Floats exponential(Floats x) {  // of x at most 0, to a few units in the last place
  Floats least = -87.0f - Floats{};
  x = x > least ? x : least;
  Floats whole = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the rounded product
  Ints power = as<Ints>(whole) << 23;
  whole -= 12582912.0f;
  Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return as<Floats>(as<Ints>(sum) + power);
}

// Sums of exp(score - top) over the scores of at least `kept`: all of them, and those before `token`.
LPR_EACH_CPU inline void sum_weights(const Scores& scores, float kept, int64_t token, double& whole, double& before) {
  const float* scaled = scores.scaled.data();
  float mine = scaled[token];
  Floats zero = {}, border = mine - zero, limit = kept - zero;
  whole = before = 0;
  for (size_t block = 0; block < scores.largest.size(); block++) {
    if (scores.largest[block] < kept || scores.largest[block] < scores.top - FAR) continue;
    Floats all = {}, earlier = {};
    const float* at = scaled + block * BLOCK;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      Floats score = load(at + i);
      Floats weight = exponential(score - scores.top);
      weight = score >= limit ? weight : zero;
      all += weight;
      earlier += score > border ? weight : zero;
    }
    for (int lane = 0; lane < LANES; lane++) {
      whole += all[lane];
      before += earlier[lane];
    }
  }
  int32_t ties = 0;
  for (int64_t other = 0; other < token; other++) ties += scaled[other] == mine;
  before += ties * std::exp(static_cast<double>(mine) - scores.top);
}

// The k-th largest score.
inline float kth(const Scores& scores, int64_t k) {
  if (k <= 0 || k >= scores.size) return -std::numeric_limits<float>::infinity();
  if (k > MOST_IN_HEAP) {
    std::vector<float> all(scores.scaled.begin(), scores.scaled.begin() + scores.size);
    std::nth_element(all.begin(), all.begin() + (k - 1), all.end(), std::greater<float>());
    return all[k - 1];
  }
  std::vector<float> heap;  // the least of the largest first
  heap.reserve(k);
  auto more = std::greater<float>();
  for (size_t block = 0; block < scores.largest.size(); block++) {
    bool full = static_cast<int64_t>(heap.size()) == k;
    if (full && scores.largest[block] <= heap.front()) continue;
    int64_t last = std::min<int64_t>(scores.size, (block + 1) * BLOCK);
    for (int64_t token = block * BLOCK; token < last; token++) {
      float score = scores.scaled[token];
      if (static_cast<int64_t>(heap.size()) < k) {
        heap.push_back(score);
        std::push_heap(heap.begin(), heap.end(), more);
      } else if (score > heap.front()) {
        std::pop_heap(heap.begin(), heap.end(), more);
        heap.back() = score;
        std::push_heap(heap.begin(), heap.end(), more);
      }
    }
  }
  return heap.front();
}

// The sum of exp(score - top) over all scores.
LPR_EACH_CPU inline double sum_all(const Scores& scores) {
  double whole = 0;
  for (size_t block = 0; block < scores.largest.size(); block++) {
    if (scores.largest[block] < scores.top - FAR) continue;
    Floats all = {};
    for (int64_t i = 0; i < BLOCK; i += LANES)
      all += exponential(load(scores.scaled.data() + block * BLOCK + i) - scores.top);
    for (int lane = 0; lane < LANES; lane++) whole += all[lane];
  }
  return whole;
}

constexpr int64_t NONE = -1, DOUBT = -2;

// The `k` largest scores, of equal ones that of the lowest token first, and minus the tokens; what is no number is -inf.
using Ranked = std::vector<std::pair<float, int64_t>>;
inline Ranked largest_of(const Scores& scores, int64_t k) {
  Ranked heap;  // the least of the best first
  heap.reserve(static_cast<size_t>(k));
  auto more = std::greater<std::pair<float, int64_t>>();
  for (size_t block = 0; block < scores.largest.size(); block++) {
    if (static_cast<int64_t>(heap.size()) == k && scores.largest[block] <= heap.front().first) continue;
    int64_t last = std::min<int64_t>(scores.size, (block + 1) * BLOCK);
    for (int64_t token = block * BLOCK; token < last; token++) {
      float score = scores.scaled[token];
      bool is_full = static_cast<int64_t>(heap.size()) == k;
      if (is_full && !(score > heap.front().first)) continue;
      if (is_full) {
        std::pop_heap(heap.begin(), heap.end(), more);
        heap.pop_back();
      }
      heap.emplace_back(score == score ? score : -std::numeric_limits<float>::infinity(), -token);
      std::push_heap(heap.begin(), heap.end(), more);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), more);
  return heap;
}

// The `k` most likely tokens, of equal ones the lowest first, and round(-`steps` * log-probability), at most `most`.
inline void rank_row(const Logits& logits, int64_t row, int64_t k, float steps, int most, Scores& scores, int32_t* tokens,
                     uint8_t* ranks) {
  scale(logits, row, 1.0f, scores);
  Ranked best = largest_of(scores, k);
  double total = scores.broken ? std::numeric_limits<double>::quiet_NaN() : std::log(sum_all(scores));
  for (int64_t i = 0; i < k; i++) {
    double step = std::nearbyint(steps * (total - (static_cast<double>(best[i].first) - scores.top)));
    tokens[i] = static_cast<int32_t>(-best[i].second);
    ranks[i] = static_cast<uint8_t>(step >= 0 && step <= most ? step : step < 0 ? 0 : most);  // NaN: the most
  }
}

// Scores of at least `floor`, or if they are more than `most` the largest of them, in any order.
inline Ranked scores_from(const Scores& scores, float floor, int64_t most) {
  Ranked found;
  for (size_t block = 0; block < scores.largest.size(); block++) {
    if (scores.largest[block] < floor) continue;
    int64_t last = std::min<int64_t>(scores.size, (block + 1) * BLOCK);
    for (int64_t token = block * BLOCK; token < last; token++)
      if (scores.scaled[token] >= floor) found.emplace_back(scores.scaled[token], -token);
  }
  if (static_cast<int64_t>(found.size()) > most) {
    std::nth_element(found.begin(), found.begin() + most, found.end(), std::greater<std::pair<float, int64_t>>());
    found.resize(static_cast<size_t>(most));
  }
  return found;
}

constexpr float MOST_LIFT = 14.0f;  // noise lifts one token of a million further

// The `k` columns that a row's choice is likeliest to take, of which column i stands for token `vocabulary[i]` or, without
// one, i; and how likely (lpr.model.heads.guesses.likeliest). Nothing is likely in a row that is not of numbers.
inline void guess_row(const Logits& logits, int64_t row, float temperature, uint32_t key, int64_t num_noised, int64_t k,
                      const int64_t* vocabulary, Scores& scores, int64_t* tokens, float* shares) {
  bool is_sampled = temperature > 0;
  scale(logits, row, is_sampled ? temperature : 1.0f, scores);
  Ranked best;
  if (is_sampled) best = scores_from(scores, scores.top - MOST_LIFT, num_noised);
  if (static_cast<int64_t>(best.size()) < k) best = largest_of(scores, k);
  auto token_of = [&](int64_t column) { return vocabulary ? vocabulary[column] : column; };
  bool is_known = !scores.broken && std::isfinite(scores.top);
  double top = scores.top, total = is_known && !is_sampled ? sum_all(scores) : 0;
  if (is_sampled && is_known) {
    for (auto& [score, column] : best)
      score += static_cast<float>(noise_of(key, static_cast<uint32_t>(token_of(-column))));
    std::partial_sort(best.begin(), best.begin() + k, best.end(), std::greater<std::pair<float, int64_t>>());
    top = best[0].first;
    for (const auto& each : best) total += std::exp(each.first - top);
  }
  for (int64_t i = 0; i < k; i++) {
    tokens[i] = token_of(-best[i].second);
    shares[i] = is_known ? static_cast<float>(std::exp(best[i].first - top) / total) : 0;
  }
}

// The token of a row that is sampled; NONE if it has no choice, DOUBT if rounding decides.
inline int64_t choose_row(const Logits& logits, int64_t row, const Chooser& choice, Scores& scores) {
  scale(logits, row, choice.temperature, scores);
  if (scores.broken || !std::isfinite(scores.top)) return NONE;
  float kept = kth(scores, choice.top_k);
  float end = -std::numeric_limits<float>::infinity();
  int64_t end_token = scores.size;
  while (true) {
    Winner winner = search(scores, choice, kept, end, end_token);
    if (winner.second >= winner.total - (NEAR + NEAR_PART * std::abs(winner.total))) return DOUBT;
    if (winner.token == scores.first) return winner.token;
    bool allowed = true, doubtful = false;
    if (choice.top_p < 1) {
      double whole, before;
      sum_weights(scores, kept, winner.token, whole, before);
      doubtful = std::abs(before / whole - choice.top_p) <= SUM_DOUBT;
      allowed = before < choice.top_p * whole;
    }
    if (choice.min_p > 0) {
      double weight = std::exp(static_cast<double>(scores.scaled[winner.token]) - scores.top);
      doubtful |= std::abs(weight - choice.min_p) <= RATIO_DOUBT * choice.min_p;
      allowed = allowed && weight >= choice.min_p;
    }
    if (doubtful) return DOUBT;
    if (allowed) return winner.token;
    end = scores.scaled[winner.token];
    end_token = winner.token;
  }
}

// The `k` best totals of a sampled row, the best first, and minus the tokens.
LPR_EACH_CPU inline Ranked best_totals(const Scores& scores, const Chooser& choice, int64_t k) {
  auto more = std::greater<std::pair<float, int64_t>>();
  auto total_of = [&](int64_t token) {
    return scores.scaled[token] + static_cast<float>(noise_of(choice.key, static_cast<uint32_t>(token) + choice.first_token));
  };
  Ranked best = largest_of(scores, k), first = best;
  for (auto& each : best) each.first = total_of(-each.second);
  std::make_heap(best.begin(), best.end(), more);  // the least of the best first
  Words32 folded = choice.key * 0x85EBCA6Bu - Words32{}, lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = static_cast<uint32_t>(lane) + choice.first_token;
  for (size_t block = 0; block < scores.largest.size(); block++) {
    if (scores.largest[block] + MOST_NOISE < best.front().first) continue;
    for (int64_t i = block * BLOCK; i < static_cast<int64_t>(block + 1) * BLOCK; i += LANES) {
      Floats score = load(scores.scaled.data() + i);
      Ints possible = score + most_noise(lanes + static_cast<uint32_t>(i), choice.key, folded) >= best.front().first;
      if (!any_of(possible)) continue;
      for (int lane = 0; lane < LANES; lane++) {
        int64_t token = i + lane;
        if (!possible[lane] || token >= scores.size) continue;
        std::pair<float, int64_t> found{total_of(token), -token};
        auto same = [&](const auto& each) { return each.second == -token; };
        if (found <= best.front() || std::any_of(first.begin(), first.end(), same)) continue;
        std::pop_heap(best.begin(), best.end(), more);
        best.back() = found;
        std::push_heap(best.begin(), best.end(), more);
      }
    }
  }
  std::sort_heap(best.begin(), best.end(), more);
  return best;
}

// What a copy drafts by a row: its choice or NONE, then the likeliest other tokens, `k` in all; and the odds of each, where
// those of the likeliest are 1. Where rounding decides, the copy takes either token.
inline void draft_row(const Logits& logits, int64_t row, const Chooser& choice, int64_t k, Scores& scores, int64_t* tokens,
                      float* odds) {
  bool is_sampled = choice.temperature > 0;
  scale(logits, row, is_sampled ? choice.temperature : 1.0f, scores);
  std::fill(tokens, tokens + k, NONE);
  std::fill(odds, odds + k, 0.0f);
  if (scores.broken || !std::isfinite(scores.top)) return;
  Ranked best = is_sampled ? best_totals(scores, choice, k) : largest_of(scores, k);
  float top = best[0].first;
  if (is_sampled && (choice.top_k > 0 || choice.top_p < 1 || choice.min_p > 0)) {
    Scores own;
    int64_t chosen = choose_row(logits, row, choice, own);
    auto is_chosen = [&](const auto& each) { return each.second == -chosen; };
    auto known = chosen < 0 ? best.begin() : std::find_if(best.begin(), best.end(), is_chosen);
    if (known == best.end()) {
      best.back() = {scores.scaled[chosen] + static_cast<float>(noise_of(choice.key, static_cast<uint32_t>(chosen) + choice.first_token)), -chosen};
      known = best.end() - 1;
    }
    std::rotate(best.begin(), known, known + 1);
  }
  for (size_t i = 0; i < best.size(); i++) {
    tokens[i] = -best[i].second;
    odds[i] = std::exp(best[i].first - top);
  }
}

}  // namespace lpr
