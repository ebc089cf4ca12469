// The words that go up to the device. Specification: lpr/core/rows.py.
#pragma once

#include "state.h"

namespace lpr {

// Tokens, parents and positions of a rank's row, one after the other: its pending chain and its shard's nodes below it.
inline Tokens row_entries(const SequenceState& state, const TokenTree& tree, const Shard& shard, size_t rank) {
  int64_t computed = state.num_computed_tokens[rank], length = state.tokens.size();
  size_t above = length - computed - 1, count = above + shard.nodes.size();
  Tokens entries(3 * count), entry(tree.size(), -1);
  int32_t *tokens = entries.data(), *parents = tokens + count, *positions = parents + count;
  for (size_t i = 0; i <= above; i++) {
    tokens[i] = state.tokens[computed + i];
    parents[i] = static_cast<int32_t>(i) - 1;
    positions[i] = static_cast<int32_t>(computed + i);
  }
  entry[0] = static_cast<int32_t>(above);
  for (size_t i = 1; i < shard.nodes.size(); i++) {
    int node = shard.nodes[i];
    entry[node] = static_cast<int32_t>(above + i);
    tokens[above + i] = tree.tokens[node];
    parents[above + i] = entry[tree.parents[node]];
    positions[above + i] = static_cast<int32_t>(length - 1) + tree.depths[node];
  }
  return entries;
}

// Bit j % 64 of word j / 64 of entry i is set if entry j is this entry or one of its ancestors.
inline std::vector<uint64_t> ancestor_words(const Tokens& parents, size_t num_words) {
  std::vector<uint64_t> words(parents.size() * num_words, 0);
  for (size_t i = 0; i < parents.size(); i++) {
    uint64_t* mine = words.data() + i * num_words;
    if (parents[i] >= 0) std::copy_n(words.data() + parents[i] * num_words, num_words, mine);
    mine[i / 64] |= uint64_t{1} << i % 64;
  }
  return words;
}

// The words of a graph step's rows (lpr/model/graph_inputs.py): bits, tokens, positions and cache rows of B rows with T
// entries each, padded on the left, and per row the committed and the real entries.
class RowWords {
 public:
  RowWords(int32_t* words, size_t batch, size_t num_entries)
      : batch_(batch), length_(num_entries), num_words_(std::max<size_t>(2, (num_entries + 63) / 64)), words_(words) {
    bits_ = words;
    tokens_ = bits_ + batch * length_ * 2 * num_words_;
    positions_ = tokens_ + batch * length_;
    write_rows_ = positions_ + batch * length_;
    num_cached_ = write_rows_ + batch * length_;
    num_real_ = num_cached_ + batch;
  }

  size_t size() const { return num_real_ + batch_ - words_; }

  // `entries` is int32 [3, count]: tokens, parents, positions; `table` are the pages of the row.
  void place(size_t row, const int32_t* table, int64_t page_size, int32_t spare_row, int64_t num_cached,
             const int32_t* entries, size_t count) {
    size_t first = row * length_ + length_ - count, begin = row * length_;
    std::fill(bits_ + begin * 2 * num_words_, bits_ + (begin + length_) * 2 * num_words_, 0);
    std::fill(tokens_ + begin, tokens_ + begin + length_, 0);
    std::fill(positions_ + begin, positions_ + begin + length_, 0);
    std::fill(write_rows_ + begin, write_rows_ + begin + length_, spare_row);
    num_cached_[row] = count ? static_cast<int32_t>(num_cached) : 0;
    num_real_[row] = static_cast<int32_t>(count);
    if (!count) return;
    std::copy_n(entries, count, tokens_ + first);
    std::copy_n(entries + 2 * count, count, positions_ + first);
    for (size_t i = 0; i < count; i++) {
      int64_t place = num_cached + static_cast<int64_t>(i);
      write_rows_[first + i] = static_cast<int32_t>(table[place / page_size] * page_size + place % page_size);
    }
    std::vector<uint64_t> ancestors = ancestor_words({entries + count, entries + 2 * count}, num_words_);
    std::memcpy(bits_ + first * 2 * num_words_, ancestors.data(), ancestors.size() * sizeof(uint64_t));
  }

 private:
  size_t batch_, length_, num_words_;
  int32_t *words_, *bits_, *tokens_, *positions_, *write_rows_, *num_cached_, *num_real_;
};

}  // namespace lpr
