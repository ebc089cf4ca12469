// Recycled candidates: token -> the candidates of the last node that held it. Specification: lpr/core/recycle.py.
#pragma once

#include <cstring>

#include "keyed_hash.h"
#include "tree.h"

namespace lpr {

// A hash table whose slots hold the candidates themselves: finding a token's row touches one or two cache lines.
class CandidateTable {
 public:
  struct Row {
    const int32_t* tokens;
    const uint8_t* scores;
    int size;
  };

  size_t size() const { return size_; }

  // The `count` candidates of a node that holds `token`, most likely first.
  void update(int32_t token, const int32_t* candidates, const uint8_t* scores, int count) {
    if (count > most_ || 2 * (size_ + 1) > num_slots()) rebuild(std::max(count, most_));
    int32_t* slot = find(token);
    size_ += slot[kKey] == kFree;
    slot[kKey] = token;
    slot[kSize] = count;
    std::copy(candidates, candidates + count, slot + kFirst);
    std::memcpy(slot + kFirst + most_, scores, count);
  }

  Row get(int32_t token) const {
    if (words_.empty()) return {nullptr, nullptr, 0};
    const int32_t* slot = const_cast<CandidateTable*>(this)->find(token);
    if (slot[kKey] == kFree) return {nullptr, nullptr, 0};
    return {slot + kFirst, reinterpret_cast<const uint8_t*>(slot + kFirst + most_), slot[kSize]};
  }

  // Begin to load a token's row: many rows are then waited for together.
  void prefetch(int32_t token) const {
    if (!words_.empty()) __builtin_prefetch(words_.data() + home(token) * stride_);
  }

 private:
  static constexpr int32_t kFree = -1;
  enum { kKey, kSize, kFirst };  // words of a slot: its token, a number, so many candidates, and their scores in bytes

  size_t num_slots() const { return words_.empty() ? 0 : mask_ + 1; }
  size_t home(int32_t token) const { return KeyedHash()(token) & mask_; }

  int32_t* find(int32_t token) {
    for (size_t at = home(token);; at = (at + 1) & mask_) {
      int32_t* slot = words_.data() + at * stride_;
      if (slot[kKey] == token || slot[kKey] == kFree) return slot;
    }
  }

  void rebuild(int most) {
    CandidateTable wider;
    wider.most_ = most;
    wider.stride_ = kFirst + most + (most + 3) / 4;
    wider.mask_ = std::max<size_t>(64, 4 * (size_ + 1)) - 1;
    while (wider.mask_ & (wider.mask_ + 1)) wider.mask_ |= wider.mask_ >> 1;  // a power of two less one
    wider.words_.assign((wider.mask_ + 1) * wider.stride_, kFree);
    for (size_t at = 0; at < num_slots(); at++) {
      const int32_t* slot = words_.data() + at * stride_;
      if (slot[kKey] == kFree) continue;
      wider.update(slot[kKey], slot + kFirst, reinterpret_cast<const uint8_t*>(slot + kFirst + most_), slot[kSize]);
    }
    *this = std::move(wider);
  }

  Tokens words_;
  size_t mask_ = 0, size_ = 0, stride_ = 0;
  int most_ = 0;  // candidates that a slot has room for
};

}  // namespace lpr
