// A running 64-bit digest of whole numbers. Specification: lpr/core/digest.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lpr {

class Digest {
 public:
  uint64_t value = 1;

  void add(uint64_t word) {
    value = (value ^ word) * 0x9E3779B97F4A7C15u;
    value ^= value >> 32;
  }

  // Signed words count modulo 2^64.
  template <typename Words>
  void update(const Words& words) {
    for (auto word : words) add(static_cast<uint64_t>(static_cast<int64_t>(word)));
  }
};

}  // namespace lpr
