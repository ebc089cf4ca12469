// The n-gram pool: least recently used first tokens and n-grams go first. Specification: lpr/core/pool.py.
#pragma once

#include <algorithm>
#include <list>
#include <unordered_map>

#include "keyed_hash.h"
#include "tree.h"

namespace lpr {

class NGramPool {
 public:
  int64_t guess_set_size, max_keys;

  explicit NGramPool(int64_t size, int64_t keys = 4096) : guess_set_size(size), max_keys(keys) {}

  size_t size() const {
    size_t total = 0;
    for (const Row& row : rows_) total += row.ngrams.size();
    return total;
  }

  void add(const Tokens& ngram) {
    if (guess_set_size < 1 || max_keys < 1) return;
    auto found = by_key_.find(ngram[0]);
    if (found == by_key_.end()) {
      if (static_cast<int64_t>(rows_.size()) >= max_keys) {
        by_key_.erase(rows_.front().key);
        rows_.pop_front();
      }
      rows_.push_back({ngram[0], {}});
      found = by_key_.emplace(ngram[0], std::prev(rows_.end())).first;
    } else {
      rows_.splice(rows_.end(), rows_, found->second);
    }
    auto& ngrams = found->second->ngrams;
    ngrams.erase(std::remove(ngrams.begin(), ngrams.end(), ngram), ngrams.end());
    ngrams.push_back(ngram);
    if (static_cast<int64_t>(ngrams.size()) > guess_set_size) ngrams.erase(ngrams.begin());
  }

  // The n-grams of `size` tokens that end in `tokens`, a text that follows `before`.
  void add_text(const Tokens& before, const int32_t* tokens, size_t count, size_t size) {
    Tokens text = before;
    text.insert(text.end(), tokens, tokens + count);
    for (size_t end = std::max(size, before.size() + 1); end <= text.size(); end++)
      add(Tokens(text.begin() + (end - size), text.begin() + end));
  }

  // The n-grams that start with `token`, the oldest first; null if there are none. The token counts as used now.
  const std::vector<Tokens>* get(int32_t token) {
    auto found = by_key_.find(token);
    if (found == by_key_.end()) return nullptr;
    rows_.splice(rows_.end(), rows_, found->second);
    return &found->second->ngrams;
  }

 private:
  struct Row {
    int32_t key;
    std::vector<Tokens> ngrams;
  };
  std::list<Row> rows_;  // the most recently used last
  std::unordered_map<int32_t, std::list<Row>::iterator, KeyedHash> by_key_;
};

}  // namespace lpr
