// A hash map of whole numbers in one array: no allocation per entry, and lookups touch one cache line. With
// tsl::robin_map in its place small inserts took twice as long (dev/LOG.md).
#pragma once

#include <cstdint>
#include <vector>

#include "keyed_hash.h"

namespace lpr {

// Keys and values are not negative. Linear probing; deletion moves the entries behind it back, so nothing decays.
class FlatMap {
 public:
  static constexpr int64_t kNone = -1;

  size_t size() const { return size_; }

  int64_t get(int64_t key) const {
    if (slots_.empty()) return kNone;
    for (size_t at = home(key);; at = (at + 1) & mask_) {
      if (slots_[at].key == key) return slots_[at].value;
      if (slots_[at].key == kNone) return kNone;
    }
  }

  // Set a key's value; return the one before it.
  int64_t replace(int64_t key, int64_t value) {
    if (4 * (size_ + 1) > 3 * slots_.size()) grow();
    size_t at = home(key);
    while (slots_[at].key != key && slots_[at].key != kNone) at = (at + 1) & mask_;
    int64_t before = slots_[at].key == kNone ? kNone : slots_[at].value;
    size_ += slots_[at].key == kNone;
    slots_[at] = {key, value};
    return before;
  }

  void erase(int64_t key) {
    if (slots_.empty()) return;
    size_t hole = home(key);
    while (slots_[hole].key != key) {
      if (slots_[hole].key == kNone) return;
      hole = (hole + 1) & mask_;
    }
    size_--;
    for (size_t at = (hole + 1) & mask_; slots_[at].key != kNone; at = (at + 1) & mask_) {
      // An entry may fill the hole unless its home lies behind it.
      if (((at - home(slots_[at].key)) & mask_) >= ((at - hole) & mask_)) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole].key = kNone;
  }

  static uint64_t hash(int64_t key) { return keyed_hash(static_cast<uint64_t>(key)); }

 private:
  struct Slot {
    int64_t key, value;
  };

  size_t home(int64_t key) const { return (hash(key) >> 20) & mask_; }

  void grow() {
    std::vector<Slot> old = std::move(slots_);
    slots_.assign(old.empty() ? 8 : 2 * old.size(), Slot{kNone, 0});
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.key == kNone) continue;
      size_t at = home(slot.key);
      while (slots_[at].key != kNone) at = (at + 1) & mask_;
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;
  size_t mask_ = 0, size_ = 0;
};

// The same for a million entries: split, because a table of that size stalls for milliseconds when it grows.
class ShardedMap {
 public:
  int64_t get(int64_t key) const { return shard(key).get(key); }
  int64_t replace(int64_t key, int64_t value) { return shard(key).replace(key, value); }
  void erase(int64_t key) { shard(key).erase(key); }
  size_t size() const {
    size_t total = 0;
    for (const FlatMap& each : shards_) total += each.size();
    return total;
  }

 private:
  static constexpr int kBits = 6;
  const FlatMap& shard(int64_t key) const { return shards_[FlatMap::hash(key) >> (64 - kBits)]; }
  FlatMap& shard(int64_t key) { return shards_[FlatMap::hash(key) >> (64 - kBits)]; }
  FlatMap shards_[1 << kBits];
};

}  // namespace lpr
