// The suffix index: a token history, and links to previous equal contexts. Specification: lpr/core/suffix_index.py.
//
// The history lies in blocks, so that appending never moves it and forgetting frees whole blocks. Links are distances
// back, which fit 32 bits because no place is further away than the capacity.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "constants.h"
#include "flat_map.h"
#include "tree.h"

namespace lpr {

constexpr int32_t kEnd = -1;

class SuffixIndex {
 public:
  int64_t capacity, base = 0, start = 0;

  explicit SuffixIndex(int64_t capacity_tokens) : capacity(capacity_tokens) {
    if (capacity < 1)
      throw std::invalid_argument("capacity_tokens=" + std::to_string(capacity) + " must be at least 1");
  }

  // The newest `capacity` of a history whose documents are separated by kEnd.
  SuffixIndex(const int32_t* tokens, int64_t count, int64_t capacity_tokens) : SuffixIndex(capacity_tokens) {
    for (int64_t i = std::max<int64_t>(0, count - capacity); i < count; i++) append(tokens[i]);
  }

  SuffixIndex(const SuffixIndex&) = delete;

  int64_t size() const { return size_; }
  int64_t num_held() const { return size_ - start; }
  int32_t token(int64_t index) const { return at(index).token; }
  // Entries of all containers: tokens, two links for each, and the latest places.
  int64_t num_entries() const { return 3 * size_ + static_cast<int64_t>(pairs_.size() + singles_.size()); }

  void extend(const int32_t* tokens, size_t count) {
    for (size_t i = 0; i < count; i++) {
      if (tokens[i] < 0) throw std::invalid_argument("a token is negative");
      append(tokens[i]);
      if (num_held() > capacity) evict();
    }
  }

  // Append documents that kEnd separates; the last one is ended, too. Into an empty index, without evicting.
  void insert(const int32_t* history, int64_t count) {
    if (!num_held() && !base) {
      for (int64_t i = std::max<int64_t>(0, count - capacity); i < count; i++) append(history[i]);
      end_document();
      return;
    }
    for (int64_t i = 0; i < count; i++) {
      if (history[i] == kEnd)
        end_document();
      else
        extend(history + i, 1);
    }
    end_document();
  }

  void end_document() {
    if (num_held() && token(size_ - 1) != kEnd) {
      append(kEnd);
      if (num_held() > capacity) evict();
    }
  }

  // Calls found(index of the token that followed, match length) for the `limit` latest places, the newest first.
  template <typename Found>
  void match(const int32_t* suffix, size_t count, int limit, Found found) const {
    if (count < 2) return;
    int64_t reach = std::min<int64_t>(count, constants.max_match);
    const int32_t* last = suffix + count - 1;
    int64_t latest = pairs_.get(pair_key(last[-1], last[0]));
    if (latest < 0) return;
    int64_t index = latest - base;
    while (index > start && limit--) {  // the place at `start` has lost its left neighbour
      int64_t after = index + 1;
      if (after < size_ && token(after) >= 0) {
        int length = 2;
        int most = static_cast<int>(std::min(reach, after - start));
        while (length < most && token(index - length) == last[-length]) length++;
        found(after, length);
      }
      uint32_t back = at(index).back_pair;
      if (!back) return;
      index -= back;
    }
  }

  // Calls found(index of the token that followed) for the latest occurrences of a token, the newest first.
  template <typename Found>
  void match_last(int32_t wanted, int limit, Found found) const {
    int64_t latest = singles_.get(wanted);
    if (latest < 0) return;
    int64_t index = latest - base;
    while (index >= start && limit--) {
      int64_t after = index + 1;
      if (after < size_ && token(after) >= 0) found(after);
      uint32_t back = at(index).back_token;
      if (!back) return;
      index -= back;
    }
  }

 private:
  struct Entry {
    int32_t token;
    uint32_t back_token, back_pair;  // 0: there is none
  };
  static constexpr int kBlockBits = 12;
  static constexpr int64_t kBlock = 1 << kBlockBits;

  static int64_t pair_key(int32_t left, int32_t right) { return static_cast<int64_t>(left) << 32 | right; }

  const Entry& at(int64_t index) const {
    int64_t position = base + index;
    return blocks_[(position >> kBlockBits) - first_block_][position & (kBlock - 1)];
  }

  void append(int32_t token) {
    int64_t position = base + size_;
    if ((position >> kBlockBits) - first_block_ == static_cast<int64_t>(blocks_.size()))
      blocks_.emplace_back(new Entry[kBlock]);
    Entry& entry = blocks_.back()[position & (kBlock - 1)];
    int32_t last = num_held() ? this->token(size_ - 1) : kEnd;
    entry = {token, 0, 0};
    if (token != kEnd) {
      entry.back_token = distance(position, singles_.replace(token, position));
      if (last != kEnd) entry.back_pair = distance(position, pairs_.replace(pair_key(last, token), position));
    }
    size_++;
  }

  static uint32_t distance(int64_t position, int64_t before) {
    return before < 0 ? 0 : static_cast<uint32_t>(position - before);
  }

  // Forget the oldest tokens, a few more than needed. `base` moves as in the Python core, which cuts its arrays then.
  void evict() {
    int64_t stop = start + std::max(num_held() - capacity, std::min<int64_t>(64, capacity / 64));
    int32_t last = kEnd;
    for (int64_t index = start; index < stop; index++) {
      int32_t here = token(index);
      if (here != kEnd) {
        if (singles_.get(here) == base + index) singles_.erase(here);
        if (last != kEnd) forget_pair(last, here, base + index);
      }
      last = here;
    }
    // The first token kept lost its left neighbour: its pair can no longer be matched.
    if (last != kEnd && stop < size_ && token(stop) != kEnd) forget_pair(last, token(stop), base + stop);
    start = stop;
    if (stop > capacity / 16) {
      base += stop;
      size_ -= stop;
      start = 0;
      int64_t gone = std::min<int64_t>((base >> kBlockBits) - first_block_, blocks_.size());
      blocks_.erase(blocks_.begin(), blocks_.begin() + gone);
      first_block_ += gone;
    }
  }

  void forget_pair(int32_t left, int32_t right, int64_t position) {
    int64_t key = pair_key(left, right);
    if (pairs_.get(key) == position) pairs_.erase(key);
  }

  int64_t size_ = 0, first_block_ = 0;
  std::vector<std::unique_ptr<Entry[]>> blocks_;
  FlatMap singles_;
  ShardedMap pairs_;
};

}  // namespace lpr
