// The sampling noise as a drafter knows it. Specification: lpr/core/noise_keys.py.
#pragma once

#include <optional>
#include <vector>

#include "selection.h"

namespace lpr {

// By how many octaves the sampling noise raises a token's odds.
class Noise {
 public:
  void begin(std::optional<uint64_t> seed, int64_t position) {
    seed_ = seed;
    position_ = position;
    keys_.clear();
  }

  bool is_known() const { return seed_.has_value(); }

  int octaves(int depth, int32_t token) {
    if (!seed_) return 0;
    while (static_cast<int>(keys_.size()) <= depth)
      keys_.push_back(noise_key(*seed_, static_cast<int32_t>(position_ + keys_.size())));
    uint32_t bits = token_bits(keys_[depth], static_cast<uint32_t>(token));
    return bits ? __builtin_clz(bits) - 1 : 31;
  }

 private:
  std::optional<uint64_t> seed_;
  int64_t position_ = 0;
  std::vector<uint32_t> keys_;  // per depth of the parent
};

}  // namespace lpr
