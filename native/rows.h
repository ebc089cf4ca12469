// What goes up to the device and comes back (lpr/core/rows.py), in flat arrays.
#pragma once

#include <utility>

#include "state.h"

namespace lpr {

// Per rank, the length of its pending chain without the root.
inline std::vector<int64_t> pending_of(const SequenceState& state) {
  std::vector<int64_t> pending;
  for (int64_t computed : state.num_computed_tokens)
    pending.push_back(static_cast<int64_t>(state.tokens.size()) - computed - 1);
  return pending;
}

// The most pending tokens of a rank, all sequences together, and the longest sequence.
inline std::pair<int64_t, int64_t> workload(const std::vector<const SequenceState*>& states) {
  if (states.empty()) return {0, 0};
  std::vector<int64_t> total(states[0]->num_computed_tokens.size(), 0);
  int64_t longest = 0;
  for (const SequenceState* state : states) {
    std::vector<int64_t> pending = pending_of(*state);
    for (size_t rank = 0; rank < total.size(); rank++) total[rank] += pending[rank];
    longest = std::max<int64_t>(longest, state->tokens.size());
  }
  return {*std::max_element(total.begin(), total.end()), longest};
}

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

// Bit j % 64 of word j / 64 of entry i: is entry j this entry or one of its ancestors?
inline std::vector<uint64_t> ancestor_words(const Tokens& parents, size_t num_words) {
  std::vector<uint64_t> words(parents.size() * num_words, 0);
  for (size_t i = 0; i < parents.size(); i++) {
    uint64_t* mine = words.data() + i * num_words;
    if (parents[i] >= 0) std::copy_n(words.data() + parents[i] * num_words, num_words, mine);
    mine[i / 64] |= uint64_t{1} << i % 64;
  }
  return words;
}

// What all ranks say of a tree's nodes: each node's owner counts. `payloads` is [ranks, trees, capacity, 1 + 2k or more].
inline TreeResult results_of(const int32_t* payloads, const int64_t* strides, size_t index,
                             const std::vector<const Shard*>& shards, int k) {
  size_t count = 0;
  for (const Shard* shard : shards) count += shard->owned.size();
  TreeResult all{Tokens(count), Tokens(count * k), Tokens(count * k), k};
  for (size_t rank = 0; rank < shards.size(); rank++) {
    const int32_t* table = payloads + rank * strides[0] + index * strides[1];
    for (size_t row = 0; row < shards[rank]->owned.size(); row++) {
      const int32_t* from = table + row * strides[2];
      size_t node = shards[rank]->owned[row];
      all.next_tokens[node] = from[0];
      std::copy_n(from + 1, k, all.candidates.begin() + node * k);
      std::copy_n(from + 1 + k, k, all.scores.begin() + node * k);
    }
  }
  return all;
}

}  // namespace lpr
