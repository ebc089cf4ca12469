// Recycled candidates by their context. Specification: lpr/core/evaluated.py.
#pragma once

#include <algorithm>
#include <cstring>

#include "constants.h"
#include "recycle.h"
#include "suffix_index.h"
#include "tree.h"

namespace lpr {

class EvaluatedNodes {
 public:
  using Row = CandidateTable::Row;

  // Keep a step of a sequence of `num_tokens`, the last of which is the root; rows of k per node of the tree.
  void keep(const TokenTree& tree, const Tokens& path, int64_t num_tokens, int32_t before, const int32_t* candidates,
            const uint8_t* scores, int k) {
    for (int node = 0; node < tree.size(); node++) {
      int32_t left = node ? tree.tokens[tree.parents[node]] : before;
      if (left >= 0) keep_pair(left, tree.tokens[node], candidates + static_cast<size_t>(node) * k,
                               scores + static_cast<size_t>(node) * k, k);
    }
    ranked_.resize(num_tokens - 1 + path.size());
    for (size_t i = 0; i < path.size(); i++) {
      const int32_t* row = candidates + static_cast<size_t>(path[i]) * k;
      const uint8_t* row_scores = scores + static_cast<size_t>(path[i]) * k;
      ranked_[num_tokens - 1 + i] = {ranked_tokens_.size(), k};
      ranked_tokens_.insert(ranked_tokens_.end(), row, row + k);
      ranked_scores_.insert(ranked_scores_.end(), row_scores, row_scores + k);
    }
    // A copy of few kilobytes, so that the tree's owner may change it.
    tokens_ = tree.tokens;
    first_child_ = tree.first_child;
    next_sibling_ = tree.next_sibling;
    size_t count = static_cast<size_t>(tree.size()) * k;
    last_tokens_.assign(candidates, candidates + count);
    last_scores_.assign(scores, scores + count);
    k_ = k;
    siblings_.clear();
    for (int child = first_child_[path.back()]; child >= 0; child = next_sibling_[child])
      if (static_cast<int>(siblings_.size()) < constants.most_siblings) siblings_.push_back(child);
    num_tokens_ = num_tokens + static_cast<int64_t>(path.size());
  }

  // Set `rows` to the candidates after those places of the own suffix index where the context agrees longest.
  void nearest(const SuffixIndex& trie, const std::vector<int64_t>& places, const Tokens& context,
               std::vector<Row>& rows) const {
    const int32_t* last = &context.back();
    int64_t reach = std::min<int64_t>(context.size(), constants.max_match), longest = 0;
    rows.clear();
    for (int64_t after : places) {
      Row row = ranked(trie.base + after - 1);
      if (!row.size) continue;
      int64_t length = 1, most = std::min(reach, after - trie.start);
      while (length < most && trie.token(after - 1 - length) == last[-length]) length++;
      if (length < longest) continue;
      if (length > longest) rows.clear();
      longest = length;
      rows.push_back(row);
    }
    if (longest >= 2 || context.size() < 2 || pairs_.empty()) return;
    const int32_t* slot = &pairs_[slot_of(last[-1], last[0]) * stride_];
    if (!slot[kSize] || slot[kLeft] != last[-1] || slot[kLast] != last[0]) return;
    rows.assign(1, {slot + kFirst, reinterpret_cast<const uint8_t*>(slot + kFirst + most_), slot[kSize]});
  }

  // Set `rows` to the candidates of rejected siblings, and below them of the nodes that `count` tokens lead to.
  void of_siblings(int64_t num_tokens, const int32_t* below, size_t count, std::vector<Row>& rows) {
    rows.clear();
    if (num_tokens != num_tokens_) return;
    level_.assign(siblings_.begin(), siblings_.end());
    for (size_t i = 0; i < count; i++) {
      size_t found = 0;
      for (int node : level_) {
        int child = first_child_[node];
        while (child >= 0 && tokens_[child] != below[i]) child = next_sibling_[child];
        if (child >= 0) level_[found++] = child;
      }
      level_.resize(found);
    }
    for (int node : level_) {
      size_t at = static_cast<size_t>(node) * k_;
      rows.push_back({&last_tokens_[at], &last_scores_[at], k_});
    }
  }

 private:
  struct Place {
    size_t begin = 0;
    int count = 0;
  };
  enum { kLeft, kLast, kSize, kFirst };  // words of a slot: a pair, a number, so many candidates, scores in bytes

  size_t slot_of(int32_t left, int32_t last) const {
    uint32_t key = (static_cast<uint32_t>(left) * 0x9E3779B1u + static_cast<uint32_t>(last)) * 0x85EBCA77u;
    return key >> (32 - constants.pair_bits);
  }

  void keep_pair(int32_t left, int32_t last, const int32_t* candidates, const uint8_t* scores, int k) {
    if (k > most_ || pairs_.empty()) widen(std::max(k, most_));
    int32_t* slot = &pairs_[slot_of(left, last) * stride_];
    slot[kLeft] = left;
    slot[kLast] = last;
    slot[kSize] = k;
    std::copy(candidates, candidates + k, slot + kFirst);
    std::memcpy(slot + kFirst + most_, scores, k);
  }

  // Make room for more candidates in each slot.
  void widen(int most) {
    size_t count = size_t{1} << constants.pair_bits, stride = kFirst + most + (most + 3) / 4;
    Tokens wider(count * stride, 0);
    for (size_t at = 0; at < count && !pairs_.empty(); at++) {
      const int32_t* from = &pairs_[at * stride_];
      int32_t* to = &wider[at * stride];
      std::copy(from, from + kFirst + from[kSize], to);
      std::memcpy(to + kFirst + most, from + kFirst + most_, from[kSize]);
    }
    pairs_ = std::move(wider);
    most_ = most;
    stride_ = stride;
  }

  Row ranked(int64_t position) const {
    if (position >= static_cast<int64_t>(ranked_.size()) || !ranked_[position].count) return {nullptr, nullptr, 0};
    const Place& place = ranked_[position];
    return {&ranked_tokens_[place.begin], &ranked_scores_[place.begin], place.count};
  }

  std::vector<Place> ranked_;  // by position: the candidates after a committed token
  Tokens ranked_tokens_;
  std::vector<uint8_t> ranked_scores_;
  Tokens pairs_;  // slots
  size_t stride_ = 0;
  int most_ = 0;  // candidates that a slot has room for
  // The last tree, its candidates, and the rejected siblings of the next root.
  Tokens tokens_, first_child_, next_sibling_, last_tokens_, siblings_, level_;
  std::vector<uint8_t> last_scores_;
  int k_ = 0;
  int64_t num_tokens_ = -1;  // of the sequence, when the next root stands there
};

}  // namespace lpr
