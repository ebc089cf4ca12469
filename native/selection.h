// The choice parameters of a step's tokens, in words. Specification: lpr/core/noise_keys.py.
#pragma once

#include <tsl/robin_map.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>


namespace lpr {

inline uint32_t mix32(uint32_t x) {
  x = (x ^ x >> 17) * 0xED5AD4BBu;
  x = (x ^ x >> 11) * 0xAC4C1B51u;
  x = (x ^ x >> 15) * 0x31848BABu;
  return x ^ x >> 14;
}

inline uint32_t noise_key(uint64_t seed, int32_t position) {
  uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  return mix32(mix32(mix32(low ^ 0x9E3779B9u) ^ high) ^ static_cast<uint32_t>(position));
}

// The hash that a token's noise is made of; smaller is more noise.
inline uint32_t token_bits(uint32_t key, uint32_t token) { return mix32(mix32(token ^ key) ^ key * 0x85EBCA6Bu); }

struct Choice {
  uint64_t seed;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

// What a copy drafts by one row of logits (sampling.h, which is compiled apart): tokens [count], its choice first, and
// their odds.
void draft_likely(uintptr_t logits, int64_t size, bool is_half, const Choice& choice, uint32_t key, int64_t count,
                  int64_t* tokens, float* odds);

struct Positions {
  const int32_t* begin;
  size_t count;
};

// One request's tokens at one position share a key, and so do those of requests with equal seeds.
inline std::vector<int32_t> selection_words(const std::vector<Choice>& choices, const std::vector<Positions>& positions) {
  size_t total = 0;
  for (const Positions& each : positions) total += each.count;
  std::vector<int32_t> words(5 * total);
  int32_t *key_of = words.data(), *rest = key_of + total;
  std::vector<uint64_t> seeds;
  std::vector<tsl::robin_map<int32_t, int32_t>> known;  // per seed: position -> number of its key
  std::vector<uint32_t> keys;
  for (size_t i = 0; i < choices.size(); i++) {
    size_t mine = std::find(seeds.begin(), seeds.end(), choices[i].seed) - seeds.begin();
    if (mine == seeds.size()) {
      seeds.push_back(choices[i].seed);
      known.emplace_back();
    }
    int32_t numbers[4] = {choices[i].top_k};
    std::memcpy(numbers + 1, &choices[i].temperature, 4);
    std::memcpy(numbers + 2, &choices[i].top_p, 4);
    std::memcpy(numbers + 3, &choices[i].min_p, 4);
    for (size_t j = 0; j < positions[i].count; j++) {
      int32_t at = positions[i].begin[j];
      auto [key, is_new] = known[mine].try_emplace(at, static_cast<int32_t>(keys.size()));
      if (is_new) keys.push_back(noise_key(choices[i].seed, at));
      *key_of++ = key->second;
      for (int column = 0; column < 4; column++) rest[column * total + j] = numbers[column];
    }
    rest += positions[i].count;
  }
  words.insert(words.end(), keys.begin(), keys.end());
  return words;
}

}  // namespace lpr
