// The words that go up to the device. Specification: lpr/core/rows.py.
#pragma once

#include "state.h"

namespace lpr {

// Append tokens, parents and positions of a rank's row, one after the other: its pending chain and its shard's nodes
// below it.
inline void add_row_entries(const SequenceState& state, const TokenTree& tree, const Shard& shard, size_t rank,
                            Tokens& all) {
  int64_t computed = state.num_computed_tokens[rank], length = state.tokens.size();
  size_t above = length - computed - 1, count = above + shard.nodes.size();
  size_t begin = all.size();
  all.resize(begin + 3 * count);
  int32_t *tokens = all.data() + begin, *parents = tokens + count, *positions = parents + count;
  for (size_t i = 0; i <= above; i++) {
    tokens[i] = state.tokens[computed + i];
    parents[i] = static_cast<int32_t>(i) - 1;
    positions[i] = static_cast<int32_t>(computed + i);
  }
  if (shard.nodes.size() < 2) return;
  int32_t root = static_cast<int32_t>(above);
  if (static_cast<int32_t>(shard.nodes.size()) == tree.size()) {  // all nodes, in their order
    for (int node = 1; node < tree.size(); node++) {
      tokens[root + node] = tree.tokens[node];
      parents[root + node] = root + tree.parents[node];
      positions[root + node] = static_cast<int32_t>(length - 1) + tree.depths[node];
    }
    return;
  }
  Tokens entry(tree.size(), -1);
  entry[0] = root;
  for (size_t i = 1; i < shard.nodes.size(); i++) {
    int node = shard.nodes[i];
    entry[node] = static_cast<int32_t>(above + i);
    tokens[above + i] = tree.tokens[node];
    parents[above + i] = entry[tree.parents[node]];
    positions[above + i] = static_cast<int32_t>(length - 1) + tree.depths[node];
  }
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

// The words of a packed step: rows one after the other, at the end of N entries (lpr/core/rows.py, place_packed).
class PackedWords {
 public:
  PackedWords(int32_t* words, size_t num_sequences, size_t num_entries, size_t num_kept, int32_t spare_row)
      : num_words_(std::max<size_t>(2, (num_entries + 63) / 64)), length_(num_entries), words_(words) {
    tokens_ = words + num_entries * 2 * num_words_;
    positions_ = tokens_ + num_entries;
    write_rows_ = positions_ + num_entries;
    wanted_ = write_rows_ + num_entries;
    starts_ = wanted_ + num_kept;
    slots_ = starts_ + num_sequences + 1;
    num_cached_ = slots_ + num_sequences;
    num_real_ = num_cached_ + num_sequences;
    size_ = num_real_ + num_sequences - words;
    spare_row_ = spare_row;
  }

  size_t size() const { return size_; }

  // Fill all words with what they are without rows; those of `total` entries come next.
  void begin(size_t total) {
    std::fill(words_, words_ + size_, 0);
    std::fill(write_rows_, wanted_, spare_row_);
    std::fill(wanted_, starts_, static_cast<int32_t>(length_) - 1);
    std::fill(starts_ + 1, slots_, static_cast<int32_t>(length_));
    at_ = length_ - total;
  }

  // The next row, whose last `num_results` entries have results; `table` are the pages of its slot.
  void add(const int32_t* table, int64_t page_size, int32_t slot, int64_t num_cached, size_t num_results,
           const int32_t* entries, size_t count) {
    starts_[row_] = row_ ? static_cast<int32_t>(at_) : 0;
    slots_[row_] = slot;
    num_cached_[row_] = static_cast<int32_t>(num_cached);
    num_real_[row_] = static_cast<int32_t>(count);
    std::copy_n(entries, count, tokens_ + at_);
    std::copy_n(entries + 2 * count, count, positions_ + at_);
    const int32_t* parents = entries + count;
    auto* bits = reinterpret_cast<uint64_t*>(words_) + at_ * num_words_;
    for (size_t i = 0; i < count; i++) {
      int64_t place = num_cached + static_cast<int64_t>(i);
      write_rows_[at_ + i] = static_cast<int32_t>(table[place / page_size] * page_size + place % page_size);
      if (parents[i] >= 0) std::copy_n(bits + parents[i] * num_words_, num_words_, bits + i * num_words_);
      bits[i * num_words_ + i / 64] |= uint64_t{1} << i % 64;
    }
    at_ += count;
    for (size_t i = 0; i < num_results; i++) wanted_[kept_++] = static_cast<int32_t>(at_ - num_results + i);
    row_++;
  }

 private:
  size_t num_words_, length_, size_, at_ = 0, row_ = 0, kept_ = 0;
  int32_t spare_row_;
  int32_t *words_, *tokens_, *positions_, *write_rows_, *wanted_, *starts_, *slots_, *num_cached_, *num_real_;
};

}  // namespace lpr
